"""The harness gives every test as many ranks as it asked for."""

import pytest
from mpi4py import MPI


def test_all_ranks_take_part(comm: MPI.Intracomm, ranks: int) -> None:
    assert comm.size == ranks
    assert comm.allreduce(1 << comm.rank) == (1 << ranks) - 1


@pytest.mark.ranks(2, 3)
def test_a_marker_chooses_the_number_of_ranks(comm: MPI.Intracomm) -> None:
    assert comm.size in (2, 3)
