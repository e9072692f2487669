"""Ranks that disagree all get the same error, naming who called what; no data moves and no rank hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl

pytestmark = pytest.mark.ranks(2, 3, 5)


def one_rank_calls(comm: MPI.Intracomm, odd: Callable[[Any], Any], usual: Callable[[Any], Any]) -> hpcdl.MismatchError:
    """The error of a call that the last rank makes differently."""
    x = np.ones(10)
    with pytest.raises(hpcdl.MismatchError) as caught:
        (odd if comm.rank == comm.size - 1 else usual)(x)
    assert (x == 1).all()
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert len(caught.value.table) == comm.size
    # What was wrong is over: the communicator works.
    assert hpcdl.allreduce(x, comm)[0] == comm.size
    return caught.value


CASES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "another length": (lambda x, c: hpcdl.allreduce(np.ones(8), c), ["float64 10", "float64 8"]),
    "another shape": (lambda x, c: hpcdl.allreduce(x.reshape(2, 5), c), ["float64 10", "float64 2x5"]),
    "another type": (lambda x, c: hpcdl.allreduce(x.astype(np.int64), c), ["float64 10", "int64 10"]),
    "a type of half the size": (lambda x, c: hpcdl.allreduce(np.ones(20, np.float32), c), ["float32 20"]),
    "another operation": (lambda x, c: hpcdl.allreduce(x, c, op="max"), ["allreduce sum", "allreduce max"]),
    "another algorithm": (lambda x, c: hpcdl.allreduce(x, c, algorithm="ring"), ["by ring"]),
    "another collective": (lambda x, c: hpcdl.allgather(x, c), ["allgather of", "allreduce sum of"]),
    "another form": (lambda x, c: hpcdl.iallreduce(x, c).wait(), ["iallreduce sum of float64 10"]),
    "a plan": (lambda x, c: hpcdl.plan_allreduce(x, c), ["plan_allreduce sum of float64 10"]),
    "a barrier": (lambda x, c: hpcdl.barrier(c), [": barrier"]),
    "an array to be made": (lambda x, c: hpcdl.empty(10, "float64", c), ["empty of float64 (10,)"]),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_get_the_same_table(comm: MPI.Intracomm, case: str) -> None:
    odd, words = CASES[case]
    error = one_rank_calls(comm, lambda x: odd(x, comm), lambda x: hpcdl.allreduce(x, comm))
    assert all(word in str(error) for word in words)
    assert f"rank {comm.size - 1}: " in str(error)
    assert error.table[0] != error.table[-1]


def test_long_arrays_are_no_exception(comm: MPI.Intracomm) -> None:
    for n, other in ((409600, 409598), (100_000, 1)):
        x = np.ones(n if comm.rank else other, np.float32)
        with pytest.raises(hpcdl.MismatchError):
            hpcdl.allreduce(x, comm, algorithm="ring")


def test_another_root_is_another_call(comm: MPI.Intracomm) -> None:
    with pytest.raises(hpcdl.MismatchError, match="root 1"):
        hpcdl.broadcast(np.ones(3), comm, root=1 if comm.rank == 0 else 0)


def test_an_order_turned_round_is_noticed(comm: MPI.Intracomm) -> None:
    calls = [lambda: hpcdl.allreduce(np.ones(4), comm), lambda: hpcdl.broadcast(np.ones(4), comm)]
    for call in calls if comm.rank else calls[::-1]:
        with pytest.raises(hpcdl.MismatchError, match="broadcast"):
            call()


def test_several_disagreements_in_flight_are_kept_apart(comm: MPI.Intracomm) -> None:
    """Waited for in different orders, with a good one between them."""
    works = [
        hpcdl.iallreduce(np.ones(3 + (comm.rank == 0)), comm),
        hpcdl.iallreduce(np.ones(6), comm),
        hpcdl.iallreduce(np.ones(2), comm, op="max" if comm.rank == 0 else "min"),
    ]
    errors = [None, None, None]
    for k in (0, 1, 2) if comm.rank % 2 else (2, 1, 0):
        try:
            works[k].wait()
        except hpcdl.MismatchError as error:
            errors[k] = str(error)
    assert errors[1] is None
    assert (works[1].result() == comm.size).all()
    assert "float64 4" in str(errors[0])
    assert "max" in str(errors[2])
    with pytest.raises(hpcdl.MismatchError):
        works[0].result()  # a failed work says so each time it is asked


def test_one_ranks_refusal_is_every_ranks(comm: MPI.Intracomm) -> None:
    x = np.ones(4)
    wrong = x.copy()
    wrong.flags.writeable = False
    with pytest.raises(hpcdl.UnsupportedArrayError, match="rank 0: unsupported: a read-only array") as caught:
        hpcdl.allreduce(wrong if comm.rank == 0 else x, comm)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(ValueError, match="rank 0: invalid: op is one of"):
        hpcdl.allreduce(x, comm, op="nonsense" if comm.rank == 0 else "sum")
    assert (x == 1).all()


def test_each_communicator_counts_for_itself(comm: MPI.Intracomm) -> None:
    half = comm.Split(comm.rank == 0)
    if comm.rank == 0:
        hpcdl.allreduce(np.ones(3), half)
    assert hpcdl.allreduce(np.ones(3), comm)[0] == comm.size
    half.Free()
