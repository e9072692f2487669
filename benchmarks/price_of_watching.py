"""What the flight recorder, a trace and hpcdl.preemption add: mpiexec -n 2 python benchmarks/price_of_watching.py

Each stands beside the same loop without it, in turns; medians of 50 blocks, and the best. HPCDL_TRACE=FILE has the
recorder write a trace meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

import hpcdl
from hpcdl import record

BLOCKS, CALLS = 50, 400
ABOUT = record.About("allreduce sum of float32 2 by auto", "0.1", 8)


def nothing() -> None:
    """The baseline."""


def recorded() -> None:
    """What a call does for the record, and no more."""
    record.begin(ABOUT, 1, 1, 0)[record.ENDED] = record.now()


def compare(comm: MPI.Comm, what: str, loops: dict[str, Callable[[], object]]) -> None:
    """Print the time of a call in each loop; the ranks' slowest counts."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(BLOCKS):
        for name, call in loops.items():
            comm.Barrier()
            began = perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append(comm.allreduce((perf_counter() - began) / CALLS, MPI.MAX))
    if comm.rank == 0:
        values = (f"{name} {1e6 * median(each):.2f} (best {1e6 * min(each):.2f})" for name, each in times.items())
        print(f"{what}, us a call: {', '.join(values)}", flush=True)


def main() -> None:
    """Measure, and print."""
    comm = MPI.COMM_WORLD
    if comm.rank == 0:
        tracing = f", a trace in {os.environ['HPCDL_TRACE']}" if "HPCDL_TRACE" in os.environ else ""
        print(f"{comm.size} ranks, {MPI.Get_library_version().splitlines()[0]}{tracing}", flush=True)
    compare(comm, "the record", {"with": recorded, "without": nothing})

    plan = hpcdl.plan_allreduce(np.zeros(2, np.float32))
    compare(comm, "a plan of 8 B", {"recorded": plan, "not": plan.run})

    gradient = hpcdl.plan_allreduce(np.zeros(1 << 16, np.float32))
    with hpcdl.preemption(comm) as stop:

        def step() -> None:
            gradient()
            stop()

        compare(comm, "an all-reduce of 256 KiB", {"with stop()": step, "without": gradient})


if __name__ == "__main__":
    main()
