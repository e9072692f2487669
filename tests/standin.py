"""Device memory for machines without a GPU: host memory that behaves like a GPU's, and writes down what is done to it.

Kernels do not run when they are launched but when somebody synchronises, as on a busy GPU. So whoever reads too early
finds old numbers, and is written down as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from hpcdl.buffers import Device, Family, Look


class Gpu:
    """The pretended device: the kernels that wait in its stream, and everything that happened."""

    def __init__(self) -> None:
        self.stream: list[Callable[[], object]] = []
        self.running: dict[int, Any] = {}  # the memory that kernels launched since its last synchronisation touch
        self.in_flight: set[Request] = set()
        self.pinned: list[Any] = []
        self.downloads: list[int] = []  # the bytes of each
        self.uploads: list[int] = []
        self.starts: list[tuple[str, str, int]] = []  # "send" or "receive", "device", "pinned" or "host", bytes
        self.synchronizations = 0
        self.errors: list[str] = []
        self.filled: set[tuple[int, int]] = set()  # pinned memory, address and bytes, that holds what was downloaded
        self.arrived: set[tuple[int, int]] = set()  # or received

    def array(self, values: Any) -> StandIn:
        return StandIn(self, np.array(values))

    def launch(self, kernel: Callable[[], object], out: StandIn, *operands: object) -> None:
        """Put a kernel into the stream."""
        touched = [array for array in (out, *operands) if isinstance(array, StandIn)]
        for array in touched:
            self.running[array.block] = array
            for request in self.in_flight:
                in_use = request.where == "device" and (array is out or request.kind == "receive")
                if in_use and overlap(request.span, extent(array.memory)):
                    self.errors.append(f"a kernel uses memory during a {request.kind}")
        self.stream.append(kernel)

    def synchronize(self, block: int) -> None:
        """Wait for the stream; counts as done for this block of memory alone."""
        self.synchronizations += 1
        self.drain()
        self.running.pop(block, None)

    def drain(self) -> None:
        kernels, self.stream = self.stream, []
        for kernel in kernels:
            kernel()

    def copied(self, place: Any, host: Any, done: list[int]) -> None:
        """A copy between device and host memory."""
        done.append(host.size)
        if not any(overlap(extent(host), extent(pinned)) for pinned in self.pinned):
            self.errors.append("a copy to or from memory that is not pinned")
        if place.size != host.size:
            self.errors.append(f"a copy of {place.size} bytes to or from {host.size}")
        if any(overlap(request.span, extent(host)) for request in self.in_flight):
            self.errors.append("a copy to or from pinned memory that MPI is using")

    def where(self, message: object) -> str:
        if isinstance(message, Window):
            return "device"
        assert isinstance(message, np.ndarray)
        if any(contains(extent(pinned), extent(message)) for pinned in self.pinned):
            return "pinned"
        return "host"


class StandIn:
    """An array on the pretended device. The host cannot look into it, except the test, by `read`."""

    def __init__(self, gpu: Gpu, memory: Any, block: int | None = None) -> None:
        self.gpu, self.memory = gpu, memory
        self.block = extent(memory)[0] if block is None else block  # which allocation it is a part of
        self.dtype, self.shape, self.size, self.strides = memory.dtype, memory.shape, memory.size, memory.strides
        self.itemsize, self.flags = memory.itemsize, memory.flags

    def part(self, memory: Any) -> StandIn:
        return StandIn(self.gpu, memory, self.block)

    def __getitem__(self, at: Any) -> StandIn:
        return self.part(self.memory[at])

    def reshape(self, *shape: Any) -> StandIn:
        return self.part(self.memory.reshape(*shape))

    def read(self) -> Any:
        """What a test may see."""
        self.gpu.drain()
        return self.memory.copy()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interface(self)

    def refuse(self, *args: object, **options: object) -> NoReturn:
        self.gpu.errors.append("implicit access from the host")
        raise TypeError("this array lies on a device")

    __array__ = __array_ufunc__ = __array_function__ = __dlpack__ = __dlpack_device__ = refuse
    __iter__ = __len__ = __float__ = __int__ = __bool__ = __index__ = __buffer__ = refuse


class Window:
    """Some bytes of the device, as a CUDA-aware MPI takes them."""

    def __init__(self, array: StandIn) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interface(self.array)


def interface(array: StandIn) -> dict[str, Any]:
    return {
        "version": 3,
        "shape": array.shape,
        "typestr": array.dtype.str,
        "strides": array.strides,
        "data": (extent(array.memory)[0], False),
    }


class StandInDevice(Device):
    def __init__(self, flat: StandIn) -> None:
        self.gpu, self.flat = flat.gpu, flat.part(flat.memory.view(np.uint8))

    def synchronize(self) -> None:
        self.gpu.synchronize(self.flat.block)

    def bytes(self, lo: int, hi: int) -> Window:
        return Window(self.flat[lo:hi])

    def pinned(self, nbytes: int) -> Any:
        self.gpu.pinned.append(np.zeros(nbytes, np.uint8))
        return self.gpu.pinned[-1]

    def download(self, lo: int, hi: int, host: Any) -> None:
        self.gpu.drain()  # the copy stands in the stream behind the kernels
        host[...] = self.flat.memory[lo:hi]
        self.gpu.copied(self.flat[lo:hi], host, self.gpu.downloads)
        self.gpu.filled.add((extent(host)[0], host.size))

    def upload(self, lo: int, hi: int, host: Any) -> None:
        self.gpu.drain()
        self.flat.memory[lo:hi] = host
        self.gpu.copied(self.flat[lo:hi], host, self.gpu.uploads)
        place = (extent(host)[0], host.size)
        if place not in self.gpu.arrived:
            self.gpu.errors.append("an upload of what has not arrived")
        self.gpu.arrived.discard(place)


class StandInFamily(Family):
    def owns(self, x: object) -> bool:
        return isinstance(x, StandIn)

    def look(self, x: StandIn) -> Look:
        return Look(x.dtype.name, x.shape, x.strides, x.itemsize, extent(x.memory)[0], False)

    def flat(self, x: StandIn) -> tuple[StandIn, bool]:
        if x.flags.c_contiguous:
            return x.reshape(-1), False
        return x.gpu.array(np.empty(x.size, x.dtype)), True

    def empty(self, like: StandIn, size: int, dtype: str) -> StandIn:
        return like.gpu.array(np.full(size, 99, dtype))

    def ufunc(self, name: str) -> Callable[..., None]:
        return partial(launch_ufunc, getattr(np, name))

    def put(self, target: StandIn, source: StandIn) -> None:
        target.gpu.launch(lambda: np.copyto(target.memory, source.memory, casting="unsafe"), target, source)

    def host(self, flat: StandIn) -> None:
        return None

    def device(self, flat: StandIn) -> StandInDevice:
        return StandInDevice(flat)


def launch_ufunc(ufunc: np.ufunc, low: Any, high: Any, out: StandIn) -> None:
    """A kernel for out = ufunc(low, high), where high may be a number."""
    second = high.memory if isinstance(high, StandIn) else high
    out.gpu.launch(lambda: ufunc(low.memory, second, out=out.memory), out, low, high)


# What goes over the wire.


class Wire:
    """A communicator that looks at every message before it is handed on."""

    def __init__(self, gpu: Gpu, comm: MPI.Intracomm) -> None:
        self.gpu, self.comm = gpu, comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def Send_init(self, message: Any, *peer: int) -> Request:
        return Request(self.gpu, "send", message[0], self.comm.Send_init(message, *peer))

    def Recv_init(self, message: Any, *peer: int) -> Request:
        return Request(self.gpu, "receive", message[0], self.comm.Recv_init(message, *peer))

    def Allreduce(self, mine: Any, message: Any, op: MPI.Op) -> None:
        note(self.gpu, "send", message[0])
        self.comm.Allreduce(mine, message, op)


def note(gpu: Gpu, kind: str, message: Any) -> str:
    """Write down that a message is started, and whether its memory is ready."""
    where = gpu.where(message)
    memory = message.array.memory if where == "device" else message
    gpu.starts.append((kind, where, memory.nbytes))
    if where == "device" and message.array.block in gpu.running:
        gpu.errors.append(f"a {kind} starts while a kernel is running")
    if where == "pinned" and kind == "send":
        place = (extent(memory)[0], memory.size)
        if place not in gpu.filled:
            gpu.errors.append("a send starts before its numbers are downloaded")
        gpu.filled.discard(place)
    return where


class Request:
    """A persistent request under observation."""

    def __init__(self, gpu: Gpu, kind: str, message: Any, request: MPI.Prequest) -> None:
        self.gpu, self.kind, self.message, self.request = gpu, kind, message, request
        self.where = gpu.where(message)
        self.span = extent(message.array.memory if self.where == "device" else message)

    def Start(self) -> None:
        note(self.gpu, self.kind, self.message)
        self.gpu.in_flight.add(self)
        self.request.Start()

    def Wait(self) -> None:
        self.request.Wait()
        self.complete()

    def Test(self) -> bool:
        done = self.request.Test()
        if done:
            self.complete()
        return done

    def Free(self) -> None:
        self.request.Free()

    def complete(self) -> None:
        self.gpu.in_flight.discard(self)
        if self.where == "pinned" and self.kind == "receive":
            lo, hi = self.span
            self.gpu.arrived.add((lo, hi - lo))


def extent(memory: Any) -> tuple[int, int]:
    """The first byte of an array and the one after its last."""
    lo = memory.__array_interface__["data"][0]
    if memory.flags.c_contiguous:
        return lo, lo + memory.nbytes
    return np.lib.array_utils.byte_bounds(memory)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


# CuPy, for what hpcdl asks of it.


def fake_cupy() -> ModuleType:
    """A module that answers as CuPy does on a machine with two devices: kernels run on the current device alone, and
    each device has a current stream of its own."""
    cupy = ModuleType("cupy")
    state = SimpleNamespace(current=0, streams={0: [], 1: []}, known={})

    class Device:
        def __init__(self, number: int) -> None:
            self.number, self.before = number, []

        def __enter__(self) -> None:
            self.before.append(state.current)
            state.current = self.number

        def __exit__(self, *error: object) -> None:
            state.current = self.before.pop()

    class ndarray:
        def __init__(self, memory: Any, number: int) -> None:
            self.memory, self.device = memory, Device(number)
            self.dtype, self.shape, self.size, self.strides = memory.dtype, memory.shape, memory.size, memory.strides
            self.itemsize, self.flags, self.nbytes = memory.itemsize, memory.flags, memory.nbytes
            self.data = SimpleNamespace(ptr=memory.ctypes.data if memory.size else 0)
            state.known[self.data.ptr] = number

        def __getitem__(self, at: Any) -> ndarray:
            return ndarray(self.memory[at], self.device.number)

        def __setitem__(self, at: Any, source: ndarray) -> None:
            kernel(self, source)
            self.memory[at] = source.memory

        def reshape(self, *shape: Any) -> ndarray:
            return ndarray(self.memory.reshape(*shape), self.device.number)

        def view(self, dtype: Any) -> ndarray:
            return ndarray(self.memory.view(dtype), self.device.number)

        def flatten(self) -> ndarray:
            kernel(self)
            return ndarray(self.memory.flatten(), self.device.number)

        def get(self, out: Any) -> None:
            kernel(self)
            out[...] = self.memory

        def set(self, host: Any) -> None:
            kernel(self)
            self.memory[...] = host

    def kernel(*arrays: object) -> None:
        for array in arrays:
            if isinstance(array, ndarray) and array.device.number != state.current:
                raise ValueError(f"an array on device {array.device.number}, while device {state.current} is current")

    def ufunc(name: str, low: Any, high: Any, out: Any) -> None:
        kernel(low, high, out)
        getattr(np, name)(low.memory, getattr(high, "memory", high), out=out.memory)

    def asarray(x: Any) -> ndarray:
        number = state.known[x.__cuda_array_interface__["data"][0]]
        return ndarray(x.memory if number == state.current else x.memory.copy(), state.current)

    cupy.ndarray, cupy.asarray = ndarray, asarray
    cupy.array = lambda values: ndarray(np.array(values), state.current)
    cupy.empty = lambda size, dtype: ndarray(np.empty(size, dtype), state.current)
    for name in ("add", "multiply", "minimum", "maximum", "true_divide"):
        setattr(cupy, name, partial(ufunc, name))
    cupy.cuda = SimpleNamespace(
        Device=Device,
        runtime=SimpleNamespace(pointerGetAttributes=lambda ptr: SimpleNamespace(device=state.known[ptr])),
        alloc_pinned_memory=bytearray,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: state.streams[state.current].append("wait")),
    )
    cupy.state = state
    return cupy
