"""Our all-reduce algorithms beside MPI's own, in one run: mpiexec -n 4 python benchmarks/bench.py [--check]

Times are medians over the rounds of the slowest rank. The competitors take turns within each round, so that a noisy
machine is noisy for all of them; quote the ratios. MPI_Allreduce is the better of its in-place and out-of-place forms.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import mpi4py
import numpy as np
from mpi4py import MPI

import hpcdl
from hpcdl import collectives, settings

Competitor = Callable[[], object]


def medians(comm: MPI.Intracomm, competitors: dict[str, Competitor], rounds: int, repeat: int) -> dict[str, float]:
    """Seconds a call: the slowest rank's mean over `repeat` calls in a row, the median over the rounds."""
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(rounds + 2):
        for name, run in competitors.items():
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                run()
            spent = comm.allreduce((time.perf_counter() - began) / repeat, MPI.MAX)
            if number >= 2:  # two rounds warm up
                times[name].append(spent)
    return {name: statistics.median(every) for name, every in times.items()}


def shown(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def against_mpi(comm: MPI.Intracomm, rounds: int) -> list[str]:
    """A table: MPI's time, and for each algorithm its time as a multiple of that, plain and as a plan."""
    names = [*collectives.names(comm.size), "auto"]
    lines = [
        "| bytes | MPI_Allreduce | " + " | ".join(names) + " | auto, as a plan |",
        "|---:|---:|" + "---:|" * (len(names) + 1),
    ]
    for nbytes in (8, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23, 1 << 26):
        x = np.zeros(nbytes // 4, np.float32)  # a sum of zeros can be repeated in place
        out = np.empty_like(x)
        competitors: dict[str, Competitor] = {
            "in place": lambda x=x: comm.Allreduce(MPI.IN_PLACE, x),
            "out of place": lambda x=x, out=out: comm.Allreduce(x, out),
        }
        for name in names:
            competitors[name] = lambda x=x, name=name: hpcdl.allreduce(x, comm, algorithm=name)
        with hpcdl.plan_allreduce(x, comm) as plan:
            competitors["plan"] = plan
            repeat = max(1, min(50, (1 << 18) // nbytes))
            times = medians(comm, competitors, rounds if nbytes < 1 << 23 else max(3, rounds // 3), repeat)
        native = min(times["in place"], times["out of place"])
        ratios = [f"{times[name] / native:.2f}" for name in (*names, "plan")]
        lines.append(f"| {nbytes} | {shown(native)} | " + " | ".join(ratios) + " |")
    return lines


def price_of_the_check(comm: MPI.Intracomm, rounds: int) -> list[str]:
    """What the agreement ahead of every call costs: the same call with and without."""
    x = np.zeros(2, np.float32)

    def call(check: bool) -> Competitor:
        def run() -> None:
            settings.CHECK = check
            hpcdl.allreduce(x, comm)

        return run

    times = medians(comm, {"with": call(True), "without": call(False)}, 3 * rounds, 50)
    settings.CHECK = True
    return [
        f"allreduce of 8 bytes with the check {shown(times['with'])}, without {shown(times['without'])}: "
        f"the check costs {shown(times['with'] - times['without'])} a call."
    ]


def main() -> None:
    """Measure what the options ask for; rank 0 prints it as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--check", action="store_true", help="only measure what the check costs")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    lines = [
        f"### {comm.size} ranks, {library}",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, one node; "
        f"Python {platform.python_version()}, NumPy {np.__version__}, mpi4py {mpi4py.__version__}."
        f" float32; medians of {options.rounds} rounds.",
        "",
    ]
    if not options.check:
        lines += [*against_mpi(comm, options.rounds), ""]
    lines += price_of_the_check(comm, options.rounds)
    if comm.rank == 0:
        print("\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
