"""Memory that all ranks of a node map: arrays in it, the all-reduce there, and what happens where it cannot be had."""

from __future__ import annotations

import errno
import itertools
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import BY_NODE, FORMS, call, pretended
from mpi4py import MPI

import hpcdl
from hpcdl import collectives
from hpcdl.collectives.catalogue import FLAT

TORCH = "torch is not installed"


def mapped() -> int:
    """How many of our memories this process maps: files in /dev/shm without a name."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/#")


def total(comm: MPI.Intracomm, value: Callable[[int], Any]) -> Any:
    return sum(value(rank) for rank in range(comm.size))


def used(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator with all it will ever keep: what is counted afterwards is somebody else's."""
    for x in (np.ones(3), hpcdl.empty(3, "float32", comm)):
        for n in (3, 100_000):
            hpcdl.allreduce(np.resize(x, n), comm, algorithm="by_node")
        hpcdl.allreduce(x, comm, algorithm="by_node")
    return comm


# ---- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_an_array_outlives_its_communicator_and_its_memory_goes_with_the_last_view(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    from hpcdl.torch import empty

    used(comm)
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    duplicate = comm.Dup()
    x, t = hpcdl.empty((100, 10), "float64", duplicate), empty(5000, torch.bfloat16, duplicate)
    for array in (x, t):
        array[...] = 1
        hpcdl.allreduce(array, duplicate)
        hpcdl.iallreduce(array, duplicate).wait()
        with hpcdl.plan_allreduce(array, duplicate) as plan:
            plan()
        hpcdl.plan_allreduce(array, duplicate)  # left open
    duplicate.Free()
    assert (x == comm.size**3).all()
    view = x[50:, ::2]
    del x, array, plan
    x = view.base
    for array in (view, x, t):  # of the same processes
        array[...] = comm.rank
        assert (hpcdl.allreduce(array, comm) == total(comm, lambda rank: rank)).all()
    assert mapped() == before + 2
    del x, array, t
    assert mapped() == before + 1
    view += 1
    assert (view == total(comm, lambda rank: rank) + 1).all()
    del view
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.ranks(2)
def test_a_freed_communicator_and_a_closed_plan_keep_no_memory(comm: MPI.Intracomm) -> None:
    hpcdl.barrier(comm)
    before = mapped()
    with pretended(comm, "1+1") as duplicate:
        used(duplicate)
    duplicate = comm.Dup()
    used(duplicate)
    plans = [hpcdl.plan_allreduce(np.ones(n), duplicate, algorithm="shared") for n in (1, 5000, 500_000)]
    assert mapped() > before
    for plan in plans:
        plan()
        plan.close()
    duplicate.Free()
    assert mapped() == before


@pytest.mark.ranks(1, 2, 3)
def test_arrays_of_any_shape_hold_zeros_and_begin_on_a_line(comm: MPI.Intracomm) -> None:
    for dtype, shape in itertools.product(("float32", "bool", "complex128", np.int8), (7, (), 0, (3, 0, 2), (2, 3, 5))):
        for make in (hpcdl.empty, hpcdl.zeros):
            x = make(shape, dtype, comm)
            assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
            assert x.dtype == dtype
            assert x.ctypes.data % 64 == 0
            assert not x.any()
            assert x.flags.writeable and x.flags.c_contiguous
            x[...] = 1
            assert (hpcdl.allreduce(x, comm, op="prod") == 1).all()


@pytest.mark.ranks(1, 2)
def test_tensors_of_any_type_and_shape(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    from hpcdl.torch import empty, zeros

    assert empty(3, comm=comm).dtype == torch.get_default_dtype()
    for dtype, shape in itertools.product((torch.bfloat16, torch.float32, torch.bool), (7, (), 0, (3, 0), (2, 3))):
        x = zeros(shape, dtype, comm)
        assert tuple(x.shape) == (shape if isinstance(shape, tuple) else (shape,))
        assert x.dtype == dtype
        assert x.data_ptr() % 64 == 0
        assert not x.any()
        x.fill_(1)
        assert hpcdl.allreduce(x, comm, op="max").all()


@pytest.mark.ranks(2, 3)
def test_what_one_rank_asks_for_wrongly_no_rank_gets(comm: MPI.Intracomm) -> None:
    odd = comm.rank == comm.size - 1
    for shape, dtype in (
        (4 if odd else 5, "float32"),
        ((5, 1) if odd else 5, "float32"),
        (5, "int32" if odd else "f4"),
    ):
        with pytest.raises(hpcdl.MismatchError, match="empty of") as caught:
            hpcdl.empty(shape, dtype, comm)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert len(caught.value.table) == comm.size
    for dtype in ("object", ">f8", "float128", "nonsense", "M8[s]"):
        with pytest.raises(hpcdl.UnsupportedArrayError):
            hpcdl.empty(5, dtype if odd else "float32", comm)
    with pytest.raises(ValueError, match="no negative lengths"):
        hpcdl.empty((2, -1) if odd else (2, 1), "float32", comm)
    with pytest.raises(hpcdl.MismatchError, match="allreduce"):
        hpcdl.allreduce(np.ones(5), comm) if odd else hpcdl.empty(5, "float32", comm)
    assert hpcdl.allreduce(hpcdl.empty(5, "float32", comm) + 1, comm)[0] == comm.size


@pytest.mark.ranks(2)
def test_a_forked_child_may_look_and_leave(comm: MPI.Intracomm) -> None:
    x = hpcdl.empty(1000, "int64", comm)
    x[...] = 1
    plan = hpcdl.plan_allreduce(x, comm)
    plan()
    child = os.fork()
    if child == 0:
        os._exit(0 if x.sum() == 1000 * comm.size else 1)
    assert os.waitpid(child, 0)[1] == 0
    plan()
    assert (hpcdl.allreduce(x, comm) == comm.size**3).all()


# ---- which arrays meet in place ------------------------------------------------------------------------------------


def odd_arrays(comm: MPI.Intracomm) -> dict[str, tuple[Any, Any]]:
    """Arrays that differ from rank to rank in where they lie, each with the memory around it."""
    n, last = 3000, comm.rank == comm.size - 1
    y, z = hpcdl.empty(2 * n, "float32", comm), hpcdl.empty(2 * n, "float32", comm)
    turned, half = comm.Split(0, -comm.rank), comm.Split(comm.rank % 2)
    theirs = hpcdl.empty(2 * n, "float32", turned), hpcdl.empty(2 * n, "float32", half)
    turned.Free()
    half.Free()
    own = np.zeros(2 * n, np.float32)
    around = {
        "alike": (y, y[7 : n + 7]),
        "at different places": (y, y[: n // 2] if last else y[n // 2 : n]),
        "at places that overlap": (y, y[comm.rank : n + comm.rank]),
        "of two arrays": (z, z[:n]) if last else (y, y[:n]),
        "one private": (own, own[:n]) if last else (y, y[:n]),
        "all but one private": (y, y[:n]) if last else (own, own[:n]),
        "of the ranks turned round": (theirs[0], theirs[0][:n]),
        "of half the ranks": (theirs[1], theirs[1][:n]),
        "turned": (y, y.reshape(2, n).T),
        "turned on one rank": (y, y.reshape(2, n).T if last else y.reshape(n, 2)),
        "every second": (y, y[::2]),
        "none at all": (y, y[comm.rank : comm.rank]),
    }
    try:
        import torch
    except ImportError:
        return around
    return around | {"a tensor on one rank": (y, torch.from_numpy(y)[:n] if last else y[:n])}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", ["auto", "shared", "ring"])
def test_arrays_may_lie_anywhere_on_every_rank(comm: MPI.Intracomm, algorithm: str) -> None:
    for name, (memory, x) in odd_arrays(comm).items():
        in_place = name in ("alike", "a tensor on one rank", "none at all")
        for form in (*FORMS, "plain"):
            memory[...] = -1
            x[...] = comm.rank + 1
            outside = np.count_nonzero(memory == -1)
            if form == "i" and algorithm == "shared" and not in_place:
                with pytest.raises(ValueError, match=r"shared can be started on the arrays of hpcdl\.empty only"):
                    call("allreduce", form, x, comm, algorithm=algorithm)
                continue
            call("allreduce", form, x, comm, algorithm=algorithm)
            assert (x == total(comm, lambda rank: rank + 1)).all(), f"{name}, {form}"
            assert np.count_nonzero(memory == -1) == outside, f"{name}, {form}"


@pytest.mark.ranks(2, 3)
def test_an_array_may_move_from_call_to_call(comm: MPI.Intracomm) -> None:
    """A plan was kept on some ranks, and not on others; for memory of one kind, and now it is another."""
    y, own = hpcdl.empty(40, "float32", comm), np.zeros(40, np.float32)
    dice = np.random.default_rng(3)  # alike on all ranks
    held = [y[:10], own[:10], y[10:20], y[:10].copy()]
    for step in range(80):
        x = held[dice.integers(0, 4, comm.size)[comm.rank]]
        x[...] = comm.rank + step
        assert (hpcdl.allreduce(x, comm) == total(comm, lambda rank, step=step: rank + step)).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", FORMS)
def test_the_result_may_go_to_a_shared_array(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Also where a rank is late with copying what it has there."""
    from hpcdl.buffers import Vector

    put, copying = Vector.put, Vector.copying
    pause_s = 0.01 if comm.rank == comm.size - 1 else 0

    def slow_put(self: Vector, *arguments: Any) -> None:
        time.sleep(pause_s)
        put(self, *arguments)

    def slow_copying(self: Vector, *arguments: Any) -> Callable[[], object]:
        act = copying(self, *arguments)
        return lambda: (time.sleep(pause_s), act())

    monkeypatch.setattr(Vector, "put", slow_put)
    monkeypatch.setattr(Vector, "copying", slow_copying)
    for n in (10, 20_000):
        y, x, turned = hpcdl.empty(n, "float32", comm), np.empty(n, np.float32), np.empty((2, n), np.float32).T[:, 0]
        for source, target in ((x, y), (turned, y), (y, x), (y[: n // 2], y[n // 2 :])):
            for step in range(3):
                source[...] = comm.rank + step
                call("allreduce", form, source, comm, out=target, algorithm="auto" if form == "i" else "shared")
                assert (target == total(comm, lambda rank, step=step: rank + step)).all()
                assert (source == comm.rank + step).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["private", "shared"])
def test_one_rank_may_work_in_place_and_another_not(comm: MPI.Intracomm, where: str) -> None:
    for n, form in itertools.product((10, 10_000), FORMS):
        y = hpcdl.empty(n, "float32", comm) if where == "shared" else np.empty(n, np.float32)
        for step in range(3):
            y[...] = 1
            out = {"out": y} if comm.rank == 0 else {}
            call("allreduce", form, np.full(n, 1, np.float32) if out else y, comm, **out)
            assert (y == comm.size).all(), f"{n}, {form}, call {step}"


# ---- several at a time ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_works_on_shared_arrays_complete_in_any_order(comm: MPI.Intracomm) -> None:
    arrays = [hpcdl.empty(n, "float64", comm) for n in (1, 100, 50_000, 3, 7000)]
    for turn in range(4):
        for k, x in enumerate(arrays):
            x[...] = comm.rank * k + turn
        works = [hpcdl.iallreduce(x, comm, algorithm="shared") for x in arrays]
        works.append(hpcdl.iallreduce(np.full(5000, turn), comm))  # by messages
        if turn == 2:
            assert hpcdl.allreduce(np.ones(3), comm)[0] == comm.size
        order = np.random.default_rng([turn, comm.rank]).permutation(len(works))
        while turn == 3 and sum(works[k].is_completed() for k in order) < len(works):
            pass
        for k in order:
            works[k].wait()
        for k, x in enumerate(arrays):
            assert (x == total(comm, lambda rank, k=k, turn=turn: rank * k + turn)).all()
        assert (works[-1].result() == comm.size * turn).all()


@pytest.mark.ranks(2, 3)
def test_more_works_than_the_board_has_room_for(comm: MPI.Intracomm) -> None:
    from hpcdl.shared import Board

    y = hpcdl.empty((2 * Board.ROOM + 5, 10), "int64", comm)
    for turn in range(3):
        y[...] = np.arange(len(y))[:, None] + comm.rank
        works = [hpcdl.iallreduce(row, comm, algorithm="shared") for row in y]
        if turn == 1 and comm.rank == 0:
            works[0].wait()
        if turn == 2:
            hpcdl.barrier(comm)
        for work in works if comm.rank % 2 else works[::-1]:
            work.wait()
        assert (y == total(comm, lambda rank: np.arange(len(y))[:, None] + rank)).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["shared", "private"])
def test_started_plans_are_waited_for_in_any_order(comm: MPI.Intracomm, where: str) -> None:
    lengths = (10, 5000, 40_000, 300_000)
    xs = [hpcdl.empty(n, "float32", comm) if where == "shared" else np.empty(n, np.float32) for n in lengths]
    plans = [hpcdl.plan_allreduce(x, comm, algorithm="shared") for x in xs]
    for step in range(6):
        for k, x in enumerate(xs):
            x[...] = comm.rank + k + step
        works = [plan.start() for plan in plans]
        for work in works if (comm.rank + step) % 2 else works[::-1]:
            work.wait()
        for k, x in enumerate(xs):
            assert (x == total(comm, lambda rank, k=k, step=step: rank + k + step)).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("waits_for", ["the check", "a gate"])
def test_messages_go_on_while_a_rank_waits_for_others_in_shared_memory(comm: MPI.Intracomm, waits_for: str) -> None:
    y = hpcdl.empty(100, "float32", comm)
    plan = hpcdl.plan_allreduce(y, comm, algorithm="shared")
    for step in range(4):
        y[...] = comm.rank
        long = np.full(1 << 20, comm.rank, np.float32)  # 4 MB, which MPI does not send before the other rank looks
        work = hpcdl.iallreduce(long, comm, algorithm="ring")
        if comm.rank == step % 2:
            work.wait()
        plan() if waits_for == "a gate" else hpcdl.allreduce(y, comm, algorithm="shared")
        work.wait()
        for x in (y, long):
            assert (x == total(comm, lambda rank: rank)).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "waits_in",
    [
        "a call",
        "a plan",
        "a call, with works in flight",
        "a loop that asks",
    ],
)
def test_the_users_messages_go_on_while_a_rank_waits_in_shared_memory(comm: MPI.Intracomm, waits_in: str) -> None:
    """MPI moves a long message only while both ranks are in some call of MPI's, and waiting here is none."""
    y, z, long = hpcdl.empty(10, "float32", comm), hpcdl.empty(10, "float32", comm), np.ones(1 << 20)
    y[...] = z[...] = 1
    plan = hpcdl.plan_allreduce(z, comm)
    request = comm.Irecv(long, 0) if comm.rank else None
    hpcdl.barrier(comm)
    if comm.rank == 0:
        time.sleep(0.1)
        comm.Send(long * 2, 1)
    work = hpcdl.iallreduce(y, comm) if waits_in in ("a call, with works in flight", "a loop that asks") else None
    while waits_in == "a loop that asks" and not work.is_completed():
        pass
    plan() if waits_in == "a plan" else hpcdl.allreduce(z, comm)
    if work:
        work.wait()
        assert (y == 2).all()
    assert (z == 2).all()
    if request:
        request.Wait()
        assert (long == 2).all()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_computes_first_holds_up_the_others_and_breaks_nothing(comm: MPI.Intracomm) -> None:
    y = hpcdl.empty(50_000, "float32", comm)
    for x in (y, y[:10], np.empty(10, np.float32), np.empty(50_000, np.float32)):
        with hpcdl.plan_allreduce(x, comm) as plan:
            for late in range(2):
                for run in (plan, lambda x=x: hpcdl.allreduce(x, comm)):
                    x[...] = comm.rank + late
                    if comm.rank == late:
                        time.sleep(0.05)
                    run()
                    assert (x == total(comm, lambda rank, late=late: rank + late)).all()


@pytest.mark.ranks(3, 4)
def test_calls_in_any_order_with_any_rank_slow(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call another rank pauses ahead of all it does: were a gate missing, the others would run past it.

    Without the check nothing else keeps them.
    """
    from hpcdl.buffers import Vector

    slow = 0

    def pausing(bind: Callable[..., Callable[[], object]]) -> Callable[..., Callable[[], object]]:
        def bound(self: Vector, *arguments: Any) -> Callable[[], object]:
            act = bind(self, *arguments)
            return lambda: (time.sleep(0.0005 if comm.rank == slow else 0), act())

        return bound

    for name in ("combine", "copying"):
        monkeypatch.setattr(Vector, name, pausing(getattr(Vector, name)))
    for name, nbytes in (("CHUNK_BYTES", 1024), ("TILES_BYTES", 1024), ("WHOLE_BYTES", 64)):
        monkeypatch.setattr(f"hpcdl.inside.{name}", nbytes)
    dice = np.random.default_rng(comm.size)  # alike on all ranks
    shapes = {3: ("3", "2+1"), 4: ("4", "3+1")}[comm.size]
    for nodes, checked in itertools.product(shapes, (True, False)):
        monkeypatch.setattr("hpcdl.settings.CHECK", checked)
        with pretended(comm, nodes) as duplicate:
            options: Any = {"comm": duplicate, "algorithm": "by_node" if "+" in nodes else "shared"}
            y = hpcdl.empty(1400, "int32", duplicate)
            arrays = [a[:n] for a in (y, np.empty(1400, np.int32)) for n in (10, 200, 1400)]
            runs: list[Callable[[], object]] = [partial(hpcdl.allreduce, x, **options) for x in arrays]
            runs += [hpcdl.plan_allreduce(x, **options) for x in arrays]
            for step in range(50):
                slow, which = int(dice.integers(comm.size)), int(dice.integers(len(runs)))
                x = arrays[which % len(arrays)]
                x[...] = np.arange(x.size) + step * comm.rank
                runs[which]()
                right = total(comm, lambda rank, x=x, step=step: np.arange(x.size) + step * rank)
                assert (x == right).all(), f"{nodes}, {checked}, call {step}: {which}, rank {slow} slow"


# ---- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_numbers_are_added_in_the_order_of_the_ranks(comm: MPI.Intracomm) -> None:
    """However they are spread over the ranks, wherever they lie, all ranks get these bits, and get them again."""
    spread = np.array(list(itertools.permutations([1e8, 1, -1e8, 1], comm.size))).T
    for dtype, nbytes in itertools.product(("float32", "float64", "float16"), (200, 20_000, 600_000)):
        n = nbytes // np.dtype(dtype).itemsize
        with np.errstate(over="ignore"):
            every = [np.resize(row, n).astype(dtype) for row in spread]
        if dtype == "float16":
            every = [np.clip(row, -2048, 2048) for row in every]  # 2048 + 1 is lost in float16, and not in float32
        right = every[0].astype("float32" if dtype == "float16" else dtype)
        for row in every[1:]:
            right = right + row
        right = right.astype(dtype).tobytes()
        shared = hpcdl.empty(n, dtype, comm)
        for form, x in ((form, x) for form in FORMS for x in (shared, np.empty(n, dtype))):
            if form == "i" and x is not shared:
                continue
            for _ in range(2):
                x[...] = every[comm.rank]
                assert call("allreduce", form, x, comm, algorithm="shared").tobytes() == right, f"{n} {dtype}, {form}"


@pytest.mark.ranks(3, 4, 5)
def test_the_form_of_a_call_changes_no_bit(comm: MPI.Intracomm) -> None:
    values = np.random.default_rng(comm.rank).standard_normal(200_003).astype(np.float32)
    for name in [*collectives.names(comm.size), "shared"]:
        # What is started goes through messages, and by_node adds in another order there.
        forms = FORMS if name in FLAT else ("plain", "plan")
        bits = {call("allreduce", form, values.copy(), comm, algorithm=name).tobytes() for form in forms}
        assert len(bits) == 1, name
        assert len(set(comm.allgather(bits.pop()))) == 1, name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", BY_NODE)
def test_on_nodes_all_ranks_get_the_same_bits_and_get_them_again(comm: MPI.Intracomm, algorithm: str) -> None:
    """Not the same for every map of ranks to nodes: that is an order of adding."""
    every = np.random.default_rng(1).standard_normal((4, 40_003)).astype(np.float32)
    scale = np.abs(every).sum(0) * np.finfo(np.float32).eps * 2
    for nodes in ("0,0,1,1", "0,1,0,1", "3+1", "2+1+1"):
        with pretended(comm, nodes) as duplicate:
            shared = hpcdl.empty(40_003, "float32", duplicate)
            for forms in ("plain", "plan"), ("i",):
                bits = set()
                for form, x in itertools.product((*forms, *forms), (shared, np.empty(40_003, np.float32))):
                    x[...] = every[comm.rank]
                    y = call("allreduce", form, x, duplicate, algorithm=algorithm)
                    assert (np.abs(y - every.sum(0, np.float64)) <= scale).all()
                    bits.add(y.tobytes())
                assert len(bits) == 1, f"{nodes}, {forms}"
                assert len(set(comm.allgather(bits.pop()))) == 1, f"{nodes}, {forms}"


# ---- without the check, without memory, half-way -------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_without_the_check_shared_arrays_are_summed_as_well(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcdl.settings.CHECK", False)
    duplicate = comm.Dup()
    y = hpcdl.empty(20_000, "float32", duplicate)
    for step in range(100):
        form = FORMS[step % 3]
        for x in (y, y[:10], np.empty(10, np.float32)):
            x[...] = comm.rank + step
            call("allreduce", form, x, duplicate, algorithm="auto" if form == "i" else "shared")
            assert (x == total(comm, lambda rank, step=step: rank + step)).all()
    duplicate.Free()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def warned(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returns, and the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def check_messages_only(comm: MPI.Intracomm, arrays: list[Any]) -> None:
    """All forms still work, and so does what asks for shared memory by name."""
    for algorithm, form, x in itertools.product(("shared", "auto", "by_node"), FORMS, arrays):
        x[...] = comm.rank
        _, told = warned(lambda a=algorithm, f=form, x=x: call("allreduce", f, x, comm, algorithm=a))
        assert (x == total(comm, lambda rank: rank)).all()
        assert not told
    assert hpcdl.choose(1 << 20, comm, kind="shared") != "shared"


@pytest.mark.ranks(2, 3)
def test_where_one_rank_gets_no_memory_none_does_and_one_is_told(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    y, own = hpcdl.empty(10, "float32", comm), np.ones(10, np.float32)
    before = mapped()
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr("os.posix_fallocate", no_room)
        x, told = warned(lambda: hpcdl.empty(5000, "float32", comm))
    assert mapped() == before
    assert len(told) == (comm.rank == 0)
    assert all(f"rank {comm.size - 1}: " in line and "No space left on device" in line for line in told)
    again, told = warned(lambda: hpcdl.empty((2, 3), "int8", comm))
    assert again.shape == (2, 3) and not again.any()
    assert not told
    check_messages_only(comm, [x, y, own])
    duplicate = comm.Dup()
    assert hpcdl.choose(1 << 20, duplicate, kind="shared") == "shared"  # there may be room by then
    duplicate.Free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("without", ["a board", "a staging area", "a plan's own area", "a gate"])
def test_without_memory_of_any_kind_there_are_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    duplicate = comm.Dup()
    y, own = np.ones(20_000, np.float32), np.ones(20_000, np.float32)
    if without != "a board":
        y = hpcdl.empty(20_000, "float32", duplicate)
    refused = {
        "a board": lambda: hpcdl.barrier(duplicate),
        "a staging area": lambda: hpcdl.allreduce(own, duplicate, algorithm="shared"),
        "a plan's own area": lambda: hpcdl.plan_allreduce(own, duplicate, algorithm="shared")(),
        "a gate": lambda: hpcdl.plan_allreduce(y, duplicate, algorithm="shared")(),
    }[without]
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr("os.posix_fallocate", no_room)
        _, told = warned(refused)
    assert len(told) == (comm.rank == 0)
    assert set(y) | set(own) <= {0, 1, comm.size}
    check_messages_only(duplicate, [y, own])
    duplicate.Free()


@pytest.mark.ranks(2, 3)
def test_a_plan_kept_from_better_days_is_not_used_any_more(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank comes with a new array, and knows that there is no memory left to share."""
    x = np.ones(10)
    hpcdl.allreduce(x, comm, algorithm="shared")
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", no_room)
        warned(lambda: hpcdl.empty(10, "float32", comm))
    y = x if comm.rank == 0 else np.full(10, float(comm.size))
    assert (hpcdl.allreduce(y, comm, algorithm="shared") == comm.size**2).all()


@pytest.mark.ranks(2, 3)
def test_sharing_can_be_switched_off(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    hpcdl.barrier(comm)
    y = hpcdl.empty(10, "float32", comm)  # of the same processes
    before = mapped()
    monkeypatch.setattr("hpcdl.settings.SHARED", False)
    duplicate = comm.Dup()
    x, told = warned(lambda: hpcdl.empty(10, "float32", duplicate))
    assert not told
    assert not x.any()
    check_messages_only(duplicate, [x, y])
    assert mapped() == before
    duplicate.Free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["shared", "private"])
def test_a_plan_interrupted_half_way_cannot_be_called(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    x = hpcdl.empty(100, "float32", comm) if where == "shared" else np.zeros(100, np.float32)
    plan = hpcdl.plan_allreduce(x, comm, algorithm="shared")
    plan()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdl.shared.Meeting.Wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan()
    with pytest.raises(RuntimeError, match="this plan is in flight"):
        plan()
    plan.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        plan()
    x[...] = 1
    assert (hpcdl.allreduce(x, comm) == 2).all()
    with hpcdl.plan_allreduce(x, comm, algorithm="shared") as plan:
        assert (plan() == 4).all()


@pytest.mark.ranks(3)
def test_ranks_on_several_nodes_that_disagree_are_told(comm: MPI.Intracomm) -> None:
    with pretended(comm, "2+1") as duplicate:
        x = np.ones(10)
        for odd in range(3):
            with pytest.raises(hpcdl.MismatchError, match="allreduce max"):
                hpcdl.allreduce(x, duplicate, op="max" if comm.rank == odd else "sum")
            with pytest.raises(ValueError, match=r"shared is for the ranks of one node, and here are nodes of 2\+1"):
                hpcdl.allreduce(x, duplicate, algorithm="shared")
            assert (x == 1).all()
            assert (hpcdl.allreduce(np.ones(3), duplicate) == 3).all()


@pytest.mark.ranks(1)
def test_the_choice_knows_the_lengths_that_matter(comm: MPI.Intracomm) -> None:
    from hpcdl import choice, inside

    assert (choice.WHOLE_BYTES, choice.CHUNK_BYTES) == (inside.WHOLE_BYTES, inside.CHUNK_BYTES)
