"""What a server does about gradients that are older than the parameters they are to change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

EPSILON = 1e-7
"""Of the root of the mean square in DC-ASGD's adaptive form."""


def staleness_aware(staleness: int) -> float:
    """The rate over the staleness (Zhang et al. 2015, arXiv 1511.05950, section 3): what it is multiplied by."""
    return 1 / max(1, staleness)


@dataclass
class DelayCompensation:
    """What the gradient would be at the present parameters, to first order (Zheng et al. 2016, arXiv 1609.08326).

    g + l * g * g * (now - then), element by element, where then are the parameters that g was computed from: g * g
    stands for the diagonal of the Hessian. l is `strength` (DC-ASGD-c, algorithm 2), or where there is a `decay` that
    over the root of the mean square of the gradients (DC-ASGD-a, section 6). The paper takes 0.04 for the first, 2 and
    0.95 for the second.
    """

    strength: float = 0.04
    decay: float | None = None
    _mean_square: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.strength < math.inf:
            raise ValueError(f"the strength of a compensation is a number from 0 upwards, not {self.strength}")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"a mean square decays by a share from 0 to below 1, not {self.decay}")

    def __call__(self, gradient: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """The compensated gradient."""
        square = gradient * gradient
        strength: Tensor | float = self.strength
        if self.decay is not None:
            before = torch.zeros_like(square) if self._mean_square is None else self._mean_square
            self._mean_square = self.decay * before + (1 - self.decay) * square
            strength = self.strength / torch.sqrt(self._mean_square + EPSILON)
        return gradient + strength * square * (now - then)
