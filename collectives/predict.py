"""What an all-reduce takes on nodes joined by a network: its cost on two links, inside a node and between nodes.

The closed forms take the ranks as packed, one node's after another's, and each node as joined to the others by one
link, full duplex, that its ranks share:

- Where a chain of messages cannot be told to stay inside nodes for a while, all its messages pay the network's alpha:
  a round is as slow as its slowest message.
- Data between nodes count as often as there is a crowd: the ranks of one node that use its link at the same time.
- Adding is a rank's own work, whichever way the data came: gamma is `inside`'s.
"""

from __future__ import annotations

from functools import lru_cache

from .by_node import packed
from .catalogue import FLAT, HIERARCHICAL, find, resolve
from .cost import Cost, Link

NOTHING = Cost(0, 0, 0)


def predicted(name: str, nbytes: float, sizes: tuple[int, ...], inside: Link, between: Link) -> float:
    """The seconds of an all-reduce of nbytes on nodes of these sizes: (4,), (2, 2), (3, 1)."""
    near, far = parts(name, sizes)
    a_byte = near.sent * inside.beta + far.sent * between.beta + (near.added + far.added) * inside.gamma
    return near.messages * inside.alpha + far.messages * between.alpha + nbytes * a_byte


@lru_cache(maxsize=4096)
def parts(name: str, sizes: tuple[int, ...]) -> tuple[Cost, Cost]:
    """An all-reduce's cost for n = 1 inside the nodes and between them, there with the crowd counted into `sent`."""
    outer, flat = resolve(name)
    size, count, largest = sum(sizes), len(sizes), max(sizes)
    find(name, size, nodes=packed(sizes, range(size)))  # refuses what cannot be served
    cost = FLAT[flat].cost
    if outer:
        near, far = HIERARCHICAL[outer][1](sizes, 1, cost)
        # Each owner of a lane is on the network, or only the master.
        return near, _crowded(far, min(sizes) if outer == "by_node" else 1)
    if count == 1:
        return cost(size, 1), NOTHING
    return _flat_parts(flat, size, count, largest, aligned=largest == min(sizes) and not largest & (largest - 1))


def _flat_parts(flat: str, size: int, count: int, largest: int, aligned: bool) -> tuple[Cost, Cost]:
    """A flat algorithm's on several nodes; they are aligned if all have the same 2**k ranks."""
    cost = FLAT[flat].cost
    if flat == "ring":
        # At any time a node's last rank sends out and its first one receives, and all wait for them.
        return NOTHING, cost(size, 1)
    if flat == "direct":
        # Of a rank's size - 1 messages in each half size - largest leave the node, and so do its neighbours'.
        return NOTHING, _crowded(cost(size, 1), largest * (size - largest) / (size - 1))
    # In a tree only multiples of the distance are at work, so no two messages pass a node's edge at once.
    crowd = 1 if flat == "tree" else largest
    if aligned and (flat in ("tree", "binary_blocks") or not count & (count - 1)):
        # Partners 1, 2, 4, ... apart: first those on the node, which leave each rank its part of the data if they
        # halve; then those in the same place of other nodes, all ranks at once.
        rest = 1 if flat in ("tree", "doubling") else 1 / largest
        return cost(largest, 1), _crowded(cost(count, rest), crowd)
    # Partners may be anywhere. A message that leaves has one end on this side and one on that: there are no more at a
    # time than the smaller side has ranks.
    return NOTHING, _crowded(cost(size, 1), min(crowd, size - largest))


def _crowded(cost: Cost, crowd: float) -> Cost:
    return cost._replace(sent=cost.sent * crowd)
