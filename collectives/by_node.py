"""In two steps: inside each node, then between the nodes.

`by_node` is Horovod's hierarchical all-reduce with all ranks of a node at work on the network: each owns a lane of
the vector. `by_master` is the older form, one rank a node at work: Jia et al., "Highly scalable deep learning
training system with mixed-precision: training ImageNet in four minutes", arXiv 1807.11205.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from .cost import Cost, CostOf
from .direct import direct, direct_cost
from .ring import ring
from .schedule import Gather, Nodes, Rounds, Span
from .tree import tree, tree_cost


def packed(sizes: Sequence[int], group: Sequence[int]) -> Nodes:
    """Nodes of these sizes, filled with the ranks of the group one after the other."""
    return tuple(tuple(group[lo:hi]) for lo, hi in pairwise(accumulate(sizes, initial=0)))


def by_node(group: Sequence[int], me: int, span: Span, nodes: Sequence[Sequence[int]], between: Gather) -> Rounds:
    """Everybody sends the owners on its node their lanes; then the owners of a lane on all nodes run `between` on it.

    There are as many lanes as the smallest node has ranks: each lane needs an owner on every node.
    """
    lanes = min(map(len, nodes))
    return (yield from _in_two_steps(group, me, span, nodes, lanes, partial(direct, owners=lanes), between))


def by_master(
    group: Sequence[int], me: int, span: Span, nodes: Sequence[Sequence[int]], between: Gather = ring
) -> Rounds:
    """Up a tree to each node's first rank, its master; then the masters run `between` on the whole vector."""
    return (yield from _in_two_steps(group, me, span, nodes, 1, tree, between))


def _in_two_steps(
    group: Sequence[int],
    me: int,
    span: Span,
    nodes: Sequence[Sequence[int]],
    lanes: int,
    inside: Gather,
    between: Gather,
) -> Rounds:
    """`inside` leaves parts of the span with the first `lanes` members of each node, the same part with each k-th."""
    place = {rank: place for place, rank in enumerate(group)}
    ordered = sorted(sorted(place[rank] for rank in node) for node in nodes)
    number = next(number for number, places in enumerate(ordered) if me in places)
    member = ordered[number].index(me)
    held = yield from inside([group[other] for other in ordered[number]], member, span)
    if member >= lanes:
        return held
    return (yield from between([group[places[member]] for places in ordered], number, held))


def by_node_cost(sizes: Sequence[int], n: float, between: CostOf) -> tuple[Cost, Cost]:
    """An all-reduce's, inside the largest node and between the nodes, where each rank moves its lane alone."""
    lanes = min(sizes)
    return direct_cost(max(sizes), n, lanes), between(len(sizes), n / lanes)


def by_master_cost(sizes: Sequence[int], n: float, between: CostOf) -> tuple[Cost, Cost]:
    """An all-reduce's, inside the largest node and between the masters."""
    return tree_cost(max(sizes), n), between(len(sizes), n)
