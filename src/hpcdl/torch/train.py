"""Synchronous data-parallel SGD, plain: forward, backward, one all-reduce of all gradients, the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hpcdl
from hpcdl.data import CLASSES, ImageSet, Part, part, shares

if TYPE_CHECKING:
    from mpi4py import MPI


class Epoch(NamedTuple):
    """What one epoch came to, the same on all ranks."""

    number: int
    loss: float
    accuracy: float
    images_per_s: float
    communication: float  # the share of the ranks' training time spent in the all-reduce, waiting included


class Replica:
    """One rank's copy of a model, all its parameters in one vector and all its gradients in another.

    The model's own parameters and gradients are views into the two, so one all-reduce moves every gradient
    and the optimiser is three operations on whole vectors. Buffers, such as running statistics, stay the
    rank's own.
    """

    def __init__(
        self, model: nn.Module, comm: MPI.Comm, *, lr: float, momentum: float = 0.0, algorithm: str = "auto"
    ) -> None:
        self.model, self.comm = model, comm
        self.lr, self.momentum, self.algorithm = lr, momentum, algorithm
        parameters = list(model.parameters())
        self.parameters = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradient = torch.zeros_like(self.parameters)
        self.velocity = torch.zeros_like(self.parameters)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = self.parameters[start:stop].view_as(parameter)
            # autograd adds to a gradient that is there already, so this view stays the gradient.
            parameter.grad = self.gradient[start:stop].view_as(parameter)
            start = stop
        self.communication_s = 0.0
        hpcdl.broadcast(self.parameters, comm, root=0)

    def step(self, images: Tensor, labels: Tensor, total: int) -> float:
        """Take one step on a global batch of total samples, these being mine; give my part of its loss."""
        self.gradient.zero_()
        # Divided by the samples of all ranks, the losses' sum is the mean over the global batch, however
        # unevenly the samples lie. A mean of the ranks' means would weigh a short share too much, and the mean
        # over no sample is NaN where the sum is 0.
        loss = nn.functional.cross_entropy(self.model(images), labels, reduction="sum") / total
        loss.backward()  # type: ignore[no-untyped-call]
        began = perf_counter()
        hpcdl.allreduce(self.gradient, self.comm, op="sum", algorithm=self.algorithm)
        self.communication_s += perf_counter() - began
        self.velocity.mul_(self.momentum).add_(self.gradient)
        self.parameters.add_(self.velocity, alpha=-self.lr)
        return loss.item()

    def spread(self) -> float:
        """The largest difference of a parameter between ranks; it should be 0, and is finite if all of them are."""
        # MPI's own all-reduce is the witness here: the one that may have gone wrong shall not judge itself.
        # MPI's max and min may drop a NaN, but no infinity.
        highest = self.parameters.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        lowest = highest.clone()
        hpcdl.allreduce(highest, self.comm, op="max", algorithm="native")
        hpcdl.allreduce(lowest, self.comm, op="min", algorithm="native")
        return float((highest - lowest).max())


class Scale:
    """Bytes to numbers of mean 0 and deviation 1, as measured on the images that are trained on."""

    def __init__(self, images: NDArray[np.uint8], dtype: torch.dtype = torch.float32) -> None:
        self.mean, self.deviation, self.dtype = float(images.mean()), float(images.std()) or 1.0, dtype

    def __call__(self, images: NDArray[np.uint8]) -> Tensor:
        return torch.from_numpy(images).to(self.dtype).sub_(self.mean).div_(self.deviation)


def mlp(rows: int, columns: int) -> nn.Module:
    """One hidden layer of 256."""
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def cnn(rows: int, columns: int) -> nn.Module:
    """Two convolutions of 3 x 3, each followed by a pooling, and one linear layer."""
    if min(rows, columns) < 4:
        raise ValueError(f"two poolings by 2 need images of at least 4 x 4, these are {rows} x {columns}")
    return nn.Sequential(
        nn.Unflatten(1, (1, rows)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (rows // 4) * (columns // 4), CLASSES),
    )


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": mlp, "cnn": cnn}


def build(name: str, images: ImageSet, *, seed: int) -> nn.Module:
    """The named model for images of this size, its parameters drawn from the seed."""
    rows, columns = images.train.images.shape[1:]
    torch.manual_seed(seed)
    return MODELS[name](rows, columns)


def train(
    replica: Replica,
    images: ImageSet,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_step: Callable[[int], object] = lambda samples: None,
) -> Iterator[Epoch]:
    """Train on my share of each global batch; tell on_step each batch's samples, give each epoch's result."""
    comm, n = replica.comm, len(images.train.labels)
    scale = Scale(images.train.images, replica.parameters.dtype)
    for epoch in range(epochs):
        replica.model.train()
        began, waited, loss = perf_counter(), replica.communication_s, 0.0
        for mine, total in shares(n, epoch, seed=seed, batch_size=batch_size, rank=comm.rank, size=comm.size):
            pixels, labels = scale(images.train.images[mine]), torch.from_numpy(images.train.labels[mine])
            loss += replica.step(pixels, labels, total) * total
            on_step(total)
        sums = np.array([loss, perf_counter() - began, replica.communication_s - waited])
        hpcdl.allreduce(sums, comm, op="sum")
        loss, seconds, communication_s = sums.tolist()
        accuracy = count_correct(replica, scale, images.test) / len(images.test.labels)
        yield Epoch(epoch + 1, loss / n, accuracy, n * comm.size / seconds, communication_s / seconds)


@torch.no_grad()
def count_correct(replica: Replica, scale: Scale, test: Part, *, batch_size: int = 1000) -> int:
    """How many test images all ranks together name rightly; each image is looked at by one rank."""
    comm, model = replica.comm, replica.model
    model.eval()
    mine = part(len(test.labels), comm.rank, comm.size)
    correct = np.zeros(1, dtype=np.int64)
    for start in range(mine.start, mine.stop, batch_size):
        batch = slice(start, min(start + batch_size, mine.stop))
        correct += int((model(scale(test.images[batch])).argmax(1).numpy() == test.labels[batch]).sum())
    hpcdl.allreduce(correct, comm, op="sum")
    return int(correct[0])
