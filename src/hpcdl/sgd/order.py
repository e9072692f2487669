"""What a server decides, with no message in it: which gradients count, when they are taken, and who may go on.

Arrivals go in (`push`, `ask`, `leave`), decisions come out (`full`, `ready`, `silent`). Times are handed in too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable


class Order:
    """Who works and who waits for parameters, behind how many updates."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.version = 0
        """How many updates the parameters have behind them."""
        self.workers = sorted(workers)
        """Who has not left."""
        self.waiting: list[int] = []
        """Who has asked for parameters and has no answer yet, the first to ask first."""
        self.staleness: Counter[int] = Counter()
        """How many gradients counted, by how many updates came between their parameters and them."""
        self.late: Counter[int] = Counter()
        """How many gradients of each worker did not count."""
        self.taken = 0
        """The gradients that count and are not in an update yet."""
        self._heard: dict[int, float] = {}
        if not self.workers:
            raise ValueError("a server needs at least one worker")

    def push(self, worker: int, version: int) -> bool:
        """A gradient has come that was computed from these parameters; does it count?"""
        if worker not in self.workers:
            self.late[worker] += 1
            return False
        self.staleness[self.version - version] += 1
        self.taken += 1
        return True

    @property
    def full(self) -> bool:
        """Do the gradients that count make an update?"""
        return self.taken > 0

    def update(self) -> None:
        """The parameters were changed by those that count."""
        self.version, self.taken = self.version + 1, 0

    def ask(self, worker: int) -> None:
        """A worker wants parameters."""
        if worker in self.workers:
            self.waiting.append(worker)

    def ready(self) -> list[int]:
        """Who is to be answered now."""
        return list(self.waiting)

    def answer(self, worker: int) -> None:
        """It was."""
        self.waiting.remove(worker)

    def leave(self, worker: int) -> None:
        """A worker has finished, or is given up: nobody waits for it any more."""
        self.workers = [each for each in self.workers if each != worker]
        self.waiting = [each for each in self.waiting if each != worker]

    def hear(self, worker: int, now: float) -> None:
        """Something has come from a worker, or was sent to it."""
        self._heard[worker] = now

    def silent(self, now: float, timeout_s: float) -> list[int]:
        """Of whom nothing has come for so long, though it does not wait for an answer."""
        owed = set(self.waiting)
        return [each for each in self.workers if each not in owed and now - self._heard.get(each, now) > timeout_s]


class Asynchronous(Order):
    """Each gradient counts when it comes, or each `group` of them together.

    - Downpour (Dean et al. 2012, "Large scale distributed deep networks", section 4.1): a group of one. With `warm`
      the lowest worker alone brings the first so many gradients; the others get their first parameters behind them.
    - n-softsync (Zhang et al. 2015, arXiv 1511.05950, section 3): groups of floor(workers / n), of whoever comes.
    - `bound`, stale synchronous parallel (Ho et al. 2013, "More effective distributed ML via a stale synchronous
      parallel parameter server", section 2): a worker's clock counts the times that it came back for parameters. Who is
      more than so many clocks ahead of the slowest waits.
    """

    def __init__(self, workers: Iterable[int], *, bound: float = math.inf, group: int = 1, warm: int = 0) -> None:
        super().__init__(workers)
        if not bound >= 0:
            raise ValueError(f"a worker may be 0 clocks ahead of the slowest, or more, not {bound}")
        if not 1 <= group <= len(self.workers):
            raise ValueError(f"an update takes 1 to {len(self.workers)} gradients, as there are workers, not {group}")
        if warm < 0:
            raise ValueError(f"one worker alone begins with 0 gradients or more, not {warm}")
        self.bound, self.group, self.warm = bound, group, warm
        self.clocks = dict.fromkeys(self.workers, 0)
        """Of those who have not left. They run from when all may work."""
        self._out: set[int] = set()

    def push(self, worker: int, version: int) -> bool:
        counts = super().push(worker, version)
        self.warm -= counts and self.warm > 0
        return counts

    @property
    def full(self) -> bool:
        # Alone, the one that begins would wait for others in vain.
        return self.taken >= (1 if self.warm else self.group)

    def ask(self, worker: int) -> None:
        super().ask(worker)
        if worker in self._out and worker in self.clocks:
            self._out.discard(worker)
            self.clocks[worker] += not self.warm

    def ready(self) -> list[int]:
        if self.warm:
            return [worker for worker in self.waiting if worker == self.workers[0]]
        slowest = min(self.clocks.values(), default=0)
        return [worker for worker in self.waiting if self.clocks[worker] - slowest <= self.bound]

    def answer(self, worker: int) -> None:
        super().answer(worker)
        self._out.add(worker)

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self.clocks.pop(worker, None)


class Backup(Order):
    """Steps that all take together, without waiting for the last (Chen et al. 2016, arXiv 1604.00981, algorithms 3, 4).

    Of `backups` workers too many, the first others make a step. A gradient carries the number of the step whose
    parameters it was computed from: one that comes when the step is over does not count. Where workers leave, a step
    takes what is left of them.
    """

    def __init__(self, workers: Iterable[int], *, backups: int) -> None:
        super().__init__(workers)
        if not 0 <= backups < len(self.workers):
            most = len(self.workers) - 1
            raise ValueError(f"of {len(self.workers)} workers 0 to {most} can be backups, not {backups}")
        self.needed = len(self.workers) - backups
        """Gradients of a step."""
        self._in: set[int] = set()

    def push(self, worker: int, version: int) -> bool:
        if version != self.version or worker in self._in:
            self.late[worker] += 1
            return False
        counts = super().push(worker, version)
        if counts:
            self._in.add(worker)
        return counts

    @property
    def full(self) -> bool:
        return 0 < self.taken >= min(self.needed, len(self._in.union(self.workers)))

    def update(self) -> None:
        super().update()
        self._in.clear()

    def ready(self) -> list[int]:
        return [worker for worker in self.waiting if worker not in self._in]
