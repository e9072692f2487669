"""What the doctor makes of a node: /dev/shm, fork, torch, CuPy and GPUs. Pure functions on gathered facts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hpcdl.cli.doctor_facts import SHM, Facts
from hpcdl.cli.doctor_report import ERROR, NOTE, OK, WARNING, Finding

MIB = 1 << 20
MPI_BYTES = MIB
"""What MPICH 5.0 takes of /dev/shm for each rank of a node; with less it does not start. Open MPI 5.0 takes 16."""
ROOM_BYTES = 256 * MIB
"""Docker's usual 64 MiB is gone with the first buckets of a network, and with a DataLoader's first batches."""
MORE_SHM = f"In a container: docker run --shm-size=8g, or --ipc=host; elsewhere: mount -o remount,size=50% {SHM}"
MOST_FILES = 200


def about_shm(node: Facts) -> Iterator[Finding]:
    """Is there room for shared memory, and what have killed jobs left in it?"""
    host = node["host"]
    if "shm" not in node:
        do = "On Linux: mount -t tmpfs tmpfs /dev/shm"
        yield Finding(WARNING, "shared memory", f"there is no {SHM}: ranks exchange messages instead", do, host=host)
        return
    total, free = node["shm"]
    room = f"{SHM} has {free / MIB:,.0f} MiB free of {total / MIB:,.0f}"
    if free < ROOM_BYTES:
        seen = f"{room}: the arrays and buckets that the ranks of a node share lie there"
        yield Finding(WARNING, "shared memory", seen, MORE_SHM, host=host)
    else:
        yield Finding(OK, "shared memory", room, host=host)
    if names := node["stale"]:
        files = f"{len(names)} file{'s' if len(names) > 1 else ''}"
        seen = f"killed jobs have left {files} of MPI's in {SHM}, {node['stale_bytes'] / MIB:,.0f} MiB in all"
        if node["unsure"]:
            do = f"{node['unsure']} of your processes do not let us see what they map: look first whether they use one"
            yield Finding(NOTE, "left over", seen, do, host=host)
            return
        do = "No process of this host maps them" + (f"; the first {MOST_FILES}" if len(names) > MOST_FILES else "")
        command = f"cd {SHM} && rm -f -- {shlex.join(names[:MOST_FILES])}"
        yield Finding(WARNING, "left over", seen, do, command, host)


def about_memory(reason: str, detached: str) -> Iterator[Finding]:
    """Do the ranks of a node share memory? The reason is why not; detached says which ranks cannot see each other."""
    if detached:
        do = "They run in containers of their own: give them one /dev/shm and one pid namespace (--ipc=host --pid=host)"
        yield Finding(WARNING, "shared memory", detached, do)
    if reason:
        do = "Unset it" if reason.startswith("HPCDL_") else "See what is said of /dev/shm"
        seen = f"the ranks of a node share no memory, so all goes through messages, which are slower ({reason})"
        yield Finding(WARNING, "shared memory", seen, do)
    elif not detached:
        yield Finding(OK, "shared memory", "the ranks of a node share it")


def about_fork(node: Facts) -> Iterator[Finding]:
    """May a DataLoader fork its workers under MPI?"""
    usual = f"multiprocessing starts workers by {node['start_method']}"
    rule = "no worker may call MPI or a collective"
    if node["infiniband"] and node["start_method"] == "fork":
        seen = (
            f"{usual}, and {', '.join(node['infiniband'])} is there: a fork can corrupt memory that RDMA has registered"
        )
        do = f"DataLoader(multiprocessing_context='forkserver') or 'spawn'; or RDMAV_FORK_SAFE=1; {rule}"
        yield Finding(NOTE, "fork", seen, do, host=node["host"])
    else:
        yield Finding(OK, "fork", f"{usual}, which goes with MPI over shared memory and TCP; {rule}", host=node["host"])


def about_devices(node: Facts, ranks: int, found: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs, and whether MPI, torch and CuPy see them, by what the child has found before it ended."""
    host, seen_by = node["host"], {name: found[name] for name in ("torch", "cupy") if name in found}
    for name, about in seen_by.items():
        if "missing" in about:
            level = NOTE if node["nvidia"] and name == "cupy" else OK
            yield Finding(level, name, f"{name} is not installed", host=host)
        elif "error" in about:
            yield Finding(WARNING, name, f"{name} cannot be used: {about['error']}", host=host)
        else:
            devices = f"sees {', '.join(about['devices'])}" if about["devices"] else "sees no GPU"
            blind = node["nvidia"] and not about["devices"]
            do = "The driver is there: this build is for CPUs, or for a newer driver" if blind else ""
            yield Finding(WARNING if blind else OK, name, f"{about['version']}, {devices}", do, host=host)
    gpus = max([node["nvidia"], *(len(about.get("devices", ())) for about in seen_by.values())])
    if "mpi" in found:
        yield from about_aware_mpi(found["mpi"], gpus, host)
    if 0 < gpus < ranks:
        seen = f"{ranks} ranks for {gpus} GPU{'s' if gpus > 1 else ''}: some share one"
        yield Finding(NOTE, "GPUs", seen, "One rank a GPU is usual: ask for as many ranks a node", host=host)
    if found.get("ended"):
        seen = f"the process that looked at MPI, torch and CuPy {found['ended']} while it was at {found['at']}"
        command = f"python -c 'import {found['at']}'" if found["at"] in ("mpi4py.MPI", "torch", "cupy") else ""
        yield Finding(WARNING, "GPUs", seen, "Try it alone" if command else "", command, host)


def about_aware_mpi(mpi: Mapping[str, Any], gpus: int, host: str) -> Iterator[Finding]:
    """Does MPI read device memory, as it says and as it was tried?"""
    if "error" in mpi:
        yield Finding(NOTE, "CUDA-aware", f"MPI could not be asked: {mpi['error']}", host=host)
    elif not gpus:
        yield Finding(
            OK, "CUDA-aware", "no GPU here" + ("" if not mpi["aware"] else "; MPI is built for them"), host=host
        )
    elif mpi["aware"]:
        tried = mpi.get("tried", "")
        if tried and tried != "right":
            do = "hpcdl trusts what MPI says: set up its CUDA support, or use an MPI without"
            yield Finding(ERROR, "CUDA-aware", f"MPI says it reads device memory, but {tried}", do, host=host)
        else:
            yield Finding(OK, "CUDA-aware", "MPI reads device memory" + (", as was tried" if tried else ""), host=host)
    else:
        seen = "MPI does not read device memory: hpcdl stages arrays of GPUs through pinned host memory"
        yield Finding(NOTE, "CUDA-aware", seen, "An MPI built with CUDA spares the copies", host=host)
