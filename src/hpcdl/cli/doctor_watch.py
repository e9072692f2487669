"""A process that watches the one that is examined: if MPI ends that one, or never lets go of it, somebody can say so.

The watcher is the process that the launcher has started; it never touches MPI. Its child tells it, line by line, how
far it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Any, NamedTuple

STARTED = "MPI has started"
DONE = "done"

# A start of a thousand processes from a slow disk takes a minute.
START_S, PHASE_S = 120.0, 60.0


class End(NamedTuple):
    """How the child ended."""

    status: int | None
    """Its exit status, negative for a signal; None if it was stuck, and has been killed."""
    phase: str
    """What it did last."""
    told: dict[str, Any]
    """What else it has told."""
    words: str
    """What the start of MPI has printed."""


class Child:
    """The child's side: what it tells the watcher."""

    def __init__(self, pipe: int, file: IO[bytes]) -> None:
        self._pipe, self._file = pipe, file
        self._outputs: list[int] = []

    def tell(self, phase: str, **facts: Any) -> None:
        """What it is at now."""
        with suppress(OSError):
            os.write(self._pipe, json.dumps({"phase": phase, **facts}).encode() + b"\n")

    def quiet(self) -> None:
        """Let what is printed go to a file, until `loud`: MPI's own words for what the watcher says better."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._outputs = [os.dup(1), os.dup(2)]
        os.dup2(self._file.fileno(), 1)
        os.dup2(self._file.fileno(), 2)

    def loud(self) -> str:
        """Print again as usual; what was said meanwhile."""
        sys.stdout.flush()
        sys.stderr.flush()
        for output, own in enumerate(self._outputs, 1):
            os.dup2(own, output)
            os.close(own)
        self._outputs = []
        return _words(self._file)


def watched(start_s: float = START_S, phase_s: float = PHASE_S) -> Child | End:
    """Fork: a Child in the child, and in the watcher how it ended."""
    ours, theirs = os.pipe()
    file = tempfile.TemporaryFile()  # noqa: SIM115 - both processes keep it
    sys.stdout.flush()
    sys.stderr.flush()
    watcher, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(ours)
        die_with_parent(watcher)
        return Child(theirs, file)
    os.close(theirs)
    try:
        phase, told, stuck = _follow(ours, start_s, phase_s)
        if stuck:
            os.kill(pid, signal.SIGKILL)
        status = _wait(pid)
        return End(None if stuck else status, phase, told, _words(file))
    finally:
        os.close(ours)
        file.close()


def _follow(pipe: int, start_s: float, phase_s: float) -> tuple[str, dict[str, Any], bool]:
    """Read what the child tells until it ends, or has been too long at one thing."""
    phase, told, rest = "its start", dict[str, Any](), b""
    limit = time.monotonic() + start_s
    while True:
        try:
            ready, _, _ = select.select([pipe], [], [], max(0.0, limit - time.monotonic()))
            part = os.read(pipe, 65536) if ready else b""
        except KeyboardInterrupt:  # the child has got it too, and ends
            continue
        if not ready:
            return phase, told, True
        if not part:
            return phase, told, False
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            phase = facts.pop("phase")
            told |= facts
            limit = time.monotonic() + (phase_s if STARTED in told else start_s)


def _wait(pid: int) -> int:
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except KeyboardInterrupt:
            continue


def die_with_parent(parent: int) -> None:
    """End when the parent does, however it does: the launcher kills the watcher, which is all it knows of."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, on Linux
    if os.getppid() != parent:
        os._exit(1)


def _words(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 16).decode(errors="replace").replace("\0", "")
