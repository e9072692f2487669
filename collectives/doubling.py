"""Recursive doubling: whole vectors, the fewest rounds; for short messages.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 4.5.
"""

from collections.abc import Sequence

from .cost import Cost
from .halving import fold
from .schedule import Reduce, Rounds, Send, Span, bits, power_of_two


def doubling(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Partners 1, 2, 4, ... apart exchange all they have and add it: nothing is left to hand out.

    The ranks add the same numbers, each on its own: only one bracketing gives them equal bits. So the places
    are taken in ascending rank order, whatever the group's, and (lower rank's, higher rank's) is added.
    """
    rank, group = group[me], sorted(group)
    core, place = yield from fold(group, group.index(rank), span)
    if place is None:
        return Span(span.lo, span.lo)
    for bit in bits(len(core)):
        yield Send(core[place ^ bit], span), Reduce(core[place ^ bit], span)
    return span


def doubling_cost(size: int, n: float) -> Cost:
    """An all-reduce's: the fewest rounds there can be, each with the whole vector."""
    core = power_of_two(size)
    rounds, surplus = len(bits(core)), 0 if core == size else 1
    return Cost(messages=rounds + 2 * surplus, sent=n * (rounds + surplus), added=n * (rounds + surplus))
