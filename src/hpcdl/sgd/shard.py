"""A server's part of the parameters, and how gradients change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hpcdl.sgd.flat import Pieces

if TYPE_CHECKING:
    from hpcdl.torch.train import Scheduler


class Gradient(NamedTuple):
    """What a worker has brought."""

    worker: int
    values: Tensor
    samples: int
    staleness: int = 0


class Shard:
    """The pieces, their optimiser, and what is done about stale gradients.

    `rate` gives by what a gradient's staleness multiplies the rate; `compensate` the gradient to take instead, from it,
    the present parameters and those that it was computed from.
    """

    def __init__(
        self,
        pieces: Pieces,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        *,
        rate: Callable[[int], float] | None = None,
        compensate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Scheduler | None] = lambda _: None,
    ) -> None:
        self.pieces, self.optimizer = pieces, optimizer(pieces)
        self.rate, self.compensate = rate, compensate
        self.scheduler = scheduler(self.optimizer)

    @property
    def values(self) -> Tensor:
        """The parameters as they are now."""
        return self.pieces.values

    @property
    def lr(self) -> float:
        """The rate of the next update, of a gradient that is not stale."""
        return float(self.optimizer.param_groups[0]["lr"])

    def compensated(self, gradient: Gradient, then: Tensor) -> Gradient:
        """The gradient to take for one that was computed from those parameters."""
        if self.compensate is None:
            return gradient
        return gradient._replace(values=self.compensate(gradient.values, self.values, then))

    def update(self, gradients: Sequence[Gradient]) -> None:
        """One step by the mean over all samples of the gradients, each that of its own samples.

        Gradients of equally many samples are added up as they are, and the sum is divided by their number. One that is
        stale weighs less among the others, and the rate is multiplied by the mean of what each would be multiplied by.
        """
        count, samples = len(gradients), sum(each.samples for each in gradients)
        if not samples:
            return
        weights, factor = [each.samples * count / samples for each in gradients], 1.0
        if self.rate:
            weights = [weight * self.rate(each.staleness) for weight, each in zip(weights, gradients, strict=True)]
            factor = sum(weights) / count
            weights = [weight / factor for weight in weights]
        total = self.pieces.gradients
        torch.mul(gradients[0].values, weights[0], out=total)
        for weight, each in zip(weights[1:], gradients[1:], strict=True):
            total.add_(each.values, alpha=weight)
        if count > 1:
            total.div_(count)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.scheduler:
            self.scheduler.step()
