"""Arrays to reduce, of every type and layout, and the numbers that must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

import hpcdl
from hpcdl import settings
from hpcdl.buffers import INTEGERS, TYPES

if TYPE_CHECKING:
    from mpi4py import MPI

OPS = ("sum", "mean", "min", "max", "prod")
# "out" stands here as if it were a layout: the result goes to another array, and x must be as it was. "shared" is one
# where it lies in memory that all ranks of the node map.
LAYOUTS = ("flat", "strided", "turned", "reversed", "out", "torch", "torch turned", "shared", "torch shared")

GUARD = 77
"""What stands around an array in its memory, and must stand there afterwards."""


LONG = 100003

SHAPES = {3: ("2+1", "1+1+1"), 4: ("4", "3+1", "2+2", "2+1+1", "1+1+1+1", "0,1,0,1"), 5: ("3+2", "2+2+1")}
"""By number of ranks: the nodes that they may seem to be on."""

BY_NODE = ("by_node", "by_node:binary_blocks", "by_node:doubling", "by_node:tree")
FORMS = ("plain", "i", "plan")


def sizes(p: int) -> list[int]:
    return sorted({0, 1, p - 1, p, p + 1, 17 * p + 3, LONG})


def makes_sense(dtype: str, op: str, layout: str) -> bool:
    """Is there such a case at all?"""
    if op == "mean" and dtype in (*INTEGERS, "bool"):
        return False
    if op in ("min", "max") and dtype.startswith("complex"):
        return False
    if "torch" in layout:
        return torch is not None
    return dtype != "bfloat16"


def pairwise(axes: Sequence[Sequence[Any]], possible: Callable[..., bool]) -> list[tuple[Any, ...]]:
    """Rows in which every two values of two axes meet that can; the same on all ranks.

    Each row is made for two that have not met yet, and of some drawn by lot the one in which most others meet too.
    """
    dice, rows = Random(0), []
    places = list(combinations(range(len(axes)), 2))
    apart = {(i, j, a, b): None for i, j in places for a in axes[i] for b in axes[j]}  # a set that has an order

    def met(row: tuple[Any, ...]) -> list[Any]:
        return [(i, j, row[i], row[j]) for i, j in places if (i, j, row[i], row[j]) in apart]

    while apart:
        i, j, a, b = next(iter(apart))
        fixed = [[a] if at == i else [b] if at == j else axis for at, axis in enumerate(axes)]
        drawn = [row for row in (tuple(map(dice.choice, fixed)) for _ in range(30)) if possible(*row)]
        drawn = drawn or [row for row in product(*fixed) if possible(*row)]
        del apart[i, j, a, b]
        if drawn:
            rows.append(max(drawn, key=lambda row: len(met(row))))
            for pair in met(rows[-1]):
                del apart[pair]
    return rows


def frozen(make: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what was made, and let nobody change it: making the long ones anew took most of the tests' time."""

    @lru_cache(maxsize=512)
    def made(*case: Any) -> Any:
        array = make(*case)
        array.flags.writeable = False
        return array

    return made


@frozen
def numbers(dtype: str, op: str, n: int, rank: int) -> Any:
    """What a rank holds: integers so small that float16 adds and multiplies them exactly."""
    place = np.arange(n)
    of_rank = (place * 7 + place // 5 + rank * (3 + place // 3)) % 4
    if op == "prod":
        of_rank = of_rank % 2 + 1
    if dtype == "bool":
        return of_rank == 0
    if dtype.startswith("complex"):
        return (of_rank + 1j * ((of_rank + rank) % 2)).astype(dtype)
    return of_rank.astype("float32" if dtype == "bfloat16" else dtype)


@frozen
def expected(dtype: str, op: str, n: int, ranks: int) -> Any:
    """What every rank must hold in the end; in float32 for bfloat16, rounded as torch rounds."""
    every = [numbers(dtype, op, n, rank) for rank in range(ranks)]
    total = every[0].copy()
    ufunc = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    total = total.astype(wide)
    for other in every[1:]:
        total = ufunc(total, other.astype(wide))
    if op == "mean":
        total = total / np.asarray(ranks, wide)
    if dtype == "bfloat16":
        return torch.from_numpy(total).bfloat16().float().numpy()
    return total.astype(dtype)


def call(collective: str, form: str, x: Any, comm: MPI.Intracomm, **options: Any) -> Any:
    """Call a collective in one of its forms."""
    if form == "i":
        work = getattr(hpcdl, f"i{collective}")(x, comm, **options)
        work.wait()
        assert work.is_completed()
        return work.result()
    if form == "plan":
        with getattr(hpcdl, f"plan_{collective}")(x, comm, **options) as plan:
            return plan()
    return getattr(hpcdl, collective)(x, comm, **options)


@dataclass
class Arrangement:
    """An array in some layout, and how to look at it."""

    x: Any
    out: Any
    read: Callable[[], Any]
    """The elements of the result in C order, as NumPy's (float32 for bfloat16)."""
    untouched: Callable[[], bool]
    """Is everything around it as it was?"""


class Shelf:
    """Node-shared arrays of a communicator, by type: to make one is a collective call, so each is made but once."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.arrays: dict[tuple[str, str], Any] = {}

    def take(self, layout: str, dtype: str, length: int) -> Any:
        """The first elements of the array of that type."""
        if (layout, dtype) not in self.arrays:
            self.arrays[layout, dtype] = self.make(layout, dtype)
        return self.arrays[layout, dtype][:length]

    def make(self, layout: str, dtype: str) -> Any:
        if layout == "shared":
            return hpcdl.empty(LONG + 7, dtype, self.comm)
        from hpcdl.torch import empty

        return empty(LONG + 7, getattr(torch, dtype), self.comm)


@contextmanager
def pretended(comm: MPI.Intracomm, nodes: str) -> Iterator[MPI.Intracomm]:
    """A duplicate whose ranks seem to be on such nodes."""
    before, settings.NODES = settings.NODES, nodes
    try:
        duplicate = comm.Dup()
        hpcdl.barrier(duplicate)  # it looks round when it is first used
    finally:
        settings.NODES = before
    yield duplicate
    duplicate.Free()  # only if all is well: it is a collective call


def columns(n: int) -> int:
    return next(width for width in (3, 2, 7, 1) if n % width == 0)


def arrange(values: Any, layout: str, dtype: str, shelf: Shelf) -> Arrangement:
    """An array with these elements in C order."""
    n = values.size
    if layout.startswith("torch"):
        return arrange_torch(values, layout, dtype, shelf)
    guard = np.asarray(GUARD % 2 if dtype == "bool" else GUARD).astype(dtype)
    if layout == "turned":
        shape = (n // columns(n), columns(n)) if n else (0, 3)
        x = values.reshape(shape).copy(order="F")
        return Arrangement(x, None, lambda: x.reshape(-1), lambda: True)
    if layout == "shared":
        base = shelf.take(layout, dtype, n + 7)
        base[...] = guard
    else:
        base = np.full(2 * n + 7, guard)
    at = {"strided": slice(3, 3 + 2 * n, 2), "reversed": slice(n + 2, 2, -1)}.get(layout, slice(3, 3 + n))
    x = base[at]
    x[...] = values
    around = np.ones(base.size, bool)
    around[at] = False
    if layout == "out":
        out = np.full(n, guard)
        kept = values.copy()
        return Arrangement(x, out, lambda: out, lambda: bool((base[around] == guard).all() and (x == kept).all()))
    return Arrangement(x, None, lambda: x, lambda: bool((base[around] == guard).all()))


def arrange_torch(values: Any, layout: str, dtype: str, shelf: Shelf) -> Arrangement:
    n = values.size
    tensor = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    if layout == "torch shared":
        tensor = shelf.take(layout, dtype, n).copy_(tensor)
    elif layout == "torch turned":
        tensor = tensor.reshape((n // columns(n), columns(n)) if n else (0, 3)).t().contiguous().t()

    def read() -> Any:
        flat = tensor.reshape(-1)
        return (flat.float() if dtype == "bfloat16" else flat).numpy()

    return Arrangement(tensor, None, read, lambda: True)


def every_type() -> list[str]:
    return [dtype for dtype in TYPES if dtype != "bfloat16" or torch is not None]
