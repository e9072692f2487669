"""Asynchronous SGD with parameter servers: no worker waits for another, unless it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hpcdl.sgd.order import Asynchronous, Order
from hpcdl.sgd.roles import Plan, play
from hpcdl.sgd.server import Passed, Report

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from hpcdl.sgd.pace import Pace
    from hpcdl.sgd.worker import Loss
    from hpcdl.torch.train import Scheduler


def parameter_server(
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    comm: MPI.Intracomm | None = None,
    *,
    samples: int,
    every: int | None = None,
    servers: int = 1,
    n_fetch: int = 1,
    n_push: int = 1,
    bound: float = math.inf,
    softsync: int | None = None,
    warm: int = 0,
    rate: Callable[[int], float] | None = None,
    compensate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Scheduler | None] = lambda _: None,
    clip_norm: float | None = None,
    timeout_s: float = 60.0,
    pace: Pace | None = None,
    on_pass: Callable[[Passed], object] = lambda passed: None,
    on_leave: Callable[[int, str], object] = lambda worker, why: None,
    judge: Callable[[Report], int] = lambda report: 0,
) -> Report:
    """Train until so many samples have counted, by Downpour SGD (Dean et al. 2012, section 4.1); all ranks call it.

    The first `servers` ranks keep a part of the parameters each and never compute a gradient; the others work. A worker
    fetches parameters every `n_fetch` steps, and changes its own by plain SGD between; every `n_push` steps it pushes
    the sum of its gradients, which the servers take as they come, by the `optimizer` that is made for their part: any
    of torch's that looks at each number by itself. With one server and one worker it is plain SGD, bit by bit.

    `loss` is called by workers, with their own step's number. What is done about stale gradients: `rate`
    (`staleness_aware`), `compensate` (`DelayCompensation`), `softsync` (n: an update takes the mean of floor(workers /
    n) gradients), `bound` (who is more than so many clocks ahead of the slowest waits) and `warm` (the first so many
    gradients are those of one worker); see `Asynchronous`.

    On rank 0: `on_pass` is called `every` so many samples, when the model holds the parameters behind them, and may end
    the training by True; `on_leave` when a worker has finished early or is given up, having been silent for `timeout_s`
    outside of its waits for a server; `judge` at the end, when the model holds the final parameters, which the other
    ranks do not get.
    """

    def order(workers: range, first: bool) -> Order:
        n = len(workers) if softsync is None else softsync
        if not 1 <= n <= len(workers):
            raise ValueError(f"softsync is a number from 1 to {len(workers)}, the number of workers, not {softsync}")
        group = len(workers) // n
        # The first server alone lets workers wait: they ask it first.
        if not first:
            return Asynchronous(workers, group=group)
        return Asynchronous(workers, group=group, bound=bound, warm=warm)

    plan = Plan(
        servers=servers,
        order=order,
        samples=samples,
        every=every or samples,
        n_fetch=n_fetch,
        n_push=n_push,
        clip_norm=clip_norm,
        timeout_s=timeout_s,
        pace=pace,
        optimizer=optimizer,
        rate=rate,
        compensate=compensate,
        scheduler=scheduler,
        on_pass=on_pass,
        on_leave=on_leave,
        judge=judge,
    )
    return play(model, loss, comm, plan)
