"""The catalogue: each algorithm's name, what it asks for, and what else people call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .binary_blocks import binary_blocks, binary_blocks_cost
from .cost import Cost
from .direct import direct, direct_cost
from .doubling import doubling, doubling_cost
from .halving import folded, folded_cost, halving, halving_cost
from .ring import ring, ring_cost
from .schedule import Rounds, Span
from .tree import tree, tree_cost


@dataclass(frozen=True)
class Algorithm:
    """The gathering half of a family of collectives, and what a caller must know about it."""

    name: str
    gather: Callable[[Sequence[int], int, Span], Rounds]
    cost: Callable[[int, float], Cost]
    """Of an all-reduce of n bytes on `size` ranks: cost(size, n)."""
    any_size: bool = True
    in_order: bool = False
    """Place r ends with block r of `cut(span, size)`."""
    raw: bool = False
    """Only a rank's own, untouched numbers are sent to be added, never a partial sum."""
    whole: bool = False
    """For all-reduce only: the ranks exchange whole vectors and no rank owns a part."""


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("ring", ring, ring_cost, in_order=True),
        Algorithm("halving", halving, halving_cost, any_size=False),
        Algorithm("folded", folded, folded_cost),
        Algorithm("binary_blocks", binary_blocks, binary_blocks_cost),
        Algorithm("doubling", doubling, doubling_cost, whole=True),
        Algorithm("direct", direct, direct_cost, in_order=True, raw=True),
        Algorithm("tree", tree, tree_cost),
    )
}

ALIASES = {"rabenseifner": "folded", "halving_doubling": "folded", "recursive_doubling": "doubling"}


def find(name: str, size: int = 1, collective: str = "allreduce") -> Algorithm:
    """The algorithm of that name or alias. ValueError if there is none, or if it cannot serve size ranks."""
    algorithm = ALGORITHMS.get(ALIASES.get(name, name))
    if algorithm is None:
        raise ValueError(f"no algorithm is called {name!r}; there are {', '.join([*ALGORITHMS, *ALIASES])}")
    if size & (size - 1) and not algorithm.any_size:
        raise ValueError(f"{name} needs 2**k ranks, not {size}; folded and binary_blocks take any number")
    if algorithm.whole and collective != "allreduce":
        others = ", ".join(names(size, collective))
        raise ValueError(f"{name} exchanges whole vectors and serves allreduce only; {collective} has {others}")
    return algorithm


def names(size: int = 1, collective: str = "allreduce") -> list[str]:
    """The algorithms that serve a collective on that many ranks."""
    return [
        algorithm.name
        for algorithm in ALGORITHMS.values()
        if (algorithm.any_size or not size & (size - 1)) and (collective == "allreduce" or not algorithm.whole)
    ]
