"""Arrays in device memory, played on host memory that refuses what a GPU's would (standin.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import expected, makes_sense, numbers, pairwise
from mpi4py import MPI
from standin import Gpu, StandInFamily, Wire, fake_cupy

import hpcdl
import hpcdl.call
import hpcdl.channel
import hpcdl.execute
from hpcdl import buffers, collectives, device

pytestmark = pytest.mark.ranks(1, 3)

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "reduce", "broadcast")
OPS = ("sum", "mean", "max")
DTYPES = ("float32", "float16", "int64")
FORMS = ("plain", "i", "plan")
PIECE_BYTES = 256
AWARE = [pytest.param(True, id="aware"), pytest.param(False, id="staged")]


@pytest.fixture
def gpu(comm: MPI.Intracomm, aware: bool, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A pretended GPU, on a communicator whose MPI can read it or not."""
    monkeypatch.setattr(buffers, "FAMILIES", [StandInFamily(), *buffers.FAMILIES])
    monkeypatch.setattr(hpcdl.execute, "mpi_reads_devices", lambda: aware)
    monkeypatch.setattr(hpcdl.call, "mpi_reads_devices", lambda: aware)
    monkeypatch.setattr(hpcdl.execute, "MESSAGE_BYTES", PIECE_BYTES)
    pretended = Gpu()
    own = hpcdl.channel.channel(comm)
    monkeypatch.setattr(own, "wire", Wire(pretended, own.wire))
    return pretended


def lengths(p: int) -> list[int]:
    return [0, 1, p, 1003]


def call(collective: str, form: str, x: Any, comm: MPI.Intracomm, **options: Any) -> Any:
    """Call a collective in one of its forms."""
    if form == "i":
        return getattr(hpcdl, f"i{collective}")(x, comm, **options).result()
    if form == "plan":
        with getattr(hpcdl, f"plan_{collective}")(x, comm, **options) as plan:
            return plan()
    return getattr(hpcdl, collective)(x, comm, **options)


def check_journey(gpu: Gpu, aware: bool, case: str) -> None:
    """Nothing was touched too early or from the host, and everything went by the way it should."""
    assert not gpu.errors, (case, gpu.errors)
    assert not gpu.in_flight, case
    assert not gpu.filled, case  # what is downloaded is sent,
    assert not gpu.arrived, case  # and what is received is uploaded
    if aware:
        assert not gpu.pinned + gpu.downloads + gpu.uploads, case
        assert all(where == "device" for _, where, _ in gpu.starts), case
    else:
        assert all(where == "pinned" for _, where, _ in gpu.starts), case
        assert all(nbytes <= PIECE_BYTES for nbytes in gpu.downloads + gpu.uploads), case
        assert sum(gpu.downloads) == sum(nbytes for kind, _, nbytes in gpu.starts if kind == "send"), case
        assert sum(gpu.uploads) == sum(nbytes for kind, _, nbytes in gpu.starts if kind == "receive"), case


def forget(gpu: Gpu) -> None:
    """Make room for the next case."""
    vars(gpu).update(vars(Gpu()))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("aware", AWARE)
def test_the_sum_of_device_arrays_is_exact_and_no_byte_travels_too_early(
    comm: MPI.Intracomm, gpu: Gpu, aware: bool
) -> None:
    for algorithm, op, dtype, n in product(collectives.names(comm.size, "allreduce"), OPS, DTYPES, lengths(comm.size)):
        if makes_sense(dtype, op, "flat"):
            case = f"{algorithm} {op} of {n} {dtype}"
            x = gpu.array(numbers(dtype, op, n, comm.rank))
            assert hpcdl.allreduce(x, comm, op=op, algorithm=algorithm) is x, case
            assert (x.read() == expected(dtype, op, n, comm.size)).all(), case
            check_journey(gpu, aware, case)
            assert (comm.size == 1 or n == 0) == (not gpu.starts), case
            forget(gpu)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("aware", AWARE)
def test_every_collective_of_device_arrays_in_every_form(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    rank, size, root = comm.rank, comm.size, comm.size - 1

    def possible(collective: str, algorithm: str, dtype: str, op: str, *_: object) -> bool:
        return algorithm in collectives.names(size, collective) and makes_sense(dtype, op, "flat")

    axes = [COLLECTIVES, [*collectives.ALGORITHMS], DTYPES, OPS, lengths(size), FORMS, ("in place", "out")]
    cases = pairwise(axes, possible)
    for collective, algorithm, dtype, op, n, form, where in cases:
        case = f"{collective} {algorithm} {op} of {n} {dtype}, {form}, {where}"
        mine, right = numbers(dtype, op, n, rank), expected(dtype, op, n, size)
        part = hpcdl.share(n, comm)
        options: dict[str, Any] = {"algorithm": algorithm}
        if collective not in ("allgather", "broadcast"):
            options["op"] = op
        if collective in ("reduce", "broadcast"):
            options["root"] = root
        if collective == "reduce_scatter":
            right = right[part]
        elif collective == "allgather":
            spans = collectives.cut(collectives.Span(0, n), size)
            right = np.concatenate([numbers(dtype, op, n, other)[slice(*span)] for other, span in enumerate(spans)])
            mine = mine[part] if where == "out" else mine
        elif collective == "broadcast":
            right = numbers(dtype, op, n, root)
        x = gpu.array(mine)
        if where == "out":
            options["out"] = gpu.array(np.zeros(right.size, dtype))
        given = call(collective, form, x, comm, **options)
        if collective == "reduce" and rank != root:
            assert given is None, case
        else:
            assert (given.read() == right).all(), case
        if where == "out":
            assert (x.read() == mine).all(), case
        check_journey(gpu, aware, case)
        forget(gpu)


@pytest.mark.parametrize("aware", AWARE)
def test_a_plan_takes_the_numbers_of_the_last_kernel_each_time(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    x = gpu.array(np.zeros(1003, np.float16))
    for algorithm in collectives.names(comm.size, "allreduce"):
        with hpcdl.plan_allreduce(x, comm, algorithm=algorithm) as plan:
            for step in range(5):
                fresh = gpu.array(np.full(1003, comm.rank + step, np.float16))
                StandInFamily().put(x, fresh)  # a kernel that is still running when the plan is called
                plan()
                assert (x.read() == sum(rank + step for rank in range(comm.size))).all()
        check_journey(gpu, aware, algorithm)


@pytest.mark.parametrize("aware", AWARE)
def test_device_arrays_of_any_layout(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    """Those that are not in C order are packed and unpacked by kernels, and what lies between is left alone."""
    n = 17 * 6
    for algorithm in collectives.names(comm.size, "allreduce"):
        base = gpu.array(np.full(3 * n, 77, np.float32))
        base.memory[::3] = numbers("float32", "sum", n, comm.rank)
        hpcdl.allreduce(base[::3], comm, algorithm=algorithm)
        assert (base.read()[::3] == expected("float32", "sum", n, comm.size)).all()
        assert (np.delete(base.read(), np.s_[::3]) == 77).all()
        turned = gpu.array(numbers("int64", "sum", n, comm.rank)).reshape(6, 17)
        turned = turned.part(np.asfortranarray(turned.memory))
        hpcdl.allreduce(turned, comm, algorithm=algorithm)
        assert (turned.read().reshape(-1) == expected("int64", "sum", n, comm.size)).all()
        check_journey(gpu, aware, algorithm)


@pytest.mark.parametrize("aware", [False])
@pytest.mark.parametrize("dtype", ["int8", "float32", "int64"])
def test_pinned_memory_holds_the_largest_round_and_no_more(
    comm: MPI.Intracomm, gpu: Gpu, aware: bool, dtype: str
) -> None:
    p, n, itemsize = comm.size, 1000, np.dtype(dtype).itemsize
    chunk = -(-n // p)
    # What a rank sends and receives at once: in a ring a chunk of each, in doubling a whole vector of each.
    for algorithm, most in (("ring", 2 * chunk), ("doubling", 2 * n)):
        hpcdl.allreduce(gpu.array(np.zeros(n, dtype)), comm, algorithm=algorithm)
        assert sum(pinned.size for pinned in gpu.pinned) <= most * itemsize
        assert bool(gpu.pinned) == (p > 1)
        forget(gpu)


@pytest.mark.parametrize("aware", AWARE)
def test_ranks_may_hold_host_and_device_memory_side_by_side(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    """The bytes on the wire are the same, and cut in the same places."""
    for algorithm, op, dtype, n in product(collectives.names(comm.size, "allreduce"), OPS, DTYPES, lengths(comm.size)):
        if makes_sense(dtype, op, "flat"):
            values = numbers(dtype, op, n, comm.rank)
            x = values.copy() if comm.rank == 0 else gpu.array(values)
            hpcdl.allreduce(x, comm, op=op, algorithm=algorithm)
            result = x if comm.rank == 0 else x.read()
            assert (result == expected(dtype, op, n, comm.size)).all(), f"{algorithm} {op} of {n} {dtype}"
            assert not gpu.errors
            forget(gpu)


@pytest.mark.parametrize("aware", AWARE)
def test_native_takes_device_arrays_where_mpi_can_read_them(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    """Elsewhere all ranks refuse, also where only one has a device array, and before any data moves."""
    for n, form in product(lengths(comm.size), FORMS):
        x = gpu.array(np.zeros(n))
        StandInFamily().put(x, gpu.array(numbers("float64", "mean", n, comm.rank)))
        if aware:
            call("allreduce", form, x, comm, op="mean", algorithm="native")
            assert (x.read() == expected("float64", "mean", n, comm.size)).all()
            continue
        for mine in (x, x if comm.rank == comm.size - 1 else np.zeros(n)):
            with pytest.raises(hpcdl.UnsupportedArrayError, match="not CUDA-aware"):
                call("allreduce", form, mine, comm, algorithm="native")
        # The table of who calls what travels, where the ranks differ; it lies in host memory.
        assert {where for _, where, _ in gpu.starts} <= {"host"}
    assert not gpu.errors


@pytest.mark.parametrize("aware", AWARE)
def test_out_must_lie_where_x_lies(comm: MPI.Intracomm, gpu: Gpu, aware: bool) -> None:
    x = gpu.array(np.ones(5))
    for mine, out in ((x, np.zeros(5)), (np.ones(5), x)):
        with pytest.raises(hpcdl.UnsupportedArrayError, match="both in host memory"):
            hpcdl.allreduce(mine, comm, out=out)
    assert not gpu.errors and not gpu.starts


# CuPy and torch themselves, as far as that can be told without a GPU.


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class Foreign:
    """Another library's array in CUDA memory."""

    def __init__(self, memory: Any, read_only: bool = False) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": memory.dtype.str,
            "data": (memory.ctypes.data, read_only),
        }


@pytest.mark.parametrize("aware", AWARE)
def test_cupy_arrays_need_not_be_on_the_current_device(
    comm: MPI.Intracomm, cupy: Any, aware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpcdl.execute, "mpi_reads_devices", lambda: aware)
    monkeypatch.setattr(hpcdl.call, "mpi_reads_devices", lambda: aware)
    for algorithm, op, dtype, n in product(collectives.names(comm.size, "allreduce"), OPS, DTYPES, [0, 1, 102]):
        if not makes_sense(dtype, op, "flat"):
            continue
        values = numbers(dtype, op, n, comm.rank)
        with cupy.cuda.Device(1):
            x = cupy.array(values)
            turned = cupy.array(values.reshape(-1, 1 if n < 2 else 17))
        turned.memory = np.asfortranarray(turned.memory)
        turned = type(turned)(turned.memory, 1)
        hpcdl.allreduce(x, comm, op=op, algorithm=algorithm)
        hpcdl.allreduce(turned, comm, op=op, algorithm=algorithm)
        assert (x.memory == expected(dtype, op, n, comm.size)).all()
        assert (turned.memory.reshape(-1) == expected(dtype, op, n, comm.size)).all()
    assert cupy.state.current == 0
    assert not cupy.state.streams[0], "only the streams of the arrays' device are waited for"
    assert bool(cupy.state.streams[1]) == (comm.size > 1)


def test_an_array_of_another_library_is_reduced_in_its_own_memory(comm: MPI.Intracomm, cupy: Any) -> None:
    """Also on a device that is not the current one: cupy.asarray would copy, and the sum would go into the copy."""
    memory = numbers("float32", "sum", 100, comm.rank).copy()
    cupy.state.known[memory.ctypes.data] = 1
    foreign = Foreign(memory)
    assert hpcdl.allreduce(foreign, comm) is foreign
    assert (memory == expected("float32", "sum", 100, comm.size)).all()
    with pytest.raises(hpcdl.UnsupportedArrayError, match="read-only"):
        hpcdl.allreduce(Foreign(memory, read_only=True), comm)


def test_without_cupy_an_array_of_another_library_is_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # an import then fails
    with pytest.raises(hpcdl.UnsupportedArrayError, match="pip install cupy-cuda12x"):
        hpcdl.allreduce(Foreign(np.zeros(3)), comm)


@pytest.mark.ranks(1)
def test_torch_is_asked_for_the_current_stream_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    waited: list[Any] = []

    def current_stream(of: Any) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(of))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    x = torch.arange(4, dtype=torch.bfloat16)
    seen, host = device.TorchDevice(x), np.zeros(8, np.uint8)
    seen.synchronize()
    seen.download(2, 6, host[:4])
    seen.upload(0, 4, host[:4])
    assert waited == [x.device] * 3
    assert x.tolist() == [1, 2, 2, 3]
    window: Any = seen.bytes(2, 6)
    assert window.__cuda_array_interface__["data"] == (x.data_ptr() + 2, False)
    assert window.__cuda_array_interface__["shape"] == (4,)


@pytest.mark.ranks(1)
def test_the_mpi_in_use_is_asked_whether_it_reads_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH and Open MPI have the question, and their wheels answer no; an MPI without it counts as one that cannot."""
    answer = device.mpi_reads_devices.__wrapped__
    asked = [library for library in device._mpi_libraries() if hasattr(library, "MPIX_Query_cuda_support")]
    if MPI.get_vendor()[0] in ("MPICH", "Open MPI"):
        assert asked
    assert device.mpi_reads_devices() == any(library.MPIX_Query_cuda_support() for library in asked)

    without, yes, no = SimpleNamespace(), *(SimpleNamespace(MPIX_Query_cuda_support=lambda n=n: n) for n in (1, 0))
    for libraries, right in (([without, yes], True), ([without, no], False), ([without], False)):
        monkeypatch.setattr(device, "_mpi_libraries", lambda libraries=libraries: libraries)
        assert answer() is right
