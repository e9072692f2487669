"""Do the ranks agree? Asked ahead of every collective, so that all get the same error before any data moves."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from itertools import groupby
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdl import settings
from hpcdl.buffers import Vector
from hpcdl.channel import TABLES, TAGS, Channel
from hpcdl.collectives import Span, find, program
from hpcdl.errors import MismatchError, UnsupportedArrayError
from hpcdl.execute import Job, Plan
from hpcdl.record import CAME, ENDED, NUMBER, About, Operation, begin, now
from hpcdl.shared import Meeting

ROW_BYTES = 512

# What a collective's array is: every rank posts one of these, or for an array in node-shared memory a number from
# `KINDS` on that names the memory and the place in it.
PRIVATE, DEVICE, KINDS = 0, 1, 2


class Check(Meeting):
    """One question to all ranks, started, tested and waited for like a request: do you make this call too?

    16 bytes of every rank: the number of the operation, and a hash of the call and of the kind of the array. On one
    node they are posted on a board in shared memory; else MPI's own all-reduce takes the maximum of (hash, -hash), in
    its non-blocking form whichever of ours was called, so that ours match each other.
    """

    number = 0
    equal = True
    """Do all ranks make the same call?"""
    alike = True
    """Have all ranks the same kind of array?"""

    def __init__(self, channel: Channel, call: str, kind: int = PRIVATE) -> None:
        self.channel, self.call = channel, call
        self.poke, self.rank = channel.poke, channel.rank
        self.others = [] if channel.board is None else channel.board.others
        self._code = zlib.crc32(call.encode()) << 31 | kind
        self._request: MPI.Request | None = None
        self._posted = False

    def Start(self) -> None:
        """Ask, as the communicator's next operation."""
        channel, board = self.channel, self.channel.board
        with channel.lock:  # with two threads, the number and the place in MPI's order must go together
            self.number = channel.operation()
            if board is not None:
                board.begin(self.number)
            elif settings.CHECK and channel.size > 1:
                mine, self._largest = np.array([self._code, -self._code]), np.empty(2, np.int64)
                self._request = channel.wire.Iallreduce([mine, MPI.INT64_T], [self._largest, MPI.INT64_T], MPI.MAX)
        self._posted = board is not None and board.post(self.number, self._code)

    def there(self) -> bool:
        """Have all ranks asked?"""
        board = self.channel.board
        if board is not None:
            if not self._posted:
                self._posted = board.post(self.number, self._code)
            if settings.CHECK:
                codes = board.codes(self.number) if self._posted else None
                if codes is None:
                    return False
                self._compare(codes)
        elif self._request is not None:
            if not self._request.Test():
                return False
            self._compare([int(self._largest[0]), -int(self._largest[1])])
        return True

    def absent(self) -> list[int]:
        """The ranks of this node that have not asked."""
        board = self.channel.board
        return [] if board is None else board.without(self.number)

    def Wait(self) -> None:
        """Wait until all ranks have asked."""
        if self._request is not None:
            self._request.Wait()
        super().Wait()

    def _compare(self, codes: list[int]) -> None:
        self.alike = self.equal = True
        for code in codes:
            if code != self._code:
                self.alike = False
                if code >> 31 != self._code >> 31:
                    self.equal = False

    def end(self) -> None:
        """This rank has done with the operation."""
        if self.channel.board is not None:
            self.channel.board.end(self.number)


def agree(
    channel: Channel,
    call: str,
    kind: int = PRIVATE,
    refusal: ValueError | TypeError | None = None,
    operation: Operation | None = None,
) -> Generator[Any, None, Check]:
    """Go on only if all ranks make the same call: returns the check, which knows the operation's number.

    If it is part of an operation in the record, that one gets the number, else it is one of its own.

    A rank that must refuse its array takes part with its refusal. Where the hashes differ, the ranks exchange what they
    called, and all raise the same error; nothing else is in flight, and the communicator can be used afterwards.
    """
    if refusal is not None:
        call = f"{_kind(refusal)}{refusal}"
    mine = operation or begin(About(call, channel.key), 0, 0, None)
    try:
        check = Check(channel, call, kind)
        check.Start()
        mine[NUMBER] = check.number
        yield check
        mine[CAME] = now()
        if not check.equal:
            yield from disagree(check)
        if refusal is not None:
            check.end()
            raise refusal
        return check
    finally:
        if mine is not operation:
            mine[ENDED] = now()


def _kind(refusal: ValueError | TypeError) -> str:
    return "unsupported: " if isinstance(refusal, TypeError) else "invalid: "


def disagree(check: Check) -> Generator[Any, None, None]:
    """Exchange what every rank has called, and raise."""
    channel = check.channel
    check.end()
    rows = np.zeros((channel.size, ROW_BYTES), np.uint8)
    text = check.call.encode()[:ROW_BYTES]
    rows[channel.rank, : len(text)] = list(text)
    vector = Vector(rows)
    handed = program("allgather", find("tree"), range(channel.size), channel.rank, Span(0, vector.size))
    with Plan(channel, Job(vector), handed, tag=TABLES + check.number % TAGS) as plan:
        yield from plan.steps()
    table = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
    for kind, error in (("unsupported: ", UnsupportedArrayError), ("invalid: ", ValueError)):
        if any(row.startswith(kind) for row in table):
            raise error(f"a rank cannot take part in this collective, so none does:\n{_shown(table)}")
    raise MismatchError(f"the ranks do not call the same collective:\n{_shown(table)}", table)


def _shown(table: list[str]) -> str:
    """The table with runs of equal rows in one line."""
    lines = []
    for row, run in groupby(enumerate(table), key=lambda item: item[1]):
        ranks = [rank for rank, _ in run]
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        lines.append(f"  {name}: {row}")
    return "\n".join(lines)
