"""What the agreement ahead of every plain call costs: mpiexec -n 2 python benchmarks/price_of_the_check.py"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import hpcdl
from hpcdl import settings
from hpcdl.cli.bench import surroundings
from hpcdl.cli.bench_measure import Competitor, measure

SIZES = (8, 1 << 10, 64 << 10)
CALLS = 50


def main() -> None:
    """Time the same call with and without, in turns; rank 0 writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", required=True, metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rows = []
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)

        def checked(check: bool, x: object = x) -> Callable[[], object]:
            def call() -> None:
                settings.CHECK = check
                hpcdl.allreduce(x, comm)

            return call

        competitors = {check: Competitor(checked(check)) for check in (True, False)}
        for check, timed in measure(comm, competitors, options.rounds, CALLS).items():
            rows.append({"size": size, "check": check, "rounds_us": [1e6 * value for value in timed.seconds]})
    found = {"header": surroundings(comm), "results": rows}
    if comm.rank == 0:
        Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
