"""How the learning rate of a large batch begins: scaled with the batch, and led up to it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

Rate: TypeAlias = float | Tensor  # what torch lets a group have


def linear_scaled_lr(base: float, batch: int, base_batch: int = 256) -> float:
    """The rate for a global batch, if `base` is right for `base_batch`: in proportion to it.

    Goyal et al. 2017, arXiv 1706.02677, section 2.1: k times the batch takes one step where there were k, so let it be
    k times as long. It holds as long as the gradient changes little in these k steps: see `GradualWarmup`.
    """
    if not 0 < base < math.inf:
        raise ValueError(f"a rate is a number above 0, and the rate for a batch of {base_batch} is given as {base}")
    if not (1 <= batch < math.inf and 1 <= base_batch < math.inf):
        raise ValueError(f"a batch has a sample at least: not {batch}, scaled from {base_batch}")
    return base * (batch / base_batch)


class GradualWarmup(LRScheduler):
    """A scheduler whose rates are led up to, in a straight line, in the first `steps` updates.

    Call `step()` behind every update, and leave the stepping of the wrapped scheduler to it. Update number t, counted
    from 0, has the rates that the wrapped scheduler says, times start_factor + (1 - start_factor) t / steps; from
    t = steps on they are the wrapped scheduler's to the last bit. Its clock runs during the warm-up, so that epochs
    count from the beginning of the training. Momentum is not touched.

    - `scheduler`: any of torch's, also ReduceLROnPlateau.
    - `start_factor`: 1 / steps if None. Goyal et al. 2017 (arXiv 1706.02677, section 2.2) begin at 1 / k behind a
      scaling by k: at the rate of the small batch.
    - `every`: the wrapped scheduler is stepped once in so many updates: those of an epoch, if it counts epochs. What
      `step` is given, such as the metric of ReduceLROnPlateau, is for that step; in between nothing looks at it.

    An update that a loss scaler skips is none: do not step. `state_dict` holds the wrapped scheduler's state too, and
    `load_state_dict` sets the rates, whether the optimiser is loaded before, behind, or not at all.
    """

    # Without the constructor of LRScheduler, which would take the rates it finds for its own and make a first step.
    def __init__(
        self, scheduler: LRScheduler, steps: int, *, start_factor: float | None = None, every: int = 1
    ) -> None:
        if not (hasattr(scheduler, "optimizer") and hasattr(scheduler, "step")):
            raise TypeError(f"a warm-up goes around a scheduler of torch's kind, not a {type(scheduler).__name__}")
        if not 0 <= steps < math.inf:
            raise ValueError(f"steps={steps}: a warm-up takes 0 updates (none at all) or more")
        if start_factor is not None and not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor={start_factor}: a warm-up begins at a part of the rate, from 0 to 1")
        if not 1 <= every < math.inf:
            raise ValueError(f"every={every}: the wrapped scheduler is stepped once in so many updates, 1 or more")
        self.optimizer, self.scheduler = scheduler.optimizer, scheduler
        self.steps, self.every = steps, every
        self.start_factor = 1 / max(steps, 1) if start_factor is None else start_factor
        self.last_epoch = 0  # torch's name for it; here it counts updates
        self._scheduled: list[Rate] = []
        self._warm()

    def step(self, *metric: Any) -> None:
        """Go on to the rates of the next update."""
        due = (self.last_epoch + 1) % self.every == 0
        if due and isinstance(self.scheduler, ReduceLROnPlateau) and not metric:
            raise TypeError(f"behind update {self.last_epoch} ReduceLROnPlateau is stepped: give step() its metric")
        if self.last_epoch < self.steps:
            # Many schedulers compute the next rate from the one they find.
            _set_rates(self.optimizer, self._scheduled)
        self.last_epoch += 1
        if due:
            self.scheduler.step(*metric)
        self._warm()

    def _warm(self) -> None:
        if self.last_epoch < self.steps:
            factor = self.start_factor + (1 - self.start_factor) * self.last_epoch / self.steps
            self._scheduled = _rates(self.optimizer)
            _set_rates(self.optimizer, [rate * factor for rate in self._scheduled])
        self._last_lr = _rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Where the warm-up is, its settings, and the wrapped scheduler's state."""
        own = {name: value for name, value in vars(self).items() if name not in ("optimizer", "scheduler")}
        return {**own, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a warm-up of the same kind of scheduler was, and set the rates it had."""
        if state_dict.keys() != self.state_dict().keys():
            raise ValueError(f"this is the state of another scheduler, of {', '.join(state_dict)}: load it into that")
        if len(saved := state_dict["_last_lr"]) != (groups := len(self.optimizer.param_groups)):
            raise ValueError(f"the saved warm-up is of {len(saved)} parameter groups, this optimiser has {groups}")
        own = dict(state_dict)
        self.scheduler.load_state_dict(dict(own.pop("scheduler")))  # a copy: CyclicLR takes out of what it is given
        vars(self).update(own)
        _set_rates(self.optimizer, self._last_lr)


def _rates(optimizer: Optimizer) -> list[Rate]:
    rates = (group["lr"] for group in optimizer.param_groups)
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _set_rates(optimizer: Optimizer, rates: Iterable[Rate]) -> None:
    # A group that was added since the rates were taken keeps its own.
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(torch.as_tensor(rate))  # in place: a captured step reads this tensor
        else:
            group["lr"] = rate
