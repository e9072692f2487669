"""Elastic averaging: ranks that go their own ways, each on a spring to a common centre."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hpcdl
from hpcdl.sgd.averaging import Averaging

if TYPE_CHECKING:
    from mpi4py import MPI

MOVING_RATE = 0.9
"""Zhang et al., section 5."""


class ElasticAveraging(Averaging):
    """EASGD: every `every` steps each rank and the centre are drawn together, by the share alpha of their distance.

    Rank i has the parameters x_i, all have the centre c, and alpha is `moving_rate` over the number of ranks:

        d_i = alpha (x_i - c),    x_i <- x_i - d_i,    c <- c + sum of all d_i

    which is one all-reduce. Without steps between, the distance of the mean from the centre becomes 1 - alpha (1 + p)
    times itself, so that has to lie between -1 and 1. It is the centre that is to be evaluated: `with
    averaging.consensus()`. With torch.optim.SGD(nesterov=True) on each rank it is EAMSGD. Running statistics do not go
    into the dynamics; the centre's are the mean of the ranks'. After Zhang, Choromanska, LeCun 2015, Deep learning with
    Elastic Averaging SGD, arXiv 1412.6651, section 3, in its synchronous form. See Averaging for what is averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: MPI.Intracomm | None = None,
        *,
        every: int = 10,
        moving_rate: float = MOVING_RATE,
        algorithm: str = "auto",
    ) -> None:
        self.moving_rate = moving_rate
        super().__init__(model, comm, every=every, moving_rate=moving_rate, algorithm=algorithm)
        self._plans = [hpcdl.plan_allreduce(flat, comm, algorithm=algorithm) for flat in self._parameters.flat]
        self._parameters.gather()
        self.centre = [flat.clone() for flat in self._parameters.flat]
        """One vector for each type of parameter, the same on all ranks."""

    @property
    def alpha(self) -> float:
        """The share of the distance by which a rank moves towards the centre."""
        return self.moving_rate / self.size

    def _problem(self) -> str | None:
        reach = self.alpha * (1 + self.size)
        if 0 < reach < 2:
            return None
        most = 2 * self.size / (1 + self.size)
        return (
            f"moving_rate {self.moving_rate:g} on {self.size} ranks is alpha = {self.alpha:g}, and alpha (1 + ranks) = "
            f"{reach:g}: above 0 and below 2 the centre and the ranks come together, elsewhere they fly apart; take a "
            f"moving_rate above 0 and below {most:.4g}"
        )

    @torch.no_grad()
    def average(self) -> None:
        """Draw the ranks and the centre together once."""
        vectors = self._parameters
        vectors.gather()
        for flat, centre in zip(vectors.flat, self.centre, strict=True):
            flat.sub_(centre).mul_(self.alpha)
        for tensor, distance in zip(vectors.tensors, vectors.views, strict=True):
            tensor.sub_(distance)
        for plan, flat, centre in zip(self._plans, vectors.flat, self.centre, strict=True):
            plan()
            centre.add_(flat)

    def _meet(self) -> None:
        for flat, centre in zip(self._parameters.flat, self.centre, strict=True):
            flat.copy_(centre)
        self._parameters.scatter()
        self._take_mean(self._buffers)

    def state_dict(self) -> dict[str, Any]:
        """With the centre."""
        return {**super().state_dict(), "centre": [centre.clone() for centre in self.centre]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        for centre, saved in zip(self.centre, state["centre"], strict=True):
            centre.copy_(saved)
