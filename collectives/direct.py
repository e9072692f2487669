"""Direct: each piece straight to its owner, in one round.

What is sent to be added is a rank's own untouched numbers, never a partial sum: 16-bit
floats can travel as they are and still be added in float32.
"""

from collections.abc import Sequence

from .cost import Cost
from .schedule import Reduce, Rounds, Send, Span, cut


def direct(group: Sequence[int], me: int, span: Span) -> Rounds:
    """Everybody sends everybody its piece; the next neighbour first, so that no rank is everyone's first."""
    pieces = cut(span, len(group))
    others = [(me + distance) % len(group) for distance in range(1, len(group))]
    if others:
        yield (
            *(Send(group[you], pieces[you]) for you in others),
            *(Reduce(group[you], pieces[me]) for you in reversed(others)),
        )
    return pieces[me]


def direct_cost(size: int, n: float) -> Cost:
    """An all-reduce's: a ring's messages and data, but in two rounds; all ranks talk to all at once."""
    share = n * (size - 1) / size
    return Cost(messages=2 * (size - 1), sent=2 * share, added=share)
