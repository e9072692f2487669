"""Schedules on the wire: a Plan is a program bound once to a vector, a Work is one that is in flight.

Floor 2, and the only place that sends what a schedule moves. Requests are persistent: set up once, started at each run.
Sends are started behind their round's receives, and nothing relies on buffer space at the other end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcdl.buffers import HALVES, Action, Vector, segments
from hpcdl.channel import Channel
from hpcdl.collectives import Program, Reduce, Round, Send, Span, Step
from hpcdl.device import mpi_reads_devices
from hpcdl.inside import UFUNCS, Ticks, Within
from hpcdl.record import ENDED, WAITS, About, Operation, begin, now, traffic
from hpcdl.shared import Awaited

MESSAGE_BYTES = 4 << 20
"""Longer messages are cut, on all ranks alike: MPI counts may be C ints, and device memory that MPI cannot read goes
through pinned host memory piece by piece, one being copied while another travels."""

SEGMENT_BYTES, WINDOW = 1 << 20, 2
"""What is to be added comes in segments of so many bytes, so many at a time from each peer: while one is added, and is
still in the cache, the next comes in. Scratch is that long and no longer. The bits of the sum do not depend on it.
A tuning table may have found another length to be the fastest."""

Result = TypeVar("Result")


Steps: TypeAlias = Generator[Any, None, None]
"""A collective under way: it yields each request, or what behaves like one, that it cannot go on without."""


class Job(NamedTuple):
    """What a plan works on: a vector, the reduction if there is one, what happens before and after each run."""

    vector: Vector
    op: str | None = None
    before: Sequence[Action] = ()
    after: Sequence[Action] = ()
    result: Callable[[], Any] = lambda: None


class _Bound(NamedTuple):
    """A round, bound: what is started, what is waited for and what happens then."""

    starts: list[tuple[Action | None, Awaited]]
    waits: list[tuple[Awaited, list[Action]]]
    last: list[Action]


class _Line(NamedTuple):
    """Do this, then wait for that."""

    actions: Sequence[Action]
    awaited: Awaited | None


NAMELESS = About("a collective", "")


class Plan:
    """A collective bound once to an array: call it as often as the array has new contents.

    Every rank of the communicator makes and calls its plans in the same order. Close it, use it as a context manager,
    or let it be freed with its communicator.
    """

    about: About | None = None
    """What it is called in the record; None if its runs are part of another operation."""
    number = runs = 0
    """The operation that made it, and how often it has run since."""

    def __init__(
        self,
        channel: Channel,
        job: Job,
        program: Program,
        *,
        tag: int,
        raw: bool = False,
        within: Within | None = None,
    ) -> None:
        self._channel, self._vector, self._tag = channel, job.vector, tag
        self._before, self._after, self.result = list(job.before), list(job.after), job.result
        self._requests: list[MPI.Prequest] = []
        self.scratch_bytes = self.sent_bytes = 0  # the second at each run
        self.state: Literal["idle", "in flight", "closed"] = "idle"
        self._segment_bytes = min(channel.segment_bytes or SEGMENT_BYTES, MESSAGE_BYTES)
        self._stage = self._pinned(program)
        self._turn: Callable[[], int] = lambda: 0  # which of two scripts
        if within is not None and within.alone:
            # Twice, to be taken in turns, where the next run may begin while this one still ends on another rank.
            assert job.op is not None
            bindings = [self._meeting(ticks, within.gate) for ticks in within.bind_alone(job.vector, job.op)]
            if len(bindings) > 1:
                self._turn = within.turn
        else:
            bindings = [self._bind(program, job.op, raw, within)]
        self._scripts = [self._written(rounds) for rounds in bindings]
        channel.plans.add(self)

    def _written(self, rounds: Sequence[_Bound]) -> list[_Line]:
        """All of it in the order of what is to be done: some actions, something to wait for, and so on."""
        actions, lines = list(self._before), list[_Line]()
        for starts, waits, last in rounds:
            for prepare, request in starts:
                actions += [prepare, request.Start] if prepare else [request.Start]
            for awaited, then in waits:
                lines.append(_Line(actions, awaited))
                actions = then
            actions = [*actions, *last]
        actions = [*actions, *self._after]
        return [*lines, _Line(actions, None)] if actions else lines

    # ---- binding -------------------------------------------------------------------------------------------------

    def _bind(self, program: Program, op: str | None, raw: bool, within: Within | None) -> list[_Bound]:
        """The rounds that reduce, a last action on the finished span, the rounds that hand out."""
        vector, finished = self._vector, program.finished
        if op is None:
            return [self._bind_round(steps, vector, vector, "") for steps in program.handing]

        ufunc = UFUNCS[op]
        ends: list[Action] = []
        work = sent = vector
        if vector.dtype in HALVES and op not in ("min", "max"):
            # Partial sums travel and are added in float32 and are rounded once, by the owner of the span, who takes
            # the rounded numbers himself. An algorithm that only ever sends a rank's own numbers sends 16 bits.
            work = self._scratch(vector, vector.size, "float32")
            sent = vector if raw else work
            if within is None:
                widened = finished if raw else Span(0, vector.size)
                self._before.append(lambda: work.put(widened, vector[widened]))
        if op == "mean":
            ends.append(work.combine("true_divide", work[finished], self._channel.size, work[finished]))
        if work is not vector:
            ends.append(lambda: vector.put(finished, work[finished]))

        longest = self._longest(sent, self._segment_bytes)
        scratch = self._scratch(sent, max((_window(steps, longest) for steps in program.reducing), default=0))
        reducing = [self._bind_round(steps, sent, work, ufunc, scratch) for steps in program.reducing]
        handing = [self._bind_round(steps, vector, vector, ufunc) for steps in program.handing]
        rounds = [*reducing, _Bound([], [], ends), *handing]
        if within is None:
            return rounds
        first, last = within.bind_lane(vector, work, op)
        return [*self._meeting(first, within.gate), *rounds, *self._meeting(last, within.gate)]

    def _scratch(self, vector: Vector, size: int, dtype: str | None = None) -> Vector:
        scratch = vector.empty(size, dtype)
        self.scratch_bytes += scratch.look.nbytes
        return scratch

    @staticmethod
    def _meeting(ticks: Ticks, gate: Awaited) -> list[_Bound]:
        """Rounds with a gate between every two ticks."""
        first, *others = ticks
        return [_Bound([], [], first), *(_Bound([(None, gate)], [(gate, tick)], []) for tick in others)]

    def _bind_round(
        self, steps: Round, sent: Vector, work: Vector, ufunc: str, scratch: Vector | None = None
    ) -> _Bound:
        """One round: `sent` is sent from, `work` is added to, and what is to be added arrives in `scratch`."""
        longest = self._longest(sent, MESSAGE_BYTES if scratch is None else self._segment_bytes)
        receives: list[tuple[Action | None, Awaited]] = []
        sends: list[tuple[Action | None, Awaited]] = []
        waits: list[tuple[Awaited, list[Action]]] = []
        last: list[Action] = []
        taken = staged = 0  # elements of scratch, bytes of pinned memory
        for step in steps:
            pieces = list(segments(step.span, longest))
            slots = _slots(step, steps, longest)
            arrivals: list[list[Action]] = []
            for number, piece in enumerate(pieces):
                host = self._stage[staged : staged + piece.size * sent.itemsize]
                staged += host.size
                if isinstance(step, Send):
                    self.sent_bytes += piece.size * sent.itemsize
                    prepare, message = self._outgoing(sent, piece, host)
                    sends.append((prepare, self._keep(self._channel.wire.Send_init(message, step.peer, self._tag))))
                    continue
                target, place = sent, piece
                if scratch is not None:
                    start = taken + number % slots * longest
                    target, place = scratch, Span(start, start + piece.size)
                prepare, message, arrive = self._incoming(target, place, host)
                request = self._keep(self._channel.wire.Recv_init(message, step.peer, self._tag))
                actions = [arrive] if arrive else []
                if scratch is not None:
                    mine, theirs = work[piece], scratch[place]
                    low, high = (theirs, mine) if step.peer < self._channel.rank else (mine, theirs)
                    add = work.combine(ufunc, low, high, mine)
                    # A sum may be put in place as soon as it is there, unless the old numbers are still being sent.
                    (last if _still_sent(step, steps) else actions).append(add)
                if number < slots:
                    receives.append((prepare, request))
                else:  # when the one that was there before has been added
                    arrivals[number - slots] += [*([prepare] if prepare else []), request.Start]
                arrivals.append(actions)
                waits.append((request, actions))
            if isinstance(step, Reduce):
                taken += min(slots * longest, step.span.size)
        waits += [(request, []) for _, request in sends]
        return _Bound([*receives, *sends], waits, last)

    def _pinned(self, program: Program) -> npt.NDArray[np.uint8]:
        """Host memory for the largest round, where the array is on a device that MPI cannot read."""
        vector, device = self._vector, self._vector.device
        largest = max(
            (sum(step.span.size for step in steps) for steps in (*program.reducing, *program.handing)), default=0
        )
        if device is None or mpi_reads_devices() or not largest:
            return np.empty(0, np.uint8)
        return device.pinned(largest * (4 if vector.dtype in HALVES else vector.itemsize))  # they travel as float32

    @staticmethod
    def _longest(vector: Vector, nbytes: int) -> int:
        """The number of elements in so many bytes."""
        return max(1, nbytes // vector.itemsize)

    def _keep(self, request: MPI.Prequest) -> MPI.Prequest:
        self._requests.append(request)
        return request

    def _outgoing(self, vector: Vector, span: Span, host: npt.NDArray[np.uint8]) -> tuple[Action | None, Any]:
        """What must happen before MPI may read the span, and what MPI is handed."""
        lo, hi = span.lo * vector.itemsize, span.hi * vector.itemsize
        if vector.host is not None:
            return None, [vector.host[lo:hi], hi - lo, MPI.BYTE]
        device = vector.device
        assert device is not None
        if mpi_reads_devices():
            return device.synchronize, [device.bytes(lo, hi), hi - lo, MPI.BYTE]
        return lambda: device.download(lo, hi, host), [host, hi - lo, MPI.BYTE]

    def _incoming(
        self, vector: Vector, span: Span, host: npt.NDArray[np.uint8]
    ) -> tuple[Action | None, Any, Action | None]:
        """What must happen before MPI may write the span, what MPI is handed, and what follows the arrival."""
        lo, hi = span.lo * vector.itemsize, span.hi * vector.itemsize
        if vector.host is not None:
            return None, [vector.host[lo:hi], hi - lo, MPI.BYTE], None
        device = vector.device
        assert device is not None
        if mpi_reads_devices():
            # A kernel of the last round may still read the scratch that this message overwrites.
            return device.synchronize, [device.bytes(lo, hi), hi - lo, MPI.BYTE], None
        return None, [host, hi - lo, MPI.BYTE], lambda: device.upload(lo, hi, host)

    # ---- running -------------------------------------------------------------------------------------------------

    def steps(self) -> Steps:
        """Run once. Yields what it cannot go on without; whoever drives it waits or tests as he likes."""
        self._begin()
        traffic.sent_bytes += self.sent_bytes
        for actions, awaited in self._script():
            for action in actions:
                action()
            if awaited is not None:
                yield awaited
        self.state = "idle"

    def __call__(self) -> Any:
        """Run the collective once, on what the array holds now; the result, as the plain function returns it."""
        operation = self.enter(1)
        try:
            self.run()
        finally:
            operation[ENDED] = now()
        return self.result()

    def run(self) -> None:
        """Run once, as part of what is in the record already."""
        # What finish(self.steps()) does, without the generator's share and other calls' share of a short plan's time.
        if self.state != "idle":
            self._begin()
        self.state = "in flight"
        traffic.sent_bytes += self.sent_bytes
        scripts = self._scripts
        for actions, awaited in scripts[0] if len(scripts) == 1 else self._script():
            for action in actions:
                action()
            if awaited is not None:
                if _in_flight:
                    wait(awaited)
                else:
                    awaited.Wait()
        self.state = "idle"

    def enter(self, depth: int) -> Operation:
        """Record that a run begins, called by the frame so many above this function's caller."""
        self.runs += 1
        return begin(self.about or NAMELESS, self.number, self.runs, depth + 1)

    def _begin(self) -> None:
        """Take the plan for one run. RuntimeError if it is closed, or in flight."""
        if self.state != "idle":
            hint = "wait for its work first" if self.state == "in flight" else "make another"
            raise RuntimeError(f"this plan is {self.state}; {hint}")
        self.state = "in flight"

    def _script(self) -> Sequence[_Line]:
        """What is to be done this time."""
        return self._scripts[self._turn()]

    def start(self) -> Work:
        """Run the collective once, without waiting for it."""
        return Work(self.steps(), self.result, self.enter(1))

    def close(self) -> None:
        """Free the requests; the plan cannot be called any more. Local: the other ranks need not take part."""
        requests, self._requests, self._scripts = self._requests, [], []
        self._turn = lambda: 0  # it holds on to the staging area
        if self.state != "closed" and self.about and self.runs:
            self._channel.remember(self.number, self.runs)
        if self.state == "idle" and not MPI.Is_finalized():
            for request in requests:
                request.Free()
        # In flight, as after an error, the requests are MPI's: dropped, not freed.
        self.state = "closed"

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_requests", None):
            self.close()


def _slots(step: Step, steps: Round, longest: int) -> int:
    """How many segments of a step are on their way at once: all of them, but for what is added as it comes."""
    if isinstance(step, Reduce) and not _still_sent(step, steps):
        return WINDOW
    return -(-step.span.size // longest)


def _still_sent(step: Step, steps: Round) -> bool:
    """Is what the step adds to sent in the same round?"""
    leaving = (other.span for other in steps if isinstance(other, Send))
    return any(span.lo < step.span.hi and step.span.lo < span.hi for span in leaving)


def _window(steps: Round, longest: int) -> int:
    """The elements of scratch that a round needs."""
    return sum(
        min(step.span.size, _slots(step, steps, longest) * longest) for step in steps if isinstance(step, Reduce)
    )


class Work:
    """A collective in flight. Its array belongs to the library until it is complete.

    MPI makes no progress on its own: `is_completed` and `wait`, of this work or of another, do.
    """

    def __init__(self, steps: Steps, result: Callable[[], Any], operation: Operation) -> None:
        self._steps, self._result, self._operation = steps, result, operation
        operation[WAITS] = 0
        self._request: Awaited | None = None
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        _in_flight.append(self)  # also keeps the array alive as long as MPI may write to it
        self._advance(lambda request: False)

    def _advance(self, passed: Callable[[Awaited], bool]) -> None:
        """Go on for as long as the requests that stand in the way are passed."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is driving it, or this one, further down
        try:
            while not self._done:
                if self._request is not None and not passed(self._request):
                    return
                self._request = next(self._steps, None)
                self._done = self._request is None
        except BaseException as error:
            self._error, self._done = error, True
            if not isinstance(error, Exception):
                raise  # the user's Ctrl-C
        finally:
            if self._done:
                self._operation[ENDED] = now()
                if self in _in_flight:
                    _in_flight.remove(self)
            self._lock.release()

    def is_completed(self) -> bool:
        """Is it done (or has it failed)? Does not wait, but makes what progress all works in flight can make now."""
        for work in (self, *_in_flight):
            work._advance(_test)
        return self._done

    def wait(self) -> None:
        """Wait until it is done. Raises what went wrong, each time it is asked."""
        self._operation[WAITS] = now()
        while not self._done:
            self._advance(lambda request: wait(request, self))
            if not self._done:
                time.sleep(1e-4)  # another thread drives it
        if self._error is not None:
            raise self._error

    def result(self) -> Any:
        """Wait, and give what the plain function returns."""
        self.wait()
        return self._result()


_in_flight: list[Work] = []


def _test(request: Awaited) -> bool:
    return request.Test()


def wait(request: Awaited, me: Work | None = None) -> Literal[True]:
    """Wait for one request: the only place that does.

    What else is in flight goes on meanwhile: one rank may wait for A then B, another for B then A.
    """
    if not _in_flight or (len(_in_flight) == 1 and _in_flight[0] is me):
        request.Wait()
        return True
    while not request.Test():
        for work in list(_in_flight):
            if work is not me:
                work._advance(_test)
        time.sleep(0)  # the rank waited for may need this core
    return True


def finish(steps: Generator[Any, None, Result]) -> Result:
    """Drive a collective to its end, waiting; what it returns."""
    while True:
        try:
            request = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        wait(request)


class Native(Plan):
    """MPI's own all-reduce behind the face of a Plan.

    One that is to be called often is set up as a persistent collective, where the MPI has them: all ranks set it up.
    """

    def __init__(self, channel: Channel, job: Job, *, often: bool) -> None:
        vector, whole = job.vector, Span(0, job.vector.size)
        super().__init__(channel, job, Program([], whole, []), tag=0)
        logical = {"sum": MPI.LOR, "max": MPI.LOR, "prod": MPI.LAND, "min": MPI.LAND}
        usual = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
        assert job.op is not None
        # The bitwise ones of bool, which MPI has for integers only.
        logical |= {"band": MPI.LAND, "bor": MPI.LOR, "bxor": MPI.LXOR}
        usual |= {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
        self._op = (logical if vector.dtype == "bool" else usual)[job.op]
        device = vector.device
        memory = vector.flat if device is None else device.bytes(0, vector.look.nbytes)
        self._message = [memory, vector.size, _mpi_types()[vector.dtype]]
        first, last = [*self._before], [*self._after]
        if job.op == "mean":
            last.insert(0, vector.combine("true_divide", vector[whole], channel.size, vector[whole]))
        if device is None:
            request: Awaited = self
            if often:
                with suppress(NotImplementedError):  # they came with MPI 4
                    request = self._keep(channel.wire.Allreduce_init(MPI.IN_PLACE, self._message, self._op))
            ends = [_Line(last, None)] if last else []
            self._scripts = [[_Line([*first, request.Start], request), *ends]]
        else:
            # The CUDA-aware Open MPI reduces device memory in the blocking form only; the other one crashes.
            blocking = partial(channel.wire.Allreduce, MPI.IN_PLACE, self._message, self._op)
            self._scripts = [[_Line([*first, device.synchronize, blocking, *last], None)]]

    # Without persistent collectives the request is a new one each time.

    def Start(self) -> None:
        """Post it."""
        self._request = self._channel.wire.Iallreduce(MPI.IN_PLACE, self._message, self._op)

    def Test(self) -> bool:
        """Is it there?"""
        return self._request.Test()

    def Wait(self) -> None:
        """Wait for it."""
        self._request.Wait()


def _mpi_types() -> dict[str, MPI.Datatype]:
    return {
        "float32": MPI.FLOAT,
        "float64": MPI.DOUBLE,
        "complex64": MPI.C_FLOAT_COMPLEX,
        "complex128": MPI.C_DOUBLE_COMPLEX,
        "bool": MPI.C_BOOL,
        **{f"int{bits}": getattr(MPI, f"INT{bits}_T") for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": getattr(MPI, f"UINT{bits}_T") for bits in (8, 16, 32, 64)},
    }
