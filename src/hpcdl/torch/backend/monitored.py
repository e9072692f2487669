"""A barrier that tells who has not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import distributed as dist

from hpcdl import watch
from hpcdl.channel import PLAIN
from hpcdl.torch.backend.group import ProcessGroupHpcdl
from hpcdl.torch.backend.progress import Pause

CAME, VERDICT = PLAIN + 2, PLAIN + 3
TEXT_BYTES = 1024
GRACE_S = 10.0
"""How long after the timeout rank 0's verdict may come: it first asks what the missing do."""


def barrier(given: Any, timeout: timedelta | None, wait_all_ranks: bool) -> None:
    """Rank 0 waits for a word from each, and tells all whether it got them."""
    group = given or dist.group.WORLD
    if not isinstance(group, ProcessGroupHpcdl):
        raise ValueError(
            f"monitored_barrier takes a process group of the backend hpcdl, not {group!r}; for gloo's there is "
            "torch.distributed.monitored_barrier"
        )
    timeout_s = group.timeout_s if timeout is None else timeout.total_seconds()
    if not timeout_s > 0:
        raise ValueError(f"timeout is above 0, not {timeout}")
    if group.broken:
        raise dist.DistBackendError(group.broken)
    group.monitored += 1
    group.kept = [each for each in group.kept if not MPI.Request.Testall(each[1])]
    first = group.channel.rank == 0
    verdict = _collect(group, timeout_s, wait_all_ranks) if first else _report(group, timeout_s)
    if verdict:
        raise dist.DistBackendError(verdict)


def _collect(group: ProcessGroupHpcdl, timeout_s: float, wait_all_ranks: bool) -> str:
    wire, size, number = group.channel.wire, group.channel.size, group.monitored
    words = np.zeros(size, np.int64)
    waiting = {rank: wire.Irecv(words[rank : rank + 1], rank, CAME) for rank in range(1, size)}

    def all_came() -> bool:
        for rank, request in list(waiting.items()):
            if request.Test():
                if words[rank] < number:  # of an earlier one, which it came to too late
                    waiting[rank] = wire.Irecv(words[rank : rank + 1], rank, CAME)
                else:
                    del waiting[rank]
        return not waiting

    verdict = ""
    if not _wait(all_came, timeout_s):
        missing = list(waiting) if wait_all_ranks else list(waiting)[:1]
        doing = watch.watch().doing(group.channel, missing)
        which = "ranks" if len(missing) > 1 else "rank"
        verdict = f"{which} {', '.join(map(str, missing))} did not come to monitored_barrier within {timeout_s:g} s:\n"
        verdict += "\n".join(doing)
    for request in waiting.values():
        request.Cancel()
        request.Wait()
    answer = np.zeros(8 + TEXT_BYTES, np.uint8)
    answer[:8].view(np.int64)[0] = number
    text = np.frombuffer(verdict.encode()[:TEXT_BYTES], np.uint8)
    answer[8 : 8 + len(text)] = text
    requests = [wire.Isend(answer, rank, VERDICT) for rank in range(1, size)]
    # A rank that comes late is told so then.
    group.kept.append((answer, requests))
    _wait(lambda: MPI.Request.Testall(requests), 0.0 if verdict else timeout_s)
    return verdict


def _report(group: ProcessGroupHpcdl, timeout_s: float) -> str:
    wire, number = group.channel.wire, group.monitored
    word, answer = np.array([number]), np.zeros(8 + TEXT_BYTES, np.uint8)
    sent = wire.Isend(word, 0, CAME)
    group.kept.append((word, [sent]))
    request = [wire.Irecv(answer, 0, VERDICT)]

    def answered() -> bool:
        while request[0].Test():
            if answer[:8].view(np.int64)[0] == number:
                return True
            request[0] = wire.Irecv(answer, 0, VERDICT)
        return False

    if _wait(answered, timeout_s + GRACE_S):
        return bytes(answer[8:]).rstrip(b"\0").decode(errors="replace")
    request[0].Cancel()
    request[0].Wait()
    doing = "\n".join(watch.watch().doing(group.channel, [0]))
    return f"rank 0 did not answer in monitored_barrier within {timeout_s:g} s, and {GRACE_S:g} s more:\n{doing}"


def _wait(there: Callable[[], bool], limit_s: float) -> bool:
    pause, until = Pause(), time.monotonic() + limit_s
    while not there():
        if time.monotonic() > until:
            return False
        pause(False)
    return True
