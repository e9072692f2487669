"""An orderly stop: a signal that reaches one rank becomes one decision of all ranks, at the same step.

Floor 4. Importing this starts no MPI.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TypeAlias

from hpcdl.api import plan_allreduce
from hpcdl.logs import host, logger

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.execute import Plan

    Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SIGACTION_BYTES = 1 << 10  # more than any system's struct has
CODES = 1 << 10  # more than there are signals


def preemption(comm: MPI.Comm | None = None, *, signals: Iterable[int] = SIGNALS) -> Preemption:
    """Have a `with` block in which the signals end no rank, but are asked for by all ranks together.

        with hpcdl.preemption(comm) as stop:
            for batch in batches:
                ...
                if stop():
                    save_checkpoint(...)
                    break

    `stop()` is a collective call, once a step. It is one small all-reduce that goes on beside the step: what it answers
    is what the ranks knew at the call before, and so the same on all of them. `stop.reason` tells which signal came to
    which rank; rank 0 logs it. Both hold also where the signal came behind the last call: look at it behind the block.

    A rank may leave the block before the others, whose batches are more: at its end it waits for them and takes part in
    their calls. On the main thread only; the signals' earlier handlers are not called, and are put back at the end.
    SIGINT remains Python's KeyboardInterrupt. On two cores two ranks pay some 20 to 40
    us a call, and four 40 to 110.
    """
    return Preemption(comm, signals)


class Preemption:
    """The ranks' common knowledge of whether any of them has been asked to stop."""

    reason: str | None = None
    """Why the ranks stop, such as "SIGUSR1 at rank 2 (h2)"; the same on all ranks, None as long as they do not."""

    def __init__(self, comm: MPI.Comm | None, signals: Iterable[int]) -> None:
        self._comm, self._signals = comm, signals
        self._before: dict[signal.Signals, tuple[Handler, ctypes.Array[ctypes.c_char]]] = {}
        self._asked = 0
        """The first signal that has come to this rank."""
        self._plan: Plan | None = None

    def __enter__(self) -> Preemption:
        import numpy as np

        from hpcdl.call import channel
        from hpcdl.check import agree
        from hpcdl.execute import finish

        if self._plan is not None:
            raise RuntimeError("this preemption is in use: make another for a block inside the block")
        own = channel(self._comm)
        self.reason, self._asked, refusal = None, 0, None
        try:
            self._install()
        except (TypeError, ValueError) as error:
            refusal = error
        try:
            finish(agree(own, "preemption", refusal=refusal)).end()
            self._wire: MPI.Intracomm = own.wire.Dup()
            self._word = np.zeros(2, np.int64)  # who has been asked for what; is any rank still in its block?
            self._plan = plan_allreduce(self._word, self._wire, op="max")
            assert self._plan.about is not None
            self._plan.about.call = "stop() of hpcdl.preemption"
            self._begin(inside=True)
        except BaseException:
            self._put_back()
            raise
        return self

    def __call__(self) -> bool:
        """Is it time to stop? The same answer on all ranks; a collective call."""
        if self._plan is None:
            raise RuntimeError("ask stop() inside the block only: with hpcdl.preemption(comm) as stop: ...")
        if self.reason is None:
            self._take()
            if self.reason is None:
                self._begin(inside=True)
        return self.reason is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._plan is not None
        try:
            # Behind an error of this rank the others may never come: what is in flight is left to them.
            if error is None:
                while self.reason is None and self._take():
                    if self.reason is None:
                        self._begin(inside=False)
                self._plan.close()
                self._wire.Free()
        finally:
            self._plan = None
            self._put_back()
        if error is None and self.reason is None and self._asked:
            signal.raise_signal(self._asked)  # too late for all to hear of it: it means what it meant before

    def _begin(self, *, inside: bool) -> None:
        """Begin to tell each other."""
        from hpcdl.record import WAITS

        assert self._plan is not None
        # The lowest of the ranks that were asked has the largest word.
        self._word[:] = self._asked and (self._wire.size - self._wire.rank) * CODES + self._asked, inside
        # Not by start(): the collectives of the step would look after a work in flight, at 80 us each time they wait.
        self._operation = self._plan.enter(2)
        self._operation[WAITS] = 0
        self._steps = self._plan.steps()
        self._awaited = next(self._steps, None)

    def _take(self) -> bool:
        """Hear what was told; is any rank still in its block?"""
        from hpcdl.execute import finish, wait
        from hpcdl.record import ENDED, WAITS, now

        self._operation[WAITS] = now()
        if self._awaited is not None:
            wait(self._awaited)
            finish(self._steps)
        self._operation[ENDED] = now()
        word, inside = self._word.tolist()
        if word:
            behind, number = divmod(word, CODES)
            rank = self._wire.size - behind
            where = self._wire.bcast(host(), rank)
            self.reason = f"{signal.Signals(number).name} at rank {rank} ({where})"
            if self._wire.rank == 0:
                logger.warning("the ranks were asked to stop: %s", self.reason)
        return bool(inside)

    def _install(self) -> None:
        """Catch the signals. ValueError or TypeError if that cannot be."""
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise ValueError(f"hpcdl.preemption is for the main thread, which alone gets signals, not for {name}")
        if not isinstance(self._signals, Iterable):
            raise TypeError(f"signals is a sequence such as (signal.SIGTERM, signal.SIGUSR1), not {self._signals!r}")
        libc = ctypes.CDLL(None)
        for each in map(signal.Signals, self._signals):
            before = signal.getsignal(each)
            if each == signal.SIGINT:
                raise ValueError("SIGINT is Ctrl-C and remains KeyboardInterrupt: take SIGTERM, SIGUSR1 or others")
            kept = ctypes.create_string_buffer(SIGACTION_BYTES)
            libc.sigaction(int(each), None, kept)
            try:
                signal.signal(each, self._note)
            except OSError:
                raise ValueError(f"{each.name} cannot be caught: take SIGTERM, SIGUSR1 or others") from None
            signal.siginterrupt(each, False)  # what reads or writes a file is not to be disturbed
            self._before.setdefault(each, (before, kept))

    def _put_back(self) -> None:
        """The signals mean again what they meant before."""
        libc = ctypes.CDLL(None)
        for each, (handler, kept) in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
            # MPICH has a handler for SIGUSR1, of which Python does not know.
            libc.sigaction(int(each), kept, None)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Anywhere, in the middle of a collective too: no more than this may be done here.
        self._asked = self._asked or number
