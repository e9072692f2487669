"""hpcdl train: data-parallel SGD on real images, or on text; synchronous, unless another mode is asked for."""

from __future__ import annotations

import argparse
import math
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import hpcdl
from hpcdl import data, text, verdict
from hpcdl.cli.agreed import Refused, agree, begin, complain
from hpcdl.cli.mode_options import SERVED, paced
from hpcdl.cli.train_log import Log, plain
from hpcdl.cli.train_options import COMPRESSION, LOG_STEPS, MODELS, add_arguments, choose
from hpcdl.cli.train_report import compressed_by, exchange, header, pays, reporting, table
from hpcdl.data import DataError
from hpcdl.environment import cores_per_rank
from hpcdl.errors import HpcdlError
from hpcdl.logs import logger
from hpcdl.preemption import SIGNALS, preemption

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import nn
    from torch.optim import Optimizer

    from hpcdl.compress import Compression, Method
    from hpcdl.preemption import Preemption
    from hpcdl.sgd.training import Training
    from hpcdl.torch.checkpoint import Checkpoint
    from hpcdl.torch.parallel import DistributedDataParallel
    from hpcdl.torch.recipe import Schedule
    from hpcdl.torch.tasks import Task
    from hpcdl.torch.train import Epoch, Trainer

__all__ = ["add_arguments", "run"]

Prepare: TypeAlias = "Callable[[MPI.Intracomm, argparse.Namespace], tuple[Training, Log | None, str]]"

STOPPED = 75
"""EX_TEMPFAIL: try again."""

IN_MEMORY = (
    "all ranks are on one node, where they add up gradients in their shared memory: there is no wire, and compression "
    "saves nothing but costs time and precision; leave out --compress, unless to try what it does to the accuracy"
)


def run(arguments: argparse.Namespace) -> int:
    """Train on all ranks; the exit status is the same on all of them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if arguments.survive and MPI.Comm.Get_parent() != MPI.COMM_NULL:
        from hpcdl.cli import train_survive

        return train_survive.join(comm, arguments)
    begin(comm)
    try:
        compare(comm, arguments)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2
    if arguments.survive:
        from hpcdl.cli import train_survive

        return train_survive.run(comm, arguments)
    if arguments.mode in SERVED:
        from hpcdl.cli import train_server

        return train_server.run(comm, arguments)
    if arguments.mode != "sync":
        from hpcdl.cli import train_modes

        return train_modes.run(comm, arguments)
    if not arguments.checkpoint:
        return train(comm, arguments)
    with preemption(comm) as stop:
        status = train(comm, arguments, stop)
    if status == STOPPED:
        # Whoever asks again while the ranks end gets the same answer.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
    return status


def train(
    comm: MPI.Intracomm,
    arguments: argparse.Namespace,
    stop: Preemption | None = None,
    prepare: Prepare | None = None,
) -> int:
    """Train, up to the end or until told to stop; the exit status. `prepare` is that of another mode."""
    trainer: Trainer | Training
    try:
        trainer, log, how = (prepare or synchronous)(comm, arguments)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2

    from hpcdl.torch.checkpoint import CheckpointError
    from hpcdl.torch.train import Trainer, spread

    began, first = perf_counter(), comm.rank == 0
    if first:
        print(header(arguments, trainer, comm.size, how), flush=True)
    stopped = unsaved = None
    done = trainer.steps - trainer.updates(len(trainer.epochs))
    done *= trainer.growth.batch(len(trainer.epochs))
    with log or nullcontext(), reporting(trainer, arguments.epochs, done, on=first) as (on_step, on_epoch):
        try:
            stopped = follow(trainer, arguments, log, on_step, on_epoch, stop)
        except CheckpointError as error:  # the same on all ranks
            unsaved = str(error)
    if stopped:
        logger.info(stopped)
        return STOPPED
    apart = spread(trainer.model, comm) if isinstance(trainer, Trainer) else trainer.spread()

    if first:
        print(table(trainer))
        if remark := pays(trainer) if isinstance(trainer, Trainer) else trainer.remark:
            print(remark)
        seconds = perf_counter() - began
        left_out = sum(epoch.skipped for epoch in trainer.epochs)
        scale = f", {left_out} of them left out; loss scale {trainer.scaler.get_scale():g}" if trainer.scaler else ""
        spent = f"{seconds:.1f} s, {trainer.steps} steps{scale}"
        print(f"{spent}; largest difference of a parameter between ranks: {apart:g}", flush=True)
    where = trainer.first_not_finite()
    first_at = where and (f"step {where.step} on rank {where.rank}", where.parameter)
    failure = judge(trainer.epochs[-1], first_at, apart, arguments.target_accuracy)
    failure = unsaved or failure
    if failure:
        complain(comm, failure)
        return 1
    return 0


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


def synchronous(comm: MPI.Intracomm, arguments: argparse.Namespace) -> tuple[Trainer, Log | None, str]:
    """The trainer, rank 0's log, and how gradients are added up; what is wrong on one rank is refused by all."""
    try_algorithm(comm, arguments.algorithm)
    task, model = learnt(comm, arguments)
    trainer = assemble(comm, arguments, task, model)
    if arguments.checkpoint:
        begin_or_resume(trainer, arguments)
    return trainer, open_log(comm, arguments, trainer.steps), exchange(arguments, trainer)


def try_algorithm(comm: MPI.Intracomm, name: str) -> None:
    """The library says itself which names there are and which numbers of ranks each can serve."""
    try:
        hpcdl.allreduce(np.zeros(1), comm, algorithm=name)
    except (ValueError, HpcdlError) as error:
        raise Refused(f"--algorithm {name}: {error}") from error


def stepper(arguments: argparse.Namespace, lr: float) -> Callable[[nn.Module], Optimizer]:
    """What makes the optimiser of a module."""
    from hpcdl.torch.recipe import optimizer

    return lambda module: optimizer(
        arguments.optimizer,
        module,
        lr=lr,
        momentum=arguments.momentum,
        weight_decay=arguments.weight_decay,
        exclude_lr=arguments.exclude_lr,
    )


def learnt(comm: MPI.Intracomm, arguments: argparse.Namespace) -> tuple[Task, nn.Module]:
    """What is learnt and by which network, once the data are read and torch knows how many threads it has."""
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

        from hpcdl.torch.tasks import build, image_task, text_task
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
        return task, build(arguments.model, task, seed=arguments.seed)
    except ValueError as error:
        raise Refused(f"--model {arguments.model}: {error}") from error


def assemble(comm: MPI.Intracomm, arguments: argparse.Namespace, task: Task, model: nn.Module) -> Trainer:
    """The trainer that the arguments describe."""
    import torch

    from hpcdl.torch.growth import BatchGrowth
    from hpcdl.torch.hooks import has_a_wire
    from hpcdl.torch.recipe import optimizer, scheduler
    from hpcdl.torch.train import Trainer

    batch = arguments.batch_size * arguments.accumulate * comm.size
    growth, most = None, None
    if arguments.grow_batch:
        try:
            growth = BatchGrowth(batch, arguments.milestones, factor=1 / arguments.gamma, limit=arguments.grow_batch)
        except ValueError as error:
            raise Refused(f"--grow-batch {arguments.grow_batch}: {error}") from error
        most = arguments.max_batch_size
    lr, schedule, settings = plan(arguments, batch)
    settings["growth"] = str(growth)
    method = compressor(arguments)
    if method:
        settings["compression"] = compressed_by(arguments)
        if arguments.exchange == "by_node":  # what is kept belongs to shares of the buckets
            settings["bucket cap"] = arguments.bucket_cap_mb
        if not has_a_wire(comm):
            logger.info(IN_MEMORY)
    momentum, weight_decay, clip_norm = arguments.momentum, arguments.weight_decay, arguments.clip_norm
    if arguments.compress == "dgc":
        # Which sees to both itself. Without its momentum the decay would be as much weaker than in a plain training.
        momentum, weight_decay, clip_norm = 0.0, weight_decay / (1 - momentum), None
    trainer = Trainer(
        task,
        model,
        optimizer(
            arguments.optimizer,
            model,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            exclude_lr=arguments.exclude_lr,
        ),
        comm,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        accumulate=arguments.accumulate,
        growth=growth,
        most=most,
        precision=arguments.precision,
        clip_norm=clip_norm,
        settings=settings,
        compression=partial(compress, method, arguments.exchange) if method else None,
        bucket_cap_mb=arguments.bucket_cap_mb,
        first_bucket_mb=min(1.0, arguments.bucket_cap_mb),
        algorithm=arguments.algorithm,
        overlap={"auto": "auto", "on": True, "off": False}[arguments.overlap],
        wire_dtype=arguments.wire_dtype and getattr(torch, arguments.wire_dtype),
    )
    trainer.scheduler = scheduler(
        schedule, trainer.optimizer, epochs=arguments.epochs, updates=trainer.updates, growth=trainer.growth
    )
    pace = paced(comm, arguments)
    if pace.step_s:
        pace.hold(trainer.model, comm.rank, passes=arguments.accumulate)
    return trainer


def plan(arguments: argparse.Namespace, batch: int) -> tuple[float, Schedule, dict[str, Any]]:
    """The rate for a global batch, how it goes, and what of that must be the same to go on from a checkpoint."""
    from hpcdl.torch.recipe import Schedule
    from hpcdl.torch.schedules import linear_scaled_lr

    lr, start = arguments.lr, None
    if arguments.base_batch:
        lr = linear_scaled_lr(arguments.lr, batch, arguments.base_batch)
        start = min(1.0, arguments.lr / lr)
    schedule = Schedule(
        arguments.schedule,
        milestones=arguments.milestones,
        gamma=arguments.gamma,
        lowest=arguments.min_lr / arguments.lr,
        cycle_epochs=arguments.cycle_epochs,
        low_momentum=arguments.low_momentum,
        warmup_epochs=arguments.warmup_epochs,
        start_factor=start,
    )
    settings: dict[str, Any] = {"schedule": str(schedule)}
    if schedule.name != "constant" or schedule.warmup_epochs:  # which holds the rates, also those yet to come
        settings |= {"epochs": arguments.epochs, "lr": lr, "momentum": arguments.momentum}
    return lr, schedule, settings


def compressor(arguments: argparse.Namespace) -> Method | None:
    """What compresses the gradients."""
    if not arguments.compress:
        return None
    from hpcdl.compress import make

    options = {name: getattr(arguments, argument) for argument, name in COMPRESSION[arguments.compress].items()}
    try:
        return make(arguments.compress, **{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise Refused(f"--compress {arguments.compress}: {error}") from error


def compress(method: Method, exchange: str, model: DistributedDataParallel) -> Compression:
    """Have the method reduce the gradients of the model."""
    from hpcdl.compress import Compression

    try:
        return Compression(model, method, exchange=exchange)
    except ValueError as error:
        raise Refused(f"--exchange {exchange}: {error}") from error


def begin_or_resume(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Have a folder that can be written to; and either go on from what is in it, or find it empty."""
    from hpcdl.torch.checkpoint import CheckpointError

    comm, folder = trainer.comm, Path(arguments.checkpoint)
    if not resumes(comm, arguments):
        return
    try:
        with warnings.catch_warnings(record=True) as passed_over:
            warnings.simplefilter("always")
            checkpoint = trainer.resume(folder)
    except CheckpointError as error:
        raise Refused(f"--resume: {error}") from error
    tell_resumed(folder, checkpoint, passed_over)


def resumes(comm: MPI.Intracomm, arguments: argparse.Namespace) -> bool:
    """Is a checkpoint to be gone on from? The folder can be written to, and if not, it holds none."""
    folder = Path(arguments.checkpoint)
    agree(comm, unusable("--checkpoint", folder))
    if not arguments.resume:
        there = f"--checkpoint: {folder} holds checkpoints: go on from them by --resume, or name another folder"
        agree(comm, there if any(folder.glob("checkpoint-*")) else None)
    return bool(arguments.resume)


def tell_resumed(folder: Path, checkpoint: Checkpoint | None, passed_over: Iterable[warnings.WarningMessage]) -> None:
    """From where a training goes on, and which checkpoints it has passed over."""
    for warning in passed_over:
        logger.info("%s", warning.message)
    if checkpoint is None:
        logger.info("no checkpoint in %s yet: starting from the beginning", folder)
    else:
        logger.info("going on from %s, step %d", checkpoint.path, checkpoint.step)


def open_log(comm: MPI.Intracomm, arguments: argparse.Namespace, step: int) -> Log | None:
    """Rank 0's log, if one is wanted."""
    log, problem = None, None
    if arguments.log_dir and comm.rank == 0:
        folder = Path(arguments.log_dir)
        problem = unusable("--log-dir", folder)
        if problem is None:
            log = Log(folder, logged(arguments, comm.size), step)
            if log.missing:
                logger.info(log.missing)
    agree(comm, problem)
    return log


def logged(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """What a log begins with."""
    settings = {name: value for name, value in vars(arguments).items() if name != "run"} | {"ranks": ranks}
    return settings | {"fault": [asdict(fault) for fault in arguments.fault or ()]}


def unusable(option: str, folder: Path) -> str | None:
    """Why a folder cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{option} {folder}: {error.strerror}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{option} {folder}: Permission denied"


def follow(
    trainer: Trainer | Training,
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
            news = trainer.measure()
            if log:
                log.write("train", trainer.steps, len(trainer.epochs) + 1, plain(unit, news) | state(trainer))
        if stop and stop():
            path = trainer.save(arguments.checkpoint)
            if log:
                log.stop(trainer.steps, stop.reason, path)
            stopped = f"stopped at step {trainer.steps} by {stop.reason}: {path} is written, go on by --resume"
            return True
        ends = trainer.steps == trainer.updates(len(trainer.epochs) + 1)  # then its result is saved too, below
        if arguments.checkpoint_every and trainer.steps % arguments.checkpoint_every == 0 and not ends:
            trainer.save(arguments.checkpoint)
        return False

    for epoch in trainer.train(arguments.epochs, after_step):
        on_epoch(epoch)
        if log:
            values = plain(unit, epoch)
            values |= {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy, "skipped": epoch.skipped}
            values |= state(trainer) | {"lr": epoch.lr, "batch": epoch.batch}
            if epoch.compressed:
                told = epoch.compressed
                values |= {"error": told.error, "residual": told.residual, "plain_reduction_s": told.plain_s}
            log.write("epoch", trainer.steps, epoch.number, values)
        if not math.isfinite(epoch.loss):
            break
        if arguments.checkpoint:
            trainer.save(arguments.checkpoint)
    return stopped


def state(trainer: Trainer | Training) -> dict[str, float]:
    """What a schedule or a scaler may change on the way."""
    values = {"lr": trainer.lr, "batch": trainer.growth.batch(len(trainer.epochs))}
    return values | ({"loss_scale": trainer.scaler.get_scale()} if trainer.scaler else {})


def judge(last: Epoch, first_at: tuple[str, str | None] | None, spread: float, target: float | None) -> str | None:
    """What has gone wrong, in one line; None if nothing has.

    `first_at` is where the loss was first not finite, and the parameter whose gradient was not either.
    """
    if not math.isfinite(last.loss):
        if first_at is None:  # no step was taken at all
            return f"all {last.skipped} steps of epoch {last.number} were left out, as their gradients were not finite"
        where, parameter = first_at
        first = f"first at {where}{f' with the gradient of {parameter}' if parameter else ''}"
        return f"the training diverged in epoch {last.number} (loss {last.loss:g}, {first}): try a smaller --lr"
    if not math.isfinite(spread):
        return f"after epoch {last.number} some parameters are not finite: try a smaller --lr"
    if spread != 0:
        return f"the ranks' parameters differ, by up to {spread:g}: they must be equal to the last bit"
    if target is not None and last.accuracy < target:
        return f"test accuracy {last.accuracy:.2%} is below the target of {target:.2%}"
    return None
