"""The catalogue: each algorithm's name, what it asks for, and what else people call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from .binary_blocks import binary_blocks, binary_blocks_cost
from .by_node import by_master, by_master_cost, by_node, by_node_cost
from .cost import Cost, CostOf
from .direct import direct, direct_cost
from .doubling import doubling, doubling_cost
from .halving import folded, folded_cost, halving, halving_cost
from .ring import ring, ring_cost
from .schedule import Gather, Nodes, Rounds, Span
from .tree import tree, tree_cost


@dataclass(frozen=True)
class Algorithm:
    """The gathering half of a family of collectives, and what a caller must know about it."""

    name: str
    gather: Gather
    cost: CostOf
    any_size: bool = True
    in_order: bool = False
    """Place r ends with block r of `cut(span, size)`."""
    raw: bool = False
    """Only a rank's own, untouched numbers are sent to be added, never a partial sum."""
    whole: bool = False
    """For all-reduce only: the ranks exchange whole vectors and no rank owns a part."""


FLAT = {
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

HIERARCHICAL = {"by_node": (by_node, by_node_cost), "by_master": (by_master, by_master_cost)}
"""What runs a flat algorithm between nodes, and its cost in two parts."""

ALIASES = {
    "rabenseifner": "folded",
    "halving_doubling": "folded",
    "recursive_doubling": "doubling",
    "hierarchical": "by_node",
}


def resolve(name: str) -> tuple[str, str]:
    """What a name or alias stands for: by_node, by_master or "", and a flat algorithm. ValueError for another name.

    >>> resolve("hierarchical:rabenseifner"), resolve("by_master"), resolve("tree")
    (('by_node', 'folded'), ('by_master', 'ring'), ('', 'tree'))
    """
    # Anything but a ValueError would escape the check of a call's arguments, and hang the other ranks: so str().
    outer, colon, inner = str(name).partition(":")
    outer = ALIASES.get(outer, outer)
    if outer in HIERARCHICAL:
        flat = ALIASES.get(inner, inner) if colon else "ring"
    else:
        outer, flat = "", ALIASES.get(str(name), str(name))
    if flat not in FLAT:
        raise ValueError(
            f"no algorithm is called {name!r}; there are {', '.join([*ALGORITHMS, *ALIASES])}, and "
            f"{' and '.join(f'{outer}:X' for outer in HIERARCHICAL)} with X one of {', '.join(FLAT)}"
        )
    return outer, flat


@lru_cache(maxsize=256)
def _bound(outer: str, flat: str, nodes: Nodes | None) -> Algorithm:
    """by_node or by_master on these nodes; on one node that holds everybody where none are given."""
    ranks = [rank for node in nodes or () for rank in node]
    if nodes is not None and (len(set(ranks)) < len(ranks) or not all(nodes)):
        raise ValueError(f"a rank is on one node only, and every node holds a rank; not so in {nodes}")
    run, parts = HIERARCHICAL[outer]
    between = FLAT[flat]

    def gather(group: Sequence[int], me: int, span: Span) -> Rounds:
        return run(group, me, span, nodes or (group,), between.gather)

    def cost(size: int, n: float) -> Cost:
        sizes = [len(node) for node in nodes] if nodes else [size]
        near, far = parts(sizes, n, between.cost)
        return Cost(near.messages + far.messages, near.sent + far.sent, near.added + far.added)

    return Algorithm(f"{outer}:{flat}", gather, cost, whole=between.whole)


ALGORITHMS = FLAT | {outer: _bound(outer, "ring", None) for outer in HIERARCHICAL}


def find(name: str, size: int = 1, collective: str = "allreduce", nodes: Nodes | None = None) -> Algorithm:
    """The algorithm of that name or alias, bound to the nodes if it asks for them.

    ValueError if there is none, or if it cannot serve size ranks. Without nodes all ranks are taken to be on one.
    """
    outer, flat = resolve(name)
    algorithm = FLAT[flat]
    parties, what, prefix = size, "ranks", ""
    if outer:
        algorithm = _bound(outer, flat, nodes)
        parties, what, prefix = len(nodes) if nodes is not None else 1, "nodes", f"{outer}:"
        if nodes is not None and sum(map(len, nodes)) != size:
            raise ValueError(f"the nodes {nodes} hold {sum(map(len, nodes))} ranks, and {name} is to serve {size}")
    if not _takes(FLAT[flat], parties):
        others = f"{prefix}folded and {prefix}binary_blocks"
        raise ValueError(f"{name} needs 2**k {what}, not {parties}; {others} take any number")
    if algorithm.whole and collective != "allreduce":
        others = ", ".join(names(size, collective))
        raise ValueError(f"{name} exchanges whole vectors and serves allreduce only; {collective} has {others}")
    return algorithm


def names(size: int = 1, collective: str = "allreduce", nodes: Nodes | None = None) -> list[str]:
    """The algorithms that serve a collective on that many ranks; given the nodes, also what else can run between."""
    between = [] if nodes is None else _able(len(nodes), collective)
    return [
        *_able(size, collective),
        *HIERARCHICAL,
        *(f"{outer}:{flat}" for outer in HIERARCHICAL for flat in between if flat != "ring"),
    ]


def _able(size: int, collective: str) -> list[str]:
    """The flat algorithms that serve."""
    return [
        algorithm.name
        for algorithm in FLAT.values()
        if _takes(algorithm, size) and (collective == "allreduce" or not algorithm.whole)
    ]


def _takes(algorithm: Algorithm, size: int) -> bool:
    return algorithm.any_size or not size & (size - 1)
