"""Do the ranks agree? Asked ahead of every collective, so that all get the same error before any data moves."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from itertools import groupby

import numpy as np
from mpi4py import MPI

from hpcdl import settings
from hpcdl.buffers import Vector
from hpcdl.channel import TABLES, TAGS, Channel
from hpcdl.collectives import Span, find, program
from hpcdl.errors import MismatchError, UnsupportedArrayError
from hpcdl.execute import Job, Plan

ROW_BYTES = 512


def agree(
    channel: Channel, call: str, refusal: ValueError | TypeError | None = None
) -> Generator[MPI.Request, None, int]:
    """Go on only if all ranks make the same call: returns the operation's number.

    16 bytes travel, the maximum of (h, -h) with h a hash of the call: if all are equal, its two halves agree. It is
    MPI's own all-reduce, non-blocking whichever form was called, so that the two forms match each other. A rank that
    must refuse its array takes part with its refusal. Where the hashes differ, the ranks exchange what they called,
    and all raise the same error; nothing else is in flight, and the communicator can be used afterwards.
    """
    if refusal is not None:
        call = f"{_kind(refusal)}{refusal}"
    with channel.lock:  # with two threads, the number and the place in MPI's order must go together: they give the tag
        number = channel.operation()
        if settings.CHECK:
            code = zlib.crc32(call.encode())
            mine, largest = np.array([code, -code]), np.empty(2, np.int64)
            request = channel.wire.Iallreduce([mine, MPI.INT64_T], [largest, MPI.INT64_T], MPI.MAX)
    if settings.CHECK:
        yield request
        if largest[0] != -largest[1]:
            yield from _disagree(channel, call, number)
    if refusal is not None:
        raise refusal
    return number


def _kind(refusal: ValueError | TypeError) -> str:
    return "unsupported: " if isinstance(refusal, TypeError) else "invalid: "


def _disagree(channel: Channel, call: str, number: int) -> Generator[MPI.Request, None, None]:
    """Exchange what every rank has called, and raise."""
    rows = np.zeros((channel.size, ROW_BYTES), np.uint8)
    text = call.encode()[:ROW_BYTES]
    rows[channel.rank, : len(text)] = list(text)
    vector = Vector(rows)
    handed = program("allgather", find("tree"), range(channel.size), channel.rank, Span(0, vector.size))
    with Plan(channel, Job(vector), handed, tag=TABLES + number % TAGS) as plan:
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
