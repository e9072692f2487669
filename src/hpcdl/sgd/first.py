"""The first server: it also counts samples, tells how the training goes, and ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hpcdl.errors import RankFailedError
from hpcdl.sgd.letters import Box, End, Header, Kind
from hpcdl.sgd.server import Passed, Report, Server

if TYPE_CHECKING:
    from hpcdl.sgd.flat import Flat


class Others:
    """The other servers, to whom nothing is said before they have room for it, and nothing is waited for."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        self._to_say: list[deque[Header]] = [deque() for _ in boxes]
        self._parts: list[deque[Tensor]] = [deque() for _ in boxes]

    def say(self, header: Header) -> None:
        """Tell all of them, in time."""
        for each in self._to_say:
            each.append(header)
        self.look()

    def look(self) -> bool:
        """Go on as far as it goes; has anything happened?"""
        happened = False
        for box, headers, parts in zip(self.boxes, self._to_say, self._parts, strict=True):
            while headers and box.free():
                box.answer(headers.popleft())
                happened = True
            if box.arrived():
                parts.append(box.letter.body.clone())
                box.next()
                happened = True
            if box.lost:
                raise RankFailedError(
                    f"rank {box.peer}, a server, is lost, and with it its part of the parameters: start the training "
                    "again",
                    [box.peer],
                )
        return happened

    def parts(self) -> list[Tensor] | None:
        """What each had when it was asked first of all that is open; None if one of them has not answered yet."""
        return [each.popleft() for each in self._parts] if all(self._parts) else None

    def close(self, end: End) -> None:
        """Let them go."""
        self.say(Header(Kind.BYE, end.parting, number=end.status))
        while any(self._to_say):
            self.look()
        for box in self.boxes:
            box.settle()
            box.close()


class _Sums(NamedTuple):
    """Of everything up to now."""

    samples: int = 0
    loss: float = 0.0
    at: float = 0.0
    seconds: float = 0.0  # of all workers
    waited_s: float = 0.0


class First:
    """What the first server does besides serving: every so many samples it tells what they came to."""

    def __init__(
        self,
        server: Server,
        flat: Flat,
        others: Others,
        *,
        samples: int,
        every: int,
        on_pass: Callable[[Passed], object],
        on_leave: Callable[[int, str], object],
    ) -> None:
        self.server, self.flat, self.others = server, flat, others
        self.samples, self.every = samples, every
        self.on_pass, self.on_leave = on_pass, on_leave
        self._due: deque[tuple[Passed, Tensor]] = deque()
        self._told = _Sums(at=perf_counter())
        self._late = 0
        self._passed = 0
        self._apart_s = 0.0
        server.on_update, server.on_leave = self._updated, self._leave

    def run(self, judge: Callable[[Report], int]) -> Report:
        """Serve until the samples have counted, or no worker is left; the status that all end with is the judge's."""
        server, began, cpu_s = self.server, perf_counter(), process_time()
        server.until(lambda: not server.order.workers, meanwhile=self._look)
        end = self._told.at if server.stopping else perf_counter()
        seconds, cpu_s = end - began, process_time() - cpu_s - self._apart_s
        if server.counted > self._told.samples and not server.stopping:
            self._pass()
        server.until(lambda: not self._due, meanwhile=self._look)
        report = server.report(seconds, cpu_s)
        report = report._replace(status=judge(report))
        absent = server.close(report.status)
        self.others.close(server.end)
        return report._replace(absent=absent)

    def _updated(self) -> None:
        server = self.server
        while not server.stopping and server.counted >= min((self._passed + 1) * self.every, self.samples):
            # The last part of all may be shorter.
            server.stopping = server.counted >= self.samples
            self._pass()

    def _pass(self) -> None:
        server = self.server
        self._passed += 1
        seconds, waited_s = (sum(each) for each in zip((0.0, 0.0), *server.times.values(), strict=True))
        now = _Sums(server.counted, server.loss, perf_counter(), seconds, waited_s)
        samples, loss, at, seconds, waited_s = (new - old for new, old in zip(now, self._told, strict=True))
        late = sum(server.order.late.values())
        passed = Passed(
            self._passed,
            int(samples),
            loss / samples if samples else float("nan"),
            at,
            waited_s / seconds if seconds else 0.0,
            server.order.version,
            server.shard.lr,
            late - self._late,
            self._serve,
        )
        self._told, self._late = now, late
        self._due.append((passed, server.shard.values.clone()))
        self.others.say(Header(Kind.FETCH))

    def _serve(self) -> None:
        self.server.serve()
        self.others.look()

    def _look(self) -> bool:
        """Tell what is due, once the other servers' parts are there."""
        happened = self.others.look()
        if self._due and (parts := self.others.parts()) is not None:
            passed, mine = self._due.popleft()
            lo = 0
            for each in (mine, *parts):
                self.flat.values[lo : lo + len(each)].copy_(each)
                lo += len(each)
            cpu_s = process_time()
            if self.on_pass(passed):
                self.server.stopping = True
                self._due.clear()
            self._apart_s += process_time() - cpu_s
            return True
        return happened

    def _leave(self, worker: int, why: str) -> None:
        self.others.say(Header(Kind.DROP, number=worker))
        self.on_leave(worker, why)
