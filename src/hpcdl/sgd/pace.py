"""Steps that last a given time, and one rank that is late: what slow ranks cost can be seen on one machine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Pace:
    """How long a rank's steps last at least: `step_s`, on `slow_rank` times `slow_factor`.

    Each is longer or shorter by up to the share `jitter` of that, by chance, which depends on the seed, the rank and
    the step alone. What a step has not computed it sleeps: a rank that burnt the time would take the core of another.
    """

    step_s: float = 0.0
    slow_rank: int | None = None
    slow_factor: float = 1.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.step_s < math.inf:
            raise ValueError(f"a step lasts {self.step_s} s: take a number of seconds from 0 upwards, such as 0.02")
        if not 1 <= self.slow_factor < math.inf:
            raise ValueError(f"the slow rank takes {self.slow_factor} times as long: take a number from 1 upwards")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"a step varies by the share {self.jitter} of its time: take one from 0 to 1")
        if self.slow_rank is not None and self.slow_rank < 0:
            raise ValueError(f"rank {self.slow_rank} is to be slow: ranks count from 0")
        if self.slow_rank is None and self.slow_factor != 1:
            raise ValueError(f"nobody is {self.slow_factor:g} times as slow: say which by slow_rank")
        if not self.step_s and (self.slow_rank is not None or self.jitter):
            raise ValueError("a slow rank and jitter are in proportion to the time of a step, which is 0: give step_s")

    def late(self, rank: int, step: int) -> float:
        """How many seconds this rank's step is to last at least."""
        seconds = self.step_s * (self.slow_factor if rank == self.slow_rank else 1)
        if not self.jitter:
            return seconds
        return float(seconds * (1 + self.jitter * np.random.default_rng([self.seed, rank, step]).uniform(-1, 1)))

    def wait(self, rank: int, step: int, began: float) -> None:
        """Sleep until a step that began then, by `time.perf_counter()`, has lasted so long."""
        left = began + self.late(rank, step) - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def hold(self, model: nn.Module, rank: int, *, passes: int = 1) -> None:
        """Have forward and backward of a module last their part of a step, whose `passes` they are.

        Backward sleeps once all gradients are computed and before it returns: hence, under DistributedDataParallel,
        ahead of the reduction.
        """
        from torch.autograd.graph import register_multi_grad_hook

        began, count = 0.0, 0

        def begin(*_: object) -> None:
            nonlocal began
            began = time.perf_counter()

        def end(*_: object) -> None:
            nonlocal count
            step, count = count // passes, count + 1
            left = began + self.late(rank, step) / passes - time.perf_counter()
            if left > 0:
                time.sleep(left)

        model.register_forward_pre_hook(begin)
        register_multi_grad_hook([each for each in model.parameters() if each.requires_grad], end, mode="all")
