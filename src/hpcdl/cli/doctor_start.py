"""How MPI starts, and what to say where it does not."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from hpcdl.cli.doctor_facts import SHM
from hpcdl.cli.doctor_launch import old_mpi4py, own_mpiexec
from hpcdl.cli.doctor_node import MORE_SHM, MPI_BYTES
from hpcdl.cli.doctor_report import ERROR, Finding, as_json, as_text, merged
from hpcdl.cli.doctor_watch import STARTED, Child, End
from hpcdl.environment import LAUNCHERS, Launch, classify, right_launcher

MOST_WORDS = 300
NOISE = re.compile(r"<frozen|Sorry!|from the file:|But I couldn't find")
"""Of what MPI prints: a wheel of Open MPI lies elsewhere than where it looks for its own words."""


def start_mpi(own: Child) -> str:
    """Start MPI as mpi4py would, but tell the watcher first which library it is; what it printed meanwhile."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    own.quiet()
    try:
        from mpi4py import MPI

        vendor, numbers = MPI.get_vendor()
        own.tell("starting MPI", vendor=vendor, mpi=f"{vendor} {'.'.join(map(str, numbers))}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mpi4py's guess at a wrong launcher: about_launcher knows more
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        words = own.loud()
    return words


def report(end: End, as_object: bool) -> int:
    """The exit status of a child that came to its end; else say what has become of it."""
    if end.status is not None and end.status >= 0 and STARTED in end.told:
        return end.status
    findings = merged(explain(end, classify()), 1)
    rank = classify().rank
    if rank in (None, 0):
        head = "hpcdl doctor: MPI has not started" if STARTED not in end.told else "hpcdl doctor: it came to no end"
        print(as_json(findings, {}) if as_object else as_text(findings, head), flush=True)
    else:
        # All ranks may say the same. When rank 0 has, and has ended, the launcher ends the others.
        time.sleep(1)
        line = f"[rank {rank} on {platform.node()}] {findings[0].topic}: {findings[0].seen}\n"
        sys.stderr.write(line)
        sys.stderr.flush()
    return 1


def explain(end: End, launch: Launch) -> Iterator[Finding]:
    """Why MPI did not start, or what stopped the doctor later."""
    how = "did not get any further" if end.status is None else ended(end.status)
    if STARTED in end.told:
        seen = f"this rank {how} while it was at: {end.phase}"
        do = "If it concerns messages: is a firewall between the hosts, which interface does MPI take?"
        yield Finding(ERROR, "doctor", seen, do, host=platform.node())
        return
    with suppress(PackageNotFoundError):
        yield from old_mpi4py(version("mpi4py"))
    words = briefly(end.words)
    if "unusable" in end.told:
        yield unusable(end.told["unusable"])
        return
    vendor = end.told.get("vendor", "")
    seen = f"{end.told.get('mpi', 'MPI')} {how} in its start" + (f"; it said: {words}" if words else "")
    speaks_pmix = launch.pmi == "pmix"
    if launch.by in LAUNCHERS and vendor and speaks_pmix != (vendor == "Open MPI"):
        yield Finding(
            ERROR,
            "launcher",
            f"{launch.by} ({launch.pmi or 'no PMI'}) has started processes of {vendor}. {seen}",
            f"{right_launcher(vendor)}. {own_mpiexec(sys.prefix)}",
        )
    else:
        yield Finding(ERROR, "MPI", seen, remedy(end.words, vendor, full_shm(end.status)))


def ended(status: int) -> str:
    """In words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def unusable(error: str) -> Finding:
    """mpi4py, or the MPI library that it loads, cannot be imported."""
    seen = " ".join(error.split())
    if "No module named 'mpi4py'" in error:
        return Finding(ERROR, "MPI", "mpi4py is not installed", command="pip install 'mpi4py>=4.1'")
    for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):
        if name in os.environ:
            return Finding(ERROR, "MPI", f"{seen}. {name}={os.environ[name]} is set", "Unset it", f"unset {name}")
    do = "Load the cluster's MPI module, or put an MPI into this environment"
    return Finding(ERROR, "MPI", f"mpi4py finds no MPI library: {seen}", do, "pip install mpich")


def full_shm(status: int | None) -> bool:
    """Is /dev/shm full? Memory that was promised there and cannot be had is a bus error."""
    with suppress(OSError):
        return status == -signal.SIGBUS or shutil.disk_usage(SHM).free < MPI_BYTES
    return False


def remedy(words: str, vendor: str, full: bool) -> str:
    """What is likely to help, by what MPI has said."""
    if full or re.search(r"shm|shared memory|No space|ENOSPC|ftruncate|fallocate", words, re.IGNORECASE):
        return f"{SHM} seems to be full: MPI needs 1 MiB (MPICH) to 16 MiB (Open MPI) of it a rank. {MORE_SHM}"
    if re.search(r"home directory", words):
        return "HOME is not set: export HOME"
    if re.search(r"pmi", words, re.IGNORECASE):
        return right_launcher(vendor)
    return "Does mpiexec -n 1 hostname run, and does it for two hosts? Which network does MPI take?"


def briefly(words: str) -> str:
    """The gist of what MPI prints: no rules of dashes, no lines twice."""
    lines = [" ".join(line.split()) for line in words.splitlines()]
    telling = dict.fromkeys(line for line in lines if re.search(r"[A-Za-z]{3}", line) and not NOISE.search(line))
    text = " / ".join(telling)
    return text if len(text) <= MOST_WORDS else f"...{text[-MOST_WORDS:]}"
