"""Log lines that tell which rank says it, and on which host. The logger is "hpcdl", and is silent until configured.

Floor 1. Nothing here starts MPI.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("hpcdl")
logger.addHandler(logging.NullHandler())

WORDS = {logging.INFO: "note: ", logging.WARNING: "warning: "}


def configure(comm: MPI.Comm) -> None:
    """Write this rank's log to standard error, and Python's warnings: of rank 0 from INFO on, of others from WARNING.

    Each line has the rank and its host ahead, unless there is one rank alone. For the command line and for your script;
    a library leaves it to them.
    """
    handler = _Handler()
    handler.setFormatter(_Lines(comm))
    logging.captureWarnings(True)
    for each in logger, logging.getLogger("py.warnings"):
        for earlier in [one for one in each.handlers if isinstance(one, _Handler)]:
            each.removeHandler(earlier)
        each.addHandler(handler)
        each.setLevel(logging.INFO if comm.rank == 0 else logging.WARNING)
        each.propagate = False  # or a handler of the root would say it again


def speaker(comm: MPI.Comm) -> str:
    """What stands ahead of a rank's lines."""
    return f"[rank {comm.rank} on {host()}] " if comm.size > 1 else ""


def host() -> str:
    """This host's short name."""
    return os.uname().nodename.partition(".")[0]


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # it has a type argument for type checkers alone
    """To standard error."""


class _Lines(logging.Formatter):
    """Each line of a message with the speaker ahead."""

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__()
        self._speaker = speaker(comm)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).strip()
        if record.name != "py.warnings":  # which say themselves what they are
            text = f"hpcdl: {WORDS.get(record.levelno, '')}{text}"
        return "\n".join(f"{self._speaker}{line}" for line in text.splitlines())
