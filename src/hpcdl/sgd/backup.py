"""Synchronous SGD with backup workers: a step waits for the first gradients, and not for the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from hpcdl.sgd.order import Backup
from hpcdl.sgd.roles import Plan, play
from hpcdl.sgd.server import Passed, Report

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from hpcdl.sgd.pace import Pace
    from hpcdl.sgd.worker import Loss
    from hpcdl.torch.train import Scheduler


def backup_workers(
    model: nn.Module,
    loss: Loss,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    comm: MPI.Intracomm | None = None,
    *,
    samples: int,
    backups: int = 1,
    every: int | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Scheduler | None] = lambda _: None,
    clip_norm: float | None = None,
    timeout_s: float = 60.0,
    pace: Pace | None = None,
    on_pass: Callable[[Passed], object] = lambda passed: None,
    on_leave: Callable[[int, str], object] = lambda worker, why: None,
    judge: Callable[[Report], int] = lambda report: 0,
) -> Report:
    """Train until so many samples have counted, `backups` late gradients being dropped in each step; all ranks call it.

    Chen et al. 2016, "Revisiting distributed synchronous SGD", arXiv 1604.00981, section 3. Rank 0 keeps the parameters
    and makes the steps, all others work. Of N + b workers the first N gradients of a step are added up and divided by
    N; a later one carries an old step's number, and is dropped and counted (`Report.late`). They are added in the order
    of their ranks, so with b = 0 a run has the same bits each time, and they are those of synchronous SGD on the
    workers' batches up to how that rounds its sum.

    `loss` is called by workers with the number of the step, the same on all who compute for it; a late worker leaves
    steps out. What else is passed is as in `parameter_server`.
    """
    plan = Plan(
        servers=1,
        order=lambda workers, first: Backup(workers, backups=backups),
        samples=samples,
        every=every or samples,
        by_version=True,
        clip_norm=clip_norm,
        timeout_s=timeout_s,
        pace=pace,
        optimizer=optimizer,
        scheduler=scheduler,
        on_pass=on_pass,
        on_leave=on_leave,
        judge=judge,
    )
    return play(model, loss, comm, plan)
