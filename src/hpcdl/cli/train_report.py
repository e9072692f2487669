"""What hpcdl train tells a person."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Protocol

from hpcdl.cli.launch import terminal
from hpcdl.cli.mode_options import pacing
from hpcdl.cli.train_options import COMPRESSION, MODELS

if TYPE_CHECKING:
    from torch import nn

    from hpcdl.torch.growth import BatchGrowth
    from hpcdl.torch.tasks import Task
    from hpcdl.torch.train import Compressed, Epoch, Trainer


class Told(Protocol):
    """What is told of a training, whatever its mode."""

    @property
    def task(self) -> Task: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def growth(self) -> BatchGrowth: ...

    @property
    def epochs(self) -> Sequence[Epoch]: ...

    @property
    def compression(self) -> object: ...


def header(arguments: argparse.Namespace, trainer: Told, ranks: int, how: str) -> str:
    """One line with all that a result depends on; `how` is how gradients are added up, or what the mode does."""
    import torch
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().replace("Version:", "").split("\n")[0].split(",")[0].split())
    task, passes = trainer.task, arguments.accumulate
    # A pipeline's ranks have a stage each.
    parameters = getattr(trainer, "parameters", None) or sum(each.numel() for each in trainer.model.parameters())
    block = f", block {arguments.block_size}" if MODELS[arguments.model].of == "text" else ""
    decay = f", weight decay {arguments.weight_decay:g}" if arguments.weight_decay else ""
    clip = f", clipped at {arguments.clip_norm:g}" if arguments.clip_norm else ""
    what = "all-reduce" if arguments.mode == "sync" else f"mode {arguments.mode}:"
    batch = f"{ranks} x {arguments.batch_size}{f' x {passes}' if passes > 1 else ''}{growing(arguments)}"
    if arguments.mode == "federated":
        batch = f"{arguments.batch_size} of a client"
    return (
        f"hpcdl train: ranks {ranks}, threads {torch.get_num_threads()}, "
        f"{what} {how}, "
        f"model {arguments.model}, parameters {parameters}, {arguments.precision}, data {task.name} ({task.counts})"
        f"{block}, batch {batch}, "
        f"{arguments.optimizer}, lr {rates(arguments, trainer)}, momentum {arguments.momentum:g}{decay}{clip}, "
        f"seed {arguments.seed}{pacing(arguments)}, {library}"
    )


def exchange(arguments: argparse.Namespace, trainer: Trainer) -> str:
    """How gradients are added up."""
    sums = f"in {arguments.wire_dtype} between nodes" if arguments.wire_dtype else arguments.algorithm
    if arguments.compress:
        sums = f"compressed by {compressed_by(arguments)}"
    overlap = "on" if trainer.model.reducer.overlap else "off"
    return f"{sums}, buckets of {arguments.bucket_cap_mb:g} MiB, overlap {overlap}"


def compressed_by(arguments: argparse.Namespace) -> str:
    """The method, how it is set and the exchange."""
    names = {"density": "density {:g}", "compress_rank": "rank {}", "compress_warmup": "{} epochs of warm-up"}
    values = {name: getattr(arguments, name) for name in names if name in COMPRESSION[arguments.compress]}
    settings = ", ".join(names[name].format(value) for name, value in values.items() if value)
    return f"{arguments.compress} {arguments.exchange}{f' ({settings})' if settings else ''}"


def growing(arguments: argparse.Namespace) -> str:
    """Up to where the batch grows."""
    if not arguments.grow_batch:
        return ""
    most = arguments.max_batch_size
    return f" growing to {arguments.grow_batch}{f' in passes of up to {most} a rank' if most else ''}"


def rates(arguments: argparse.Namespace, trainer: Told) -> str:
    """The highest rate, and how it goes."""
    highest = arguments.lr
    if arguments.base_batch:
        highest *= trainer.growth.first / arguments.base_batch
    known: dict[str, Callable[[], str]] = {
        "step": lambda: f"x {arguments.gamma:g} at epochs {', '.join(map(str, arguments.milestones))}",
        "cyclic": lambda: f"from {arguments.min_lr / arguments.lr:g} of it in {arguments.cycle_epochs:g} epochs",
        "onecycle": lambda: f"from {arguments.min_lr / arguments.lr:g} of it",
    }
    more = f" {known[arguments.schedule]()}" if arguments.schedule in known else ""
    how = "" if arguments.schedule == "constant" else f" ({arguments.schedule}{more})"
    warmup = f" behind {arguments.warmup_epochs:g} epochs of warm-up" if arguments.warmup_epochs else ""
    return f"{highest:g}{how}{warmup}"


COLUMNS = "{:>6}  {:>7}  {:>9}  {:>9}  {:>9}  {:>13}  {:>12}  {:>13}"
MORE = "  {:>7}  {:>7}  {:>9}  {:>11}"
"""With compression."""


def table(trainer: Told) -> str:
    """One line an epoch, under their names."""
    unit = trainer.task.unit
    names = COLUMNS.format("epoch", "batch", "lr", "loss", "test loss", "test accuracy", f"{unit}/s", "communication")
    lines = [names + (MORE.format("ratio", "error", "residual", "compressing") if trainer.compression else "")]
    lines += [
        COLUMNS.format(
            epoch.number,
            epoch.batch,
            f"{epoch.lr:.3g}",
            f"{epoch.loss:.4f}",
            f"{epoch.test_loss:.4f}",
            f"{epoch.accuracy:.2%}",
            f"{epoch.per_s:.0f}",
            f"{epoch.communication:.1%}",
        )
        + (MORE.format(*shown(epoch.compressed)) if epoch.compressed else "")
        for epoch in trainer.epochs
    ]
    return "\n".join(lines)


def shown(compressed: Compressed) -> tuple[str, str, str, str]:
    """The ratio, the error, the residual and the share of time; where nothing was sent there is no ratio."""
    return (
        f"{compressed.ratio:.3g}x" if math.isfinite(compressed.ratio) else "none",
        f"{compressed.error:.1%}" if math.isfinite(compressed.error) else "none",
        f"{compressed.residual:.3g}",
        f"{compressed.compressing:.1%}",
    )


def pays(trainer: Trainer) -> str | None:
    """Does compression save time here? By what it took, and what the gradient takes as it is; None: not compressed."""
    told = [epoch.compressed for epoch in trainer.epochs if epoch.compressed]
    # The first sum of its kind takes longer than the others.
    plain = [each.plain_s for each in told if math.isfinite(each.plain_s)]
    plain, took = plain[1:] or plain, [each.reduction_s for each in told if math.isfinite(each.reduction_s)]
    if not plain or not took:
        return None
    ours, theirs = 1e3 * median(took), 1e3 * median(plain)
    if ours < theirs:
        so = f"it saves {theirs - ours:.3g} ms a step"
    else:
        so = "it costs more time than it saves here, so leave out --compress"
    return f"compression takes {ours:.3g} ms a step, to add up the whole gradient would take {theirs:.3g} ms: {so}"


@contextmanager
def reporting(
    trainer: Told, epochs: int, done: int = 0, *, on: bool
) -> Iterator[tuple[Callable[[int], object], Callable[[Epoch], object]]]:
    """What to call after each step and each epoch: a progress bar on a terminal, else a line an epoch.

    `done` are the samples of this epoch that it has behind it.
    """

    def line(epoch: Epoch) -> str:
        compressed = ""
        if epoch.compressed:
            compressed = "  ratio {}  error {}  residual {}  compressing {}".format(*shown(epoch.compressed))
        return (
            f"epoch {epoch.number}/{epochs}  loss {epoch.loss:.4f}  test loss {epoch.test_loss:.4f}  "
            f"test accuracy {epoch.accuracy:.2%}  {epoch.per_s:.0f} {trainer.task.unit}/s  "
            f"communication {epoch.communication:.1%}{compressed}"
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
    behind = min(samples, len(trainer.epochs) * trainer.task.train_count + done)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"epoch {len(trainer.epochs) + 1}/{epochs}", total=samples, completed=behind)
        yield (
            lambda samples: progress.advance(task, samples),
            lambda epoch: progress.update(task, description=line(epoch)),
        )
