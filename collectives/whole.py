"""Whole collectives out of gathering halves: what each rank does, from its first round to its last.

Only the half that reduces is written in the algorithms. What follows it is made here:

- all-reduce: the same rounds mirrored;
- reduce-scatter: each finished piece is dealt to the rank whose block it is;
- reduce: each finished piece is dealt to the root;
- all-gather and broadcast: reduce-scatter and reduce, mirrored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .catalogue import Algorithm, find
from .schedule import Round, Rounds, Span, cut, deal, mirror

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "reduce", "broadcast")


class Program(NamedTuple):
    """What one rank does: it reduces, finishes a span (divides a mean, rounds), and hands out."""

    reducing: list[Round]
    finished: Span
    handing: list[Round]


def program(collective: str, algorithm: Algorithm, group: Sequence[int], me: int, span: Span, root: int = 0) -> Program:
    """The program of the rank at place `me` of the group; `root` is a place too."""
    size = len(group)
    if collective not in COLLECTIVES:
        raise ValueError(f"no collective is called {collective!r}; there are {', '.join(COLLECTIVES)}")
    if collective in ("reduce", "broadcast"):
        # The root comes first: that is where a tree ends.
        group, me = (*group[root:], *group[:root]), (me - root) % size
        wanted = [span, *[Span(span.hi, span.hi)] * (size - 1)]
    else:
        wanted = cut(span, size)

    reducing, finished = _drain(algorithm.gather(group, me, span))
    if collective == "allreduce":
        return Program(reducing, finished, mirror(reducing))
    dealt = deal(group, me, _owned(algorithm, size, span), wanted)
    if collective in ("reduce_scatter", "reduce"):
        return Program(reducing, finished, [dealt] if dealt else [])
    return Program([], Span(span.lo, span.lo), mirror([*reducing, dealt]))


def _drain(rounds: Rounds) -> tuple[list[Round], Span]:
    """All rounds of a generator, and what it returns."""
    drained: list[Round] = []
    while True:
        try:
            drained.append(next(rounds))
        except StopIteration as end:
            return drained, end.value


@lru_cache(maxsize=64)
def _owned(algorithm: Algorithm, size: int, span: Span) -> list[Span]:
    """What each place holds reduced at the end."""
    if algorithm.in_order:
        return cut(span, size)
    return [_drain(algorithm.gather(range(size), place, span))[1] for place in range(size)]


@dataclass(frozen=True)
class Schedule:
    """A collective of n elements on a group of ranks, by one algorithm."""

    collective: str
    algorithm: str
    group: Sequence[int]
    n: int
    root: int = 0
    """A rank of the group."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.group)

    def program(self, rank: int) -> Program:
        """The rank's rounds, in the two halves."""
        place, root = list(self.group).index(rank), list(self.group).index(self.root)
        algorithm = find(self.algorithm, self.size, self.collective)
        return program(self.collective, algorithm, self.group, place, Span(0, self.n), root)

    def rounds(self, rank: int) -> list[Round]:
        """The rank's rounds, one after the other."""
        reducing, _, handing = self.program(rank)
        return [*reducing, *handing]

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm} of {self.n} elements on {self.size} ranks"


def schedule(
    name: str,
    size: int,
    n: int | None = None,
    *,
    collective: str = "allreduce",
    group: Sequence[int] | None = None,
    root: int | None = None,
) -> Schedule:
    """The schedule of an algorithm by name.

    `n` elements (two for each rank and one more, unless given) on the ranks 0, 1, ..., size - 1, or on those
    of `group`, in its order. ValueError for an unknown name, or an algorithm that cannot serve so many ranks.
    """
    ranks = range(size) if group is None else tuple(group)
    if size < 1 or len(ranks) != size or len(set(ranks)) != size:
        raise ValueError(f"a group of {size} different ranks is needed, not {ranks}")
    if root is not None and root not in ranks:
        raise ValueError(f"root {root} is none of the ranks {ranks}")
    found = find(name, size, collective)
    elements = 2 * size + 1 if n is None else n
    if elements < 0:
        raise ValueError(f"n is a number of elements, not {n}")
    return Schedule(collective, found.name, ranks, elements, ranks[0] if root is None else root)
