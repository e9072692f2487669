"""hpcdl bench: the all-reduce algorithms against MPI's own, in one run, with every result checked."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

import hpcdl
from hpcdl import verdict
from hpcdl.buffers import INTEGERS
from hpcdl.cli.agreed import Refused, agree, begin, complain
from hpcdl.cli.arguments import count, rate
from hpcdl.cli.bench_compete import Call, Peer, compete_at
from hpcdl.cli.bench_measure import UFUNCS, NumPyArray
from hpcdl.cli.bench_overlap import overlap_at
from hpcdl.cli.bench_report import FORMATS, Row, label, plot
from hpcdl.cli.launch import terminal
from hpcdl.cli.sizes import parse_bytes, show_bytes
from hpcdl.errors import HpcdlError

if TYPE_CHECKING:
    from mpi4py import MPI

EPILOG = """\
The competitors take turns: in each round a block of calls each, behind a barrier, and the slowest rank's mean counts.
Every block starts from rewritten buffers, and every element of its result is compared with the exact one.
Exit status: 0 if all is well; 1 if a result was wrong; 2 if it could not begin: a wrong argument, a missing library.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl bench can be told."""
    parser.description = "Time all-reduce algorithms. Run it as: mpiexec -n 4 hpcdl bench --max 1MiB"
    parser.epilog = EPILOG
    option = parser.add_argument
    option("--min", type=parse_bytes, default="16", metavar="SIZE", help="the smallest buffer (%(default)s bytes)")
    option("--max", type=parse_bytes, default="64MiB", metavar="SIZE", help="the largest buffer (%(default)s)")
    option("--factor", type=count, default=4, metavar="N", help="from size to size, up to and with --max (%(default)s)")
    option(
        "--algorithms",
        type=names,
        default="ring,binary_blocks,shared,auto,native",
        metavar="NAMES",
        help="what is timed (%(default)s); native is mpi4py's own Allreduce, called directly",
    )
    option("--dtype", choices=("float16", "float32", "float64", *INTEGERS), default="float32", help="(%(default)s)")
    option("--op", choices=tuple(UFUNCS), default="sum", help="(%(default)s)")
    option("--form", choices=("plan", "call"), default="plan", help="bound once, or plain calls (%(default)s)")
    option(
        "--buffers",
        choices=("private", "shared", "both"),
        help="ordinary arrays, hpcdl.empty, or both (private; with --overlap both); native has private ones",
    )
    option(
        "--in-place", action="store_true", help="time in place only; native still both ways, as its better one counts"
    )
    option("--seconds", type=rate, default=1.0, metavar="S", help="about how long each size is timed (%(default)s)")
    option(
        "--iterations",
        type=bounds,
        default="5:100",
        metavar="MIN:MAX",
        help="the fewest and the most rounds of each size, whatever the time (%(default)s)",
    )
    option("--threads", choices=("single", "multiple"), help="the thread level that MPI is asked for (mpi4py's)")
    option("--peer", choices=("gloo",), help="time torch.distributed's all_reduce too, in the same ranks")
    option("--floor", action="store_true", help="time also what memory allows: the adds and copies and two barriers")
    option("--overlap", action="store_true", help="time instead how much of an iallreduce hides behind computation")
    option("--format", choices=tuple(FORMATS), default="table", help="(%(default)s)")
    option("--output", metavar="FILE", help="where the results go (standard output)")
    option("--plot", metavar="FILE.svg", help="draw time and bus bandwidth against the size")


def names(text: str) -> list[str]:
    """Names with commas between them."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names such as ring,shared,native")
    return list(dict.fromkeys(found))


def bounds(text: str) -> tuple[int, int]:
    """Two whole numbers from 1, or one for both."""
    least, _, most = text.partition(":")
    low, high = count(least), count(most or least)
    if low > high:
        raise argparse.ArgumentTypeError(f"{text}: at least {low}, but at most {high}")
    return low, high


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, print on rank 0; the exit status is the same on all of them."""
    if arguments.threads:
        import mpi4py

        mpi4py.rc.thread_level = arguments.threads  # read when MPI is imported
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    begin(comm)
    arguments.buffers = arguments.buffers or ("both" if arguments.overlap else "private")
    with ExitStack() as stack:
        try:
            prepare(comm, arguments)
            peer = stack.enter_context(gloo(comm, arguments)) if arguments.peer else None
        except Refused as refusal:
            complain(comm, str(refusal))
            return 2
        head = header(comm, arguments)
        write, speaks = FORMATS[arguments.format], comm.rank == 0
        file = stack.enter_context(open(arguments.output, "w")) if speaks and arguments.output else None

        def say(text: str) -> None:
            if speaks and text:
                print(text, file=file, flush=True)

        say(write.head(head))
        at = overlap_at if arguments.overlap else partial(compete_at, cores=head["cores"], peer=peer)
        rows: list[Row] = []
        steps = list(sizes(arguments.min, arguments.max, arguments.factor))
        with progress(len(steps), on=speaks) as advance:
            for nbytes in steps:
                advance(show_bytes(nbytes))
                found = at(comm, arguments, nbytes)
                say(write.size(found))
                rows += found
        say(write.foot(head, rows))
        if arguments.plot and speaks:
            plot(head, rows, arguments.plot)
    wrong = [f"{row['wrong']} elements of {label(row)} at {show_bytes(row['size'])}" for row in rows if row["wrong"]]
    if wrong:
        complain(comm, f"{len(wrong)} of {len(rows)} results are wrong; the first: {wrong[0]}")
    return 1 if wrong else 0


def prepare(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    """Refuse what can be wrong before anything is measured, on all ranks alike."""
    # The first agreement: a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    agree(comm, None)
    for name, value in vars(arguments).items():
        differs = None if name in ("run", "output", "plot") else verdict.difference(comm, f"--{name}", value)
        if differs:
            raise Refused(differs)
    smallest, largest, item = arguments.min, arguments.max, np.dtype(arguments.dtype).itemsize
    if not item <= smallest <= largest:
        given = f"--min {show_bytes(smallest)} --max {show_bytes(largest)}"
        raise Refused(f"{given}: sizes go up, from one {arguments.dtype} of {item} B")
    if arguments.factor < 2:
        raise Refused(f"--factor {arguments.factor}: sizes grow by 2 at least")
    if arguments.overlap and (arguments.floor or arguments.peer or arguments.plot):
        raise Refused("--overlap goes without --floor, --peer and --plot")
    for name in arguments.algorithms:
        try:
            # The library says itself which names there are and what each can serve.
            hpcdl.allreduce(np.zeros(1, arguments.dtype), comm, op=arguments.op, algorithm=name)
        except (TypeError, ValueError, HpcdlError) as error:
            raise Refused(f"--algorithms {name}: {' '.join(str(error).split())}") from error
    hosts = set(comm.allgather(platform.node()))
    if arguments.floor and len(hosts) > 1:
        raise Refused(f"--floor is that of one node's memory: these ranks are on {len(hosts)} nodes")
    problem = None
    if comm.rank == 0:
        if arguments.plot and not find_spec("matplotlib"):
            problem = "--plot needs matplotlib: pip install 'hpcdl[plot]'"
        for file in filter(None, (arguments.output, arguments.plot)):
            try:
                open(file, "a").close()
            except OSError as error:
                problem = f"{file} cannot be written: {error.strerror}"
    agree(comm, problem)


def sizes(smallest: int, largest: int, factor: int) -> Iterator[int]:
    """From the smallest by the factor up to the largest, which is always the last."""
    while smallest < largest:
        yield smallest
        smallest *= factor
    yield largest


def header(comm: MPI.Intracomm, arguments: argparse.Namespace) -> Row:
    """All that a result depends on."""
    fewest, most = arguments.iterations
    return surroundings(comm) | {
        "type": arguments.dtype,
        "redop": arguments.op,
        "form": "overlap" if arguments.overlap else arguments.form,
        "rounds": f"{fewest} to {most}, for about {arguments.seconds:g} s a size",
        "times": "of a call on the slowest rank, the mean of a block: median, 10th and 90th percentile of the rounds",
    }


def surroundings(comm: MPI.Intracomm) -> Row:
    """When and where this is, and on what software."""
    import mpi4py
    from mpi4py import MPI

    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    every = comm.allgather((platform.node(), mine))
    bindings = {f"rank {rank} on": ranges(cores) for rank, (_, cores) in enumerate(every)}
    alike = len(set(bindings.values())) == 1
    levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
    library = MPI.Get_library_version().replace("Version:", "").split("\n")[0].split(",")[0]
    versions = {"Python": platform.python_version(), "NumPy": np.__version__}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "mpi": " ".join(library.strip("\0").split()),
        "thread_level": levels.get(MPI.Query_thread(), "multiple"),
        "versions": {**versions, "mpi4py": mpi4py.__version__, "hpcdl": hpcdl.__version__},
        "machine": platform.machine(),
        "ranks": comm.size,
        "ranks_per_host": dict(Counter(host for host, _ in every)),
        "cores": len({(host, core) for host, cores in every for core in cores}),
        "binding": f"every rank on {ranges(mine)}" if alike else bindings,
    }


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with runs as ranges: 0-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


@contextmanager
def gloo(comm: MPI.Intracomm, arguments: argparse.Namespace) -> Iterator[Peer]:
    """torch.distributed's process group of the same ranks; they meet at a store of rank 0."""
    problem = None
    try:
        import torch
        from torch import distributed
    except ImportError as error:
        problem = f"--peer gloo needs PyTorch: pip install 'hpcdl[torch]' ({error})"
    agree(comm, problem)

    host = "127.0.0.1" if len(set(comm.allgather(platform.node()))) == 1 else socket.gethostname()
    meet = distributed.TCPStore  # type: ignore[attr-defined]
    store = meet(host, 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
    host, port = comm.bcast((host, store and store.port))
    store = store or meet(host, port, comm.size, False)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    ops = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
    op = getattr(distributed.ReduceOp, ops[arguments.op])

    def peer(x: NumPyArray) -> Call:
        return partial(distributed.all_reduce, torch.from_numpy(x), op)

    try:
        try:
            peer(np.ones(1, arguments.dtype))()
        except (RuntimeError, TypeError) as error:
            problem = f"--peer gloo: {' '.join(str(error).split())}"
        agree(comm, problem)
        yield peer
    finally:
        distributed.destroy_process_group()


@contextmanager
def progress(steps: int, *, on: bool) -> Iterator[Callable[[str], object]]:
    """What to call with a description ahead of each step: a bar on a terminal, else nothing."""
    size = terminal() if on and os.environ.get("TERM", "dumb") != "dumb" else None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:  # rich is a comfort, not a need
        size = None
    if size is None:
        yield lambda text: None
        return
    console = Console(force_terminal=True, width=size.columns or None)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda text: bar.update(task, description=text, advance=1)
