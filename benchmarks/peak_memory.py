"""What an all-reduce adds to each rank's peak memory: mpiexec -n 4 python benchmarks/peak_memory.py --size 256MiB"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hpcdl
from hpcdl.cli.bench import surroundings
from hpcdl.cli.sizes import parse_bytes


def growth(call: Callable[[], object]) -> int:
    """By how many bytes the call raises this process's peak resident size."""
    with suppress(OSError):  # not every kernel lets one begin a new peak: then an older, higher one would hide ours
        Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    call()
    return peak() - before


def peak() -> int:
    """The peak resident size in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Measure the first all-reduce of a private array, by our algorithm and then by MPI's own; rank 0 writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_bytes, default="256MiB")
    parser.add_argument("--algorithm", default="ring")
    parser.add_argument("--output", required=True, metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    x = np.ones(options.size // 4, np.float32)
    calls = {
        options.algorithm: lambda: hpcdl.allreduce(x, comm, algorithm=options.algorithm),
        "native": lambda: comm.Allreduce(MPI.IN_PLACE, x),
    }
    rows = []
    for name, call in calls.items():
        comm.Barrier()
        grown = comm.gather(growth(call))
        rows.append({"size": x.nbytes, "algorithm": name, "growth_bytes": grown})
    found = {"header": surroundings(comm), "results": rows}
    if comm.rank == 0:
        Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
