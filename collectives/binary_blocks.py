"""Binary blocks: halving for any number of ranks, with nobody idle.

600 ranks are blocks of 512 + 64 + 16 + 8.
Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 4.5; used by Goyal et al., arXiv 1706.02677.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .cost import Cost
from .halving import halved, halving, halving_cost
from .schedule import Reduce, Rounds, Send, Span, bits, power_of_two


def blocks_of(size: int) -> list[range]:
    """The blocks of 2**k places, largest first: 12 is range(0, 8), range(8, 12)."""
    blocks, start = [], 0
    while start < size:
        length = power_of_two(size - start)
        blocks.append(range(start, start + length))
        start += length
    return blocks


def binary_blocks(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Halve inside each block; then, from the smallest block up, deal each sum to the next larger block.

    Member m of a block of b deals what it holds to members m, m + b, m + 2 b, ... of the larger block, which
    hold just those pieces: their places agree in the lower bits, and so do their first halvings.
    """
    blocks = blocks_of(len(group))
    mine = next(number for number, block in enumerate(blocks) if me in block)
    block, larger, smaller = blocks[mine], blocks[mine - 1 : mine], blocks[mine + 1 : mine + 2]
    member = me - block.start
    span = yield from halving(group[block.start : block.stop], member, span)
    for small in smaller:
        yield (Reduce(group[small.start + member % len(small)], span),)
    for large in larger:
        partners = range(member, len(large), len(block))
        ratio = len(partners)
        yield tuple(
            Send(group[large.start + partner], halved(span, branch, ratio)) for branch, partner in enumerate(partners)
        )
        span = Span(span.lo, span.lo)
    return span


def binary_blocks_cost(size: int, n: float) -> Cost:
    """An all-reduce's: at most 2 n sent and n added by any rank; what a small block deals, it deals one by one.

    Messages are counted along the longest chain: up through the blocks as each gets ready, down again.
    """
    lengths = [len(block) for block in blocks_of(size)]
    if len(lengths) == 1:
        return halving_cost(size, n)
    rounds = [len(bits(length)) for length in lengths]
    ratios = [large // small for large, small in pairwise(lengths)]
    ready = rounds[-1]
    for own, ratio in zip(rounds[-2::-1], reversed(ratios), strict=True):
        ready = max(own, ready + ratio)
    ends = [ready + sum(ratios[:number]) + own for number, own in enumerate(rounds)]
    return Cost(messages=max(ends), sent=2 * n, added=n)
