"""Which ranks are on which node.

Floor 1. Groups of ranks are tuples, ordered by their first rank.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

from hpcdl.collectives import Nodes, packed


def group_by(labels: Iterable[Hashable]) -> Nodes:
    """The ranks that have the same label, in the order in which labels first appear: "abab" is ((0, 2), (1, 3))."""
    groups: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        groups.setdefault(label, []).append(rank)
    return tuple(map(tuple, groups.values()))


def parse_nodes(text: str, size: int) -> Nodes:
    """The nodes that HPCDL_NODES pretends there are, for size ranks.

    "3+1" are the sizes of nodes that hold the ranks one after the other, "0,1,0,1" is the node of each rank.
    """
    plain = re.sub(r"\s", "", text)
    if re.fullmatch(r"\d+(,\d+)+", plain):
        labels = [int(label) for label in plain.split(",")]
        if len(labels) == size:
            return group_by(labels)
        wrong = f"gives the nodes of {len(labels)} ranks"
    elif re.fullmatch(r"\d+(\+\d+)*", plain):
        sizes = [int(part) for part in plain.split("+")]
        if sum(sizes) == size and all(sizes):
            return packed(sizes, range(size))
        wrong = f"has nodes of {sum(sizes)} ranks" if all(sizes) else "has a node of no ranks"
    else:
        wrong = "is neither sizes of nodes nor the node of each rank"
    alike = f"{size - size // 2}+{size // 2}" if size > 1 else "1"
    raise ValueError(
        f"{text!r} {wrong}: for {size} ranks HPCDL_NODES must be sizes that add up to {size}, such as {alike}, or "
        f"{size} numbers with commas between them, the node of each rank"
    )
