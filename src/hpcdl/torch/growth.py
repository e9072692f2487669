"""Growing the batch where a schedule would let the rate fall: the same noise in fewer updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class BatchGrowth:
    """A global batch that is multiplied by `factor` at each milestone, where a step decay would divide the rate by it.

    The noise of the gradients is in proportion to lr N / (B (1 - m)): rate, samples, batch, momentum (Smith et al.
    2017, arXiv 1711.00489). So a batch times 5 does what a rate divided by 5 does, in a fifth of the updates.

    - `first`: the global batch up to the first milestone.
    - `milestones`: epochs, ascending, counted from 0: with 10 the eleventh epoch begins with the larger batch.
    - `limit`: no batch is larger. What it does not allow, and what rounding down to whole samples takes off, falls to
      the rate: `rate(epoch) / batch(epoch)` is always `decay(epoch) / first`. The paper stops at a tenth of the
      samples.
    """

    first: int
    milestones: Sequence[int]
    _: KW_ONLY
    factor: float
    limit: int

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError(f"a batch has a sample at least, not {self.first}")
        if self.limit < self.first:
            raise ValueError(f"limit={self.limit} lies below the first batch, {self.first}: let it be that or more")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor={self.factor} makes no batch grow: a rate would be divided by it, so 10, say")
        before = (0, *self.milestones)
        if any(each % 1 or not each > last for last, each in zip(before, self.milestones, strict=False)):
            raise ValueError(f"milestones are whole epochs from 1 on, in ascending order, not {[*self.milestones]}")
        object.__setattr__(self, "milestones", tuple(map(int, self.milestones)))  # a list could be changed

    def batch(self, epoch: int) -> int:
        """The global batch in this epoch."""
        return int(min(self.limit, self.first * self._growth(epoch)))

    def rate(self, epoch: int) -> float:
        """What the rate of the beginning is multiplied by in this epoch: 1 as long as the batch may grow."""
        return self.batch(epoch) / (self.first * self._growth(epoch))

    def decay(self, epoch: int) -> float:
        """What a step decay would multiply the rate by, and leave the batch as it is."""
        return 1 / self._growth(epoch)

    def updates(self, samples: int, epochs: int) -> int:
        """How many updates so many epochs take; an epoch's last batch may be a smaller one."""
        if samples < 1 or epochs < 0:
            raise ValueError(f"an epoch has a sample at least, and a training no fewer than 0: not {samples}, {epochs}")
        return sum(math.ceil(samples / self.batch(epoch)) for epoch in range(epochs))

    def _growth(self, epoch: int) -> float:
        # A product, as a power of floats would raise OverflowError instead of reaching the limit.
        return math.prod(self.factor for milestone in self.milestones if milestone <= epoch)


def split(batch: int, ranks: int, most: int) -> tuple[int, int]:
    """Samples of each rank in one backward pass, of which it has room for `most`, and the number of passes.

    The fewest passes in which all ranks come to the batch, and of these the smallest: what is too much, because it
    cannot be divided, is less than a sample a rank and pass.
    """
    if batch < 1 or ranks < 1 or most < 1:
        raise ValueError(f"batch={batch}, ranks={ranks} and most={most} must each be 1 at least")
    passes = -(-batch // (ranks * most))
    return -(-batch // (ranks * passes)), passes
