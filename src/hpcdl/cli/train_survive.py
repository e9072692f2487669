"""hpcdl train --survive: a training that goes on without lost ranks, told by the lowest of those who are left."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, cast

from hpcdl import verdict
from hpcdl.cli.agreed import Refused, agree, complain
from hpcdl.cli.train import judge, learnt, logged, open_log, plan, resumes, stepper, tell_resumed, unusable
from hpcdl.cli.train_log import Log, plain
from hpcdl.cli.train_options import LOG_STEPS, choose
from hpcdl.cli.train_report import header, reporting, table
from hpcdl.errors import HpcdlError
from hpcdl.logs import configure, logger

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import nn

    from hpcdl.survive import Survivors
    from hpcdl.survive.training import Change, Training
    from hpcdl.torch.tasks import Task
    from hpcdl.torch.train import Epoch


def run(comm: MPI.Intracomm, arguments: argparse.Namespace) -> int:
    """Train among all ranks, and end this process; the exit status where it cannot begin, the same on all ranks."""
    survivors = None
    try:
        if arguments.status:
            agree(comm, forget(Path(arguments.status)))
        task, model = learnt(comm, arguments)
        first = beginning(comm, arguments, model)
        survivors = together(comm, arguments)
        training = assemble(arguments, task, model, survivors, first)
        go_on(comm, arguments, training)
        log = open_log(comm, arguments, training.steps)
    except Refused as refusal:
        complain(comm, str(refusal))
        if survivors:
            survivors.close()
        return 2
    return alone(lambda: end(arguments, training, log))


def join(comm: MPI.Intracomm, arguments: argparse.Namespace) -> int:
    """Train in the place of a lost rank, in a process that the others have started with their command line."""
    from hpcdl.survive import Survivors

    survivors = Survivors.join(faults=arguments.fault or ())

    def begin() -> NoReturn:
        from hpcdl.survive.training import handed_over

        configure(cast(Any, survivors))
        state = handed_over(survivors)
        if problem := choose(arguments):
            raise Refused(problem)
        arguments.threads = state["threads"]
        task, model = learnt(comm, arguments)
        training = assemble(arguments, task, model, survivors, state["progress"]["first"])
        training.join(state)
        end(arguments, training, None)

    return alone(begin)


def alone(act: Callable[[], NoReturn]) -> int:
    """Do it, which ends this process, and let an exception end this rank alone: hpcdl.cli.main would end them all."""
    try:
        act()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1  # not reached: that hook is hpcdl.survive's


def together(comm: MPI.Intracomm, arguments: argparse.Namespace) -> Survivors:
    """The ranks as survivors; refused where there is no ULFM, or the algorithm cannot serve every number of ranks."""
    from hpcdl.survive import Survivors

    try:
        return Survivors(comm, policy=arguments.survive, algorithm=arguments.algorithm, faults=arguments.fault or ())
    except RuntimeError as error:
        raise Refused(f"--survive {arguments.survive}: {error}") from error
    except ValueError as error:
        raise Refused(f"--algorithm {arguments.algorithm}: {error}") from error


def beginning(comm: MPI.Intracomm, arguments: argparse.Namespace, model: nn.Module) -> int:
    """How many ranks the training began with: these, or those of the checkpoint that is gone on from."""
    if not (arguments.checkpoint and resumes(comm, arguments)):
        return comm.size
    from hpcdl.survive.training import begun_with
    from hpcdl.torch.checkpoint import CheckpointError

    first = problem = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        try:
            first = begun_with(arguments.checkpoint, model)
        except CheckpointError as error:
            problem = f"--resume: {error}; with --survive a training goes on from checkpoints of such a one alone"
    agree(comm, problem)
    return first or comm.size


def assemble(arguments: argparse.Namespace, task: Task, model: nn.Module, survivors: Survivors, first: int) -> Training:
    """The training that the arguments describe, which began with so many ranks."""
    from hpcdl.survive.training import Training
    from hpcdl.torch.recipe import scheduler

    lr, schedule, settings = plan(arguments, arguments.batch_size * arguments.accumulate * first)
    command = ["-m", "hpcdl", *sys.argv[1:]]
    training = Training(
        task,
        model,
        stepper(arguments, lr)(model),
        survivors,
        batch_size=arguments.batch_size,
        first=first,
        seed=arguments.seed,
        accumulate=arguments.accumulate,
        precision=arguments.precision,
        clip_norm=arguments.clip_norm,
        settings=settings,
        start=(lambda count: survivors.grow(count, sys.executable, command)) if arguments.replace else None,
    )
    training.scheduler = scheduler(
        schedule, training.optimizer, epochs=arguments.epochs, updates=training.updates, growth=training.growth
    )
    return training


def go_on(comm: MPI.Intracomm, arguments: argparse.Namespace, training: Training) -> None:
    """Have every rank read the newest checkpoint, if there is to be one; all must find the same."""
    if not arguments.resume:
        return
    from hpcdl.torch.checkpoint import CheckpointError

    checkpoint = problem = None
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        try:
            checkpoint = training.resume(arguments.checkpoint)
        except CheckpointError as error:
            problem = f"--resume: {error}"
    agree(comm, problem)
    differs = verdict.difference(comm, "checkpoint", f"{checkpoint.path.name if checkpoint else 'none'}")
    if differs:
        raise Refused(f"--resume: {differs}: let {arguments.checkpoint} be a folder that all nodes see")
    tell_resumed(Path(arguments.checkpoint), checkpoint, passed_over)


def forget(file: Path) -> str | None:
    """Have no status from an earlier run, and a folder to write this one's to; why that cannot be."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        return f"--status {file}: {error.strerror}"
    return unusable("--status", file.parent)


class Voice:
    """What is printed and logged, by the lowest of those who live: any rank may come to be that."""

    def __init__(self, training: Training, arguments: argparse.Namespace, log: Log | None) -> None:
        self.training, self.arguments, self.log = training, arguments, log
        self._open = ExitStack()
        self._begun = False

    def __enter__(self) -> Voice:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def speaks(self) -> bool:
        """Is it this rank's turn? It is to the end, from when the others below it are lost."""
        survivors = self.training.survivors
        if survivors.rank != survivors.members[0]:
            return False
        if not self._begun:
            self._begun = True
            self._begin()
        return True

    def _begin(self) -> None:
        training, arguments = self.training, self.arguments
        told = reporting(training, arguments.epochs, training.seen, on=True)
        self._on_step, self._on_epoch = self._open.enter_context(told)
        if self.log is None and arguments.log_dir:  # it was another rank's
            try:
                self.log = Log(Path(arguments.log_dir), logged(arguments, training.survivors.size), training.steps)
            except OSError as error:
                logger.warning("the log ends here, as %s cannot write it: %s", arguments.log_dir, error.strerror)
        if self.log:
            self._open.enter_context(self.log)

    def step(self, samples: int) -> None:
        """A step was taken, with so many samples in it."""
        training = self.training
        news = training.measure() if samples and training.steps % LOG_STEPS == 0 else None
        if not self.speaks:
            return
        self._on_step(samples)
        if self.log and news:
            values = plain(training.task.unit, news) | self._state()
            self.log.write("train", training.steps, len(training.epochs) + 1, values)

    def change(self, change: Change) -> None:
        """Ranks were lost, or have joined."""
        if self.speaks:
            logger.warning("%s", change)
            if self.log:
                self.log.loss(self.training.steps, len(self.training.epochs) + 1, change)

    def epoch(self, epoch: Epoch, samples: int) -> None:
        """An epoch has ended, in which so many samples have counted."""
        if not self.speaks:
            return
        self._on_epoch(epoch)
        if self.log:
            values = plain(self.training.task.unit, epoch) | self._state()
            values |= {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy, "samples": samples}
            values |= {"lr": epoch.lr, "batch": epoch.batch}
            if messages := self.training.survivors.messages:  # counted where there are faults
                values["messages"] = messages
            self.log.write("epoch", self.training.steps, epoch.number, values)

    def _state(self) -> dict[str, float]:
        training = self.training
        ranks = training.survivors.size
        return {"lr": training.lr * training.scale, "batch": ranks * training.each, "ranks": ranks}


def end(arguments: argparse.Namespace, training: Training, log: Log | None) -> NoReturn:
    """Train to the end, and end this process."""
    from hpcdl.survive import leave

    with Voice(training, arguments, log) as voice:
        try:
            status, last = train(arguments, training, voice), voice.speaks
        except HpcdlError as error:
            # There is no quorum. Each rank says so, as it cannot know who else does; and it does not speak for all.
            saved = f"; go on from {arguments.checkpoint} by --resume" if arguments.checkpoint else ""
            logger.error("%s%s", error, saved)
            status, last = 1, False
    training.survivors.close()
    if last and arguments.status:
        try:
            Path(arguments.status).write_text(f"{status}\n")
        except OSError as error:
            logger.error("--status %s: %s", arguments.status, error.strerror)
            status = 1
    leave(status)


def train(arguments: argparse.Namespace, training: Training, voice: Voice) -> int:
    """Train to the end; the exit status, the same on all members."""
    from hpcdl.torch.checkpoint import CheckpointError

    survivors, began, unsaved = training.survivors, perf_counter(), None
    training.on_change = voice.change
    if voice.speaks:
        copies = ", 1 copy of each rank's share" if survivors.policy == "exact" else ""
        how = f"{arguments.algorithm} among the survivors ({survivors.policy}{copies})"
        print(header(arguments, training, survivors.size, how), flush=True)
    try:
        follow(arguments, training, voice)
    except CheckpointError as error:
        unsaved = str(error)
    apart = training.spread()
    first_at = training.not_finite and (f"step {training.not_finite[0]}", training.not_finite[1])
    failure = unsaved or judge(training.epochs[-1], first_at, apart, arguments.target_accuracy)
    if voice.speaks:
        print(table(training))
        lost = f", lost ranks {len(survivors.lost)}, left {survivors.size}" if survivors.lost else ""
        spent = f"{perf_counter() - began:.1f} s, {training.steps} steps{lost}"
        print(f"{spent}; largest difference of a parameter between ranks: {apart:g}", flush=True)
        if failure:
            print(f"hpcdl: {failure}", file=sys.stderr, flush=True)
    return 1 if failure else 0


def follow(arguments: argparse.Namespace, training: Training, voice: Voice) -> None:
    """Train, report, log and save, up to the first epoch whose loss is not finite."""
    every = arguments.checkpoint_every

    def after_step(samples: int) -> None:
        voice.step(samples)
        if every and samples and training.steps % every == 0 and training.seen < training.task.train_count:
            training.save(arguments.checkpoint)

    for epoch in training.train(arguments.epochs, after_step):
        voice.epoch(epoch, training.counted)
        if not math.isfinite(epoch.loss):
            return
        if arguments.checkpoint:
            training.save(arguments.checkpoint)
