"""Play all ranks of a schedule in one process, on paper: the proof that it is right.

A send is a synchronous one here: it ends when its receiver has taken it. What passes can therefore not hang for
want of buffering.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .schedule import Copy, Reduce, Round, Send, Span, Step, cut
from .whole import Schedule


class ScheduleError(AssertionError):
    """A schedule is wrong: says which, in what round, on which rank, at what span."""


@dataclass
class _Player:
    """A rank on its way through its rounds."""

    rank: int
    vector: list[Any]
    rounds: Sequence[Round]
    number: int = -1
    received: dict[int, list[Any]] = field(default_factory=dict)
    open_steps: int = 0

    @property
    def steps(self) -> Round:
        return self.rounds[self.number]


def play(
    schedule: Schedule,
    vectors: Mapping[int, Sequence[Any]],
    add: Callable[[Any, Any], Any] = operator.add,
) -> dict[int, list[Any]]:
    """Every rank's vector after the schedule, from every rank's vector before: rank -> n values.

    The values can be anything that `add` takes: numbers, strings, sets. ScheduleError where the ranks get stuck,
    a message meets a receive of another span, or a round touches what is received in place.
    """
    players = {rank: _Player(rank, list(vectors[rank]), schedule.rounds(rank)) for rank in schedule.group}
    sent: defaultdict[tuple[int, int], deque[tuple[Span, list[Any]]]] = defaultdict(deque)
    awaited: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)

    def wrong(player: _Player, step: object, what: str) -> ScheduleError:
        return ScheduleError(f"{schedule}: round {player.number}, rank {player.rank}, {step}: {what}")

    def begin_round(player: _Player) -> None:
        player.number += 1
        player.received.clear()
        if player.number == len(player.rounds):
            return
        active = [(index, step) for index, step in enumerate(player.steps) if step.span.lo < step.span.hi]
        if clash := _clash([step for _, step in active]):
            raise wrong(player, clash[0], f"{clash[1]} touches what the same round receives in place")
        player.open_steps = len(active)
        for index, step in active:
            if step.peer == player.rank or step.peer not in players:
                raise wrong(player, step, f"there is no such peer among the ranks {schedule.group}")
            if step.span.lo < 0 or step.span.hi > schedule.n:
                raise wrong(player, step, f"the vector has the elements 0 to {schedule.n}")
            if isinstance(step, Send):
                pair = player.rank, step.peer
                sent[pair].append((step.span, player.vector[step.span.lo : step.span.hi]))
            else:
                pair = step.peer, player.rank
                awaited[pair].append(index)
            if sent[pair] and awaited[pair]:
                meet(*pair)
        if not active:
            ready.append(player)

    def meet(source: int, target: int) -> None:
        span, values = sent[source, target].popleft()
        index = awaited[source, target].popleft()
        receiver = players[target]
        if receiver.steps[index].span != span:
            raise wrong(receiver, receiver.steps[index], f"rank {source} sends {span}")
        receiver.received[index] = values
        for player in (players[source], receiver):
            player.open_steps -= 1
            if not player.open_steps:
                ready.append(player)

    def end_round(player: _Player) -> None:
        for index in sorted(player.received):
            step = player.steps[index]
            mine, theirs = player.vector[step.span.lo : step.span.hi], player.received[index]
            if isinstance(step, Reduce):
                pairs = zip(theirs, mine, strict=True) if step.peer < player.rank else zip(mine, theirs, strict=True)
                try:
                    theirs = [add(low, high) for low, high in pairs]
                except ValueError as error:
                    raise wrong(player, step, str(error)) from None
            player.vector[step.span.lo : step.span.hi] = theirs

    ready: deque[_Player] = deque()
    for player in players.values():
        begin_round(player)
    while ready:
        player = ready.popleft()
        if player.number < len(player.rounds):
            end_round(player)
            begin_round(player)

    for player in players.values():
        if player.number < len(player.rounds):
            step = next(step for step in player.steps if step.span.size)
            raise wrong(player, step, "the ranks are stuck: nobody answers this step or another of its round")
    return {rank: player.vector for rank, player in players.items()}


def _clash(steps: Sequence[Step]) -> tuple[Step, Step] | None:
    """Two steps of one round of which one is a Copy into what the other reads or writes."""
    if not any(isinstance(step, Copy) for step in steps):
        return None
    last: Step | None = None
    last_copy: Step | None = None
    for step in sorted(steps, key=lambda step: step.span):
        before = last if isinstance(step, Copy) else last_copy
        if before and before.span.hi > step.span.lo:
            return before, step
        if not last or step.span.hi > last.span.hi:
            last = step
        if isinstance(step, Copy):
            last_copy = step
    return None


def verify(schedule: Schedule) -> None:
    """Prove a schedule: raise ScheduleError, naming the place, unless

    - every send meets one receive of the same span, in an order that cannot deadlock;
    - every rank ends with what its collective promises, each contribution counted exactly once;
    - all ranks add in the same bracketing, (lower rank's, higher rank's): their bits are equal.
    """
    bit = {rank: 1 << place for place, rank in enumerate(schedule.group)}
    everybody = sum(bit.values())
    owners = [rank for rank, block in zip(schedule.group, cut(Span(0, schedule.n), schedule.size), strict=True)
              for _ in range(block.size)]  # fmt: skip
    brackets: dict[tuple[int, int], int] = {}

    # A value is who is counted in it, as a bit set, and a number for the bracketing in which they were added.
    def add(low: tuple[int, int], high: tuple[int, int]) -> tuple[int, int]:
        if not low[0] or not high[0]:
            raise ValueError("it adds what was never there")
        if low[0] & high[0]:
            twice = [rank for rank in schedule.group if bit[rank] & low[0] & high[0]]
            raise ValueError(f"it counts the ranks {twice} twice")
        return low[0] | high[0], brackets.setdefault((low[1], high[1]), len(brackets) + schedule.size)

    def has(rank: int, element: int) -> bool:
        if schedule.collective == "allgather":
            return owners[element] == rank
        return schedule.collective != "broadcast" or rank == schedule.root

    def wants(rank: int, element: int) -> bool:
        if schedule.collective == "reduce_scatter":
            return owners[element] == rank
        return schedule.collective != "reduce" or rank == schedule.root

    def promised(element: int) -> int:
        if schedule.collective == "allgather":
            return bit[owners[element]]
        return bit[schedule.root] if schedule.collective == "broadcast" else everybody

    start = {
        rank: [(bit[rank], place) if has(rank, element) else (0, -1) for element in range(schedule.n)]
        for place, rank in enumerate(schedule.group)
    }
    brackets_of: dict[int, int] = {}
    for rank, vector in play(schedule, start, add).items():
        for element in (element for element in range(schedule.n) if wants(rank, element)):
            (counted, bracket), right = vector[element], promised(element)
            if counted == right and brackets_of.setdefault(element, bracket) == bracket:
                continue
            lacking = [other for other in schedule.group if bit[other] & right & ~counted]
            foreign = [other for other in schedule.group if bit[other] & counted & ~right]
            what = f"lacks the ranks {lacking}, has the foreign ranks {foreign}"
            if counted == right:
                what = "was added in another order than on the ranks before it: the bits may differ"
            last = len(schedule.rounds(rank)) - 1
            raise ScheduleError(f"{schedule}: after round {last}, rank {rank}, {Span(element, element + 1)}: {what}")
