"""A server of parameters: it takes gradients as they come and hands out parameters, and never waits for one worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcdl.errors import RankFailedError
from hpcdl.sgd.letters import LONGEST_S, SHORTEST_S, Box, End, Header, Kind, Parting, Say
from hpcdl.sgd.order import Order
from hpcdl.sgd.shard import Gradient, Shard


class Passed(NamedTuple):
    """So many samples are behind the parameters that the model of the first server now holds."""

    number: int  # of the times that it is told, from 1
    samples: int  # since the last time, as are the other sums
    loss: float  # the mean over these
    seconds: float
    waited: float  # the share of the workers' time in which they waited for servers
    updates: int  # all of them
    lr: float  # of the next one
    late: int  # gradients that did not count
    serve: Callable[[], object]
    """Call it now and then, where what is done with the model takes longer: it answers whoever has asked."""


class Report(NamedTuple):
    """What a training came to, as one rank saw it. What is about gradients and workers, servers alone have seen."""

    updates: int
    """A worker: its steps."""
    samples: int
    seconds: float
    cpu_s: float
    """In which it kept a core busy. A server sleeps while nothing comes; what is done with the model is not in it."""
    status: int = 0
    """What `judge` has said on the first server."""
    staleness: dict[int, int] = {}  # noqa: RUF012 - never changed
    """How many gradients counted, by how many updates came between their parameters and them."""
    late: dict[int, int] = {}  # noqa: RUF012
    """How many of each worker did not count."""
    left: dict[int, str] = {}  # noqa: RUF012
    """Which workers went ahead of the end, and why."""
    not_finite: tuple[int, int] | None = None
    """Behind which update, and from which worker, the first loss came that was no number, or infinite."""
    absent: tuple[int, ...] = ()
    """Who was given up and has not come back to be told so: MPI_Finalize would wait for them."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The workers that were given up."""
        return tuple(rank for rank, why in self.left.items() if why != FINISHED)


FINISHED = "finished early"


class Server:
    """One server: its part of the parameters, its decisions and its letter boxes, in one loop (`serve`)."""

    def __init__(
        self, shard: Shard, order: Order, boxes: Sequence[Box], *, timeout_s: float, first: Box | None = None
    ) -> None:
        """`first` is the box of the first server, on all others: it asks for parts, and tells who is given up."""
        self.shard, self.order, self.timeout_s = shard, order, timeout_s
        self.boxes = {box.peer: box for box in boxes}
        self.first = first
        self.stopping = self.released = False
        self.end = End()
        self.left: dict[int, str] = {}
        self.counted = 0
        """Samples whose gradients counted."""
        self.loss = 0.0
        self.not_finite: tuple[int, int] | None = None
        self.times: dict[int, tuple[float, float]] = {}
        """Of each worker, and how much of it the worker has waited."""
        self.on_update: Callable[[], object] = lambda: None
        """Called behind each update: it may tell this server to stop."""
        self.on_leave: Callable[[int, str], object] = lambda worker, why: None
        self._group: list[Gradient] = []
        self._gone: set[int] = set()
        """From whom nothing more comes."""
        self._turned_away: set[int] = set()
        """Who was given up and must be told so."""
        self._asked = False
        now = time.monotonic()
        for worker in self.order.workers:
            self.order.hear(worker, now)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Take what has arrived and answer who can be; has anything happened?"""
        happened, now = False, time.monotonic()
        for box in self.boxes.values():
            if box.arrived():
                self._read(box, now)
                box.next()
                happened = True
            if box.lost and box.peer not in self._gone:
                self._gone.add(box.peer)
                self._leave(box.peer, "was lost")
        if self.first is not None and self.first.arrived():
            self._told(self.first.letter.header)
            self.first.next()
            happened = True
        if self.first is not None and self.first.lost:
            raise RankFailedError("rank 0, the first server, is lost, and the training with it: start it again", [0])
        if self.first is None:  # one alone decides it
            for worker in self.order.silent(now, self.timeout_s):
                self._leave(worker, f"was silent for {self.timeout_s:g} s")
        return self._answer(now) or happened

    def _read(self, box: Box, now: float) -> None:
        worker, letter, header = box.peer, box.letter, box.letter.header
        self.order.hear(worker, now)
        if header.kind & Kind.PUSH:
            self.times[worker] = header.seconds, header.waited_s
            staleness = self.order.version - header.version
            if not self.stopping and self.order.push(worker, header.version):
                gradient = Gradient(worker, letter.body, header.samples, staleness)
                self._take(self.shard.compensated(gradient, box.reply.body), header)
        if header.kind & Kind.BYE:
            self._gone.add(worker)
            if worker in self.order.workers:
                self.order.leave(worker)
                if not self.stopping:
                    self.left[worker] = FINISHED
                self._update()
        elif header.kind & Kind.FETCH:
            if worker in self.order.workers:
                self.order.ask(worker)
            else:
                self._turned_away.add(worker)

    def _take(self, gradient: Gradient, header: Header) -> None:
        self._group.append(gradient)
        self.counted += header.samples
        self.loss += header.loss
        if not math.isfinite(header.loss) and self.not_finite is None:
            self.not_finite = self.order.version, gradient.worker
        if not self._update():  # its memory is that of the next letter
            self._group[-1] = gradient._replace(values=gradient.values.clone())

    def _update(self) -> bool:
        """Change the parameters if there are gradients enough."""
        if self.stopping or not self.order.full:
            return False
        # In one order, however they came: their sum is rounded alike.
        self.shard.update(sorted(self._group, key=lambda each: each.worker))
        self._group.clear()
        self.order.update()
        self.on_update()
        return True

    def _leave(self, worker: int, why: str) -> None:
        if worker not in self.order.workers:
            return
        if worker in self.order.waiting:
            self._turned_away.add(worker)
        self.order.leave(worker)
        self.left[worker] = why
        self.on_leave(worker, why)
        self._update()

    # ---- what goes out ---------------------------------------------------------------------------------------------

    def _answer(self, now: float) -> bool:
        """Whoever can be answered, if the last answer is on its way; was anybody?"""
        answered = False
        for worker in list(self.order.waiting) if self.stopping else self.order.ready():
            if self.boxes[worker].free():
                self._hand_out(self.boxes[worker])
                self.order.answer(worker)
                self.order.hear(worker, now)
                answered = True
        for worker in sorted(self._turned_away):
            if self.boxes[worker].free():
                self.boxes[worker].answer(Header(Say.DROPPED))
                self._turned_away.discard(worker)
        if self._asked and self.first is not None and self.first.free():
            self._hand_out(self.first)
            self._asked = False
        return answered

    def _hand_out(self, box: Box) -> None:
        if self.stopping:
            box.answer(Header(Say.STOP))
        else:
            box.reply.body.copy_(self.shard.values)
            box.answer(Header(Say.GO, self.order.version, lr=self.shard.lr, filled=1))

    def _told(self, header: Header) -> None:
        """What the first server has said."""
        if header.kind & Kind.DROP:
            self._leave(header.number, "was given up by the first server")
        self._asked = self._asked or bool(header.kind & Kind.FETCH)
        if header.kind & Kind.BYE:
            self.released, self.end = True, End(header.number, Parting(header.version))

    # ---- the loop --------------------------------------------------------------------------------------------------

    def until(self, done: Callable[[], bool], *, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Serve, asleep while nothing comes."""
        pause_s = SHORTEST_S
        while not done():
            happened = self.serve()
            if meanwhile() or happened:
                pause_s = SHORTEST_S
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_S)

    def report(self, seconds: float, cpu_s: float) -> Report:
        """What has come of it, in so many seconds."""
        order = self.order
        return Report(
            order.version,
            self.counted,
            seconds,
            cpu_s,
            staleness=dict(sorted(order.staleness.items())),
            late=dict(sorted(order.late.items())),
            left=self.left,
            not_finite=self.not_finite,
        )

    @property
    def absent(self) -> tuple[int, ...]:
        """Who was given up and has neither come back nor been lost."""
        return tuple(worker for worker in self.boxes if worker not in self._gone)

    def close(self, status: int | None = None) -> tuple[int, ...]:
        """Let the workers go, the first server with a status, once those that were given up have come back.

        Who has not come in `timeout_s` is absent, and told.
        """
        end = time.monotonic() + self.timeout_s
        self.stopping = True
        self.until(lambda: not self.absent or time.monotonic() > end)
        absent = self.absent
        here = [box for box in self.boxes.values() if box.peer not in absent]
        if status is not None:
            lost = any(box.lost for box in here)
            self.end = End(status, Parting.ABSENT if absent else Parting.LOST if lost else Parting.WELL)
            for box in here:
                box.settle()
                box.answer(Header(Say.FAREWELL, self.end.parting, number=status))
        for box in here:
            box.settle()
        for box in [*self.boxes.values(), *([self.first] if self.first else [])]:
            box.close()
        return absent
