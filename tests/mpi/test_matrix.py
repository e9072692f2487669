"""Every algorithm, type, operation, layout and length: the exact sum, on all ranks, and nothing else touched."""

from __future__ import annotations

from itertools import product

import pytest
from allpairspy import AllPairs
from cases import LAYOUTS, OPS, arrange, every_type, expected, makes_sense, numbers, sizes
from mpi4py import MPI

import hpcdl
from hpcdl.buffers import HALVES

ALGORITHMS = hpcdl.algorithms()


def serves(algorithm: str, dtype: str, ranks: int) -> bool:
    if algorithm == "halving":
        return not ranks & (ranks - 1)
    return not (algorithm == "native" and dtype in HALVES)


def check(comm: MPI.Intracomm, algorithm: str, dtype: str, op: str, layout: str, n: int) -> None:
    array = arrange(numbers(dtype, op, n, comm.rank), layout, dtype)
    shape = array.x.shape
    result = hpcdl.allreduce(array.x, comm, op=op, algorithm=algorithm, out=array.out)
    case = f"{algorithm} {op} of {n} {dtype}, {layout}"
    assert result is (array.x if array.out is None else array.out), case
    assert array.x.shape == shape, case
    assert (array.read() == expected(dtype, op, n, comm.size)).all(), case
    assert array.untouched(), case


@pytest.mark.ranks(2, 3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", every_type())
def test_the_sum_is_exact_in_every_case(comm: MPI.Intracomm, algorithm: str, dtype: str) -> None:
    if not serves(algorithm, dtype, comm.size):
        pytest.skip(f"{algorithm} does not serve {dtype} on {comm.size} ranks")
    for op, layout, n in product(OPS, LAYOUTS, sizes(comm.size)):
        if makes_sense(dtype, op, layout):
            check(comm, algorithm, dtype, op, layout, n)


@pytest.mark.ranks(1, 4, 5, 7, 8)
@pytest.mark.timeout(120)
def test_the_sum_is_exact_in_every_pair_of_circumstances(comm: MPI.Intracomm) -> None:
    """On more ranks every two of algorithm, type, operation, layout and length meet at least once."""

    def possible(row: list[object]) -> bool:
        algorithm, dtype, op, layout, _ = [*map(str, row), *[""] * (5 - len(row))]
        if len(row) >= 2 and not serves(algorithm, dtype, comm.size):
            return False
        if len(row) >= 3 and not makes_sense(dtype, op, "torch"):
            return False
        return len(row) < 4 or makes_sense(dtype, op, layout)

    cases = list(AllPairs([ALGORITHMS, every_type(), OPS, LAYOUTS, sizes(comm.size)], filter_func=possible))
    assert len(cases) > 80
    for algorithm, dtype, op, layout, n in cases:
        check(comm, algorithm, dtype, op, layout, n)
