"""The other collectives, and the three forms of each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import (
    BY_NODE,
    FORMS,
    OPS,
    SHAPES,
    call,
    every_type,
    expected,
    makes_sense,
    numbers,
    pairwise,
    pretended,
    sizes,
)
from harness import RANKS
from mpi4py import MPI

import hpcdl
from hpcdl import collectives
from hpcdl.buffers import INTEGERS

pytestmark = pytest.mark.ranks(1, 2, 3, 5)
every_number_of_ranks = pytest.mark.ranks(*RANKS)

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "reduce", "broadcast")


@every_number_of_ranks
@pytest.mark.timeout(120)
def test_every_collective_in_every_form(comm: MPI.Intracomm) -> None:
    check_every_collective(comm, collectives.ALGORITHMS)


@pytest.mark.ranks(*SHAPES)
def test_every_collective_on_nodes(comm: MPI.Intracomm) -> None:
    for nodes in SHAPES[comm.size]:
        with pretended(comm, nodes) as duplicate:
            check_every_collective(duplicate, BY_NODE)


def check_every_collective(comm: MPI.Intracomm, algorithms: Iterable[str]) -> None:
    """Every two circumstances meet."""
    rank, size, root = comm.rank, comm.size, comm.size // 2
    dtypes = [dtype for dtype in every_type() if dtype != "bfloat16"]

    def possible(collective: str, algorithm: str, dtype: str, op: str, *_: object) -> bool:
        return serves(algorithm, collective, size) and makes_sense(dtype, op, "flat")

    cases = pairwise([COLLECTIVES, [*algorithms], dtypes, OPS, sizes(size), FORMS, ("in place", "out")], possible)
    for collective, algorithm, dtype, op, n, form, where in cases:
        case = f"{collective} {algorithm} {op} of {n} {dtype}, {form}, {where}"
        mine, total = numbers(dtype, op, n, rank), expected(dtype, op, n, size)
        part = hpcdl.share(n, comm)
        options: dict[str, Any] = {"algorithm": algorithm}
        if collective not in ("allgather", "broadcast"):
            options["op"] = op
        if collective in ("reduce", "broadcast"):
            options["root"] = root
        x, result, right = mine.copy(), n, total
        if collective == "reduce_scatter":
            result, right = part.stop - part.start, total[part]
        elif collective == "allgather":
            right = np.concatenate(
                [numbers(dtype, op, n, other)[slice(*piece)] for other, piece in shares(n, size)] or [mine]
            )
            x = mine[part].copy() if where == "out" else x
        elif collective == "broadcast":
            right = numbers(dtype, op, n, root)
        before = x.copy()
        if where == "out":
            options["out"] = np.zeros(result, x.dtype)
        given = call(collective, form, x, comm, **options)
        if collective == "reduce" and rank != root:
            assert given is None, case
            assert (x == before).all(), case
            continue
        assert given.shape == right.shape, case
        assert given.dtype == right.dtype, case
        assert (given == right).all(), case
        if where == "out":
            assert given is options["out"], case
            assert (x == before).all(), case
        elif collective == "reduce_scatter":
            assert (x[part] == right).all(), case
        else:
            assert given is x, case


def serves(algorithm: str, collective: str, size: int) -> bool:
    outer, _, between = algorithm.partition(":")
    return outer in collectives.names(size, collective) and (between != "doubling" or collective == "allreduce")


def shares(n: int, size: int) -> list[tuple[int, Any]]:
    return list(enumerate(collectives.cut(collectives.Span(0, n), size)))


@every_number_of_ranks
def test_reduce_scatter_and_allgather_make_an_allreduce(comm: MPI.Intracomm) -> None:
    for n in sizes(comm.size)[:-1]:
        x = numbers("int64", "sum", n, comm.rank).copy()
        hpcdl.reduce_scatter(x, comm)
        hpcdl.allgather(x, comm)
        assert (x == expected("int64", "sum", n, comm.size)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_in_the_other_collectives(comm: MPI.Intracomm, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    n, part = 37, hpcdl.share(37, comm)
    for name in collectives.names(comm.size, "reduce_scatter"):
        x = torch.from_numpy(numbers(dtype, "sum", n, comm.rank).copy()).to(getattr(torch, dtype))
        piece = hpcdl.reduce_scatter(x, comm, op="mean", algorithm=name)
        assert piece.dtype == x.dtype
        assert piece.float().tolist() == expected(dtype, "mean", n, comm.size)[part].astype("float32").tolist()
        hpcdl.allgather(x, comm, algorithm=name)
        assert x.float().tolist() == expected(dtype, "mean", n, comm.size).astype("float32").tolist()
        hpcdl.reduce(x, comm, op="max", algorithm=name)
        hpcdl.broadcast(x, comm, algorithm=name)


@every_number_of_ranks
def test_works_complete_in_any_order(comm: MPI.Intracomm) -> None:
    """One rank waits for the first, the next for the last: nobody may depend on the others' order."""
    works = [
        hpcdl.iallreduce(np.full(1000 + k, comm.rank + k), comm, algorithm=name)
        for k, name in enumerate(collectives.names(comm.size) * 2)
    ]
    ordered = works if comm.rank % 2 else works[::-1]
    for work in ordered:
        work.wait()
    for k, work in enumerate(works):
        assert (work.result() == sum(rank + k for rank in range(comm.size))).all()


def test_mpis_own_works_keep_their_order(comm: MPI.Intracomm) -> None:
    """Some ranks look after a work before they start the next, some do not."""
    works = []
    for k, name in enumerate(["native", "ring", "native", "native", "doubling"]):
        works.append(hpcdl.iallreduce(np.full(100 + k, comm.rank + k), comm, algorithm=name))
        until = time.monotonic() + (0.05 if comm.rank % 2 else 0)
        while time.monotonic() < until:  # long enough for the others to have started theirs
            works[0].is_completed()
    for work in works if comm.rank % 3 else works[::-1]:
        work.wait()
    for k, work in enumerate(works):
        assert (work.result() == sum(rank + k for rank in range(comm.size))).all()


def test_a_blocking_call_lets_the_others_works_go_on(comm: MPI.Intracomm) -> None:
    work = hpcdl.iallreduce(np.full(3000, 1), comm, algorithm="ring")
    if comm.rank % 2:
        work.wait()
    assert hpcdl.allreduce(np.ones(5, int), comm)[0] == comm.size
    assert (work.result() == comm.size).all()


@every_number_of_ranks
def test_a_plan_takes_what_the_array_holds_at_each_call(comm: MPI.Intracomm) -> None:
    for name in collectives.names(comm.size):
        base = np.zeros((7, 10), np.float32)
        for x in (base, base.T, base[:, ::3]):
            with hpcdl.plan_allreduce(x, comm, algorithm=name) as plan:
                for step in range(5):
                    x[...] = step + comm.rank
                    assert plan() is x
                    assert (x == sum(step + rank for rank in range(comm.size))).all()
                    x[...] = 1
                    assert (plan.start().result() == comm.size).all()


def test_a_plan_says_why_it_cannot_be_called(comm: MPI.Intracomm) -> None:
    plan = hpcdl.plan_allreduce(np.ones(100_000), comm)
    work = plan.start()
    if comm.size > 1 and not work.is_completed():
        with pytest.raises(RuntimeError, match="in flight; wait for its work first"):
            plan()
    work.wait()
    plan.close()
    plan.close()
    with pytest.raises(RuntimeError, match="closed; make another"):
        plan()


def test_a_barrier_keeps_everybody_until_the_last_has_come(comm: MPI.Intracomm) -> None:
    for form in range(3):
        late = form % comm.size
        if comm.rank == late:
            time.sleep(0.2)
        came = time.monotonic()
        if form == 0:
            hpcdl.barrier(comm)
        elif form == 1:
            hpcdl.ibarrier(comm).wait()
        else:
            with hpcdl.plan_barrier(comm) as plan:
                plan()
        left = time.monotonic()
        assert max(comm.allgather(came)) <= min(comm.allgather(left))  # one clock: the ranks are on one machine


def test_private_messages_never_meet_the_users(comm: MPI.Intracomm) -> None:
    """Messages of any tag from any source are in flight on the user's communicator meanwhile."""
    inbox = np.zeros(4)
    request = comm.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    x = np.ones(1000)
    hpcdl.allreduce(x, comm)
    comm.Send(np.full(4, 9.0), (comm.rank + 1) % comm.size, 0)
    request.Wait()
    assert (inbox == 9).all()
    assert (x == comm.size).all()


def test_any_intracommunicator_will_do(comm: MPI.Intracomm) -> None:
    half = comm.Split(comm.rank % 2, -comm.rank)  # the order turned round
    x = np.array([1 << comm.rank])
    hpcdl.allreduce(x, half)
    assert x[0] == sum(1 << rank for rank in range(comm.rank % 2, comm.size, 2))
    half.Free()
    assert hpcdl.allreduce(np.ones(3), MPI.COMM_SELF).tolist() == [1, 1, 1]
    assert hpcdl.allreduce(np.ones(3)).tolist() == [MPI.COMM_WORLD.size] * 3


def test_what_is_no_intracommunicator_is_refused(comm: MPI.Intracomm) -> None:
    for wrong in (3, "world", MPI.COMM_WORLD.group):
        with pytest.raises(TypeError, match="intracommunicator"):
            hpcdl.allreduce(np.ones(1), wrong)
    with pytest.raises(ValueError, match="COMM_NULL"):
        hpcdl.allreduce(np.ones(1), MPI.COMM_NULL)
    hpcdl.barrier(comm)


def test_mpis_own_operations_are_names_too(comm: MPI.Intracomm) -> None:
    for op, name in ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MIN, "min"), (MPI.MAX, "max")):
        x = numbers("int64", name, 20, comm.rank).copy()
        assert (hpcdl.allreduce(x, comm, op=op) == expected("int64", name, 20, comm.size)).all()


@every_number_of_ranks
def test_choose_names_an_algorithm_that_serves(comm: MPI.Intracomm) -> None:
    for collective, kind, dtype in product(COLLECTIVES, ("private", "shared", "device"), ("float32", "float16")):
        able = collectives.names(comm.size, collective)
        if collective == "allreduce" and kind != "device":
            able.append("shared")
        for nbytes in (0, 8, 1 << 10, 1 << 20, 1 << 30):
            name = hpcdl.choose(nbytes, comm, collective=collective, kind=kind, dtype=dtype)
            assert name in able
            getattr(hpcdl, collective)(np.ones(5, dtype), comm, algorithm=name)
    if comm.size > 2:  # on two the algorithms are one
        assert hpcdl.choose(8, comm, kind="device") in ("doubling", "halving")
    assert comm.size == 1 or hpcdl.choose(1 << 20, comm, kind="shared") == "shared"


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_a_mean_of_integers_is_a_type_error(comm: MPI.Intracomm, dtype: str) -> None:
    x = np.ones(3, dtype)
    with pytest.raises(TypeError, match=f"mean of {dtype}"):
        hpcdl.allreduce(x, comm, op="mean")
    assert (x == 1).all()
