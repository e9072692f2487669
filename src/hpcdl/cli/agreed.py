"""What the commands that run on several ranks have in common: they begin, are refused and complain alike on all."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from hpcdl import verdict
from hpcdl.environment import notices
from hpcdl.logs import configure, logger

if TYPE_CHECKING:
    from mpi4py import MPI


class Refused(Exception):
    """The training cannot begin; all ranks raise it alike."""


def begin(comm: MPI.Comm) -> None:
    """Have the ranks' log on standard error, and say there what a person should know of how the job was launched."""
    configure(comm)
    for line in notices(comm):
        word, _, text = line.partition(": ")
        if word == "note" or comm.rank == 0:  # it is the same on all ranks
            logger.log(logging.INFO if word == "note" else logging.WARNING, text)


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Refuse if any rank has a problem."""
    agreed = verdict.agree(comm, problem)
    if agreed:
        raise Refused(agreed)


def complain(comm: MPI.Comm, line: str) -> None:
    """Print one line to standard error, once for all ranks."""
    if comm.rank == 0:
        print(f"hpcdl: {line}", file=sys.stderr, flush=True)
