"""The flight recorder: the last 1,000 operations of this process, always on.

Floor 1. One costs less than a microsecond, so what is written down is what is at hand; words are made when it is read.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any, TypeAlias

LENGTH = 1000


@dataclass(slots=True)
class About:
    """What an operation is; all runs of a plan share one."""

    call: str
    """As the ranks agree on it, such as "allreduce sum of float32 1000 by auto"."""
    comm: str
    """The same on all ranks of the communicator."""
    nbytes: int = 0
    algorithm: str = ""
    """What was taken in the end."""
    bucket: int | None = None
    """The number of the gradient bucket, if it is one."""


Operation: TypeAlias = list[Any]
"""A list, which costs a tenth of what an object does:

ABOUT, NUMBER the communicator's number of it, RUN of a plan (else 0), CODE and INSTRUCTION where it was called, THREAD,
and in nanoseconds BEGAN, CAME when all ranks were known to have come, WAITS since somebody waits for it, and ENDED.
"""
ABOUT, NUMBER, RUN, CODE, INSTRUCTION, THREAD, BEGAN, CAME, WAITS, ENDED = range(10)

now = perf_counter_ns
"""The clock: nanoseconds, the same for all processes of a machine."""


class Traffic:
    """What this process has sent since it began."""

    sent_bytes = 0


traffic = Traffic()

operations: deque[Operation] = deque(maxlen=LENGTH)
_keep = operations.append

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<frozen")


def begin(about: About, number: int, run: int, depth: int | None) -> Operation:
    """Write down that an operation begins, called by the frame so many above this function's caller.

    With None the caller is looked for, which takes longer: the first frame that is no library's.
    """
    try:
        frame = sys._getframe(1) if depth is None else sys._getframe(depth + 1)
    except ValueError:  # nobody's: an exit hook, say
        frame = sys._getframe()
    if depth is None:
        frame = _user(frame)
    time = now()
    operation = [about, number, run, frame.f_code, frame.f_lasti, get_ident(), time, 0, time, 0]
    _keep(operation)
    return operation


def place(code: CodeType, instruction: int) -> str:
    """Where in a program that is, such as train.py:17."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return f"{os.path.basename(code.co_filename)}:{line}"


def describe(operation: Operation) -> str:
    """An operation in words, such as "operation 41, allreduce sum of float32 1000 by ring, called at train.py:17"."""
    run = f", run {operation[RUN]} of the plan" if operation[RUN] else ""
    return (
        f"operation {operation[NUMBER]}, {operation[ABOUT].call}{run}, "
        f"called at {place(operation[CODE], operation[INSTRUCTION])}"
    )


def in_flight() -> Iterator[Operation]:
    """What has begun and not ended, the oldest first."""
    for operation in snapshot():
        if not operation[ENDED]:
            yield operation


def snapshot() -> list[Operation]:
    """All that is remembered, the oldest first."""
    while True:
        try:
            return list(operations)
        except RuntimeError:  # another thread has just begun one
            continue


def copy_to(other: deque[Operation]) -> None:
    """Hand every operation to this one too, as it begins."""
    global _keep
    keep, copy = operations.append, other.append

    def both(operation: Operation) -> None:
        keep(operation)
        copy(operation)

    _keep = both


def whereabouts(frame: FrameType) -> str:
    """What a thread does now, by its innermost frame and the first of the user's own around it."""
    inner, user = frame, _user(frame)
    text = f"in {inner.f_code.co_name} at {place(inner.f_code, inner.f_lasti)}"
    if user is not inner and not _is_library(user.f_code.co_filename):
        text += f", from {user.f_code.co_name} at {place(user.f_code, user.f_lasti)}"
    return text


def _user(frame: FrameType) -> FrameType:
    """The innermost frame that is no library's; if all are, the outermost."""
    while _is_library(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_library(file: str) -> bool:
    """Is it ours, the standard library's or an installed package's, and so no place that a user would look at?"""
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
