"""All-reduce of real device memory, CuPy's and torch's. The ranks may share one GPU. Run by `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import expected, numbers
from mpi4py import MPI

import hpcdl
from hpcdl import collectives
from hpcdl.device import mpi_reads_devices

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4), pytest.mark.timeout(110)]

OPS = ("sum", "mean", "max")
LENGTHS = (0, 1, 5, 100_003, 1_500_000)  # the last is more than one piece of pinned memory


@dataclass
class Library:
    """What the tests ask of CuPy and of torch alike."""

    name: str
    devices: int
    dtypes: tuple[str, ...]
    on: Callable[[int], AbstractContextManager[Any]]
    """Make a device the current one."""
    stream: Callable[[], AbstractContextManager[Any]]
    """Make a new stream the current one."""
    array: Callable[[Any, str], Any]
    """The numbers as an array of that type on the current device."""
    read: Callable[[Any], Any]
    """The numbers of an array, of float32 for bfloat16."""
    busy: Callable[[], object]
    """Launch kernels on the current stream that keep the device busy for milliseconds."""


def with_cupy() -> Library | str:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed (extras cuda12, cuda13)"
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no CUDA device: {error}"

    @contextmanager
    def stream() -> Iterator[None]:
        with cupy.cuda.Stream(non_blocking=True):  # which does not wait for the default stream either
            yield

    work = {}

    def busy() -> None:
        here = cupy.cuda.Device().id
        if here not in work:
            work[here] = cupy.ones((2048, 2048), "float32")
        for _ in range(10):
            work[here] = work[here] @ work[here] * 1e-4

    return Library(
        "CuPy",
        devices,
        ("float32", "float16", "int64"),
        cupy.cuda.Device,
        stream,
        lambda values, dtype: cupy.asarray(np.ascontiguousarray(values, dtype)),
        cupy.asnumpy,
        busy,
    )


def with_torch() -> Library | str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"

    def read(x: Any) -> Any:
        return (x.float() if x.dtype is torch.bfloat16 else x).cpu().numpy()

    work = {}

    def busy() -> None:
        here = torch.cuda.current_device()
        if here not in work:
            work[here] = torch.ones((2048, 2048), device="cuda")
        for _ in range(10):
            work[here] = work[here] @ work[here] * 1e-4

    return Library(
        "torch",
        torch.cuda.device_count(),
        ("float32", "float16", "bfloat16", "int64"),
        torch.cuda.device,
        lambda: torch.cuda.stream(torch.cuda.Stream()),
        lambda values, dtype: torch.from_numpy(np.ascontiguousarray(values)).to("cuda", getattr(torch, dtype)),
        read,
        busy,
    )


@pytest.fixture(params=[with_cupy, with_torch], ids=["cupy", "torch"])
def library(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Library:
    """A library that has a GPU on every rank. Only here CUDA is asked: importing this file must not start it."""
    found = request.param()
    reasons = [reason for reason in comm.allgather(found if isinstance(found, str) else "") if reason]
    if reasons:
        pytest.skip(reasons[0])
    return found


def names(comm: MPI.Intracomm, dtype: str) -> tuple[str, ...]:
    native = mpi_reads_devices() and dtype not in ("float16", "bfloat16")
    return (*collectives.names(comm.size, "allreduce"), *(["native"] if native else []))


def test_the_sum_of_device_arrays_is_exact(comm: MPI.Intracomm, library: Library) -> None:
    for dtype in library.dtypes:
        for n in LENGTHS:
            for op in OPS:
                if not (op == "mean" and dtype == "int64"):
                    mine, right = numbers(dtype, op, n, comm.rank), expected(dtype, op, n, comm.size)
                    for algorithm in names(comm, dtype):
                        x = library.array(mine, dtype)
                        assert hpcdl.allreduce(x, comm, op=op, algorithm=algorithm) is x
                        assert (library.read(x) == right).all(), f"{algorithm} {op} of {n} {dtype}"


def test_the_other_collectives_and_forms_of_device_arrays(comm: MPI.Intracomm, library: Library) -> None:
    n = 1003
    for dtype in library.dtypes:
        right, part = expected(dtype, "sum", n, comm.size), hpcdl.share(n, comm)
        mine = numbers(dtype, "sum", n, comm.rank)
        x, out = library.array(mine, dtype), library.array(np.zeros_like(mine), dtype)
        assert (library.read(hpcdl.reduce_scatter(x, comm)) == right[part]).all()
        assert (library.read(hpcdl.allgather(x, comm)) == right).all()
        x = library.array(mine, dtype)
        assert hpcdl.iallreduce(x, comm, out=out).result() is out
        assert (library.read(out) == right).all() and (library.read(x) == mine).all()
        with hpcdl.plan_reduce(x, comm, root=1) as plan:
            result = plan()
        assert (library.read(result) == right).all() if comm.rank == 1 else result is None
        hpcdl.broadcast(x, comm, root=1)
        assert (library.read(x) == right).all()


def test_device_arrays_out_of_c_order(comm: MPI.Intracomm, library: Library) -> None:
    n = 3 * 700
    for dtype in library.dtypes:
        for algorithm in names(comm, dtype):
            mine, right = numbers(dtype, "sum", n, comm.rank), expected(dtype, "sum", n, comm.size)
            turned = library.array(mine.reshape(3, 700).T, dtype).T
            hpcdl.allreduce(turned, comm, algorithm=algorithm)
            assert (library.read(turned).reshape(-1) == right).all()
            base = library.array(np.repeat(mine, 2), dtype)
            hpcdl.allreduce(base[::2], comm, algorithm=algorithm)
            assert (library.read(base)[::2] == right).all()
            assert (library.read(base)[1::2] == mine).all()


def test_kernels_of_a_stream_have_ended_when_the_numbers_travel(comm: MPI.Intracomm, library: Library) -> None:
    """Behind a long kernel on a stream of its own stand the kernels that fill x: 200 times, each time right."""
    n = 50_000
    with library.stream():
        x, one = library.array(np.zeros(n), "float32"), library.array(np.ones(n), "float32")
        with hpcdl.plan_allreduce(x, comm, algorithm="binary_blocks") as plan:
            for step in range(200):
                library.busy()
                x *= 0
                x += one * (comm.rank + step)
                plan() if step % 2 else hpcdl.allreduce(x, comm, algorithm="ring")
                right = sum(rank + step for rank in range(comm.size))
                assert (library.read(x) == right).all(), f"step {step}"


def test_arrays_need_not_be_on_the_current_device(comm: MPI.Intracomm, library: Library) -> None:
    counts = comm.allgather(library.devices)
    if min(counts) < 2:
        pytest.skip("fewer than two GPUs")
    if mpi_reads_devices():
        pytest.skip("a CUDA-aware MPI wants the array's device to be current")
    for dtype in library.dtypes:
        mine, right = numbers(dtype, "sum", 1003, comm.rank), expected(dtype, "sum", 1003, comm.size)
        for algorithm in names(comm, dtype):
            with library.on(1):
                x, base = library.array(mine, dtype), library.array(np.repeat(mine, 2), dtype)
            hpcdl.allreduce(x, comm, algorithm=algorithm)
            hpcdl.allreduce(base[::2], comm, algorithm=algorithm)
            with library.on(1):
                assert (library.read(x) == right).all()
                assert (library.read(base)[::2] == right).all()
