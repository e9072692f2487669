"""How a rank that raises ends the whole job: else the others would wait for it for ever.

Floor 1. Nothing here starts MPI: a rank that raises before it has is ended by its launcher.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import time
from array import array
from contextlib import redirect_stderr, suppress
from io import StringIO
from types import TracebackType
from typing import Any

from hpcdl.errors import HpcdlError

MOST_IN_TURN = 10
READ_S, PASSED_ON_S = 2.0, 0.3
"""How long the launcher's process on this node may take to read, and then to send it on."""


def take_others_along() -> None:
    """Have an exception that nobody catches end the job, if there is one by then."""
    if not isinstance(sys.excepthook, _Abort):
        sys.excepthook = _Abort(sys.excepthook)


def wait_until_read(*others: int) -> None:
    """Give the launcher time to pass on what this rank has printed: of a job that is aborted it drops the rest.

    `others` are descriptors that it has printed to besides those of sys.stdout and sys.stderr.
    """
    end = time.monotonic() + READ_S
    descriptors = list(others)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or not a file
            stream.flush()
            descriptors.append(stream.fileno())
    for descriptor in descriptors:
        with suppress(OSError):  # no pipe
            while time.monotonic() < end and _unread(descriptor):
                time.sleep(0.01)
    time.sleep(PASSED_ON_S)


def _unread(descriptor: int) -> int:
    """How many bytes stand in a pipe."""
    count = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


class _Abort:
    """An excepthook that shows the error as the one before it does, and ends the job."""

    def __init__(self, before: Any) -> None:
        self.before, self.process = before, os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        MPI = sys.modules.get("mpi4py.MPI")
        runs = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1
        if not runs or os.getpid() != self.process:  # a forked child is no rank
            self.before(kind, error, trace)
            return
        assert MPI is not None
        world = MPI.COMM_WORLD
        watch = sys.modules.get("hpcdl.watch")
        if watch is not None:
            watch.flush()
        sys.stdout.flush()
        if isinstance(error, HpcdlError):  # most raise it together: one of them is enough to show it
            time.sleep(0.1 * min(world.rank, MOST_IN_TURN))
        with redirect_stderr(StringIO()) as text:
            self.before(kind, error, trace)
        who = f"rank {world.rank} of {world.size} on {os.uname().nodename} raised, and ends the job:"
        # torch's init_process_group puts a hook around this one that collects what is written, to show it afterwards.
        collected = isinstance(sys.stderr, StringIO) and sys.__stderr__ is not None
        with redirect_stderr(sys.__stderr__ if collected else sys.stderr):
            # In one write, or the words of ranks that raise together would mix.
            sys.stderr.write(f"{who}\n{text.getvalue()}")
            wait_until_read()
        world.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)
