"""Planted: ranks that die."""

import os
import signal

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(3)


def test_before(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3


def test_rank_1_leaves(comm: MPI.Intracomm) -> None:
    if comm.rank == 1:
        os._exit(3)
    comm.Barrier()


def test_between(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3


def test_rank_2_is_killed(comm: MPI.Intracomm) -> None:
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


def test_after(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3
