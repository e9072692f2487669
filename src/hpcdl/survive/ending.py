"""How a process ends when ranks have been lost: never by MPI_Finalize, which may wait for the dead for ever.

Floor 5.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

_open: set[object] = set()
"""Whose other ranks must hear of it if this one ends."""
_lost = False
"""Does this process know of losses that MPI does not?"""


def leave(status: int = 0) -> NoReturn:
    """End this process now, with its exit hooks run and its output written, but without MPI_Finalize."""
    atexit.unregister(_at_exit)
    atexit._run_exitfuncs()
    _end(status)


def opened(survivors: object) -> None:
    """From now on this process ends without MPI_Finalize where ranks are lost, and without the others if it raises."""
    _open.add(survivors)
    if not isinstance(sys.excepthook, _Alone):
        sys.excepthook = _Alone(sys.excepthook)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def closed(survivors: object) -> None:
    """The others need not hear of it any more."""
    _open.discard(survivors)
    if isinstance(sys.excepthook, _Alone) and not _open and not _is_lost():
        sys.excepthook = sys.excepthook.before


def lost() -> None:
    """This process must not end by MPI_Finalize any more."""
    global _lost
    _lost = True


def _is_lost() -> bool:
    return _lost or MPI.COMM_WORLD.Get_failed().size > 0


def _at_exit() -> None:
    if os.getpid() == _process and not MPI.Is_finalized() and (_open or _is_lost()):
        _end(0)


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if status and _open:
        # Of a rank that exits with another status than 0 Open MPI tells the others nothing, and they would wait for it.
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status)


class _Alone:
    """An excepthook that shows the error, and ends this process and no other one."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The hook before this one ends the job, and the one before that only shows the error.
        getattr(self.before, "before", self.before)(kind, error, trace)
        if os.getpid() == _process:  # a forked child is no rank
            leave(130 if issubclass(kind, KeyboardInterrupt) else 1)


_process = os.getpid()
