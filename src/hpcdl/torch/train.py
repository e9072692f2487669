"""Synchronous data-parallel training, plain: forward and backward on my share, one summed gradient, the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hpcdl
from hpcdl.data import ImageSet, part, shares
from hpcdl.text import Text, batch, windows
from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from hpcdl.torch.models import MODELS
from hpcdl.torch.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from mpi4py import MPI

Numbers: TypeAlias = NDArray[np.int64]
Samples: TypeAlias = Callable[[Numbers], tuple[Tensor, Tensor]]


# ---- what is learnt ------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What there is to learn: so many samples, handed out by their numbers as inputs and labels."""

    name: str
    counts: str
    unit: str  # what is labelled: images, characters
    shape: tuple[int, int]  # what a network is made for: rows and columns, or vocabulary and block size
    train_count: int
    test_count: int
    labels: int  # of each sample
    train: Samples
    test: Samples


def image_task(images: ImageSet, dtype: torch.dtype = torch.float32) -> Task:
    """Name what is on an image; its bytes become numbers of mean 0 and deviation 1 over all that are trained on."""
    rows, columns = images.train.images.shape[1:]
    mean, deviation = float(images.train.images.mean()), float(images.train.images.std()) or 1.0

    def samples(pixels: NDArray[np.uint8], labels: Numbers) -> Samples:
        return lambda chosen: (
            torch.from_numpy(pixels[chosen]).to(dtype).sub_(mean).div_(deviation),
            torch.from_numpy(labels[chosen]),
        )

    counts = len(images.train.labels), len(images.test.labels)
    both = samples(*images.train), samples(*images.test)
    return Task(images.name, images.counts, "images", (rows, columns), *counts, 1, *both)


def text_task(text: Text, block_size: int) -> Task:
    """Name the character that follows, at every place of a window."""

    def samples(numbers: NDArray[Any]) -> Samples:
        def take(chosen: Numbers) -> tuple[Tensor, Tensor]:
            inputs, labels = batch(numbers, chosen, block_size)
            return torch.from_numpy(inputs), torch.from_numpy(labels)

        return take

    counts = windows(text.train, block_size), windows(text.test, block_size)
    both = samples(text.train), samples(text.test)
    shape = len(text.vocabulary), block_size
    return Task(text.name, text.counts, "characters", shape, *counts, block_size, *both)


def build(name: str, task: Task, *, seed: int) -> nn.Module:
    """The named network for this task, its parameters drawn from the seed."""
    torch.manual_seed(seed)
    return MODELS[name](*task.shape)


# ---- the optimiser -------------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """What a trainer asks of an optimiser; torch.optim's have it."""

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


SQUARES = 0.999
"""How much of the average of squared gradients Adam keeps from step to step."""


class Descent:
    """What our optimisers have in common."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float) -> None:
        self.parameters, self.lr, self.momentum = list(parameters), lr, momentum

    def zero_grad(self) -> None:
        for each in self.parameters:
            each.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        raise NotImplementedError

    def check(self, state_dict: dict[str, Any]) -> None:
        """ValueError if the state is another optimiser's."""
        if state_dict.keys() != self.state_dict().keys():
            theirs = ", ".join(state_dict)
            raise ValueError(f"the saved optimiser, with {theirs}, is no {type(self).__name__}: go on with that one")


class Sgd(Descent):
    """Gradient descent with momentum, in torch's form: u = m u + g, w = w - lr u."""

    # torch.optim.SGD does the same, but the first optimiser made imports torch's compiler: 2 to 10 s a process, and
    # all of MNIST-5k is learnt in 5.
    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.0) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum)
        self.velocities = [torch.zeros_like(each) for each in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            if parameter.grad is not None:
                velocity.mul_(self.momentum).add_(parameter.grad)
                parameter.add_(velocity, alpha=-self.lr)

    def state_dict(self) -> dict[str, Any]:
        """The velocities; the rate and the momentum are for whoever resumes to choose."""
        return {"velocities": self.velocities}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check(state_dict)
        for velocity, saved in zip(self.velocities, state_dict["velocities"], strict=True):
            velocity.copy_(saved)


class Adam(Descent):
    """Steps of about the learning rate, whatever the gradients' size (Kingma and Ba 2015, arXiv 1412.6980)."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum)
        self.steps = 0
        self.means = [torch.zeros_like(each) for each in self.parameters]
        self.squares = [torch.zeros_like(each) for each in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        # Both averages begin at 0, which is divided out.
        begun, begun_squares = 1 - self.momentum**self.steps, 1 - SQUARES**self.steps
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            if parameter.grad is not None:
                mean.lerp_(parameter.grad, 1 - self.momentum)
                square.mul_(SQUARES).addcmul_(parameter.grad, parameter.grad, value=1 - SQUARES)
                deviation = (square / begun_squares).sqrt_().add_(1e-8)
                parameter.addcdiv_(mean, deviation, value=-self.lr / begun)

    def state_dict(self) -> dict[str, Any]:
        """The averages and their age; the rate and the momentum are for whoever resumes to choose."""
        return {"means": self.means, "squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check(state_dict)
        self.steps = state_dict["steps"]
        for mine, saved in ((self.means, "means"), (self.squares, "squares")):
            for each, value in zip(mine, state_dict[saved], strict=True):
                each.copy_(value)


# ---- the training --------------------------------------------------------------------------------------------------


class Epoch(NamedTuple):
    """What one epoch came to, the same on all ranks; losses are the mean over the labels."""

    number: int
    loss: float
    test_loss: float
    accuracy: float
    per_s: float  # images, or characters
    communication: float  # see Measured


class Measured(NamedTuple):
    """What some steps came to on all ranks together.

    `communication` is the share of the ranks' time between the end of the local backward and the end of the reduction:
    what training waits for it, and for slower ranks. What overlaps with backward is not in it.
    """

    loss: float
    per_s: float
    communication: float


class _Timed(DistributedDataParallel):
    """Adds up the time that backward waits for the reduction."""

    waited_s = 0.0

    def _end(self) -> None:
        began = perf_counter()
        super()._end()
        self.waited_s += perf_counter() - began


class Trainer:
    """One rank's part in a training: the wrapped model, its optimiser, and how far they have come."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        comm: MPI.Intracomm,
        *,
        batch_size: int,
        seed: int = 0,
        accumulate: int = 1,
        **wrapping: Any,
    ) -> None:
        """`batch_size` samples of each rank in each of `accumulate` backward passes; `wrapping` is the wrapper's."""
        self.task, self.comm, self.optimizer = task, comm, optimizer
        # The sum: each rank's loss is divided by the samples of all.
        self.model = _Timed(model, comm, average=False, **wrapping)
        self.batch_size, self.seed, self.accumulate = batch_size, seed, accumulate
        self.steps_an_epoch = -(-task.train_count // (batch_size * accumulate * comm.size))
        self.steps = 0
        self.epochs: list[Epoch] = []
        self._sums = np.zeros(4)  # of this epoch so far: my part of the loss, seconds, of these waited, all samples
        self._told = np.zeros(4)

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result.

        `on_step` is told each global batch's samples; on all ranks alike it may end the training there, by True.
        """
        task, comm = self.task, self.comm
        while (epoch := len(self.epochs)) < epochs:
            self.model.train()
            batches = shares(
                task.train_count,
                epoch,
                seed=self.seed,
                batch_size=self.batch_size * self.accumulate,
                rank=comm.rank,
                size=comm.size,
            )
            for mine, total in islice(batches, self.steps - epoch * self.steps_an_epoch, None):
                self.step(mine, total)
                if on_step(total):
                    return
            loss, per_s, communication = self._measure(self._sums)
            self.epochs.append(Epoch(epoch + 1, loss, *evaluate(self.model, task, comm), per_s, communication))
            self._sums, self._told = np.zeros(4), np.zeros(4)
            yield self.epochs[-1]

    def step(self, mine: Numbers, total: int) -> None:
        """Take one step on a global batch of `total` samples, these being mine."""
        began, waited_s, loss = perf_counter(), self.model.waited_s, 0.0
        self.optimizer.zero_grad()
        for number in range(self.accumulate):
            inputs, labels = self.task.train(mine[part(len(mine), number, self.accumulate)])
            # Divided by the samples of all ranks and passes, the losses' sum is the mean over the global batch, however
            # unevenly the samples lie. A mean of means would weigh a short share too much, and the mean over no sample
            # is NaN where the sum is 0.
            with nullcontext() if number == self.accumulate - 1 else self.model.no_sync():
                some = cross_entropy(self.model(inputs), labels) / (total * self.task.labels)
                some.backward()  # type: ignore[no-untyped-call]
            loss += some.item()
        self.optimizer.step()
        self.steps += 1
        self._sums += loss * total, perf_counter() - began, self.model.waited_s - waited_s, total

    def measure(self) -> Measured:
        """What came of this epoch's steps since it was last asked; a collective call."""
        news, self._told = self._sums - self._told, self._sums.copy()
        return self._measure(news)

    def _measure(self, sums: NDArray[np.float64]) -> Measured:
        loss, seconds, waited_s, samples = hpcdl.allreduce(sums.copy(), self.comm, op="sum").tolist()
        samples_each = samples / self.comm.size  # every rank has counted them all
        return Measured(loss / samples_each, samples * self.task.labels / seconds, waited_s / seconds)

    # What must be the same for the rest of the training to be the same.
    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "data": f"{self.task.counts}, shape {self.task.shape}",
            "batch size": self.batch_size,
            "accumulation": self.accumulate,
            "seed": self.seed,
            "optimizer": type(self.optimizer).__name__,
        }

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of where the training is; a collective call."""
        return save_checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            step=self.steps,
            sampler=self._settings,
            extra={"epochs": [list(each) for each in self.epochs], "sums": self._sums.tolist()},
            comm=self.comm,
        )

    def resume(self, folder: str | Path) -> Checkpoint | None:
        """Go to where the newest whole checkpoint was, None if there is none; a collective call.

        CheckpointError, on all ranks: it was saved by another number of ranks, of another model, data, batch, seed or
        kind of optimiser.
        """
        checkpoint = load_checkpoint(folder, model=self.model, optimizer=self.optimizer, comm=self.comm)
        if checkpoint is None:
            return None
        for name, ours in self._settings.items():
            if (saved := checkpoint.sampler[name]) != ours:
                raise CheckpointError(f"{checkpoint.path} is of a training with {name} {saved}, this one has {ours}")
        self.steps = checkpoint.step
        self.epochs = [Epoch(*each) for each in checkpoint.extra["epochs"]]
        self._sums = np.array(checkpoint.extra["sums"])
        self._told = self._sums.copy()
        return checkpoint


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The sum over all labels, each with the scores of its classes."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, comm: MPI.Comm, *, batch_size: int = 250) -> tuple[float, float]:
    """The held-out samples' loss, and which share of labels all ranks name rightly; one rank looks at each sample."""
    model.eval()
    mine = np.arange(task.test_count)[part(task.test_count, comm.rank, comm.size)]
    sums = np.zeros(2)
    for start in range(0, len(mine), batch_size):
        inputs, labels = task.test(mine[start : start + batch_size])
        scores = model(inputs)
        sums += cross_entropy(scores, labels).item(), int((scores.argmax(-1) == labels).sum())
    hpcdl.allreduce(sums, comm, op="sum")
    loss, correct = (sums / (task.test_count * task.labels)).tolist()
    return loss, correct


def spread(model: nn.Module, comm: MPI.Comm) -> float:
    """The largest difference of a parameter between ranks; it should be 0, and is finite if all of them are."""
    # MPI's own all-reduce is the witness here: the one that may have gone wrong shall not judge itself.
    # MPI's max and min may drop a NaN, but no infinity.
    highest = torch.cat([each.detach().flatten() for each in model.parameters()])
    highest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lowest = highest.clone()
    hpcdl.allreduce(highest, comm, op="max", algorithm="native")
    hpcdl.allreduce(lowest, comm, op="min", algorithm="native")
    return float((highest - lowest).max())
