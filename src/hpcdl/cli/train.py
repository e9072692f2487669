"""hpcdl train: synchronous data-parallel SGD on real images."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import hpcdl
from hpcdl import verdict
from hpcdl.cli.launch import terminal
from hpcdl.data import DataError, ImageSet, load_together
from hpcdl.environment import cores_per_rank, notices
from hpcdl.errors import HpcdlError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.torch.train import Epoch, Replica

# Steady from 1 to 8 ranks of 32 images; with 0.05 the cnn loses 4 points on one rank.
LEARNING_RATES = {"mlp": 0.05, "cnn": 0.02}

EPILOG = """\
Exit status: 0 if all is well; 1 if the training failed: it diverged, missed --target-accuracy, or the ranks'
parameters differ; 2 if it could not begin: a wrong argument, no data, no torch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl train can be told."""
    parser.description = (
        "Train a network by synchronous data-parallel SGD: all ranks start from the same parameters, each "
        "works on its share of every global batch, and the gradient is averaged over the ranks by one "
        "all-reduce. Run it as: mpiexec -n 4 hpcdl train"
    )
    parser.epilog = EPILOG
    option = parser.add_argument
    option(
        "--data",
        metavar="DATA",
        help="mnist5k, fashion, or a folder of IDX files (the first of the two that is installed)",
    )
    option("--model", choices=tuple(LEARNING_RATES), default="mlp", help="the network (%(default)s)")
    option("--algorithm", default="binary_blocks", metavar="NAME", help="the all-reduce (%(default)s)")
    option("--epochs", type=count, default=20, metavar="N", help="how often each image is seen (%(default)s)")
    option(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="images of each rank in one step (%(default)s): the global batch grows with the ranks",
    )
    option(
        "--lr",
        type=rate,
        metavar="RATE",
        help="learning rate (mlp 0.05, cnn 0.02), taken as it is for any number of ranks",
    )
    option("--momentum", type=momentum, default=0.9, metavar="M", help="momentum of SGD (%(default)s)")
    option("--seed", type=seed, default=0, metavar="N", help="of parameters and shuffles (%(default)s)")
    option(
        "--target-accuracy",
        type=share,
        metavar="SHARE",
        help="fail unless the last epoch's accuracy on the test images is at least this, such as 0.93",
    )
    option(
        "--threads",
        type=count,
        metavar="N",
        help="torch's threads in each rank (OMP_NUM_THREADS if set, else its share of the node's cores)",
    )


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 upwards")
    return int(text)


def seed(text: str) -> int:
    """A whole number of 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 to {2**32 - 1}")
    return int(text)


def rate(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def momentum(text: str) -> float:
    """A number from 0, below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 to below 1")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1, such as 0.93")
    return value


def number(text: str) -> float:
    """A number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def run(arguments: argparse.Namespace) -> int:
    """Train on all ranks; the exit status is the same on all of them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for line in notices(comm):
        complain(comm, line)
    try:
        images, replica = prepare(comm, arguments)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2

    began = perf_counter()
    samples = arguments.epochs * len(images.train.labels)
    if comm.rank == 0:
        print(header(comm, arguments, images, replica), flush=True)
    with reporting(samples, arguments.epochs, on=comm.rank == 0) as (on_step, on_epoch):
        epochs = list(follow(replica, images, arguments, on_step, on_epoch))
    spread = replica.spread()

    if comm.rank == 0:
        print(table(epochs))
        seconds = perf_counter() - began
        print(f"{seconds:.1f} s; largest difference of a parameter between ranks: {spread:g}", flush=True)
    failure = judge(epochs, spread, arguments.target_accuracy)
    if failure:
        complain(comm, failure)
        return 1
    return 0


class Refused(Exception):
    """The training cannot begin; all ranks raise it alike."""


def prepare(comm: MPI.Comm, arguments: argparse.Namespace) -> tuple[ImageSet, Replica]:
    """Whatever can be wrong before the first step; what is wrong on one rank is refused by all."""
    # The first agreement: a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    agree(comm, None)
    for name, value in vars(arguments).items():
        if name not in ("run", "data"):  # where the data lies may differ, what it is may not: load_together
            differs = verdict.difference(comm, f"--{name.replace('_', '-')}", value)
            if differs:
                raise Refused(differs)
    try:
        # The library says itself which names there are and which numbers of ranks each can serve.
        hpcdl.allreduce(np.zeros(1), comm, algorithm=arguments.algorithm)
    except (ValueError, HpcdlError) as error:
        raise Refused(f"--algorithm {arguments.algorithm}: {error}") from error

    try:
        images = load_together(arguments.data, comm)
    except DataError as error:
        raise Refused(f"--data: {error}") from error

    problem = None
    try:
        import torch

        from hpcdl.torch.train import Replica, build
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        problem = f"PyTorch {why}: pip install 'hpcdl[train]', or load your cluster's module of it"
    agree(comm, problem)

    cores = cores_per_rank(comm)  # on all ranks, also where the answer is not needed: it is a collective call
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    try:
        model = build(arguments.model, images, seed=arguments.seed)
    except ValueError as error:
        raise Refused(f"--model {arguments.model}: {error}") from error
    lr = arguments.lr or LEARNING_RATES[arguments.model]
    replica = Replica(model, comm, lr=lr, momentum=arguments.momentum, algorithm=arguments.algorithm)
    return images, replica


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Refuse if any rank has a problem."""
    agreed = verdict.agree(comm, problem)
    if agreed:
        raise Refused(agreed)


def follow(
    replica: Replica,
    images: ImageSet,
    arguments: argparse.Namespace,
    on_step: Callable[[int], object],
    on_epoch: Callable[[Epoch], object],
) -> Iterator[Epoch]:
    """The epochs, each reported as it ends, up to the first whose loss is not finite."""
    from hpcdl.torch.train import train

    for epoch in train(
        replica,
        images,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        on_step=on_step,
    ):
        on_epoch(epoch)
        yield epoch
        if not math.isfinite(epoch.loss):
            return


def judge(epochs: list[Epoch], spread: float, target: float | None) -> str | None:
    """What has gone wrong, in one line; None if nothing has."""
    last = epochs[-1]
    if not math.isfinite(last.loss):
        return f"the training diverged in epoch {last.number} (loss {last.loss:g}): try a smaller --lr"
    if not math.isfinite(spread):
        return f"after epoch {last.number} some parameters are not finite: try a smaller --lr"
    if spread != 0:
        return f"the ranks' parameters differ, by up to {spread:g}: they must be equal to the last bit"
    if target is not None and last.accuracy < target:
        return f"test accuracy {last.accuracy:.2%} is below the target of {target:.2%}"
    return None


def complain(comm: MPI.Comm, line: str) -> None:
    """Print one line to standard error, once for all ranks."""
    if comm.rank == 0:
        print(f"hpcdl: {line}", file=sys.stderr, flush=True)


def header(comm: MPI.Comm, arguments: argparse.Namespace, images: ImageSet, replica: Replica) -> str:
    """One line with all that a result depends on."""
    import torch
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().replace("Version:", "").split("\n")[0].split(",")[0].split())
    return (
        f"hpcdl train: ranks {comm.size}, threads {torch.get_num_threads()}, "
        f"all-reduce {arguments.algorithm}, model {arguments.model}, parameters {len(replica.parameters)}, "
        f"data {images.name} ({images.counts}), batch {comm.size} x {arguments.batch_size}, "
        f"lr {replica.lr:g}, momentum {arguments.momentum:g}, seed {arguments.seed}, {library}"
    )


COLUMNS = "{:>6}  {:>9}  {:>13}  {:>10}  {:>13}"


def table(epochs: list[Epoch]) -> str:
    """One line an epoch, under their names."""
    lines = [COLUMNS.format("epoch", "loss", "test accuracy", "images/s", "communication")]
    lines += [
        COLUMNS.format(
            epoch.number,
            f"{epoch.loss:.4f}",
            f"{epoch.accuracy:.2%}",
            f"{epoch.images_per_s:.0f}",
            f"{epoch.communication:.1%}",
        )
        for epoch in epochs
    ]
    return "\n".join(lines)


@contextmanager
def reporting(
    samples: int, epochs: int, *, on: bool
) -> Iterator[tuple[Callable[[int], object], Callable[[Epoch], object]]]:
    """What to call after each step and each epoch: a progress bar on a terminal, else a line an epoch."""

    def line(epoch: Epoch) -> str:
        return (
            f"epoch {epoch.number}/{epochs}  loss {epoch.loss:.4f}  test accuracy {epoch.accuracy:.2%}  "
            f"{epoch.images_per_s:.0f} images/s  communication {epoch.communication:.1%}"
        )

    def nothing(_: object) -> None: ...

    if not on:
        yield nothing, nothing
        return
    size = terminal()
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:  # rich is a comfort, not a need
        size = None
    if size is None or os.environ.get("TERM", "dumb") == "dumb":
        yield nothing, lambda epoch: print(line(epoch), flush=True)
        return
    console = Console(force_terminal=True, width=size.columns or None)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"epoch 1/{epochs}", total=samples)
        yield (
            lambda samples: progress.advance(task, samples),
            lambda epoch: progress.update(task, description=line(epoch)),
        )
