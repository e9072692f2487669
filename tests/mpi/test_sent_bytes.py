"""Bytes are counted where they are sent: as many as the schedule says, in each form, and none within a node."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl.collectives import schedule


def sent(call: Callable[[], Any]) -> int:
    before = hpcdl.sent_bytes()
    call()
    return hpcdl.sent_bytes() - before


def wait_for(x: Any, comm: MPI.Comm, name: str) -> None:
    hpcdl.iallreduce(x, comm, algorithm=name).wait()


@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize("name", ["ring", "folded", "binary_blocks", "doubling", "direct", "tree"])
def test_what_is_sent_is_what_the_schedule_says(comm: MPI.Intracomm, name: str) -> None:
    n = 3000
    steps = [step for steps in schedule(name, comm.size, n).rounds(comm.rank) for step in steps]
    expected = sum(step.span.size for step in steps if type(step).__name__ == "Send") * 4
    x = np.ones(n, np.float32)
    for form in (
        lambda: hpcdl.allreduce(x, comm, algorithm=name),
        lambda: wait_for(x, comm, name),
        lambda: hpcdl.allreduce(x[:], comm, algorithm=name),
    ):
        assert sent(form) == expected
    with hpcdl.plan_allreduce(x, comm, algorithm=name) as plan:
        assert sent(lambda: (plan(), plan(), plan.start().wait())) == 3 * expected


@pytest.mark.ranks(2)
def test_16_bits_travel_as_they_are_added(comm: MPI.Intracomm) -> None:
    x = np.ones(4000, np.float16)
    # The reducing half in float32, the other in float16.
    assert sent(lambda: hpcdl.allreduce(x, comm, algorithm="ring")) == 2000 * 4 + 2000 * 2
    assert sent(lambda: hpcdl.allreduce(x, comm, algorithm="direct")) == 2000 * 2 + 2000 * 2


@pytest.mark.ranks(2, 4)
def test_shared_memory_sends_nothing(comm: MPI.Intracomm) -> None:
    x = hpcdl.empty(4000, comm=comm)
    assert sent(lambda: hpcdl.allreduce(x, comm)) == 0
