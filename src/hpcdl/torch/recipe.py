"""Optimisers and schedules by name: how a training goes, apart from what is learnt and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from hpcdl.torch.decay import decay_groups
from hpcdl.torch.growth import BatchGrowth
from hpcdl.torch.lars import LARS
from hpcdl.torch.schedules import GradualWarmup

Kind = TypeVar("Kind", bound=Optimizer)

LOWEST = 0.1
"""What a cycle's lowest rate is of the highest, if nothing is said (Smith and Topin 2017, arXiv 1708.07120)."""
LOWEST_MOMENTUM = 0.85
POWER = 2
"""Of the polynomial decay (You et al. 2017, arXiv 1708.03888, section 5)."""
RISE = 0.45
"""The share of 1cycle's updates in which the rate rises; it falls in as many, and the rest is the tail."""


def _unwrapped(method: Any) -> Any:
    return getattr(method, "__wrapped__", method)


class _Plain(Optimizer):
    """torch wraps these methods so that its compiler leaves them alone."""

    add_param_group = _unwrapped(Optimizer.add_param_group)
    zero_grad = _unwrapped(Optimizer.zero_grad)
    state_dict = _unwrapped(Optimizer.state_dict)
    load_state_dict = _unwrapped(Optimizer.load_state_dict)


def light(kind: type[Kind]) -> type[Kind]:
    """The same optimiser without torch's compiler.

    The first call of a method that is wrapped for it imports it: 2 to 3 s a process. All of MNIST-5k is learnt in 5.
    """
    step = torch.no_grad()(_unwrapped(kind.step))
    return cast("type[Kind]", type(kind.__name__, (kind, _Plain), {"step": step}))


def optimizer(
    name: str, model: nn.Module, *, lr: float, momentum: float, weight_decay: float = 0, exclude_lr: float | None = None
) -> Optimizer:
    """The named optimiser of a model's parameters; biases and batch norms do not decay.

    `momentum` is Adam's first beta, and Adagrad has none; Adam's decay is decoupled (AdamW). `exclude_lr` is of LARS.
    """
    if name == "lars":
        return light(LARS)(
            model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, exclude_lr=exclude_lr
        )
    groups = decay_groups(model, weight_decay)
    if name == "adam":
        return light(torch.optim.AdamW)(groups, lr=lr, betas=(momentum, 0.999))
    if name == "adagrad":
        return light(torch.optim.Adagrad)(groups, lr=lr)
    kind = torch.optim.SGD if name == "sgd" else torch.optim.RMSprop
    made: Optimizer = light(kind)(groups, lr=lr, momentum=momentum)  # type: ignore[call-arg]
    return made


class Schedule(NamedTuple):
    """How the rate goes over a training, and with cycles the momentum; times are in epochs."""

    name: str = "constant"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    lowest: float = LOWEST  # of the rate, as a share of the highest
    cycle_epochs: float = 4.0
    low_momentum: float = LOWEST_MOMENTUM
    warmup_epochs: float = 0.0
    start_factor: float | None = None  # what the warm-up begins with; see GradualWarmup


def scheduler(
    schedule: Schedule, optimizer: Optimizer, *, epochs: int, updates: Callable[[float], int], growth: BatchGrowth
) -> LRScheduler | None:
    """torch's scheduler for it, to be stepped behind every update; None if the rate stays as it is.

    `updates` tells how many updates come before a time in epochs. Where the batch grows instead, the rate falls as far
    as the batch may not grow.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    total = updates(epochs)
    made: LRScheduler
    if schedule.name == "step" and growth.milestones:
        starts = [updates(epoch) for epoch in range(epochs)]

        def rate(update: int) -> float:
            return growth.rate(sum(start <= update for start in starts) - 1)

        made = lr_scheduler.LambdaLR(optimizer, rate)
    elif schedule.name == "step":
        milestones = [updates(epoch) for epoch in schedule.milestones]
        made = lr_scheduler.MultiStepLR(optimizer, milestones, gamma=schedule.gamma)
    elif schedule.name == "cosine":
        made = lr_scheduler.CosineAnnealingLR(optimizer, total)
    elif schedule.name == "polynomial":
        made = lr_scheduler.PolynomialLR(optimizer, total, power=POWER)
    elif schedule.name == "cyclic":
        made = lr_scheduler.CyclicLR(
            optimizer,
            [schedule.lowest * each for each in rates],
            rates,
            step_size_up=max(1, round(updates(schedule.cycle_epochs) / 2)),
            **_momenta(schedule, optimizer),
        )
    elif schedule.name == "onecycle":
        made = lr_scheduler.OneCycleLR(
            optimizer,
            rates,
            total_steps=total,
            pct_start=RISE,
            anneal_strategy="linear",
            three_phase=True,
            div_factor=1 / schedule.lowest,
            final_div_factor=100,
            **_momenta(schedule, optimizer),
        )
    elif schedule.warmup_epochs:
        made = lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    else:
        return None
    if schedule.warmup_epochs:
        made = GradualWarmup(made, updates(schedule.warmup_epochs), start_factor=schedule.start_factor)
    return made


def _momenta(schedule: Schedule, optimizer: Optimizer) -> dict[str, Any]:
    """The momentum is highest where the rate is lowest."""
    group = optimizer.param_groups[0]
    highest = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
    if not highest:
        return {"cycle_momentum": False}
    return {"base_momentum": min(schedule.low_momentum, highest), "max_momentum": highest}
