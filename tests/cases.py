"""Arrays to reduce, of every type and layout, and the numbers that must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

from hpcdl.buffers import INTEGERS, TYPES

OPS = ("sum", "mean", "min", "max", "prod")
# "out" stands here as if it were a layout: the result goes to another array, and x must be as it was.
LAYOUTS = ("flat", "strided", "turned", "reversed", "out", "torch", "torch turned")

GUARD = 77
"""What stands around an array in its memory, and must stand there afterwards."""


def sizes(p: int) -> list[int]:
    return sorted({0, 1, p - 1, p, p + 1, 17 * p + 3, 100003})


def makes_sense(dtype: str, op: str, layout: str) -> bool:
    """Is there such a case at all?"""
    if op == "mean" and dtype in (*INTEGERS, "bool"):
        return False
    if op in ("min", "max") and dtype.startswith("complex"):
        return False
    if "torch" in layout:
        return torch is not None
    return dtype != "bfloat16"


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
    of_rank = (np.arange(n) * 7 + np.arange(n) // 5 + rank * 3) % 4
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


@dataclass
class Arrangement:
    """An array in some layout, and how to look at it."""

    x: Any
    out: Any
    read: Callable[[], Any]
    """The elements of the result in C order, as NumPy's (float32 for bfloat16)."""
    untouched: Callable[[], bool]
    """Is everything around it as it was?"""


def columns(n: int) -> int:
    return next(width for width in (3, 2, 7, 1) if n % width == 0)


def arrange(values: Any, layout: str, dtype: str) -> Arrangement:
    """An array with these elements in C order."""
    n = values.size
    if layout.startswith("torch"):
        return arrange_torch(values, layout, dtype)
    guard = np.asarray(GUARD % 2 if dtype == "bool" else GUARD).astype(dtype)
    if layout == "turned":
        shape = (n // columns(n), columns(n)) if n else (0, 3)
        x = values.reshape(shape).copy(order="F")
        return Arrangement(x, None, lambda: x.reshape(-1), lambda: True)
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


def arrange_torch(values: Any, layout: str, dtype: str) -> Arrangement:
    n = values.size
    tensor = torch.from_numpy(values.copy()).to(getattr(torch, dtype))
    if layout == "torch turned":
        tensor = tensor.reshape((n // columns(n), columns(n)) if n else (0, 3)).t().contiguous().t()

    def read() -> Any:
        flat = tensor.reshape(-1)
        return (flat.float() if dtype == "bfloat16" else flat).numpy()

    return Arrangement(tensor, None, read, lambda: True)


def every_type() -> list[str]:
    return [dtype for dtype in TYPES if dtype != "bfloat16" or torch is not None]
