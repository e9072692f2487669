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

from .by_node import packed
from .catalogue import Algorithm, find
from .schedule import Nodes, Round, Rounds, Span, cut, deal, mirror

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
    dealt = deal(group, me, _owned(algorithm, tuple(group), span), wanted)
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
def _owned(algorithm: Algorithm, group: tuple[int, ...], span: Span) -> list[Span]:
    """What each place holds reduced at the end."""
    if algorithm.in_order:
        return cut(span, len(group))
    return [_drain(algorithm.gather(group, place, span))[1] for place in range(len(group))]


@dataclass(frozen=True)
class Schedule:
    """A collective of n elements on a group of ranks, by one algorithm."""

    collective: str
    algorithm: str
    group: Sequence[int]
    n: int
    root: int = 0
    """A rank of the group."""
    nodes: Nodes | None = None
    """The ranks on each node, for the algorithms that tell nodes apart."""

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.group)

    def program(self, rank: int) -> Program:
        """The rank's rounds, in the two halves."""
        place, root = list(self.group).index(rank), list(self.group).index(self.root)
        algorithm = find(self.algorithm, self.size, self.collective, self.nodes)
        return program(self.collective, algorithm, self.group, place, Span(0, self.n), root)

    def rounds(self, rank: int) -> list[Round]:
        """The rank's rounds, one after the other."""
        reducing, _, handing = self.program(rank)
        return [*reducing, *handing]

    def __str__(self) -> str:
        nodes = "" if self.nodes is None else f" on the nodes {self.nodes}"
        return f"{self.collective} by {self.algorithm} of {self.n} elements on {self.size} ranks{nodes}"


def schedule(
    name: str,
    size: int,
    n: int | None = None,
    *,
    nodes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    collective: str = "allreduce",
    group: Sequence[int] | None = None,
    root: int | None = None,
) -> Schedule:
    """The schedule of an algorithm by name.

    `n` elements (two for each rank and one more, unless given) on the ranks 0, 1, ..., size - 1, or on those
    of `group`, in its order. `nodes` are the ranks of each node, or the sizes of nodes that are filled with the group's
    ranks one after the other; one node unless given. ValueError for an unknown name, or an algorithm that cannot serve
    so many ranks or nodes.
    """
    ranks = range(size) if group is None else tuple(group)
    if size < 1 or len(ranks) != size or len(set(ranks)) != size:
        raise ValueError(f"a group of {size} different ranks is needed, not {ranks}")
    if root is not None and root not in ranks:
        raise ValueError(f"root {root} is none of the ranks {ranks}")
    grouped = None if nodes is None else _grouped(nodes, ranks)
    found = find(name, size, collective, grouped)
    elements = 2 * size + 1 if n is None else n
    if elements < 0:
        raise ValueError(f"n is a number of elements, not {n}")
    return Schedule(collective, found.name, ranks, elements, ranks[0] if root is None else root, grouped)


def _grouped(nodes: Sequence[int] | Sequence[Sequence[int]], group: Sequence[int]) -> Nodes:
    """The nodes by their ranks, whichever way they were given."""
    sizes = [node for node in nodes if isinstance(node, int)]
    listed = tuple(tuple(node) for node in nodes if not isinstance(node, int))
    grouped = packed(sizes, group) + listed
    held = sum(sizes) + sum(map(len, listed))
    if held != len(group) or {rank for node in grouped for rank in node} != set(group):
        raise ValueError(f"the nodes {nodes} hold {held} ranks, not each of the {len(group)} ranks {group} once")
    if min([*sizes, *map(len, listed)]) < 1:
        raise ValueError(f"every node holds at least one rank; not so in {nodes}")
    return grouped
