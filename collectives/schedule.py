"""The nouns of a schedule: spans of a vector, and three verbs.

A schedule is, for each rank, a list of rounds; a round is a tuple of steps. What it means:

- Sends read the vector as it stood when the round began.
- What was received is put in place at the round's end, in the order of the steps.
- Empty spans send nothing, on either side.
- Messages between two ranks match in order.
- Reduce adds (lower rank's, higher rank's), so that two ranks that exchange get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias


class Span(NamedTuple):
    """The elements lo, lo + 1, ..., hi - 1 of a flat vector."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        """How many elements."""
        return self.hi - self.lo


class Send(NamedTuple):
    """Send my copy of the span to peer. Roughly: `wire.send(vector[lo:hi], peer)`."""

    peer: int
    span: Span


class Reduce(NamedTuple):
    """Receive the span from peer and add it to mine. Roughly: `vector[lo:hi] += wire.receive(peer)`."""

    peer: int
    span: Span


class Copy(NamedTuple):
    """Receive the span from peer in place of mine. Roughly: `vector[lo:hi] = wire.receive(peer)`."""

    peer: int
    span: Span


Step: TypeAlias = Send | Reduce | Copy
Round: TypeAlias = tuple[Step, ...]
Rounds: TypeAlias = Generator[Round, None, Span]
"""What an algorithm is: it yields rounds and returns the span that I hold reduced at the end."""
Gather: TypeAlias = Callable[[Sequence[int], int, Span], Rounds]
"""An algorithm that still has to be given its group, my place in it and a span: gather(group, me, span)."""
Nodes: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks of each node."""


def cut(span: Span, parts: int) -> list[Span]:
    """Cut a span into parts that differ by one element at most, the longer ones first."""
    each, longer = divmod(span.size, parts)
    edges = [span.lo + part * each + min(part, longer) for part in range(parts + 1)]
    return [Span(lo, hi) for lo, hi in pairwise(edges)]


def overlap(one: Span, other: Span) -> Span:
    """The elements in both; an empty span where there are none."""
    lo = max(one.lo, other.lo)
    return Span(lo, max(lo, min(one.hi, other.hi)))


def mirror(rounds: Iterable[Round]) -> list[Round]:
    """The rounds backwards, every arrow turned round: what was gathered is handed out along the same paths.

    Two ranks that sent each other the same span and added both have the sum: such an exchange leaves
    nothing to hand out, and has no mirror image.
    """
    turned: dict[type, type[Send] | type[Copy]] = {Send: Copy, Reduce: Send, Copy: Send}
    handed: list[Round] = []
    for steps in reversed(list(rounds)):
        sent = {(step.peer, step.span) for step in steps if isinstance(step, Send)}
        added = {(step.peer, step.span) for step in steps if isinstance(step, Reduce)}
        rest = [step for step in steps if (step.peer, step.span) not in sent & added]
        handed.append(tuple(turned[type(step)](step.peer, step.span) for step in rest))
    return [steps for steps in handed if steps]


def deal(group: Sequence[int], me: int, owned: Sequence[Span], wanted: Sequence[Span]) -> Round:
    """One round in which every finished piece goes from the place that owns it to the place that wants it.

    `owned` and `wanted` tell it for every place of the group; no two places own the same element.
    """
    others = [place for place in range(len(group)) if place != me]
    steps: list[Step] = [Send(group[you], overlap(owned[me], wanted[you])) for you in others]
    steps += [Copy(group[you], overlap(owned[you], wanted[me])) for you in others]
    return tuple(step for step in steps if step.span.size)


def power_of_two(size: int) -> int:
    """The largest power of two that is not above size."""
    return 1 << (size.bit_length() - 1)


def bits(size: int) -> list[int]:
    """1, 2, 4, ... below size: the distances between partners."""
    return [1 << bit for bit in range((size - 1).bit_length())]
