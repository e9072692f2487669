"""Planted: rank 1 alone fails, in each of the ways in which the ranks still come together."""

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(3)


def test_before() -> None:
    pass


def test_fails_on_rank_1(comm: MPI.Intracomm) -> None:
    print(f"rank {comm.rank} was here")
    assert comm.rank != 1


def test_fails_in_teardown_on_rank_1(comm: MPI.Intracomm, request: pytest.FixtureRequest) -> None:
    if comm.rank == 1:
        request.addfinalizer(lambda: pytest.fail("torn"))


def test_is_skipped_on_rank_1(comm: MPI.Intracomm) -> None:
    if comm.rank == 1:
        pytest.skip("alone")


def test_is_skipped_everywhere() -> None:
    pytest.skip("together")


@pytest.mark.xfail(reason="known", strict=True)
def test_is_expected_to_fail() -> None:
    raise AssertionError


def test_after(comm: MPI.Intracomm) -> None:
    assert comm.allreduce(1) == 3
