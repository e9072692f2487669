"""Failures on purpose: at a given message of a given rank, so that a loop's way through them can be tried.

Floor 5. There are no timers: the same faults strike at the same messages in every run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from mpi4py import MPI

When: TypeAlias = Literal["before", "after", "completion"]
Kind: TypeAlias = Literal["kill", "stop", "delay"]


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at one of its messages: before or after it is posted, or when it has completed.

    A rank counts its messages from 0, in the order in which it posts them: those that it sends and those that it
    receives, of the exchange and of the copies for the backups, over all its all-reduces, first runs and repetitions.
    "kill" is SIGKILL, "stop" is SIGSTOP (until somebody sends SIGCONT), "delay" sleeps for so many seconds.
    """

    rank: int
    message: int
    when: When = "before"
    kind: Kind = "kill"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0 or self.message < 0:
            raise ValueError(f"ranks and messages are counted from 0; rank {self.rank}, message {self.message} is none")
        for name, value, known in (("when", self.when, get_args(When)), ("kind", self.kind, get_args(Kind))):
            if value not in known:
                raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
        if self.seconds < 0 or (self.kind == "delay") != (self.seconds > 0):
            raise ValueError(f"a delay lasts more than 0 seconds, and nothing else does; not so {self}")

    def strike(self) -> None:
        """Let it happen to this process."""
        if self.kind == "delay":
            time.sleep(self.seconds)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


class Messages:
    """Counts this rank's messages, and lets its faults strike."""

    def __init__(self, faults: Iterable[Fault], rank: int) -> None:
        self.posted = 0
        self._faults = [fault for fault in faults if fault.rank == rank]

    def through(self, comm: MPI.Intracomm) -> Any:
        """The communicator as the executor uses it, with its messages counted."""
        return _Counted(comm, self)

    def reached(self, message: int, when: When) -> None:
        """So far has that message come."""
        for fault in self._faults:
            if (fault.message, fault.when) == (message, when):
                fault.strike()


class _Counted:
    """A communicator that makes persistent requests."""

    def __init__(self, comm: MPI.Intracomm, messages: Messages) -> None:
        self._comm, self._messages = comm, messages

    def Send_init(self, *arguments: Any) -> _Message:
        return _Message(self._comm.Send_init(*arguments), self._messages)

    def Recv_init(self, *arguments: Any) -> _Message:
        return _Message(self._comm.Recv_init(*arguments), self._messages)


class _Message:
    """A persistent request that says how far it has come."""

    def __init__(self, request: MPI.Prequest, messages: Messages) -> None:
        self._request, self._messages = request, messages
        self._number: int | None = None
        self.Free = request.Free

    def Start(self) -> None:
        number = self._messages.posted
        self._messages.reached(number, "before")
        self._request.Start()
        self._number, self._messages.posted = number, number + 1
        self._messages.reached(number, "after")

    def Test(self) -> bool:
        done = self._request.Test()
        if done and self._number is not None:
            number, self._number = self._number, None
            self._messages.reached(number, "completion")
        return done
