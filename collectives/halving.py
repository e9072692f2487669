"""Recursive vector halving, distance doubling: logarithmically few rounds, the least data on the wire.

Source: Rabenseifner, "Optimization of collective reduction operations" (ICCS 2004); Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19, 2005), sections 4.4 and 4.5.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from .cost import Cost
from .schedule import Reduce, Round, Rounds, Send, Span, bits, cut, power_of_two


def halving(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Partners 1, 2, 4, ... apart halve what both hold, each keeping one half (2**k ranks).

    The first partners are the nearest and exchange the most: with ranks packed on nodes that half of the
    data stays inside. Place r ends with the block whose number is r with its bits reversed.
    """
    if len(group) & (len(group) - 1):
        raise ValueError(f"halving needs 2**k ranks, not {len(group)}; folded and binary_blocks take any number")
    for bit in bits(len(group)):
        low, high = cut(span, 2)
        span, theirs = (high, low) if me & bit else (low, high)
        yield Send(group[me ^ bit], theirs), Reduce(group[me ^ bit], span)
    return span


def halved(span: Span, place: int, size: int) -> Span:
    """The span that a place holds after `halving` among size ranks."""
    for bit in bits(size):
        span = cut(span, 2)[1 if place & bit else 0]
    return span


def fold(group: Sequence[int], me: int, span: Span) -> Generator[Round, None, tuple[Sequence[int], int | None]]:
    """Bring a group down to 2**k ranks: each surplus rank hands its vector to its neighbour, and waits.

    Of the first 2 r ranks (r of them surplus) the even ones are folded into the odd ones. Returns the core
    and my place in it, which is None for a rank that waits.
    """
    surplus = len(group) - power_of_two(len(group))
    core = [*group[1 : 2 * surplus : 2], *group[2 * surplus :]]
    if me >= 2 * surplus:
        return core, me - surplus
    neighbour = group[me ^ 1]
    if me % 2 == 0:
        yield (Send(neighbour, span),)
        return core, None
    yield (Reduce(neighbour, span),)
    return core, me // 2


def folded(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Fold the surplus ranks into their neighbours, then halve among the 2**k that are left."""
    core, place = yield from fold(group, me, span)
    if place is None:
        return Span(span.lo, span.lo)
    return (yield from halving(core, place, span))


def halving_cost(size: int, n: float) -> Cost:
    """An all-reduce's on 2**k ranks: both lower bounds of data at once, in twice the fewest rounds."""
    share = n * (size - 1) / size
    return Cost(messages=2 * len(bits(size)), sent=2 * share, added=share)


def folded_cost(size: int, n: float) -> Cost:
    """An all-reduce's: where ranks are surplus, whole vectors travel there and back besides."""
    core = power_of_two(size)
    whole = 0 if core == size else n
    messages, sent, added = halving_cost(core, n)
    return Cost(messages + (2 if whole else 0), sent + whole, added + whole)
