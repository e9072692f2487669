"""What the launcher has given this process: a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

LAUNCHERS = ("mpiexec", "mpirun", "prterun", "hydra", "orterun", "prte", "orted")


def terminal() -> os.terminal_size | None:
    """The size of the terminal that a person reads our standard output on, None if it goes elsewhere.

    isatty() does not tell under mpiexec: MPICH's gives its ranks pipes before a person's eyes, and Open MPI's
    gives them terminals of their own though it writes to a log file. Its own output is what counts.
    """
    # Nearest first: this process, perhaps in a shell, MPICH's proxy, mpiexec.
    launchers = [pid for pid, name in islice(_ancestors(), 3) if name.startswith(LAUNCHERS)]
    with suppress(OSError, ValueError):
        if not launchers:
            return os.get_terminal_size(sys.stdout.fileno())
    for pid in launchers:
        with suppress(OSError), open(f"/proc/{pid}/fd/1", "wb", opener=_quietly) as output:
            return os.get_terminal_size(output.fileno())
    return None


def _quietly(path: str, flags: int) -> int:
    # Neither may the terminal become ours, nor may a pipe that nobody reads hold us, nor a log be emptied.
    return os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)


def _ancestors() -> Iterator[tuple[int, str]]:
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        # pid (name) state parent ...: the name may hold spaces and parentheses.
        name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :]
        yield pid, name
        pid = int(rest.split()[1])
