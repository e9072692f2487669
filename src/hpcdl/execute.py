"""Schedules on the wire: a Plan is a program bound once to a vector, a Work is one that is in flight.

Floor 2, and the only place that sends anybody's data. Requests are persistent: set up once, started at each run. Sends
are started behind their round's receives, and nothing relies on buffer space at the other end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcdl.buffers import HALVES, Action, Array, Family, Look, Vector, segments
from hpcdl.channel import Channel
from hpcdl.collectives import Program, Reduce, Round, Send, Span, Step
from hpcdl.device import mpi_reads_devices

MESSAGE_BYTES = 4 << 20
"""Longer messages are cut, on all ranks alike: MPI counts may be C ints, and device memory that MPI cannot read goes
through pinned host memory piece by piece, one being copied while another travels."""

UFUNCS = {"sum": "add", "mean": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}

Result = TypeVar("Result")
Steps: TypeAlias = Generator[MPI.Request, None, None]
"""A collective under way: it yields each request that it cannot go on without."""


class Job(NamedTuple):
    """What a plan works on: a vector, the reduction if there is one, what happens before and after each run."""

    vector: Vector
    op: str | None = None
    before: Sequence[Action] = ()
    after: Sequence[Action] = ()
    result: Callable[[], Any] = lambda: None


class _Bound(NamedTuple):
    """A round, bound: what is started, what is waited for and what happens then."""

    starts: list[tuple[Action | None, MPI.Prequest]]
    waits: list[tuple[MPI.Prequest, list[Action]]]
    last: list[Action]


class Plan:
    """A collective bound once to an array: call it as often as the array has new contents.

    Every rank of the communicator makes and calls its plans in the same order. Close it, use it as a context manager,
    or let it be freed with its communicator.
    """

    def __init__(self, channel: Channel, job: Job, program: Program, *, tag: int, raw: bool = False) -> None:
        self._channel, self._vector, self._tag = channel, job.vector, tag
        self._before, self._after, self.result = list(job.before), list(job.after), job.result
        self._requests: list[MPI.Prequest] = []
        self.state: Literal["idle", "in flight", "closed"] = "idle"
        self._stage = self._pinned(program)
        self._rounds = self._bind(program, job.op, raw)
        channel.plans.add(self)

    # ---- binding -------------------------------------------------------------------------------------------------

    def _bind(self, program: Program, op: str | None, raw: bool) -> list[_Bound]:
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
            work = vector.empty(vector.size, "float32")
            widened = finished if raw else Span(0, vector.size)
            self._before.append(lambda: work.put(widened, vector[widened]))
            sent = vector if raw else work
        if op == "mean":
            ends.append(work.combine("true_divide", work[finished], self._channel.size, work[finished]))
        if work is not vector:
            ends.append(lambda: vector.put(finished, work[finished]))

        scratch = sent.empty(max(map(_received, program.reducing), default=0))
        reducing = [self._bind_round(steps, sent, work, ufunc, scratch) for steps in program.reducing]
        handing = [self._bind_round(steps, vector, vector, ufunc) for steps in program.handing]
        return [*reducing, _Bound([], [], ends), *handing]

    def _bind_round(
        self, steps: Round, sent: Vector, work: Vector, ufunc: str, scratch: Vector | None = None
    ) -> _Bound:
        """One round: `sent` is sent from, `work` is added to, and what is to be added arrives in `scratch`."""
        receives: list[tuple[Action | None, MPI.Prequest]] = []
        sends: list[tuple[Action | None, MPI.Prequest]] = []
        waits: list[tuple[MPI.Prequest, list[Action]]] = []
        last: list[Action] = []
        leaving = [step.span for step in steps if isinstance(step, Send)]
        taken = staged = 0  # elements of scratch, bytes of pinned memory
        for step in steps:
            for piece in segments(step.span, self._longest(sent)):
                host = self._stage[staged : staged + piece.size * sent.itemsize]
                staged += host.size
                if isinstance(step, Send):
                    prepare, message = self._outgoing(sent, piece, host)
                    sends.append((prepare, self._keep(self._channel.wire.Send_init(message, step.peer, self._tag))))
                    continue
                target, place = (scratch, Span(taken, taken + piece.size)) if scratch else (sent, piece)
                taken += piece.size
                prepare, message, arrive = self._incoming(target, place, host)
                request = self._keep(self._channel.wire.Recv_init(message, step.peer, self._tag))
                receives.append((prepare, request))
                actions = [arrive] if arrive else []
                if isinstance(step, Reduce) and scratch:
                    mine, theirs = work[piece], scratch[place]
                    low, high = (theirs, mine) if step.peer < self._channel.rank else (mine, theirs)
                    add = work.combine(ufunc, low, high, mine)
                    # A sum may be put in place as soon as it is there, unless the old numbers are still being sent.
                    still_sent = any(span.lo < piece.hi and piece.lo < span.hi for span in leaving)
                    (last if still_sent else actions).append(add)
                waits.append((request, actions))
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

    def _longest(self, vector: Vector) -> int:
        """The number of elements in the longest message."""
        return max(1, MESSAGE_BYTES // vector.itemsize)

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
        """Run once. Yields the requests to wait for; whoever drives it waits or tests as he likes."""
        self.begin()
        for action in self._before:
            action()
        for starts, waits, last in self._rounds:
            for prepare, request in starts:
                if prepare is not None:
                    prepare()
                request.Start()
            for request, actions in waits:
                yield request
                for action in actions:
                    action()
            for action in last:
                action()
        for action in self._after:
            action()
        self.state = "idle"

    def begin(self) -> None:
        """Take the plan for one run. RuntimeError if it is closed, or in flight."""
        if self.state != "idle":
            hint = "wait for its work first" if self.state == "in flight" else "make another"
            raise RuntimeError(f"this plan is {self.state}; {hint}")
        self.state = "in flight"

    def __call__(self) -> Any:
        """Run the collective once, on what the array holds now; the result, as the plain function returns it."""
        finish(self.steps())
        return self.result()

    def start(self) -> Work:
        """Run the collective once, without waiting for it."""
        return Work(self.steps(), self.result)

    def close(self) -> None:
        """Free the requests; the plan cannot be called any more. Local: the other ranks need not take part."""
        requests, self._requests, self._rounds = self._requests, [], []
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


class Kept(NamedTuple):
    """A plan kept for the next plain call on the same array, which it keeps alive: its id cannot come again."""

    plan: Plan
    name: str
    family: Family
    look: Look | None
    x: Array


def _received(steps: Sequence[Step]) -> int:
    return sum(step.span.size for step in steps if isinstance(step, Reduce))


class Work:
    """A collective in flight. Its array belongs to the library until it is complete.

    MPI makes no progress on its own: `is_completed` and `wait`, of this work or of another, do.
    """

    def __init__(self, steps: Steps, result: Callable[[], Any]) -> None:
        self._steps, self._result = steps, result
        self._request: MPI.Request | None = None
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        _in_flight.append(self)  # also keeps the array alive as long as MPI may write to it
        self._advance(lambda request: False)

    def _advance(self, passed: Callable[[MPI.Request], bool]) -> None:
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
            if self._done and self in _in_flight:
                _in_flight.remove(self)
            self._lock.release()

    def is_completed(self) -> bool:
        """Is it done (or has it failed)? Makes what progress can be made now, and does not wait."""
        self._advance(_test)
        return self._done

    def wait(self) -> None:
        """Wait until it is done. Raises what went wrong, each time it is asked."""
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


def _test(request: MPI.Request) -> bool:
    return request.Test()


def wait(request: MPI.Request, me: Work | None = None) -> Literal[True]:
    """Wait for one request: the only place that does.

    What else is in flight goes on meanwhile: one rank may wait for A then B, another for B then A.
    """
    if all(work is me for work in _in_flight):
        request.Wait()
        return True
    while not request.Test():
        for work in list(_in_flight):
            if work is not me:
                work.is_completed()
        time.sleep(0)  # the rank waited for may need this core
    return True


def finish(steps: Generator[MPI.Request, None, Result]) -> Result:
    """Drive a collective to its end, waiting; what it returns."""
    while True:
        try:
            request = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        wait(request)


class Native(Plan):
    """MPI's own all-reduce behind the face of a Plan, for comparison."""

    def __init__(self, channel: Channel, job: Job) -> None:
        vector, whole = job.vector, Span(0, job.vector.size)
        super().__init__(channel, job, Program([], whole, []), tag=0)
        logical = {"sum": MPI.LOR, "max": MPI.LOR, "prod": MPI.LAND, "min": MPI.LAND}
        usual = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
        assert job.op is not None
        self._op = (logical if vector.dtype == "bool" else usual)[job.op]
        device = vector.device
        if device is not None:
            self._before.append(device.synchronize)
        memory = vector.flat if device is None else device.bytes(0, vector.look.nbytes)
        self._message = [memory, vector.size, _mpi_types()[vector.dtype]]
        if job.op == "mean":
            self._after.insert(0, vector.combine("true_divide", vector[whole], channel.size, vector[whole]))
        self._rounds = []

    def steps(self) -> Steps:
        self.begin()
        for action in self._before:
            action()
        if self._vector.device is None:
            yield self._channel.wire.Iallreduce(MPI.IN_PLACE, self._message, self._op)
        else:
            # The CUDA-aware Open MPI reduces device memory in the blocking form only; the other one crashes.
            self._channel.wire.Allreduce(MPI.IN_PLACE, self._message, self._op)
        for action in self._after:
            action()
        self.state = "idle"


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
