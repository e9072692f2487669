"""Direct: each piece straight to its owner, in one round.

What is sent to be added is a rank's own untouched numbers, never a partial sum: 16-bit
floats can travel as they are and still be added in float32.
"""

from collections.abc import Sequence

from .cost import Cost
from .schedule import Reduce, Rounds, Send, Span, cut


def direct(group: Sequence[int], me: int, span: Span, owners: int | None = None) -> Rounds:
    """Everybody sends everybody its piece; the next neighbour first, so that no rank is everyone's first.

    With fewer owners than members, the first members own a piece each and the others nothing.
    """
    owners = owners or len(group)
    pieces = cut(span, owners)
    others = [(me + distance) % len(group) for distance in range(1, len(group))]
    sends = [Send(group[you], pieces[you]) for you in others if you < owners]
    if me >= owners:
        yield tuple(sends)
        return Span(span.lo, span.lo)
    if others:
        yield (*sends, *(Reduce(group[you], pieces[me]) for you in reversed(others)))
    return pieces[me]


def direct_cost(size: int, n: float, owners: int | None = None) -> Cost:
    """An all-reduce's: a ring's messages and data, but in two rounds; all ranks talk to all at once.

    An owner is the busiest: it sends the other owners their pieces, and its own, added up, to everybody.
    """
    owners = owners or size
    sends, piece = owners - 1 + size - 1, n / owners
    return Cost(messages=sends, sent=sends * piece, added=(size - 1) * piece)
