"""hpcdl tune: measure which all-reduce is the fastest here, and what a message costs, and write it down."""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

import numpy as np

import hpcdl
from hpcdl import tuning, verdict
from hpcdl.buffers import HALVES, TYPES
from hpcdl.choice import HOST, Shape, candidates, serves, shared_cost
from hpcdl.cli.agreed import Refused, agree, begin, complain
from hpcdl.cli.arguments import rate
from hpcdl.cli.bench import progress, sizes
from hpcdl.cli.bench_measure import Competitor, NumPyArray, measure
from hpcdl.cli.sizes import UNITS, parse_bytes, show_bytes, show_seconds
from hpcdl.collectives import Cost, Link, find

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.channel import Channel
    from hpcdl.execute import Plan

FACTOR = 4

# A block of the fastest algorithm's calls takes about this long, so that the barrier ahead of it counts for little.
BLOCK_S, MOST_CALLS = 1e-3, 50

# Rounds go on until the fastest stands apart, or the time is up.
ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 3, 6, 30

# What is so many times slower than the fastest at so many sizes running is not measured at larger ones; below 64 KiB
# it may be so for its many messages alone.
HOPELESS, HOPELESS_SIZES, HOPELESS_BYTES = 3, 3, 64 << 10

# Messages and bytes cannot be told apart by short arrays alone: the links are measured up to 1 MiB at least.
LINK_BYTES, LINK_LEAST = (64, 8 << 10, 1 << 20, 8 << 20), 1 << 20

# What segments are tried on: a ring's have one peer each, the others' longer rounds more or fewer.
SEGMENTED, SEGMENTED_BYTES = ("ring", "binary_blocks"), (2 << 20, 16 << 20)

NATIVE, OUT_OF_PLACE = "native", "native, out of place"

EPILOG = """\
The table goes to the user's cache folder, where every program that uses the same MPI finds it; HPCDL_TUNING=FILE names
another. What is in it for other shapes, types and kinds of array stays. Exit status: 0 if all is well; 2 if it could
not begin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl tune can be told."""
    parser.description = (
        "Measure the all-reduce algorithms on these ranks, so that algorithm='auto' takes the fastest. "
        "Run it as your program will be run: mpiexec -n 4 hpcdl tune"
    )
    parser.epilog = EPILOG
    option = parser.add_argument
    option("--output", metavar="FILE", help="the table to write or add to (the user's own)")
    option("--min", type=parse_bytes, default="8", metavar="SIZE", help=f"the shortest array (%(default)s): {UNITS}")
    option("--max", type=parse_bytes, default="64MB", metavar="SIZE", help="the longest array (%(default)s)")
    option("--budget", type=rate, default=120, metavar="SECONDS", help="about how long it may take (%(default)s)")
    types = [name for name in TYPES if name != "bfloat16"]
    option("--dtype", choices=types, default="float32", help="(%(default)s)")
    option("--kinds", type=kinds, default=",".join(HOST), help="private arrays, those of hpcdl.empty (%(default)s)")


def kinds(text: str) -> tuple[str, ...]:
    """Kinds of array with commas between them."""
    words = tuple(text.split(","))
    if not set(words) <= set(HOST):
        raise argparse.ArgumentTypeError(f"{text}: the kinds that can be measured are {', '.join(HOST)}")
    return words


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks; rank 0 prints and writes."""
    from mpi4py import MPI

    from hpcdl.call import channel, shape_of
    from hpcdl.execute import SEGMENT_BYTES

    comm, began = MPI.COMM_WORLD, time.perf_counter()
    begin(comm)
    file = Path(arguments.output) if arguments.output else tuning.default_path()
    try:
        old = prepare(comm, arguments, file)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2

    hpcdl.zeros(1, arguments.dtype, comm)  # whether memory can be shared is known only once it was tried
    own = channel(comm)
    shape = shape_of(own)
    able = [kind for kind in arguments.kinds if kind == "private" or shape.memory]
    steps = list(sizes(arguments.min, arguments.max, FACTOR))
    say = print if comm.rank == 0 else lambda *_, **__: None

    say(f"hpcdl tune: {shape}, {arguments.dtype}, {tuning.mpi()}\n")
    say(COLUMNS.format("array", "bytes", "fastest", "time", "MPI_Allreduce", "ratio"), flush=True)
    rules = []
    with progress(2 + len(able) * len(steps), on=comm.rank == 0) as advance:
        advance("segments of messages")
        own.segment_bytes = best_segment(
            comm, own, arguments.dtype, arguments.max, arguments.budget / 10, SEGMENT_BYTES
        )
        segments = {} if own.segment_bytes is None else {shape.sizes: own.segment_bytes}
        advance("the links")
        fitted = fit_links(comm, own, arguments.dtype, arguments.max, arguments.budget / 10)
        for number, kind in enumerate(able):
            spent = time.perf_counter() - began
            deadline = Deadline(comm, (arguments.budget - spent) / (len(able) - number))
            measured: dict[str, list[tuple[int, float]]] = {}
            names = candidates("allreduce", shape, kind)
            for nbytes, times in sweep(comm, names, kind, arguments.dtype, steps, deadline, advance):
                for name, seconds in times.items():
                    measured.setdefault(name, []).append((nbytes, seconds))
                say(row(kind, nbytes, times), flush=True)
            if nbytes < steps[-1]:
                say(f"the time is up: longer {kind} arrays were not measured (--budget {arguments.budget:g})")
            found = tuning.sizes_of(measured)
            rules.append(tuning.Rule("allreduce", shape.sizes, arguments.dtype, kind, found, measured))

    if comm.rank == 0:
        tuning.save(tuning.merged(old, tuning.Table(fitted, rules, made(), str(file), segments)), file)
    say("\n" + "\n".join(summary(rules, fitted)))
    for nbytes in segments.values():
        say(f"messages: added up in segments of {show_bytes(nbytes)}")
    say(f"\nwritten to {file}", flush=True)
    if tuning.path() != file:
        say(f"HPCDL_TUNING={file} has programs go by it", flush=True)
    return 0


def prepare(comm: MPI.Intracomm, arguments: argparse.Namespace, file: Path) -> tuning.Table | None:
    """Refuse what can be wrong before anything is measured, on all ranks alike; what the file has so far."""
    # The first agreement: a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    agree(comm, None)
    for name, value in vars(arguments).items():
        differs = None if name in ("run", "output") else verdict.difference(comm, f"--{name}", value)
        if differs:
            raise Refused(differs)
    item = np.dtype(arguments.dtype).itemsize
    if not item <= arguments.min <= arguments.max:
        raise Refused(
            f"--min {show_bytes(arguments.min)} --max {show_bytes(arguments.max)}: sizes go up, from one "
            f"{arguments.dtype} of {item} B"
        )
    if comm.size == 1:
        raise Refused("one rank has nothing to tune: run it as mpiexec -n 4 hpcdl tune")
    old, problem = None, None
    if comm.rank == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(file.parent, os.W_OK):
                problem = f"the folder {file.parent} cannot be written to"
            if file.exists():
                old = tuning.read(file)
                old = old if tuning.same_library(old) else None
        except OSError as error:
            problem = f"{file} cannot be written: {error.strerror or error}"
        except ValueError as error:
            problem = f"{error}: remove it, or name another file"
    agree(comm, problem)
    return old


class Deadline:
    """So many seconds from now, by the clock of rank 0 (each question is a collective call)."""

    def __init__(self, comm: MPI.Intracomm, seconds: float) -> None:
        self.comm, self.end = comm, time.perf_counter() + seconds

    def left(self) -> float:
        """The seconds that are left; the same on all ranks."""
        return float(self.comm.bcast(self.end - time.perf_counter()))


class Turn:
    """The plan whose turn it is, bound anew ahead of it: all of them at once would fill the memory."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def competitor(self, bind: Callable[[], Plan]) -> Competitor:
        """Whatever bind gives, as something to be timed."""

        def prepare() -> None:
            self.end()
            self.plan = bind()
            self.plan()
            self.plan()  # `shared` has two areas that it uses in turn, and both are new

        return Competitor(lambda: self.plan and self.plan(), prepare)

    def end(self) -> None:
        """Free the plan."""
        if self.plan is not None:
            self.plan.close()
            self.plan = None


def sweep(
    comm: MPI.Intracomm,
    names: Sequence[str],
    kind: str,
    dtype: str,
    steps: Sequence[int],
    deadline: Deadline,
    advance: Callable[[str], object],
) -> Iterator[tuple[int, dict[str, float]]]:
    """Each algorithm's seconds at each size, as far as the time allows; the hopeless ones only up to where they are."""
    native = [] if dtype in HALVES else [NATIVE]  # MPI cannot add them
    slow: dict[str, int] = {}
    for number, nbytes in enumerate(steps):
        left = deadline.left()
        if number and left <= 0:
            return
        advance(f"{kind} arrays of {show_bytes(nbytes)}")
        times = timed(comm, [*names, *native], kind, dtype, nbytes, Deadline(comm, left / (len(steps) - number)))
        yield nbytes, times
        limit = HOPELESS * min(times[name] for name in names) if nbytes >= HOPELESS_BYTES else math.inf
        for name in names:
            slow[name] = slow.get(name, 0) + 1 if times[name] > limit else 0
        names = [name for name in names if slow[name] < HOPELESS_SIZES]


def timed(
    comm: MPI.Intracomm, names: Sequence[str], kind: str, dtype: str, nbytes: int, deadline: Deadline
) -> dict[str, float]:
    """The median seconds of each algorithm in place, and of MPI's own in the better of its two forms."""
    count = nbytes // np.dtype(dtype).itemsize
    x = hpcdl.zeros(count, dtype, comm) if kind == "shared" else np.zeros(count, dtype)  # stays 0, sum after sum
    turn = Turn()

    def competitor(algorithm: str, out: NumPyArray | None = None) -> Competitor:
        return turn.competitor(partial(hpcdl.plan_allreduce, x, comm, algorithm=algorithm, out=out))

    competitors = {name: competitor(name) for name in names}
    if NATIVE in names:
        competitors[OUT_OF_PLACE] = competitor(NATIVE, np.empty(count, dtype))
    once = measure(comm, competitors, rounds=1, repeat=1, warm_up=0)
    fastest = min(min(found.seconds) for found in once.values())
    repeat = max(1, min(MOST_CALLS, int(BLOCK_S / fastest)))
    times: dict[str, list[float]] = {name: [] for name in competitors}
    while True:
        for name, found in measure(comm, competitors, ROUNDS, repeat, warm_up=0).items():
            times[name] += found.seconds
        if deadline.left() <= 0 or enough(times):
            break
    turn.end()
    medians = {name: median(seconds) for name, seconds in times.items()}
    if OUT_OF_PLACE in medians:
        medians[NATIVE] = min(medians[NATIVE], medians.pop(OUT_OF_PLACE))
    return medians


def enough(times: Mapping[str, Sequence[float]]) -> bool:
    """Does the fastest stand apart, three quarters of its rounds below three quarters of any other's?"""
    rounds = len(next(iter(times.values())))
    quarters = sorted(np.percentile(seconds, (50, 25, 75)).tolist() for seconds in times.values())
    apart = all(low > quarters[0][2] for _, low, _ in quarters[1:])
    return rounds >= MOST_ROUNDS or (rounds >= LEAST_ROUNDS and apart)


def best_segment(comm: MPI.Intracomm, own: Channel, dtype: str, largest: int, seconds: float, usual: int) -> int | None:
    """The length of segments that serves best; None if no array is long enough to tell."""
    names = [name for name in SEGMENTED if serves(name, "allreduce", Shape((comm.size,), memory=False), "private")]
    steps = [nbytes for nbytes in SEGMENTED_BYTES if nbytes <= largest]
    lost = dict.fromkeys(tuning.SEGMENTS, 0.0)
    for name, nbytes in product(names, steps):
        x, turn = np.zeros(nbytes // np.dtype(dtype).itemsize, dtype), Turn()

        def bind(length: int, x: NumPyArray = x, name: str = name) -> Plan:
            own.segment_bytes = length
            return hpcdl.plan_allreduce(x, comm, algorithm=name)

        competitors = {length: turn.competitor(partial(bind, length)) for length in tuning.SEGMENTS}
        deadline = Deadline(comm, seconds / len(names) / len(steps))
        times: dict[int, list[float]] = {length: [] for length in tuning.SEGMENTS}
        while True:
            for length, found in measure(comm, competitors, rounds=1, repeat=1, warm_up=0).items():
                times[length] += found.seconds
            if len(times[usual]) >= MOST_ROUNDS or deadline.left() <= 0:
                break
        turn.end()
        for length, spent in times.items():
            lost[length] += math.log(median(spent) / median(times[usual])) / len(names) / len(steps)
    if not steps:
        return None
    best = min(lost, key=lost.__getitem__)
    # The usual one stays unless another is clearly better. All ranks go by what rank 0 has measured.
    agreed: int = comm.bcast(best if lost[best] < -tuning.CHANGE / 2 else usual)
    return agreed


def fit_links(comm: MPI.Intracomm, own: Channel, dtype: str, largest: int, seconds: float) -> dict[str, Link]:
    """What messages cost inside the largest node and between nodes, and what memory does in that node: on rank 0."""
    from mpi4py import MPI

    from hpcdl.call import channel, shape_of

    steps = [nbytes for nbytes in LINK_BYTES if nbytes <= max(largest, LINK_LEAST)]
    node = cast("MPI.Intracomm", comm.Split(own.nodes.index(own.node), comm.rank))
    leaders = cast("MPI.Intracomm", comm.Split(0 if node.rank == 0 else MPI.UNDEFINED, comm.rank))
    mine: dict[str, Link] = {}
    if node.size > 1:
        mine["inside"] = tuning.fit(sampled(node, message_algorithms(node.size), "private", dtype, steps, seconds / 3))
        if serves("shared", "allreduce", shape_of(channel(node)), "private"):
            samples = [sampled(node, ["shared"], kind, dtype, steps, seconds / 6) for kind in HOST]
            mine["memory"] = tuning.fit(chain(*samples))
    found: list[tuple[int, dict[str, Link]]] = comm.gather((node.size, mine)) or [(node.size, mine)]
    fitted = max(found, key=lambda sized: sized[0])[1]
    if leaders != MPI.COMM_NULL:
        if leaders.size > 1:
            samples = [sampled(leaders, message_algorithms(leaders.size), "private", dtype, steps, seconds / 3)]
            fitted["between"] = tuning.fit(chain(*samples))
        leaders.Free()
    # Who has no part in it leaves the core to who has, which may be on the same one.
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(0.001)
    node.Free()
    return fitted


def message_algorithms(size: int) -> list[str]:
    """Those that the model describes."""
    return [name for name in candidates("allreduce", Shape((size,), memory=False), "private") if name != "direct"]


def sampled(
    comm: MPI.Intracomm, names: Sequence[str], kind: str, dtype: str, steps: Sequence[int], seconds: float
) -> list[tuple[Cost, float]]:
    """Of each algorithm at each size the cost on paper, and the seconds that it took."""
    deadline = Deadline(comm, seconds)
    samples = []
    for number, nbytes in enumerate(steps):
        times = timed(comm, names, kind, dtype, nbytes, Deadline(comm, deadline.left() / (len(steps) - number)))
        for name, spent in times.items():
            alone = shared_cost(comm.size, nbytes, kind) if name == "shared" else find(name).cost(comm.size, nbytes)
            samples.append((alone, spent))
    return samples


def made() -> dict[str, str]:
    """Where a table comes from."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": platform.node(),
        "mpi": tuning.mpi(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "hpcdl": hpcdl.__version__,
    }


COLUMNS = "{:>7}  {:>9}  {:<21}  {:>9}  {:>13}  {:>6}"


def row(kind: str, nbytes: int, times: Mapping[str, float]) -> str:
    """The fastest at one size, beside MPI's own."""
    best = min((name for name in times if name != NATIVE), key=times.__getitem__)
    native = times.get(NATIVE)
    beside = (show_seconds(native), f"{times[best] / native:.2f}") if native else ("-", "-")
    return COLUMNS.format(kind, show_bytes(nbytes), best, show_seconds(times[best]), *beside).rstrip()


def summary(rules: Sequence[tuning.Rule], fitted: Mapping[str, Link]) -> Iterator[str]:
    """What `auto` will do, and what the links cost."""
    for rule in rules:
        steps = [f"{name} from {show_bytes(start)}" for start, name in rule.sizes]
        yield f"{rule.kind} arrays: {', '.join(steps)}"
    unit = {"inside": "a message in a node", "between": "a message between nodes", "memory": "a flag in memory"}
    for name, link in fitted.items():
        rates = [
            f"{what} at {1e-9 / cost:.3g} GB/s" for what, cost in (("moved", link.beta), ("added", link.gamma)) if cost
        ]
        yield f"{unit[name]}: {', '.join([show_seconds(link.alpha), *rates])}"
