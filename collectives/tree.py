"""Binomial tree: whole vectors up to one rank; its mirror is the broadcast. For short reduces and broadcasts.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), sections 4.2 and 4.4.
"""

from collections.abc import Sequence

from .cost import Cost
from .schedule import Reduce, Rounds, Send, Span, bits


def tree(group: Sequence[int], me: int, span: Span) -> Rounds:
    """In round k the places with bit k set hand what they have to the place without it; place 0 ends with all."""
    for bit in bits(len(group)):
        if me & bit:
            yield (Send(group[me ^ bit], span),)
            return Span(span.lo, span.lo)
        if me | bit < len(group):
            yield (Reduce(group[me | bit], span),)
    return span


def tree_cost(size: int, n: float) -> Cost:
    """An all-reduce's: up the tree and down again, each time the whole vector lg p times in a row."""
    rounds = len(bits(size))
    return Cost(messages=2 * rounds, sent=2 * n * rounds, added=n * rounds)
