"""What a schedule costs: messages, data sent, data added; and on a given link, seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .schedule import Reduce, Send

if TYPE_CHECKING:
    from .whole import Schedule


class Cost(NamedTuple):
    """Along the longest chain of an algorithm, or of one rank: n is counted in whatever unit it came in."""

    messages: int
    sent: float
    added: float


CostOf: TypeAlias = Callable[[int, float], Cost]
"""Of an all-reduce of n bytes on `size` ranks: cost(size, n)."""


class Link(NamedTuple):
    """The usual model: alpha seconds a message, beta seconds a byte sent, gamma seconds a byte added."""

    alpha: float
    beta: float
    gamma: float


def seconds(cost: Cost, link: Link) -> float:
    """What the cost of n bytes takes on a link, if nothing overlaps."""
    return cost.messages * link.alpha + cost.sent * link.beta + cost.added * link.gamma


def counts(schedule: Schedule, rank: int) -> Cost:
    """What one rank sends (messages, elements) and adds (elements), counted from its rounds."""
    steps = [step for steps in schedule.rounds(rank) for step in steps if step.span.size]
    sent = [step.span.size for step in steps if isinstance(step, Send)]
    added = [step.span.size for step in steps if isinstance(step, Reduce)]
    return Cost(len(sent), sum(sent), sum(added))
