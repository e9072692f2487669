"""What each process and each node can say of itself: plain dictionaries, for rank 0 to judge."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpcdl.cli.doctor_probe import communicators
from hpcdl.cli.doctor_report import WARNING, Finding
from hpcdl.environment import YIELD, classify, contradiction, slurm_contradiction, wrong_size

if TYPE_CHECKING:
    from mpi4py import MPI

Facts: TypeAlias = dict[str, Any]

SHM = Path("/dev/shm")
LEFT_BY_MPI = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "Intel_MPI_*")
SETTLED_S = 60
"""A younger file may belong to a job that is just starting, and not be mapped yet."""
READ = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RANK", "WORLD_SIZE", YIELD)


def attempt(problems: list[Finding], topic: str, find: Callable[[], Any]) -> Any:
    """What it finds; None, and a finding, if it raises: the doctor goes on, and no other rank waits for this one."""
    try:
        return find()
    except Exception as error:
        what = f"this could not be found out: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        problems.append(Finding(WARNING, topic, what, host=platform.node()))
        return None


def about_process() -> Facts:
    """What a process knows without MPI."""
    import numpy as np

    import hpcdl

    return {
        "host": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "cpus": os.cpu_count() or 1,
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "numpy": np.__version__,
        "hpcdl": hpcdl.__version__,
        "mpi4py": importlib.metadata.version("mpi4py"),
        "launch": classify()._asdict(),
        "environ": {
            name: value for name, value in os.environ.items() if name in READ or name.startswith(("HPCDL_", "SLURM_"))
        },
    }


def about_rank(comm: MPI.Intracomm) -> Facts:
    """What a rank knows besides."""
    from mpi4py import MPI

    from hpcdl.shared import label

    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    vendor, version = MPI.get_vendor()
    return {
        "rank": comm.rank,
        "size": comm.size,
        "node": label(),
        "vendor": vendor,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "libraries": loaded(maps("self")),
        "thread_level": levels.get(MPI.Query_thread(), "multiple"),
        "wrong_size": wrong_size(comm.size, vendor=vendor),
        "contradiction": contradiction(comm.rank, comm.size),
        "slurm": slurm_contradiction(comm.size),
        "communicators": communicators(),
    }


def maps(process: str) -> str:
    """What a process has mapped; nothing where /proc is not to be read."""
    with suppress(OSError):
        return Path(f"/proc/{process}/maps").read_text(errors="replace")
    return ""


def loaded(text: str) -> list[str]:
    """The MPI libraries in such a list: libmpi.so.12, libmpi_abi.so.0, libmpi_cray.so.12, libmpich.so."""
    paths = {match[0] for match in re.finditer(r"/\S.*/libmpi(?:ch|_abi|_cray|_mt)?\.so[.\d]*$", text, re.MULTILINE)}
    return sorted(paths)


def about_node() -> Facts:
    """What one rank finds out for its node."""
    facts: Facts = {"host": platform.node(), "start_method": start_method(), "infiniband": infiniband()}
    facts["nvidia"] = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if SHM.is_dir():
        space = shutil.disk_usage(SHM)
        names, nbytes, unsure = stale(SHM)
        facts |= {"shm": [space.total, space.free], "stale": names, "stale_bytes": nbytes, "unsure": unsure}
    return facts


def start_method() -> str:
    """How multiprocessing, and so a DataLoader, starts its workers unless told."""
    set_by_hand: str | None = multiprocessing.get_start_method(allow_none=True)
    return set_by_hand or multiprocessing.get_all_start_methods()[0]


def infiniband() -> list[str]:
    """The RDMA devices, whose driver a fork confuses."""
    return sorted(device.name for device in Path("/sys/class/infiniband").glob("*"))


def stale(folder: Path, everybody: Iterable[str | None] | None = None) -> tuple[list[str], int, int]:
    """MPI's files that no process maps, how long they are, and how many of our processes did not let us look.

    Only our own files: those of other users we could neither judge nor remove.
    """
    user, files = os.geteuid(), {}
    for pattern in LEFT_BY_MPI:
        for file in folder.glob(pattern):
            with suppress(OSError):
                found = file.lstat()
                if found.st_uid == user and time.time() - max(found.st_mtime, found.st_ctime) > SETTLED_S:
                    files[file.name] = found.st_blocks * 512
    if not files:
        return [], 0, 0
    unsure = 0
    for mapped in processes(user) if everybody is None else everybody:
        unsure += mapped is None
        for name in [name for name in files if f"{folder}/{name}\n" in (mapped or "")]:
            del files[name]
    return sorted(files), sum(files.values()), unsure


def processes(user: int) -> Iterable[str | None]:
    """What each live process has mapped: None for one of ours that may not be looked at."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == "1":  # init, or what stands for it in a container, may be closed even to root
            continue
        try:
            yield (folder / "maps").read_text(errors="replace")
        except PermissionError:
            with suppress(OSError):
                if folder.stat().st_uid == user:
                    yield None
        except OSError:
            continue  # it has just ended


def mpiexec_on_path() -> tuple[str, str]:
    """The mpiexec that a shell would take, and whose it is, as MPI.get_vendor() names it; empty if unknown."""
    path = shutil.which("mpiexec") or ""
    return (path, whose_mpiexec(said(path, "--version"))) if path else ("", "")


def said(*command: str) -> str:
    """What a short command prints."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5)
        return done.stdout + done.stderr
    return ""


def whose_mpiexec(version: str) -> str:
    """Whose mpiexec prints that of its version."""
    marks = {"Intel(R) MPI": "Intel MPI", "HYDRA": "MPICH", "Open MPI": "Open MPI", "OpenRTE": "Open MPI"}
    return next((vendor for mark, vendor in marks.items() if mark in version), "")
