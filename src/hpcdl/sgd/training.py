"""Trainings in which ranks do not sum up every gradient: how they go on, and what each epoch comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hpcdl
from hpcdl.data import part, shares
from hpcdl.sgd.averaging import Averaging
from hpcdl.sgd.federated import FederatedAveraging
from hpcdl.sgd.pace import Pace
from hpcdl.torch.checkpoint import CheckpointError
from hpcdl.torch.growth import BatchGrowth
from hpcdl.torch.scaler import is_finite
from hpcdl.torch.tasks import Numbers, Task
from hpcdl.torch.train import PRECISIONS, Epoch, Measured, NotFinite, Scheduler, cross_entropy, evaluate, spread

if TYPE_CHECKING:
    from mpi4py import MPI

LOSS, SAMPLES, SECONDS, WAITED_S = range(4)
"""What is added up: of this rank's samples the loss and the number, its time, and how much of that it has waited."""


class Training:
    """What all have in common, seen from outside like `hpcdl.torch.train.Trainer`."""

    compression = scaler = None
    remark = ""
    """What is to be said of it at the end, besides."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: MPI.Intracomm,
        *,
        batch: int,
        precision: str = "fp32",
    ) -> None:
        """`batch` samples of all ranks together are a step."""
        self.task, self.model, self.optimizer, self.comm = task, model, optimizer, comm
        self.growth = BatchGrowth(batch, (), factor=2, limit=batch)
        self.scheduler: Scheduler | None = None
        self.steps = 0
        self.epochs: list[Epoch] = []
        self._sums, self._told = np.zeros(4), np.zeros(4)
        self._dtype = PRECISIONS[precision]
        self._not_finite: tuple[int, str | None] | None = None

    @property
    def parameters(self) -> int:
        """How many numbers are learnt."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def updates(self, epochs: float) -> int:
        """How many updates come before this time in epochs."""
        whole, rest = divmod(epochs, 1)
        in_one = self.growth.updates(self.task.train_count, 1)
        return int(whole) * in_one + round(rest * in_one)

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result. `on_step` is told how many samples each step had."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """CheckpointError: what it would have to hold is on several ranks."""
        raise CheckpointError(f"{folder}: a checkpoint holds what all ranks have alike, and these have more than that")

    def spread(self) -> float:
        """The largest difference of a parameter between ranks that should have it alike."""
        return spread(self.model, self.comm)

    def measure(self) -> Measured:
        """What came of this epoch's steps since it was last asked; a collective call."""
        news, self._told = self._sums - self._told, self._sums.copy()
        return self._measure(news)

    def _measure(self, sums: NDArray[np.float64]) -> Measured:
        return self._told_by(hpcdl.allreduce(sums.copy(), self.comm))

    def _told_by(self, sums: NDArray[np.float64]) -> Measured:
        loss, samples, seconds, waited_s = sums.tolist()
        labels = samples * self.task.labels
        return Measured(
            loss / labels if labels else math.nan, labels * self.comm.size / seconds, waited_s / seconds, None
        )

    def _end_epoch(self, number: int, lr: float) -> Epoch:
        """Once all ranks are there, see what the epoch came to."""
        began = perf_counter()
        hpcdl.barrier(self.comm)
        self._sums[[SECONDS, WAITED_S]] += perf_counter() - began
        loss, per_s, communication, _ = self._measure(self._sums)
        told = self._evaluate()
        epoch = Epoch(number, loss, *told, per_s, communication, self.growth.first, lr, skipped=0)
        self.epochs.append(epoch)
        self._sums, self._told = np.zeros(4), np.zeros(4)
        return epoch

    def _evaluate(self) -> tuple[float, float]:
        return evaluate(self.model, self.task, self.comm, within=self._within)

    def _within(self) -> AbstractContextManager[Any]:
        """What forward runs within."""
        return nullcontext() if self._dtype is None else torch.autocast("cpu", self._dtype)

    def _look(self, loss: float) -> None:
        """Remember the first step whose loss is not finite."""
        if not math.isfinite(loss) and self._not_finite is None:
            spoilt = (name for name, gradient in self._gradients() if not is_finite(gradient))
            self._not_finite = self.steps, next(spoilt, None)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, each in self.model.named_parameters():
            if each.grad is not None:
                yield name, each.grad

    def first_not_finite(self) -> NotFinite | None:
        """The first step of which a rank's loss was not finite; a collective call."""
        every = self.comm.allgather(self._not_finite)
        found = [NotFinite(each[0], rank, each[1]) for rank, each in enumerate(every) if each is not None]
        return min(found, key=lambda each: each[:2], default=None)


class Averaged(Training):
    """Ranks that take steps of their own, and are averaged now and then; what is evaluated is their consensus."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        averaging: Averaging,
        comm: MPI.Intracomm,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        precision: str = "fp32",
        clip_norm: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`batch_size` samples of each rank in each of `accumulate` backward passes."""
        batch = batch_size * accumulate * comm.size
        super().__init__(task, model, optimizer, comm, batch=batch, precision=precision)
        self.averaging, self.accumulate, self.seed = averaging, accumulate, seed
        self.clip_norm, self.pace = clip_norm, pace or Pace()

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result. At the end the model is the consensus for good."""
        comm = self.comm
        while (epoch := len(self.epochs)) < epochs:
            self.model.train()
            batch, lr = self.growth.first, self.lr
            for mine, total in shares(
                self.task.train_count, epoch, seed=self.seed, batch=batch, rank=comm.rank, size=comm.size
            ):
                lr = self.lr
                self.step(mine, total)
                on_step(total)
            yield self._end_epoch(epoch + 1, lr)
        apart = self.spread()
        self.averaging.settle()
        self.remark = f"before the ranks were brought together at the end, parameters differed by up to {apart:.3g}"

    def step(self, mine: Numbers, total: int) -> None:
        """Take a step on my part of `total` samples, and average if it is time for that."""
        began, loss = perf_counter(), 0.0
        self.optimizer.zero_grad()
        # By what each rank has in the mean: so the mean of the ranks' gradients is that of all samples, also where
        # the ranks' parts are not equal.
        each = total / self.comm.size * self.task.labels
        for number in range(self.accumulate):
            inputs, labels = self.task.train(mine[part(len(mine), number, self.accumulate)])
            with self._within():
                some = cross_entropy(self.model(inputs), labels)
            (some / each).backward()  # type: ignore[no-untyped-call]
            loss += some.item()
        self.pace.wait(self.comm.rank, self.steps, began)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1
        self._look(loss)
        ready = perf_counter()
        self.averaging.step()
        now = perf_counter()
        self._sums += loss, len(mine), now - began, now - ready

    def measure(self) -> Measured:
        """What came of this rank's steps since it was last asked: to ask the others would hold up who is ahead."""
        news, self._told = self._sums - self._told, self._sums.copy()
        return self._told_by(news)

    def _evaluate(self) -> tuple[float, float]:
        with self.averaging.consensus():
            return super()._evaluate()


class Federated(Training):
    """Rounds of federated averaging: an epoch ends with the first round behind which so many samples were seen."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        comm: MPI.Intracomm,
        *,
        clients: list[Numbers],
        batch_size: int,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        """`options` are further ones of FederatedAveraging."""
        super().__init__(task, model, optimizer(model), comm, batch=batch_size, precision=precision)
        self.averaging = FederatedAveraging(
            model, clients, self._loss, comm, optimizer=optimizer, batch_size=batch_size, **options
        )
        self.dropped = self._seen = 0
        """Clients that have not reported back, and samples that were trained on."""

    def _loss(self, model: nn.Module, numbers: Numbers) -> Tensor:
        inputs, labels = self.task.train(numbers)
        with self._within():
            some = cross_entropy(model(inputs), labels)
        return some / (len(numbers) * self.task.labels)

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on until all samples were seen so often, by number; give what came of it at each whole epoch."""
        count = self.task.train_count
        while self._seen < epochs * count:
            before, waited_s, began = self._seen // count, self.averaging.waited_s, perf_counter()
            done = self.averaging.round()
            seen = done.samples * self.averaging.local_epochs
            self._seen += seen
            self.dropped += len(done.dropped)
            self.steps += done.steps
            if seen:
                self._look(done.loss)
            # All ranks have the loss of all; the others' part of the sums is theirs.
            mine = seen / self.comm.size
            spent = perf_counter() - began, self.averaging.waited_s - waited_s
            self._sums += done.loss * self.task.labels * mine if seen else 0.0, mine, *spent
            on_step(seen)
            self.remark = f"{self.averaging.rounds} rounds; {self.dropped} times a client did not report back"
            if self._seen // count > before:
                yield self._end_epoch(min(epochs, self._seen // count), self.lr)
