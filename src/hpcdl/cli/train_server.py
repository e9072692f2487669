"""hpcdl train --mode parameter-server and backup-workers: rank 0 serves, tells how it goes and decides how it ends."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from hpcdl.cli.agreed import Refused, agree, complain
from hpcdl.cli.mode_options import paced, pacing
from hpcdl.cli.server_options import DECAY
from hpcdl.cli.train import judge, learnt, open_log, plan
from hpcdl.cli.train_log import Log, plain
from hpcdl.cli.train_options import MODELS
from hpcdl.cli.train_report import rates, reporting, table
from hpcdl.cli.train_survive import alone
from hpcdl.ends import wait_until_read
from hpcdl.logs import logger

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import Tensor, nn

    from hpcdl.sgd.server import Passed, Report
    from hpcdl.sgd.worker import Loss
    from hpcdl.torch.growth import BatchGrowth
    from hpcdl.torch.tasks import Task
    from hpcdl.torch.train import Epoch


def run(comm: MPI.Intracomm, arguments: argparse.Namespace) -> int:
    """Train; the exit status, the same on all ranks that are left."""
    try:
        agree(comm, impossible(arguments, comm.size))
        task, model = learnt(comm, arguments)
        training = Served(arguments, comm, task, model)
        training.log = open_log(comm, arguments, 0)
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2

    from hpcdl.sgd.roles import has_ulfm

    if not has_ulfm():
        return training.run()

    from hpcdl.survive import leave

    def end() -> NoReturn:
        leave(training.run())

    return alone(end)


def impossible(arguments: argparse.Namespace, ranks: int) -> str | None:
    """Why so many ranks cannot train so."""
    server = arguments.mode == "parameter-server"
    servers = arguments.servers if server else 1
    workers = ranks - servers
    if workers < 1:
        took = f"--servers {servers} leaves no rank to work" if server else "rank 0 serves, and no rank is left to work"
        return f"--mode {arguments.mode}: of {ranks} rank{'s' * (ranks > 1)} {took}: start at least {servers + 1}"
    if server and arguments.softsync and arguments.softsync > workers:
        return f"--softsync {arguments.softsync}: there are {workers} workers, and so many at most"
    if not server and arguments.backups >= workers:
        return f"--backups {arguments.backups}: of {workers} workers {workers - 1} at most"
    return None


class Served:
    """One rank's part in the training, and on rank 0 what is told of it."""

    compression = None

    def __init__(self, arguments: argparse.Namespace, comm: MPI.Intracomm, task: Task, model: nn.Module) -> None:
        from hpcdl.torch.growth import BatchGrowth

        self.arguments, self.comm, self.task, self.model = arguments, comm, task, model
        self.pace = paced(comm, arguments)
        self.log: Log | None = None
        self.asynchronous = arguments.mode == "parameter-server"
        self.servers = arguments.servers if self.asynchronous else 1
        self.workers = comm.size - self.servers
        if task.train_count < self.workers:
            raise Refused(f"{task.train_count} training samples are too few for {self.workers} workers: start fewer")
        if self.asynchronous:
            self.gradients = self.workers // (arguments.softsync or self.workers)
            batch = arguments.batch_size * arguments.push_every * self.gradients
        else:
            self.gradients = self.workers - arguments.backups
            batch = arguments.batch_size * self.gradients
        self.growth: BatchGrowth = BatchGrowth(batch, (), factor=2, limit=batch)
        """The batch of an update, which does not grow."""
        self.epochs: list[Epoch] = []
        self._on_step: Callable[[int], object] = lambda samples: None
        self._on_epoch: Callable[[Epoch], object] = lambda epoch: None

    def run(self) -> int:
        """Train to the end; the exit status."""
        first = self.comm.rank == 0
        if first:
            print(self.header(), flush=True)
        told = reporting(self, self.arguments.epochs, on=first)
        with self.log or nullcontext(), told as (self._on_step, self._on_epoch):
            report = self._play()
        if report.absent:  # MPI_Finalize would wait for them for ever
            wait_until_read()
            self.comm.Abort(report.status)
        return report.status

    def _play(self) -> Report:
        from hpcdl.sgd.backup import backup_workers
        from hpcdl.sgd.downpour import parameter_server
        from hpcdl.sgd.remedies import DelayCompensation, staleness_aware

        given, n = self.arguments, self.task.train_count
        common: dict[str, Any] = {
            "samples": n * given.epochs,
            "every": n,
            "clip_norm": given.clip_norm,
            "timeout_s": given.worker_timeout or math.inf,
            "pace": self.pace,
            "scheduler": self.scheduler,
            "on_pass": self.passed,
            "on_leave": self.left,
            "judge": self.judge,
        }
        if not self.asynchronous:
            return backup_workers(self.model, self.loss(), self.optimizer, self.comm, backups=given.backups, **common)
        compensate = None
        if given.compensate:
            decay = DECAY if given.compensate == "adaptive" else None
            compensate = DelayCompensation(given.compensation, decay)
        return parameter_server(
            self.model,
            self.loss(),
            self.optimizer,
            self.comm,
            servers=given.servers,
            n_fetch=given.fetch_every,
            n_push=given.push_every,
            bound=math.inf if given.staleness_bound is None else given.staleness_bound,
            softsync=given.softsync,
            warm=given.warm_start,
            rate=staleness_aware if given.stale_rate else None,
            compensate=compensate,
            **common,
        )

    # ---- what a worker does, and a server --------------------------------------------------------------------------

    def loss(self) -> Loss:
        """The mean loss over a worker's next samples."""
        from hpcdl.sgd.stream import Stream
        from hpcdl.torch.train import cross_entropy

        place = max(0, self.comm.rank - self.servers)
        batch = self.arguments.batch_size * self.workers
        stream = Stream(self.task.train_count, seed=self.arguments.seed, batch=batch, rank=place, size=self.workers)
        # In an epoch's last batch a worker may have no sample: alone it goes on to the next one.
        some = (share for share in map(stream.__getitem__, count()) if len(share.indices))

        def loss(step: int) -> tuple[Tensor, int]:
            mine = (next(some) if self.asynchronous else stream[step]).indices
            inputs, labels = self.task.train(mine)
            with self.autocast():
                return cross_entropy(self.model(inputs), labels) / (max(1, len(mine)) * self.task.labels), len(mine)

        return loss

    def optimizer(self, pieces: nn.Module) -> Any:
        """What changes a server's part."""
        from hpcdl.torch.recipe import optimizer

        given = self.arguments
        lr, _, _ = plan(given, self.growth.first)
        return optimizer(given.optimizer, pieces, lr=lr, momentum=given.momentum, weight_decay=given.weight_decay)

    def scheduler(self, optimizer: Any) -> Any:
        """How its rate goes, by the updates."""
        from hpcdl.torch.recipe import scheduler

        _, schedule, _ = plan(self.arguments, self.growth.first)
        updates = partial(_updates, self.task.train_count / self.growth.first)
        return scheduler(schedule, optimizer, epochs=self.arguments.epochs, updates=updates, growth=self.growth)

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward runs within."""
        import torch

        from hpcdl.torch.train import PRECISIONS

        dtype = PRECISIONS[self.arguments.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    # ---- what is told ----------------------------------------------------------------------------------------------

    def passed(self, passed: Passed) -> bool:
        """An epoch has ended; True if there is no use in another one."""
        from mpi4py import MPI

        from hpcdl.torch.train import Epoch, evaluate

        def within() -> AbstractContextManager[Any]:
            passed.serve()  # between two batches, so that no worker waits for all of them
            return self.autocast()

        test = evaluate(self.model, self.task, MPI.COMM_SELF, within=within)
        per_s = passed.samples * self.task.labels / passed.seconds
        epoch = Epoch(
            passed.number, passed.loss, *test, per_s, passed.waited, self.growth.first, passed.lr, passed.late
        )
        self.epochs.append(epoch)
        self._on_step(passed.samples)
        self._on_epoch(epoch)
        if self.log:
            values = plain(self.task.unit, epoch)
            values |= {"test_loss": epoch.test_loss, "accuracy": epoch.accuracy, "late": epoch.skipped}
            values |= {"lr": epoch.lr, "batch": epoch.batch}
            self.log.write("epoch", passed.updates, epoch.number, values)
        return not _is_well(epoch)

    def left(self, worker: int, why: str) -> None:
        """A worker is left out from now on."""
        logger.warning("rank %d %s: the others go on without it", worker, why)

    def judge(self, report: Report) -> int:
        """Print what it came to; the exit status."""
        import torch

        print(table(self))
        for line in self.summary(report):
            print(line)
        sys.stdout.flush()
        if self.log:
            self.log.write("server", report.updates, len(self.epochs), self.logged(report))
        finite = all(bool(torch.isfinite(each).all()) for each in self.model.parameters())
        first = report.not_finite and (f"update {report.not_finite[0]} from rank {report.not_finite[1]}", None)
        whole, diverged = self.arguments.epochs * self.task.train_count, not all(map(_is_well, self.epochs))
        if report.samples < whole and not diverged:
            failure: str | None = f"no worker is left: of {whole} samples {report.samples} were seen"
        else:
            failure = judge(self.epochs[-1], first, 0.0 if finite else math.inf, self.arguments.target_accuracy)
        if failure:
            complain(self.comm, failure)
        return 1 if failure else 0

    def header(self) -> str:
        """One line with all that a result depends on."""
        import torch
        from mpi4py import MPI

        given = self.arguments
        library = " ".join(MPI.Get_library_version().replace("Version:", "").split("\n")[0].split(",")[0].split())
        parameters = sum(each.numel() for each in self.model.parameters())
        decay = f", weight decay {given.weight_decay:g}" if given.weight_decay else ""
        clip = f", clipped at {given.clip_norm:g}" if given.clip_norm else ""
        block = f", block {given.block_size}" if MODELS[given.model].of == "text" else ""
        batch = f"{self.growth.first // given.batch_size} x {given.batch_size}"
        return (
            f"hpcdl train: ranks {self.comm.size}, threads {torch.get_num_threads()}, mode {given.mode}: {self.how()}, "
            f"model {given.model}, parameters {parameters}, {given.precision}, data {self.task.name} "
            f"({self.task.counts}){block}, batch {batch}, {given.optimizer}, lr {rates(given, self)}, "
            f"momentum {given.momentum:g}{decay}{clip}, seed {given.seed}{pacing(given)}, {library}"
        )

    def how(self) -> str:
        """Who serves and who works, and what is done about stale or late gradients."""
        given, workers = self.arguments, f"{self.workers} worker{'s' * (self.workers > 1)}"
        if not self.asynchronous:
            return f"1 server, {workers}, {given.backups} of them backups"
        words = [f"{self.servers} server{'s' * (self.servers > 1)}, {workers}"]
        words += [f"fetch every {given.fetch_every} and push every {given.push_every} steps"]
        words += [f"{self.gradients} gradients an update"] * (self.gradients > 1)
        words += [f"at most {given.staleness_bound} clocks ahead"] * (given.staleness_bound is not None)
        words += [f"warm start of {given.warm_start}"] * bool(given.warm_start)
        words += ["rate by staleness"] * given.stale_rate
        words += [f"{given.compensate} delay compensation {given.compensation or 0:g}"] * bool(given.compensate)
        return ", ".join(words)

    def summary(self, report: Report) -> list[str]:
        """The last lines: how fast, how stale, and who was late or lost."""
        per_s = report.samples * self.task.labels / report.seconds
        busy = report.cpu_s / report.seconds
        lines = [
            f"{report.seconds:.1f} s, {report.updates} updates, {per_s:.0f} {self.task.unit}/s; the server was busy "
            f"{busy:.1%} of the time"
        ]
        if self.asynchronous and report.staleness:
            total = sum(report.staleness.values())
            mean = sum(stale * times for stale, times in report.staleness.items()) / total
            shares = ", ".join(f"{stale}: {times / total:.1%}" for stale, times in report.staleness.items())
            lines.append(f"staleness {mean:.2f} in the mean, {max(report.staleness)} at most; gradients of {shares}")
        if report.late:
            late = ", ".join(f"rank {rank}: {times}" for rank, times in report.late.items())
            lines.append(f"gradients that came too late: {late}")
        lines += [f"rank {rank} {why}" for rank, why in report.left.items()]
        return lines

    def logged(self, report: Report) -> dict[str, float]:
        """The same for programs."""
        values = {"seconds": report.seconds, "server_cpu_s": report.cpu_s, "left": float(len(report.left))}
        values[f"{self.task.unit}_per_s"] = report.samples * self.task.labels / report.seconds
        values |= {f"staleness_{stale}": float(times) for stale, times in report.staleness.items()}
        values |= {f"late_{rank}": float(times) for rank, times in report.late.items()}
        return values | {f"left_{rank}": 1.0 for rank in report.left}


def _is_well(epoch: Epoch) -> bool:
    return math.isfinite(epoch.loss)


def _updates(an_epoch: float, epochs: float) -> int:
    return max(1, round(an_epoch * epochs))
