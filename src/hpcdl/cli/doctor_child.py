"""A process of its own that asks MPI, torch and CuPy for GPUs: if one of them crashes, that is a finding, not an end.

It prints one line of JSON for each, and ahead of each what it is at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

LIMIT_S = 40

# What would have MPI look for the ranks that the parent is one of.
LAUNCHERS = ("PMI", "PMIX_", "OMPI_COMM_", "OMPI_WORLD", "PRTE_", "HYD", "MPI_LOCAL", "SLURM_", "I_MPI_HYDRA", "MV2_")


def start() -> subprocess.Popen[str]:
    """Start it: a single process, as far as MPI can see."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def finish(child: subprocess.Popen[str], until: float) -> dict[str, Any]:
    """What it has found out when it ends, or at that time (of time.monotonic) at the latest."""
    try:
        text, _ = child.communicate(timeout=max(0.1, until - time.monotonic()))
        ended = "" if child.returncode == 0 else how(child.returncode)
    except subprocess.TimeoutExpired:
        child.kill()
        text, _ = child.communicate()
        ended = "did not end in time"
    return parse(text, ended)


def how(status: int) -> str:
    """In words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def parse(text: str, ended: str) -> dict[str, Any]:
    """Its lines as one dictionary, and what it was at if it did not come to its end."""
    found: dict[str, Any] = {"at": "its start"}
    for line in text.splitlines():
        try:
            found |= json.loads(line)
        except ValueError:
            continue  # a library has printed something
    return found | {"ended": ended}


def find(name: str) -> Mapping[str, Any]:
    """The version of torch or cupy, and the GPUs that it sees."""
    if not find_spec(name):
        return {"missing": True}
    try:
        return {"torch": with_torch, "cupy": with_cupy}[name]()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def with_torch() -> Mapping[str, Any]:
    """By torch."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    return {"version": torch.__version__, "devices": names, "threads": torch.get_num_threads()}


def with_cupy() -> Mapping[str, Any]:
    """By CuPy."""
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:  # so it says that there is none, or no driver
        count = 0
    names = [cupy.cuda.runtime.getDeviceProperties(index)["name"].decode() for index in range(count)]
    return {"version": cupy.__version__, "devices": names}


def about_mpi() -> Mapping[str, Any]:
    """Does MPI say that it is CUDA-aware?"""
    try:
        # With MPI started: Open MPI looks for its accelerators then.
        from mpi4py import MPI

        from hpcdl.device import mpi_reads_devices

        return {"aware": mpi_reads_devices() and MPI.Is_initialized()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def tried() -> str:
    """Send a little device memory from this process to itself: "right", or what came of it."""
    import numpy as np
    from mpi4py import MPI

    if find_spec("cupy"):
        import cupy

        sent, received = cupy.arange(1024.0), cupy.zeros(1024)
        cupy.cuda.get_current_stream().synchronize()
        MPI.COMM_SELF.Sendrecv(sent, 0, 0, received, 0, 0)
        return "right" if np.array_equal(cupy.asnumpy(received), np.arange(1024.0)) else "it arrived wrong"
    import torch

    from hpcdl.device import Pointer

    whole, empty = torch.arange(1024.0, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    ends = [Pointer(each.data_ptr(), 4096, each) for each in (whole, empty)]
    MPI.COMM_SELF.Sendrecv(ends[0], 0, 0, ends[1], 0, 0)
    return "right" if bool((empty == whole).all()) else "it arrived wrong"


def steps() -> Iterator[Mapping[str, Any]]:
    """Line by line, the riskiest last."""
    yield {"at": "mpi4py.MPI"}
    mpi = about_mpi()
    yield {"mpi": mpi}
    devices = 0
    for name in ("torch", "cupy"):
        yield {"at": name}
        about = find(name)
        devices += len(about.get("devices", ()))
        yield {name: about}
    if devices and mpi.get("aware"):
        yield {"at": "sending device memory through MPI", "mpi": {**mpi, "tried": "it crashes"}}
        try:
            outcome = tried()
        except Exception as error:
            outcome = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {"mpi": {**mpi, "tried": outcome}}


if __name__ == "__main__":
    for line in steps():
        print(json.dumps(line), flush=True)
