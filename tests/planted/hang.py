"""Planted: ranks that never come back from MPI."""

import pytest
from mpi4py import MPI

pytestmark = [pytest.mark.ranks(3), pytest.mark.timeout(3)]


def test_before(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3


def test_all_wait_for_a_message_that_nobody_sends(comm: MPI.Intracomm) -> None:
    comm.Recv(bytearray(8), source=(comm.rank + 1) % 3)


def test_between(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3


@pytest.mark.timeout(60)
def test_rank_1_fails_while_the_others_wait_for_it(comm: MPI.Intracomm) -> None:
    if comm.rank == 1:
        raise ValueError("rank 1 has a reason")
    comm.Recv(bytearray(8), source=1)


def test_after(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3
