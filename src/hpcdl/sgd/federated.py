"""Federated averaging: clients that train on data of their own for a while, and a model that is their weighted mean."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hpcdl
from hpcdl.errors import MismatchError
from hpcdl.sgd.clients import Numbers, asked, dropped, play
from hpcdl.sgd.pace import Pace
from hpcdl.sgd.vectors import Vectors
from hpcdl.torch.objects import broadcast_parameters
from hpcdl.verdict import agree, difference

if TYPE_CHECKING:
    from mpi4py import MPI


class Round(NamedTuple):
    """What one round came to, the same on all ranks."""

    number: int  # from 0
    asked: tuple[int, ...]  # the clients
    dropped: tuple[int, ...]  # those of them that have not reported back
    samples: int  # of those that have: by these the mean is weighted
    steps: int  # taken by the client that took most
    loss: float  # the mean over all samples that they were trained on, NaN if there were none


class FederatedAveraging:
    """FedAvg: in each round some clients train the model on their own samples, and it becomes their weighted mean.

    A round asks `fraction` of the clients. Each takes the model and an optimiser without a past, makes `local_epochs`
    passes over its samples in batches of `batch_size` (None: all at once), and reports the change; the model changes by
    the mean of those, weighted by the clients' numbers of samples. Those that drop out (each with the probability
    `drop_out`) do not count; where all do, the model stays. Who is asked and drops out follows from the seed and the
    round, and a client's shuffles from the seed, the client and the round: not from the ranks, each of which plays
    several clients.

    - `loss`: of a model and the numbers of samples, the mean loss over them as a tensor.
    - `clients`: each one's samples, by number, as `hpcdl.sgd.deal` deals them; the same on all ranks.
    - `optimizer`: of a module, what its clients step by.

    The buffers of floating point (running statistics) are averaged as parameters are; others, such as counters, stay
    as they were at the beginning. One local step, on all samples, of all clients, by plain SGD, is a step of
    synchronous SGD, up to rounding. ValueError, on all ranks: a bad argument. After McMahan et al. 2017,
    Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv 1602.05629, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: Sequence[Numbers],
        loss: Callable[[nn.Module, Numbers], Tensor],
        comm: MPI.Intracomm | None = None,
        *,
        optimizer: Callable[[nn.Module], Optimizer],
        fraction: float = 0.1,
        local_epochs: int = 1,
        batch_size: int | None = 32,
        drop_out: float = 0.0,
        seed: int = 0,
        clip_norm: float | None = None,
        pace: Pace | None = None,
        algorithm: str = "auto",
    ) -> None:
        from hpcdl.call import channel

        own = channel(comm)
        if found := agree(own.wire, _problem(clients, fraction, local_epochs, batch_size, drop_out)):
            raise ValueError(found)
        settings = (fraction, local_epochs, batch_size, drop_out, seed, algorithm, [len(each) for each in clients])
        if found := difference(own.wire, "FederatedAveraging", settings):
            raise MismatchError(found)
        self.model, self.clients, self._loss, self._optimizer = model, clients, loss, optimizer
        self.fraction, self.local_epochs, self.batch_size, self.drop_out = fraction, local_epochs, batch_size, drop_out
        self.seed, self.clip_norm, self.pace = seed, clip_norm, pace or Pace()
        self.rank, self.size = own.rank, own.size
        self.rounds = self.steps = 0
        """So far; the steps are this rank's own."""
        self.waited_s = 0.0
        """What this rank has spent in adding up, and waiting for others to."""
        broadcast_parameters(model, comm)
        parameters = [each for each in model.parameters() if each.requires_grad]
        statistics = [each for each in model.buffers() if each.is_floating_point()]
        self._numbers = Vectors([*parameters, *statistics], comm)
        self._others = [(each, each.clone()) for each in model.buffers() if not each.is_floating_point()]
        self._plans = [hpcdl.plan_allreduce(flat, comm, algorithm=algorithm) for flat in self._numbers.flat]
        self._comm = comm

    def __iter__(self) -> Iterator[Round]:
        """Rounds without end."""
        while True:
            yield self.round()

    def round(self) -> Round:
        """Have one round; a collective call."""
        number, self.rounds = self.rounds, self.rounds + 1
        chosen = asked(len(self.clients), self.fraction, number, self.seed)
        lost = dropped(chosen, self.drop_out, number, self.seed)
        sizes = {client: len(self.clients[client]) for client in chosen if client not in lost}
        samples = sum(sizes.values())
        numbers = self._numbers
        before = [each.detach().clone() for each in numbers.tensors]
        changes = [torch.zeros_like(each) for each in before]
        losses = np.zeros(1)
        for client in play(sizes, self.size)[self.rank]:
            losses += self._train(client, number)
            with torch.no_grad():
                for change, now, then in zip(changes, numbers.tensors, before, strict=True):
                    # Their sum is rounded less than that of the parameters, and where nobody reports it is 0.
                    change.add_(now - then, alpha=sizes[client] / max(1, samples))
                    now.copy_(then)
        began = time.perf_counter()
        with torch.no_grad():
            for view, change in zip(numbers.views, changes, strict=True):
                view.copy_(change)
            for plan in self._plans:
                plan()
            for tensor, view in zip(numbers.tensors, numbers.views, strict=True):
                tensor.add_(view)
            for each, then in self._others:
                each.copy_(then)
        hpcdl.allreduce(losses, self._comm)
        self.waited_s += time.perf_counter() - began
        seen = samples * self.local_epochs
        steps = max((-(-size // (self.batch_size or size)) for size in sizes.values() if size), default=0)
        loss = float(losses[0]) / seen if seen else math.nan
        return Round(number, tuple(chosen), tuple(lost), samples, steps * self.local_epochs, loss)

    def _train(self, client: int, number: int) -> float:
        """Have a client train the model; the sum of its samples' losses."""
        mine, total = self.clients[client], 0.0
        optimizer = self._optimizer(self.model)
        self.model.train()
        for epoch in range(self.local_epochs):
            shuffled = np.random.default_rng([self.seed, client, number, epoch, 4]).permutation(mine)
            size = self.batch_size or max(1, len(mine))
            for start in range(0, len(mine), size):
                began = time.perf_counter()
                some = shuffled[start : start + size]
                optimizer.zero_grad()
                loss = self._loss(self.model, some)
                loss.backward()  # type: ignore[no-untyped-call]
                self.pace.wait(self.rank, self.steps, began)
                if self.clip_norm:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
                optimizer.step()
                total += loss.item() * len(some)
                self.steps += 1
        return total


def _problem(
    clients: Sequence[Numbers], fraction: float, local_epochs: int, batch_size: int | None, drop_out: float
) -> str | None:
    """What is wrong with the arguments."""
    if not clients:
        return "there are no clients: give each one's samples, by number"
    if not 0 < fraction <= 1:
        return f"fraction {fraction} of the clients is asked: take a share above 0, up to 1"
    if local_epochs < 1:
        return f"a client makes {local_epochs} passes over its samples: take 1 or more"
    if batch_size is not None and batch_size < 1:
        return f"a client's batches have {batch_size} samples: take 1 or more, or None for all at once"
    if not 0 <= drop_out < 1:
        return f"a client drops out with the probability {drop_out}: take one from 0, below 1"
    return None
