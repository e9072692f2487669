"""Who competes in hpcdl bench at one size, for how many rounds, and what comes of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

import hpcdl
from hpcdl.cli.bench_measure import (
    Competitor,
    Contents,
    Key,
    NumPyArray,
    Timed,
    add_and_copy,
    floor,
    measure,
    percentiles,
    ratio,
)
from hpcdl.cli.bench_report import IN, OUT, Row

if TYPE_CHECKING:
    from mpi4py import MPI

# A block of calls takes about this long. Where ranks share cores they leave the barrier ahead of it up to a millisecond
# apart, which must count for little.
BLOCK_S, MOST_CALLS = 2e-2, 100

Call: TypeAlias = Callable[[], object]
Peer: TypeAlias = Callable[[NumPyArray], Call]
"""Gives a call that all-reduces an array in place."""


class Name(NamedTuple):
    """Who competes, on what."""

    algorithm: str
    buffers: str = "private"
    place: str = IN


BARRIERS = Name("barriers")


def kinds(algorithm: str, buffers: str) -> tuple[str, ...]:
    """The kinds of buffers that an algorithm is timed on: MPI's own on private ones only."""
    if algorithm == "native":
        return ("private",)
    return ("private", "shared") if buffers == "both" else (buffers,)


def places(algorithm: str, in_place: bool) -> tuple[str, ...]:
    """In which places an algorithm is timed: MPI's own always in both, since its better one counts."""
    return (IN,) if in_place and algorithm != "native" else (OUT, IN)


def new_array(comm: MPI.Intracomm, contents: Contents, kind: str) -> NumPyArray:
    """Memory of this rank alone, or of its node."""
    if kind == "private":
        return np.empty(contents.count, contents.dtype)
    array: NumPyArray = hpcdl.empty(contents.count, contents.dtype.name, comm)
    return array


def compete_at(
    comm: MPI.Intracomm, options: argparse.Namespace, nbytes: int, cores: int, peer: Peer | None
) -> list[Row]:
    """Time everybody at one size, in turns."""
    contents = Contents(comm, nbytes // np.dtype(options.dtype).itemsize, options.dtype, options.op)
    competitors: dict[Name, Competitor] = {}
    x, y = (new_array(comm, contents, "private") for _ in "xy")
    with ExitStack() as plans:
        for kind in dict.fromkeys(
            kind for algorithm in options.algorithms for kind in kinds(algorithm, options.buffers)
        ):
            pair = (x, y) if kind == "private" else [new_array(comm, contents, kind) for _ in "xy"]
            for algorithm in options.algorithms:
                if kind not in kinds(algorithm, options.buffers):
                    continue
                for place in places(algorithm, options.in_place):
                    out = pair[1] if place == OUT else None
                    call = to_call(comm, options, algorithm, pair[0], out, plans)
                    competitors[Name(algorithm, kind, place)] = contents.competitor(call, pair[0], out)
        if peer:
            competitors[Name(options.peer)] = contents.competitor(peer(x), x)
        # Where cores are few, the clock on the wall would hold the other ranks' turns, which `floor` counts itself.
        clock = perf_counter if comm.size <= cores else thread_time
        floors = [Name("floor", place=place) for place in places("floor", options.in_place)] if options.floor else []
        for name in floors:
            work = contents.competitor(
                partial(add_and_copy, options.op, x, y if name.place == OUT else x, comm.size), x
            )
            competitors[name] = Competitor(work.call, work.prepare, clock=clock)
            competitors[BARRIERS] = Competitor(partial(two_barriers, comm))
        times = timed(comm, competitors, options, contents.exact_calls())
    for name in floors:
        times[name] = floor(times[name], times[BARRIERS], comm.size, cores)
    times.pop(BARRIERS, None)
    return summarized(times, contents)


def to_call(
    comm: MPI.Intracomm,
    options: argparse.Namespace,
    algorithm: str,
    x: NumPyArray,
    out: NumPyArray | None,
    plans: ExitStack,
) -> Call:
    """What a user would call, with as little around it as can be."""
    from mpi4py import MPI

    if algorithm == "native":
        mine, result = (MPI.IN_PLACE, x) if out is None else (x, out)
        return partial(comm.Allreduce, mine, result, getattr(MPI, options.op.upper()))
    if options.form == "call":
        return partial(hpcdl.allreduce, x, comm, op=options.op, algorithm=algorithm, out=out)
    return plans.enter_context(hpcdl.plan_allreduce(x, comm, op=options.op, algorithm=algorithm, out=out))


def two_barriers(comm: MPI.Intracomm) -> None:
    """What tells the ranks that all have come, and that all have done their share."""
    comm.Barrier()
    comm.Barrier()


def timed(
    comm: MPI.Intracomm, competitors: Mapping[Key, Competitor], options: argparse.Namespace, most_calls: float
) -> dict[Key, Timed]:
    """Measure for about as long as was asked for: many rounds of many calls at small sizes, few of one at large."""
    began = perf_counter()
    once = measure(comm, competitors, rounds=1, repeat=1, warm_up=1)
    round_s = max(comm.allgather(perf_counter() - began)) / 2
    most = min(most_calls, MOST_CALLS)
    repeat = {key: int(max(1, min(most, BLOCK_S / found.seconds[0]))) for key, found in once.items()}
    round_s += sum((repeat[key] - 1) * found.seconds[0] for key, found in once.items())
    rounds = max(options.iterations[0], min(options.iterations[1], int(options.seconds / round_s)))
    times = measure(comm, competitors, rounds, repeat, warm_up=1)
    return {key: Timed(found.seconds, max(found.wrong, once[key].wrong)) for key, found in times.items()}


def summarized(times: Mapping[Name, Timed], contents: Contents) -> list[Row]:
    """The rows of one size."""
    natives = [found.seconds for name, found in times.items() if name.algorithm == "native"]
    native = min(natives, key=median, default=None)
    rows = []
    for name, found in times.items():
        middle, p10, p90 = percentiles(found.seconds)
        bandwidth = contents.nbytes / middle / 1e9
        rows.append(
            {
                **contents.described(),
                **name._asdict(),
                "time_us": rounded(1e6 * middle),
                "p10_us": rounded(1e6 * p10),
                "p90_us": rounded(1e6 * p90),
                "algbw_gb_s": rounded(bandwidth),
                "busbw_gb_s": rounded(bandwidth * 2 * (contents.size - 1) / contents.size),
                "wrong": None if name.algorithm == "floor" else found.wrong,  # the floor has no result
                "ratio": rounded(ratio(found.seconds, native)) if native else None,
                "rounds_us": [rounded(1e6 * value) for value in found.seconds],
            }
        )
    return rows


def rounded(value: float) -> float:
    """To five digits: more would be noise."""
    return float(f"{value:.5g}")
