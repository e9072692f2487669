"""hpcdl train: synchronous data-parallel SGD on real images, or on text."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import hpcdl
from hpcdl import data, text, verdict
from hpcdl.cli.launch import terminal
from hpcdl.cli.train_log import Log, plain
from hpcdl.data import DataError
from hpcdl.environment import cores_per_rank, notices
from hpcdl.errors import HpcdlError
from hpcdl.logs import configure, logger
from hpcdl.preemption import SIGNALS, preemption

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.preemption import Preemption
    from hpcdl.torch.train import Epoch, Task, Trainer


class Kind(NamedTuple):
    """What a network is for and how it is trained if nothing else is said."""

    of: str
    lrs: dict[str, float]
    """By optimiser; the first is the usual one."""
    epochs: int

    @property
    def optimizer(self) -> str:
        return next(iter(self.lrs))


# Steady from 1 to 8 ranks of 32 samples; with 0.05 the cnn loses 4 points on one rank.
MODELS = {
    "mlp": Kind("images", {"sgd": 0.05, "adam": 0.001}, 20),
    "cnn": Kind("images", {"sgd": 0.02, "adam": 0.001}, 20),
    "transformer": Kind("text", {"adam": 0.003, "sgd": 0.3}, 1),
}
BLOCK_SIZE = 64
LOG_STEPS = 20
"""How many steps come between two lines of the log: each is an all-reduce of four numbers."""

EPILOG = """\
Exit status: 0 if all is well; 1 if the training failed: it diverged, missed --target-accuracy, a checkpoint could not
be written, or the ranks' parameters differ; 2 if it could not begin: a wrong argument, no data, no torch; with
--checkpoint also 75: it was asked to stop by SIGTERM or SIGUSR1, has written a checkpoint and can go on with --resume.
"""
STOPPED = 75
"""EX_TEMPFAIL: try again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl train can be told."""
    parser.description = (
        "Train a network by synchronous data-parallel SGD: all ranks start from the same parameters, each "
        "works on its share of every global batch, and the gradient is averaged over the ranks by an "
        "all-reduce. Run it as: mpiexec -n 4 hpcdl train"
    )
    parser.epilog = EPILOG
    option = parser.add_argument
    option(
        "--data",
        metavar="DATA",
        help="images: mnist5k, fashion (the first that is installed), or a folder of IDX files; text: bible, or a file "
        "of UTF-8 text",
    )
    option("--model", choices=tuple(MODELS), help="the network (mlp for images, transformer for text)")
    option("--algorithm", metavar="NAME", help="the all-reduce (binary_blocks)")
    option("--epochs", type=count, metavar="N", help="how often each sample is seen (images 20, text 1)")
    option(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="samples of each rank in one backward pass (%(default)s): the global batch grows with the ranks",
    )
    option(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="backward passes before one reduction and step (%(default)s): the global batch grows with them",
    )
    option("--block-size", type=count, metavar="N", help=f"characters of a sample of text ({BLOCK_SIZE})")
    option(
        "--lr",
        type=rate,
        metavar="RATE",
        help=f"learning rate ({', '.join(f'{name} {kind.lrs[kind.optimizer]:g}' for name, kind in MODELS.items())}), "
        "taken as it is for any number of ranks",
    )
    option("--optimizer", choices=("sgd", "adam"), help="what steps are taken (images sgd, text adam)")
    option("--momentum", type=momentum, default=0.9, metavar="M", help="of SGD, or Adam's first beta (%(default)s)")
    option("--seed", type=seed, default=0, metavar="N", help="of parameters and shuffles (%(default)s)")
    option(
        "--bucket-cap-mb",
        type=rate,
        default=25.0,
        metavar="MIB",
        help="gradients are reduced in buckets of up to so many MiB (%(default)g)",
    )
    option(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="reduce beside backward, on a thread (auto: where a rank has a core to spare)",
    )
    option(
        "--wire-dtype",
        choices=("bfloat16", "float16"),
        help="what gradients travel as between nodes, by an all-reduce of its own instead of --algorithm",
    )
    option("--checkpoint", metavar="DIR", help="write a checkpoint into DIR at the end of every epoch")
    option("--checkpoint-every", type=count, metavar="STEPS", help="and behind every so many steps")
    option("--resume", action="store_true", help="go on from the newest whole checkpoint in DIR, if there is one")
    option(
        "--log-dir",
        metavar="DIR",
        help=f"append to DIR/log.jsonl, every {LOG_STEPS} steps and every epoch, and write TensorBoard's scalars there",
    )
    option(
        "--target-accuracy",
        type=share,
        metavar="SHARE",
        help="fail unless the last epoch's accuracy on what was held out is at least this, such as 0.93",
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
    begin(comm)
    try:
        compare(comm, arguments)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2
    if not arguments.checkpoint:
        return train(comm, arguments)
    with preemption(comm) as stop:
        status = train(comm, arguments, stop)
    if status == STOPPED:
        # Whoever asks again while the ranks end gets the same answer.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
    return status


def train(comm: MPI.Intracomm, arguments: argparse.Namespace, stop: Preemption | None = None) -> int:
    """Train, up to the end or until told to stop; the exit status."""
    try:
        trainer, log = prepare(comm, arguments)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2

    from hpcdl.torch.checkpoint import CheckpointError
    from hpcdl.torch.train import spread

    began, first = perf_counter(), comm.rank == 0
    if first:
        print(header(arguments, trainer), flush=True)
    stopped = unsaved = None
    with log or nullcontext(), reporting(trainer, arguments.epochs, on=first) as (on_step, on_epoch):
        try:
            stopped = follow(trainer, arguments, log, on_step, on_epoch, stop)
        except CheckpointError as error:  # the same on all ranks
            unsaved = str(error)
    if stopped:
        logger.info(stopped)
        return STOPPED
    apart = spread(trainer.model, comm)

    if first:
        print(table(trainer))
        seconds = perf_counter() - began
        print(f"{seconds:.1f} s; largest difference of a parameter between ranks: {apart:g}", flush=True)
    failure = unsaved or judge(trainer.epochs, apart, arguments.target_accuracy)
    if failure:
        complain(comm, failure)
        return 1
    return 0


def begin(comm: MPI.Comm) -> None:
    """Have the ranks' log on standard error, and say there what a person should know of how the job was launched."""
    configure(comm)
    for line in notices(comm):
        word, _, text = line.partition(": ")
        if word == "note" or comm.rank == 0:  # it is the same on all ranks
            logger.log(logging.INFO if word == "note" else logging.WARNING, text)


class Refused(Exception):
    """The training cannot begin; all ranks raise it alike."""


def compare(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    """Refuse arguments that differ between ranks or contradict themselves."""
    # The first agreement: a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    agree(comm, None)
    for name, value in vars(arguments).items():
        # Where the data and the log lie may differ, what is read may not: load_together.
        if name not in ("run", "data", "log_dir"):
            differs = verdict.difference(comm, f"--{name.replace('_', '-')}", value)
            if differs:
                raise Refused(differs)
    agree(comm, choose(arguments))


def prepare(comm: MPI.Intracomm, arguments: argparse.Namespace) -> tuple[Trainer, Log | None]:
    """Whatever else can be wrong before the first step; what is wrong on one rank is refused by all."""
    try:
        # The library says itself which names there are and which numbers of ranks each can serve.
        hpcdl.allreduce(np.zeros(1), comm, algorithm=arguments.algorithm)
    except (ValueError, HpcdlError) as error:
        raise Refused(f"--algorithm {arguments.algorithm}: {error}") from error
    differs = verdict.difference(comm, "model", arguments.model)  # chosen by the data, which lies elsewhere on each
    if differs:
        raise Refused(differs)
    source: data.ImageSet | text.Text
    try:
        if MODELS[arguments.model].of == "images":
            source = data.load_together(arguments.data, comm)
        else:
            source = text.load_together(arguments.data or "bible", comm, block_size=arguments.block_size)
    except DataError as error:
        raise Refused(f"--data: {error}") from error

    problem = None
    try:
        import torch

        from hpcdl.torch.train import Adam, Sgd, Trainer, build, image_task, text_task
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
    task: Task
    task = image_task(source) if isinstance(source, data.ImageSet) else text_task(source, arguments.block_size)
    try:
        model = build(arguments.model, task, seed=arguments.seed)
    except ValueError as error:
        raise Refused(f"--model {arguments.model}: {error}") from error
    optimizer: type[Sgd] | type[Adam] = Sgd if arguments.optimizer == "sgd" else Adam
    trainer = Trainer(
        task,
        model,
        optimizer(model.parameters(), lr=arguments.lr, momentum=arguments.momentum),
        comm,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        accumulate=arguments.accumulate,
        bucket_cap_mb=arguments.bucket_cap_mb,
        first_bucket_mb=min(1.0, arguments.bucket_cap_mb),
        algorithm=arguments.algorithm,
        overlap={"auto": "auto", "on": True, "off": False}[arguments.overlap],
        wire_dtype=arguments.wire_dtype and getattr(torch, arguments.wire_dtype),
    )
    if arguments.checkpoint:
        begin_or_resume(trainer, arguments)
    return trainer, open_log(trainer, arguments)


def choose(arguments: argparse.Namespace) -> str | None:
    """Fill in what was left open; what contradicts itself, in one line."""
    source = arguments.data
    is_text = source is not None and (source == "bible" or source.endswith(".txt") or Path(source).is_file())
    if arguments.model is None:
        arguments.model = "transformer" if is_text else "mlp"
    model, kind = arguments.model, MODELS[arguments.model]
    if source is not None and is_text != (kind.of == "text"):
        others = " or ".join(name for name, other in MODELS.items() if other.of != kind.of)
        what = "a text" if is_text else "of images"
        return f"--model {model} is for {kind.of}, --data {source} is {what}: take --model {others}, or other data"
    if arguments.block_size and kind.of != "text":
        return f"--block-size is for text, --model {model} is for images"
    for name in ("checkpoint_every", "resume"):
        if getattr(arguments, name) and not arguments.checkpoint:
            return f"--{name.replace('_', '-')} needs --checkpoint DIR"
    if arguments.wire_dtype and arguments.algorithm:
        return f"--wire-dtype brings an all-reduce of its own: leave out --algorithm {arguments.algorithm}"
    arguments.algorithm = arguments.algorithm or "binary_blocks"
    arguments.block_size = arguments.block_size or BLOCK_SIZE
    arguments.optimizer = arguments.optimizer or kind.optimizer
    arguments.lr, arguments.epochs = arguments.lr or kind.lrs[arguments.optimizer], arguments.epochs or kind.epochs
    return None


def begin_or_resume(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Have a folder that can be written to; and either go on from what is in it, or find it empty."""
    from hpcdl.torch.checkpoint import CheckpointError

    comm, folder = trainer.comm, Path(arguments.checkpoint)
    agree(comm, unusable("--checkpoint", folder))
    if not arguments.resume:
        there = f"--checkpoint: {folder} holds checkpoints: go on from them by --resume, or name another folder"
        agree(comm, there if any(folder.glob("checkpoint-*")) else None)
        return
    try:
        with warnings.catch_warnings(record=True) as passed_over:
            warnings.simplefilter("always")
            checkpoint = trainer.resume(folder)
    except CheckpointError as error:
        raise Refused(f"--resume: {error}") from error
    for warning in passed_over:
        logger.info("%s", warning.message)
    if checkpoint is None:
        logger.info("no checkpoint in %s yet: starting from the beginning", folder)
    else:
        logger.info("going on from %s, step %d", checkpoint.path, checkpoint.step)


def open_log(trainer: Trainer, arguments: argparse.Namespace) -> Log | None:
    """Rank 0's log, if one is wanted."""
    comm, log, problem = trainer.comm, None, None
    if arguments.log_dir and comm.rank == 0:
        folder = Path(arguments.log_dir)
        problem = unusable("--log-dir", folder)
        if problem is None:
            settings = {name: value for name, value in vars(arguments).items() if name != "run"}
            log = Log(folder, {**settings, "ranks": comm.size}, trainer.steps)
            if log.missing:
                logger.info(log.missing)
    agree(comm, problem)
    return log


def unusable(option: str, folder: Path) -> str | None:
    """Why a folder cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{option} {folder}: {error.strerror}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{option} {folder}: Permission denied"


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Refuse if any rank has a problem."""
    agreed = verdict.agree(comm, problem)
    if agreed:
        raise Refused(agreed)


def follow(
    trainer: Trainer,
    arguments: argparse.Namespace,
    log: Log | None,
    on_step: Callable[[int], object],
    on_epoch: Callable[[Epoch], object],
    stop: Preemption | None = None,
) -> str | None:
    """Train, report, log and save, up to the first epoch whose loss is not finite; why and where it was stopped."""
    unit, stopped = trainer.task.unit, None
    # Not whether this rank has a log: to measure is a collective call.
    logged = trainer.comm.bcast(log is not None)

    def after_step(samples: int) -> bool:
        nonlocal stopped
        on_step(samples)
        if logged and trainer.steps % LOG_STEPS == 0:
            loss, per_s, communication = trainer.measure()
            if log:
                epoch = len(trainer.epochs) + 1
                log.write("train", trainer.steps, epoch, plain(unit, loss, per_s, communication))
        if stop and stop():
            path = trainer.save(arguments.checkpoint)
            if log:
                log.stop(trainer.steps, stop.reason, path)
            stopped = f"stopped at step {trainer.steps} by {stop.reason}: {path} is written, go on by --resume"
            return True
        ends = trainer.steps % trainer.steps_an_epoch == 0  # then what the epoch came to is saved too, below
        if arguments.checkpoint_every and trainer.steps % arguments.checkpoint_every == 0 and not ends:
            trainer.save(arguments.checkpoint)
        return False

    for epoch in trainer.train(arguments.epochs, after_step):
        on_epoch(epoch)
        if log:
            values = plain(unit, epoch.loss, epoch.per_s, epoch.communication)
            values |= {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy}
            log.write("epoch", trainer.steps, epoch.number, values)
        if not math.isfinite(epoch.loss):
            break
        if arguments.checkpoint:
            trainer.save(arguments.checkpoint)
    return stopped


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


def header(arguments: argparse.Namespace, trainer: Trainer) -> str:
    """One line with all that a result depends on."""
    import torch
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().replace("Version:", "").split("\n")[0].split(",")[0].split())
    ranks, task, model = trainer.comm.size, trainer.task, trainer.model
    parameters = sum(each.numel() for each in model.parameters())
    wire, passes = arguments.wire_dtype, arguments.accumulate
    block = f", block {arguments.block_size}" if MODELS[arguments.model].of == "text" else ""
    return (
        f"hpcdl train: ranks {ranks}, threads {torch.get_num_threads()}, "
        f"all-reduce {f'in {wire} between nodes' if wire else arguments.algorithm}, "
        f"buckets of {arguments.bucket_cap_mb:g} MiB, overlap {'on' if model.reducer.overlap else 'off'}, "
        f"model {arguments.model}, parameters {parameters}, data {task.name} ({task.counts}){block}, "
        f"batch {ranks} x {arguments.batch_size}{f' x {passes}' if passes > 1 else ''}, "
        f"{arguments.optimizer}, lr {arguments.lr:g}, momentum {arguments.momentum:g}, seed {arguments.seed}, {library}"
    )


COLUMNS = "{:>6}  {:>9}  {:>9}  {:>13}  {:>12}  {:>13}"


def table(trainer: Trainer) -> str:
    """One line an epoch, under their names."""
    unit = trainer.task.unit
    lines = [COLUMNS.format("epoch", "loss", "test loss", "test accuracy", f"{unit}/s", "communication")]
    lines += [
        COLUMNS.format(
            epoch.number,
            f"{epoch.loss:.4f}",
            f"{epoch.test_loss:.4f}",
            f"{epoch.accuracy:.2%}",
            f"{epoch.per_s:.0f}",
            f"{epoch.communication:.1%}",
        )
        for epoch in trainer.epochs
    ]
    return "\n".join(lines)


@contextmanager
def reporting(
    trainer: Trainer, epochs: int, *, on: bool
) -> Iterator[tuple[Callable[[int], object], Callable[[Epoch], object]]]:
    """What to call after each step and each epoch: a progress bar on a terminal, else a line an epoch."""

    def line(epoch: Epoch) -> str:
        return (
            f"epoch {epoch.number}/{epochs}  loss {epoch.loss:.4f}  test loss {epoch.test_loss:.4f}  "
            f"test accuracy {epoch.accuracy:.2%}  {epoch.per_s:.0f} {trainer.task.unit}/s  "
            f"communication {epoch.communication:.1%}"
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
    samples = trainer.task.train_count * epochs
    done = min(samples, samples * trainer.steps // (trainer.steps_an_epoch * epochs))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"epoch {len(trainer.epochs) + 1}/{epochs}", total=samples, completed=done)
        yield (
            lambda samples: progress.advance(task, samples),
            lambda epoch: progress.update(task, description=line(epoch)),
        )
