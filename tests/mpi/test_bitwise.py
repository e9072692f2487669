"""The reductions bit by bit."""

from functools import reduce

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import UnsupportedArrayError, collectives

OPS = {"band": (np.bitwise_and, MPI.BAND), "bor": (np.bitwise_or, MPI.BOR), "bxor": (np.bitwise_xor, MPI.BXOR)}


def test_every_algorithm_combines_the_bits_of_all_ranks(comm: MPI.Intracomm) -> None:
    for algorithm in (*collectives.names(comm.size, "allreduce"), "shared", "native", "auto"):
        for name, (combine, mpis) in OPS.items():
            for dtype in ("int8", "uint64", "bool"):
                parts = [(np.arange(37) * 5 + rank * 11).astype(dtype) for rank in range(comm.size)]
                if dtype == "bool":
                    parts = [(np.arange(37) + rank) % 3 > 0 for rank in range(comm.size)]
                for op in (name, mpis):
                    mine = parts[comm.rank].copy()
                    hpcdl.allreduce(mine, comm, op=op, algorithm=algorithm)
                    assert (mine == reduce(combine, parts)).all(), (algorithm, name, dtype)


def test_floats_have_no_bits_to_combine(comm: MPI.Intracomm) -> None:
    for dtype in ("float32", "float16", "complex64"):
        with pytest.raises(UnsupportedArrayError, match="bxor combines the bits of integers and of bool"):
            hpcdl.allreduce(np.ones(2, dtype), comm, op="bxor")
