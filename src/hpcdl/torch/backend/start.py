"""A process group is made: who is in it, the communicator, what is refused."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

from mpi4py import MPI
from torch.distributed import DistBackendError

from hpcdl.ends import take_others_along
from hpcdl.environment import right_launcher, under_launcher
from hpcdl.errors import HpcdlError
from hpcdl.torch.backend import Options, options
from hpcdl.torch.backend.group import ProcessGroupHpcdl

LOOK_S = 5.0
"""So often a rank that waits for others to come looks up, for Ctrl-C."""


def create(wanted: Any, given: Any) -> ProcessGroupHpcdl:
    """What torch calls on the members of a new group; `wanted` says who they are."""
    _refuse_mixed()
    if given is None:
        given = options()
    if not isinstance(given, Options):
        raise TypeError(f"pg_options are made by hpcdl.torch.backend.options(...), not {given!r}")
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise HpcdlError(
            "asynchronous operations go on in a thread, so MPI must be started with MPI.THREAD_MULTIPLE, which mpi4py "
            "asks for by default: leave mpi4py.rc.thread_level and mpi4py.rc.threads alone, or use an MPI that has it"
        )
    members = list(wanted.global_ranks_in_group)
    timeout_s = wanted.timeout.total_seconds()
    whole = not members  # the default group
    members = members or list(range(wanted.group_size))
    _check_numbers(wanted.group_rank, members, whole)
    _meet(wanted.store, wanted.group_rank, members, timeout_s)
    # Only its members make a group: MPI must not ask the others. What two groups of one name would mix the tag parts.
    chosen = MPI.COMM_WORLD.group.Incl(members)
    comm = MPI.COMM_WORLD.Create_group(chosen, crc32(wanted.group_id.encode()) % 32768)
    chosen.Free()
    if whole:
        take_others_along()
    return ProcessGroupHpcdl(comm, given, timeout_s, wanted.store)


def _refuse_mixed() -> None:
    """ValueError: another backend is asked for beside this one; torch would drop it without a word.

    Nothing that torch passes says so, only the variable of the function that has called us.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    config = frame.f_locals.get("backend_config") if frame is not None else None
    if config is None:
        return
    others = {device: name for device, name in config.get_device_backend_map().items() if name != "hpcdl"}
    if others:
        text = ", ".join(f"{device}:{name}" for device, name in others.items())
        raise ValueError(
            f"the backend hpcdl cannot be mixed with another ({text}): torch would leave that away. It serves CPU and "
            'CUDA tensors: pass "hpcdl" alone, or make a second group by new_group(backend=...)'
        )


def _check_numbers(rank: int, members: Sequence[int], whole: bool) -> None:
    """HpcdlError: torch counts its ranks otherwise than MPI."""
    world = MPI.COMM_WORLD
    if members[rank] == world.rank and max(members) < world.size and (not whole or len(members) == world.size):
        return
    n = len(members)
    text = f"torch was told that this is rank {members[rank]}" + (f" of {n}" if whole else "")
    text += f", and MPI knows it as rank {world.rank} of {world.size}"
    if world.size == 1 and not under_launcher():
        raise HpcdlError(
            f"{text}: torchrun and torch.multiprocessing start no MPI. Start the processes by "
            f"mpiexec -n {n if whole else max(members) + 1} python -m hpcdl.run SCRIPT, or by srun"
        )
    if world.size == 1:
        raise HpcdlError(f"{text}: {right_launcher(MPI.get_vendor()[0])}")
    raise HpcdlError(
        f"{text}: give init_process_group MPI's numbers; mpiexec ... python -m hpcdl.run SCRIPT puts them into RANK "
        "and WORLD_SIZE"
    )


def _meet(store: Any, rank: int, members: Sequence[int], timeout_s: float) -> None:
    """Wait until all members have come. Behind this MPI makes the communicator, and cannot be interrupted."""
    store.set(f"hpcdl/{rank}", "come")
    keys = [f"hpcdl/{each}" for each in range(len(members))]
    until = time.monotonic() + timeout_s
    while True:
        left_s = until - time.monotonic()
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=min(LOOK_S, max(0.01, left_s))))
            return
        if left_s <= 0:
            missing = [each for each, key in zip(members, keys, strict=True) if not store.check([key])]
            raise DistBackendError(
                f"rank {MPI.COMM_WORLD.rank} ({os.uname().nodename}) has waited {timeout_s:g} s for all to make a "
                f"process group of the ranks {', '.join(map(str, members))}: missing are {', '.join(map(str, missing))}"
            )
