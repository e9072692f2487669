"""How much of an all-reduce in flight hides behind computation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import hpcdl
from hpcdl.cli.bench_compete import kinds, new_array, rounded, timed
from hpcdl.cli.bench_measure import Competitor, Contents
from hpcdl.cli.bench_report import Row

if TYPE_CHECKING:
    from mpi4py import MPI

CACHED = np.ones(512)
RESULT = np.empty_like(CACHED)


def compute(units: int, ask: Callable[[], object] = lambda: None) -> None:
    """Compute in one thread and out of the core's own cache, asking some 50 times."""
    for number in range(units):
        np.sqrt(CACHED, out=RESULT)
        if number % max(1, units // 50) == 0:
            ask()


def hidden(communication: float, computation: float, both: float) -> float:
    """How much of the shorter one hides behind the other, in percent, from their times alone and at once."""
    share = (communication + computation - both) / min(communication, computation)
    return 100 * max(0.0, min(1.0, share))


def overlap_at(comm: MPI.Intracomm, options: argparse.Namespace, nbytes: int) -> list[Row]:
    """Time each all-reduce at one size, a computation that takes about as long, and both at once."""
    contents = Contents(comm, nbytes // np.dtype(options.dtype).itemsize, options.dtype, options.op)
    pairs = [(algorithm, kind) for algorithm in options.algorithms for kind in kinds(algorithm, options.buffers)]
    return [_row(comm, options, contents, algorithm, kind) for algorithm, kind in pairs]


def _row(comm: MPI.Intracomm, options: argparse.Namespace, contents: Contents, algorithm: str, kind: str) -> Row:
    from mpi4py import MPI

    x = new_array(comm, contents, kind)
    start: Callable[[], Any] = partial(hpcdl.iallreduce, x, comm, op=options.op, algorithm=algorithm)
    ask, wait = methodcaller("is_completed"), methodcaller("wait")
    if algorithm == "native":
        start = partial(comm.Iallreduce, MPI.IN_PLACE, x, getattr(MPI, options.op.upper()))
        ask, wait = methodcaller("Test"), methodcaller("Wait")

    def both(asking: bool) -> None:
        work = start()
        compute(units, *([partial(ask, work)] if asking else []))
        wait(work)

    alone = contents.competitor(lambda: wait(start()), x)
    hundred = Competitor(partial(compute, 100))
    times = timed(comm, {"alone": alone, "hundred": hundred}, options, contents.exact_calls())
    units = max(1, round(100 * median(times["alone"].seconds) / median(times["hundred"].seconds)))
    competitors = {
        "communication": alone,
        "computation": Competitor(partial(compute, units)),
        "unasked": contents.competitor(partial(both, False), x),
        "asked": contents.competitor(partial(both, True), x),
    }
    times = timed(comm, competitors, options, contents.exact_calls())
    took = {key: rounded(1e6 * median(found.seconds)) for key, found in times.items()}
    row = {**contents.described(), "algorithm": algorithm, "buffers": kind}
    row |= {f"{key}_us": took[key] for key in ("communication", "computation")}
    for key in ("unasked", "asked"):
        overlap = round(hidden(took["communication"], took["computation"], took[key]), 1)
        row |= {f"{key}_us": took[key], f"{key}_overlap": overlap}
    return row | {"wrong": max(found.wrong for found in times.values())}
