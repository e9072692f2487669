"""Training a model whose layers lie on several ranks, with several such models side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

import hpcdl
from hpcdl.data import part, shares
from hpcdl.sgd.pace import Pace
from hpcdl.sgd.pipeline import Mesh, Pipeline, own
from hpcdl.sgd.training import Training
from hpcdl.torch.tasks import Numbers, Task
from hpcdl.torch.train import Epoch, cross_entropy, spread

if TYPE_CHECKING:
    from mpi4py import MPI

NO_LABEL = -100
"""What torch's cross-entropy leaves out."""


class Pipelined(Training):
    """Synchronous SGD by replicas, each a pipeline of stages: its steps are those of one rank with the whole batch.

    Micro-batches are of one size, so what is missing in a last batch is filled up by samples without labels, which
    count for nothing (a batch normalisation would see them).
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        comm: MPI.Intracomm,
        *,
        mesh: Mesh,
        batch_size: int,
        micro_batches: int,
        schedule: str = "1f1b",
        seed: int = 0,
        pace: Pace | None = None,
    ) -> None:
        """`batch_size` samples for each rank of all: a replica has that of its ranks together."""
        self._count = sum(each.numel() for each in model.parameters())
        self.pipeline = Pipeline(
            model, mesh, loss=self._loss, micro_batches=micro_batches, schedule=schedule, pace=pace
        )
        stage = self.pipeline.stage
        super().__init__(task, stage, optimizer(stage), comm, batch=batch_size * comm.size)
        self.mesh, self.seed = mesh, seed
        _, stages, parts = mesh.shape
        self._rows = -(-batch_size * stages * parts // micro_batches) * micro_batches
        self._total = 1
        """Samples of all replicas in this step."""
        self._counts = self.pipeline.last and mesh.part == 0

    @property
    def parameters(self) -> int:
        """Of all stages."""
        return self._count

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result."""
        replicas, batch = self.mesh.shape[0], self.growth.first
        while (epoch := len(self.epochs)) < epochs:
            self.model.train()
            lr = self.lr
            for mine, total in shares(
                self.task.train_count, epoch, seed=self.seed, batch=batch, rank=self.mesh.replica, size=replicas
            ):
                lr = self.lr
                self.step(mine, total)
                on_step(total)
            yield self._end_epoch(epoch + 1, lr)

    def step(self, mine: Numbers, total: int) -> None:
        """Take a step on this replica's part of `total` samples."""
        began, computed_s = perf_counter(), self.pipeline.computed_s
        self.optimizer.zero_grad()
        self._total = total
        losses = self.pipeline.step(*self._filled(*self.task.train(mine)))
        waited_s = perf_counter() - began - (self.pipeline.computed_s - computed_s)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps += 1
        loss = sum(each.item() for each in losses) * total * self.task.labels
        self._look(loss)
        counted = (loss, len(mine)) if self._counts else (0.0, 0)
        self._sums += *counted, perf_counter() - began, waited_s

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(scores, labels) / (self._total * self.task.labels)

    def _filled(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        missing = self._rows - len(inputs)
        if not missing:
            return inputs, labels
        nothing = labels.new_full((missing, *labels.shape[1:]), NO_LABEL)
        return torch.cat([inputs, inputs.new_zeros(missing, *inputs.shape[1:])]), torch.cat([labels, nothing])

    def _evaluate(self) -> tuple[float, float]:
        """Each replica looks at its part of what is held out."""
        task, replicas = self.task, self.mesh.shape[0]
        mine = np.arange(task.test_count)[part(task.test_count, self.mesh.replica, replicas)]
        sums = np.zeros(2)
        self.model.eval()
        for start in range(0, len(mine), self._rows):
            inputs, labels = self._filled(*task.test(mine[start : start + self._rows]))
            scores = self.pipeline.look(inputs, labels)
            if scores is not None and self._counts:
                sums += cross_entropy(scores, labels).item(), int((scores.argmax(-1) == labels).sum())
        hpcdl.allreduce(sums, self.comm)
        loss, correct = (sums / (task.test_count * task.labels)).tolist()
        return loss, correct

    def spread(self) -> float:
        """The largest difference of a parameter between replicas."""
        numbers = [own(each.detach()) for each in self.model.parameters()]
        mine = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in numbers])
        _, _, parts = self.mesh.shape
        alike = self.comm.Split(self.mesh.stage * parts + self.mesh.part, self.comm.rank)
        apart = np.array([spread(mine, alike)])
        alike.Free()
        hpcdl.allreduce(apart, self.comm, op="max")
        return float(apart[0])

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in super()._gradients():
            yield name, own(gradient)
