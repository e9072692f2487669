"""Operations of process groups under way, and who drives them.

A group's collectives run in one lane, one after the other in the order of their calls; each message has a lane of its
own. Who waits for a task drives its lane; what nobody waits for the library's thread drives, which tests and sleeps.
So two groups in flight never wait for each other, whatever the order in which a rank waits for them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

from torch.distributed import DistBackendError

from hpcdl.errors import MismatchError
from hpcdl.execute import Steps
from hpcdl.record import ABOUT, ENDED, Operation, now
from hpcdl.shared import LOOKS, NAP_S, PATIENCE_S, Awaited, Meeting

PATIENT_S, IDLE_S = 2e-3, 2e-4
"""How long the thread gives its core away between two looks before it sleeps, and how long it sleeps then. DDP waits
for futures, which nobody drives but the thread: what it oversleeps is added to each meeting of an operation."""

BUSY_S = 5e-4
"""How long it sleeps while others drive all there is to drive."""


@dataclass
class Health:
    """Can the group still be used? Shared by all its lanes."""

    broken: str = ""
    """Why not."""


class Task:
    """One operation: its steps, when it is too late for it, and how it has ended."""

    def __init__(
        self, steps: Steps, operation: Operation, timeout_s: float, missing: Callable[[Operation], list[str]]
    ) -> None:
        self._steps: Steps | None = steps
        self.operation, self.timeout_s, self.missing = operation, timeout_s, missing
        self.deadline = time.monotonic() + timeout_s
        self.done = False
        self.error: BaseException | None = None
        self._awaited: Awaited | None = None
        self._lock = threading.Lock()
        self._then: list[Callable[[], object]] = []

    def ended(self, lane: Lane, looks: int) -> bool:
        """Go on as far as it goes without waiting, or with so many looks at each meeting; has it ended?"""
        steps = self._steps
        assert steps is not None
        while True:
            if self._awaited is not None and not self._awaited.Test():
                return False
            lane.moves += 1
            self._awaited = next(steps, None)
            if self._awaited is None:
                return True
            if isinstance(self._awaited, Meeting):
                for _ in range(looks):
                    if self._awaited.there():
                        break

    def finish(self, error: BaseException | None = None) -> None:
        """It is over; what waits for that is called."""
        self.error = error
        self.operation[ENDED] = now()
        with self._lock:
            self.done = True
            callbacks, self._then = self._then, []
        if self not in _abandoned:
            self._steps = self._awaited = None
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call it when it is over, on the thread that finds this out; at once if it is."""
        with self._lock:
            if not self.done:
                self._then.append(callback)
                return
        callback()

    def waits_for(self) -> str:
        """What it is, and what stands in the way, in lines."""
        return "\n".join([self.operation[ABOUT].call, *self.missing(self.operation)])


_abandoned: list[Task] = []
"""They failed half-way. MPI may still write to their buffers, so these are kept."""


class Lane:
    """Tasks that run one after the other."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.tasks: deque[Task] = deque()
        self.moves = 0
        """Counts steps: has anything moved since?"""
        self.waiting = 0
        """So many wait for a task in it, and drive it."""
        self._lock = threading.RLock()
        self._owner = 0

    def put(self, task: Task) -> None:
        """Have it done behind what was put there before."""
        if self.health.broken:
            raise DistBackendError(self.health.broken)
        if self._owner != get_ident():
            self.tasks.append(task)
            return
        # Called from a callback of the task that has just ended. Its place is here on every rank, however much each has
        # put into the lane meanwhile; and the callback may block on the result, so it is run now.
        self.tasks.appendleft(task)
        self.wait(task)

    def advance(self, looks: int = 0) -> None:
        """Go on as far as it goes without waiting, but for some looks, unless another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return
        outer, self._owner = self._owner, get_ident()
        try:
            # In a callback no more than the one that it has put in is run: it may put in another, ahead of the rest.
            while self.tasks and self._advance(self.tasks[0], looks) and not outer:
                pass
        finally:
            self._owner = outer
            self._lock.release()

    def _advance(self, task: Task, looks: int) -> bool:
        error: BaseException | None = None
        try:
            if not task.ended(self, looks):
                if time.monotonic() < task.deadline:
                    return False
                error = DistBackendError(
                    f"timed out after {task.timeout_s:g} s, the timeout of the process group or of this call, in "
                    f"{task.waits_for()}"
                )
        except BaseException as raised:
            error = raised
        # What the ranks do not agree on, and what some rank has refused, is over on all of them before any data moved.
        if error is not None and not isinstance(error, MismatchError | TypeError | ValueError):
            _abandoned.append(task)
            self.health.broken = self.health.broken or (
                f"this process group cannot be used any more, since an operation on it failed: {error}"
            )
        self.tasks.remove(task)
        task.finish(error)
        while self.health.broken and self.tasks:
            self.tasks.popleft().finish(DistBackendError(self.health.broken))
        if error is not None and not isinstance(error, Exception):
            raise error  # the user's Ctrl-C
        return True

    def wait(self, task: Task, limit_s: float | None = None) -> bool:
        """Drive until it is over; False if it is not by then."""
        pause = Pause()
        until = None if limit_s is None else time.monotonic() + limit_s
        self.waiting += 1
        try:
            while not task.done:
                before = self.moves
                self.advance(LOOKS)
                if task.done:
                    break
                if until is not None and time.monotonic() > until:
                    return False
                pause(self.moves != before)
                if get_ident() == progress.ident:  # in a callback: nobody else looks after the other lanes
                    progress.turn()
        finally:
            self.waiting -= 1
        return True

    def start(self) -> None:
        """See to it that what is in the lane is done, whether somebody waits for it or not."""
        if self._owner != get_ident():  # a callback's own has been done, and the rest comes behind it
            progress.look_after(self)

    def abort(self, why: str) -> None:
        """Give up all that is in the lane."""
        self.health.broken = self.health.broken or why
        with self._lock:
            while self.tasks:
                task = self.tasks.popleft()
                _abandoned.append(task)
                task.finish(DistBackendError(self.health.broken))


class Pause:
    """What to do between two turns in which nothing has moved: give the core to others, then sleep."""

    def __init__(self) -> None:
        self._patient_until = 0.0

    def __call__(self, moved: bool) -> None:
        if moved:
            self._patient_until = 0.0
            return
        now_s = time.monotonic()
        self._patient_until = self._patient_until or now_s + PATIENCE_S
        if now_s < self._patient_until:
            os.sched_yield()
        else:
            time.sleep(NAP_S)


class Progress:
    """The thread that drives what nobody waits for."""

    def __init__(self) -> None:
        self.ident = 0
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def look_after(self, lane: Lane) -> None:
        """Drive this lane until it is empty."""
        with self._lock:
            if lane not in self._lanes:
                self._lanes.append(lane)
            if self._thread is None and not self._stopped:
                # A daemon: a rank that ends on an error must not wait for it.
                self._thread = threading.Thread(target=self._run, name="hpcdl backend", daemon=True)
                self._thread.start()
                atexit.register(self._stop, os.getpid())
        self._wanted.set()

    def turn(self) -> bool:
        """Look at every lane once; has anything moved?"""
        with self._lock:
            self._lanes = [lane for lane in self._lanes if lane.tasks]
            lanes = list(self._lanes)
            if not lanes:
                self._wanted.clear()
        before = [lane.moves for lane in lanes]
        for lane in lanes:
            lane.advance(LOOKS)
        return before != [lane.moves for lane in lanes]

    def _run(self) -> None:
        self.ident = get_ident()
        moved_at = 0.0
        while not self._stopped:
            self._wanted.wait()
            if all(lane.waiting for lane in self._lanes):
                time.sleep(BUSY_S)
            elif time.monotonic() < moved_at + PATIENT_S:
                os.sched_yield()
            else:
                time.sleep(IDLE_S)
            if not self._stopped and self.turn():
                moved_at = time.monotonic()

    def _stop(self, process: int) -> None:
        """Before MPI is finalised, in which the thread must not be."""
        self._stopped = True
        self._wanted.set()
        if self._thread is not None and os.getpid() == process:
            self._thread.join(1.0)


progress = Progress()
