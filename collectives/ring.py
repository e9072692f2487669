"""Ring: the least data on the wire for any number of ranks, at the price of many rounds.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
J. Parallel Distrib. Comput. 69 (2009).
"""

from collections.abc import Sequence

from .cost import Cost
from .schedule import Reduce, Rounds, Send, Span, cut


def ring(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Every block travels once round the ring, growing by one rank's share at each stop.

    Block b sets out at the rank to the right of its owner and comes home, complete, to rank b.
    """
    size = len(group)
    right, left = group[(me + 1) % size], group[(me - 1) % size]
    blocks = cut(span, size)
    for step in range(size - 1):
        yield Send(right, blocks[(me - step - 1) % size]), Reduce(left, blocks[(me - step - 2) % size])
    return blocks[me]


def ring_cost(size: int, n: float) -> Cost:
    """An all-reduce's: the lower bound in data, rounds that grow with the number of ranks."""
    share = n * (size - 1) / size
    return Cost(messages=2 * (size - 1), sent=2 * share, added=share)
