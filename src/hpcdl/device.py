"""Device memory: CuPy's and torch's CUDA arrays. Small on purpose: it has not yet run on a GPU (docs/gpu.md)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.buffers import Device


class Pointer:
    """Some bytes of device memory, for MPI. Handed an array, mpi4py would try DLPack first, and torch refuses that for
    an array whose device is not the current one."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner  # keeps the memory
        self.__cuda_array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


class TorchDevice(Device):
    """The memory of a flat torch tensor on a CUDA device."""

    def __init__(self, flat: Any) -> None:
        import torch

        self._torch, self._bytes = torch, flat.view(torch.uint8)

    def synchronize(self) -> None:
        # The caller's current stream: that is where the kernels that fill the tensor were launched.
        self._torch.cuda.current_stream(self._bytes.device).synchronize()

    def bytes(self, lo: int, hi: int) -> object:
        return Pointer(self._bytes.data_ptr() + lo, hi - lo, self._bytes)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()

    def download(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        self._torch.from_numpy(host).copy_(self._bytes[lo:hi], non_blocking=True)
        self.synchronize()

    def upload(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        self._bytes[lo:hi].copy_(self._torch.from_numpy(host), non_blocking=True)
        self.synchronize()


class CupyDevice(Device):
    """The memory of a flat CuPy array."""

    def __init__(self, flat: Any) -> None:
        import cupy

        self._cupy, self._bytes = cupy, flat.view(np.uint8)

    def synchronize(self) -> None:
        # As in torch: the caller's current stream, of which every device has its own.
        with self._bytes.device:
            self._cupy.cuda.get_current_stream().synchronize()

    def bytes(self, lo: int, hi: int) -> object:
        return Pointer(self._bytes.data.ptr + lo, hi - lo, self._bytes)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def download(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        with self._bytes.device:  # else the copy would go by the current stream of another device
            self._bytes[lo:hi].get(out=host)
        self.synchronize()

    def upload(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        with self._bytes.device:
            self._bytes[lo:hi].set(host)
        self.synchronize()


@cache
def mpi_reads_devices() -> bool:
    """Is the MPI in use CUDA-aware? Asked of the library itself: a wrong guess is a segmentation fault.

    MPIX_Query_cuda_support is an extension that Open MPI and MPICH both have; an MPI without it counts as no.
    """
    for library in _mpi_libraries():
        query = getattr(library, "MPIX_Query_cuda_support", None)
        if query is not None:
            return bool(query())
    return False


def _mpi_libraries() -> list[ctypes.CDLL]:
    """The process itself, and the MPI libraries that it has loaded, which need not be visible through it.

    They are called libmpi.so.12, libmpi_abi.so.0, libmpi_cray.so.12.
    """
    libraries = [ctypes.CDLL(None)]
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = {line[line.index("/") :] for line in maps.read_text().splitlines() if "/libmpi" in line}
        libraries += [ctypes.CDLL(path) for path in sorted(loaded)]
    return libraries
