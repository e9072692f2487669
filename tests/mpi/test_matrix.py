"""Every algorithm, type, operation, layout and length: the exact sum, on all ranks, and nothing else touched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from cases import (
    BY_NODE,
    FORMS,
    LAYOUTS,
    OPS,
    SHAPES,
    Shelf,
    arrange,
    call,
    every_type,
    expected,
    makes_sense,
    numbers,
    pairwise,
    pretended,
    sizes,
)
from mpi4py import MPI

import hpcdl
from hpcdl import collectives
from hpcdl.buffers import HALVES

ALGORITHMS = hpcdl.algorithms()


def serves(algorithm: str, dtype: str, ranks: int) -> bool:
    if algorithm == "halving":
        return not ranks & (ranks - 1)
    return not (algorithm == "native" and dtype in HALVES)


def pairs(size: int, algorithms: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str], *rest: Any) -> Any:
    """Cases in which every two of algorithm, type, operation, layout and what else there is meet at least once."""

    def possible(algorithm: str, dtype: str, op: str, layout: str, *_: object) -> bool:
        return serves(algorithm, dtype, size) and makes_sense(dtype, op, layout)

    return pairwise([algorithms, dtypes, OPS, layouts, *rest], possible)


def check(shelf: Shelf, algorithm: str, dtype: str, op: str, layout: str, n: int, form: str = "plain") -> None:
    comm = shelf.comm
    array = arrange(numbers(dtype, op, n, comm.rank), layout, dtype, shelf)
    shape = array.x.shape
    result = call("allreduce", form, array.x, comm, op=op, algorithm=algorithm, out=array.out)
    case = f"{algorithm} {op} of {n} {dtype}, {layout}, {form}"
    assert result is (array.x if array.out is None else array.out), case
    assert array.x.shape == shape, case
    assert (array.read() == expected(dtype, op, n, comm.size)).all(), case
    assert array.untouched(), case


@pytest.mark.ranks(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "halving"])
def test_the_sum_of_each_algorithm_is_exact_in_every_pair_of_circumstances(comm: MPI.Intracomm, algorithm: str) -> None:
    shelf = Shelf(comm)
    cases = pairs(comm.size, [algorithm], every_type(), LAYOUTS, sizes(comm.size))
    assert len(cases) > 80
    for case in cases:
        check(shelf, *case)


@pytest.mark.ranks(1, 2, 4, 5, 7, 8)
@pytest.mark.timeout(120)
def test_the_sum_is_exact_in_every_pair_of_circumstances(comm: MPI.Intracomm) -> None:
    """On other ranks every two of algorithm, type, operation, layout and length meet at least once."""
    shelf = Shelf(comm)
    cases = pairs(comm.size, ALGORITHMS, every_type(), LAYOUTS, sizes(comm.size))
    assert len(cases) > 80
    for case in cases:
        check(shelf, *case)


@pytest.mark.ranks(*SHAPES)
@pytest.mark.timeout(120)
def test_the_sum_is_exact_on_nodes_of_any_size(comm: MPI.Intracomm) -> None:
    shapes = SHAPES[comm.size]
    cases = pairs(comm.size, [*BY_NODE, "auto"], every_type(), LAYOUTS, sizes(comm.size), FORMS, shapes)
    for nodes in shapes:
        with pretended(comm, nodes) as duplicate:
            shelf = Shelf(duplicate)
            for *case, on in cases:
                if on == nodes:
                    check(shelf, *case)


# ---- plans ---------------------------------------------------------------------------------------------------------

REUSED = {"float32": ("sum", "max"), "int16": ("sum",), "float16": ("mean",), "bool": ("max",)}


def check_reused(shelf: Shelf, algorithm: str, dtype: str, op: str, layout: str, n: int) -> None:
    """100 calls of a plan, some of them started, and plain calls on the same array between them."""
    comm = shelf.comm
    x = arrange(np.empty(n, dtype), layout, dtype, shelf).x
    mine = [numbers(dtype, op, n + turn, comm.rank)[turn:].reshape(x.shape) for turn in range(5)]
    right = [expected(dtype, op, n + turn, comm.size)[turn:].reshape(x.shape) for turn in range(5)]
    with hpcdl.plan_allreduce(x, comm, op=op, algorithm=algorithm) as plan:
        for step in range(100):
            x[...] = mine[step % 5]
            if step % 8 == 3:
                plan.start().wait()
            else:
                plan()
            assert (x == right[step % 5]).all(), f"{algorithm} {op} of {n} {dtype}, {layout}, call {step}"
            if step % 4 == 2:
                x[...] = mine[step // 4 % 5]
                hpcdl.allreduce(x, comm, op=op, algorithm=algorithm)
                assert (x == right[step // 4 % 5]).all(), f"{algorithm} {op} of {n} {dtype}, {layout}, behind {step}"


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_plan_is_right_100_times_in_every_pair_of_circumstances(comm: MPI.Intracomm) -> None:
    shelf = Shelf(comm)
    for case in pairs(comm.size, ALGORITHMS, [*REUSED], ("flat", "strided", "shared"), (1, comm.size + 1, 5003)):
        check_reused(shelf, *case)


@pytest.mark.ranks(3, 4)
def test_a_plan_is_right_100_times_on_nodes(comm: MPI.Intracomm) -> None:
    for nodes in SHAPES[comm.size]:
        with pretended(comm, nodes) as duplicate:
            shelf = Shelf(duplicate)
            for case in pairs(comm.size, BY_NODE, [*REUSED], ("flat", "shared"), (comm.size + 1, 5003)):
                check_reused(shelf, *case)


# ---- pieces --------------------------------------------------------------------------------------------------------

PIECES = {
    "execute.SEGMENT_BYTES": 1024,
    "inside.CHUNK_BYTES": 1024,
    "inside.TILES_BYTES": 1024,
    "inside.WHOLE_BYTES": 64,
    "call.WHOLE_BYTES": 64,
}


def sums(comm: MPI.Intracomm, algorithms: Sequence[str]) -> dict[str, bytes]:
    """The bits of sums of any numbers, at the edges of the pieces and far beyond."""
    shelf = Shelf(comm)
    found = {}
    for dtype, layout, n in product(("float32", "float16"), ("flat", "shared"), (16, 257, 768, 5003)):
        values = np.random.default_rng([comm.rank, n]).standard_normal(n).astype(dtype)
        for algorithm, form in product(algorithms, ("plain", "plan")):
            x = arrange(values, layout, dtype, shelf).x
            op = "mean" if n % 2 else "sum"
            found[f"{algorithm} {op} of {n} {dtype}, {layout}, {form}"] = call(
                "allreduce", form, x, comm, op=op, algorithm=algorithm
            ).tobytes()
    return found


@pytest.mark.ranks(2, 3, 4)
def test_the_bits_do_not_depend_on_the_pieces(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the wire, through the staging area and in place: pieces so short that there are many, or none at all."""
    able = {"": [*collectives.names(comm.size), "shared"]}
    able |= {3: {"2+1": BY_NODE}, 4: {"2+2": BY_NODE, "2+1+1": BY_NODE}}.get(comm.size, {})
    for nodes, algorithms in able.items():
        with pretended(comm, nodes) as duplicate:
            whole = sums(duplicate, algorithms)
        with monkeypatch.context() as patch:
            for name, nbytes in PIECES.items():
                patch.setattr(f"hpcdl.{name}", nbytes)
            with pretended(comm, nodes) as duplicate:
                assert sums(duplicate, algorithms) == whole, nodes
