"""Deep Gradient Compression: of a thousand elements one is sent, and momentum is kept for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdl.compress.method import Memory, Piece
from hpcdl.compress.sparse import Chooser


class DGC(Chooser):
    """Add up each rank's momentum, send the largest sums, and remember the others.

    The optimiser behind it is plain SGD without momentum (which is here); its weight decay, if any, stays there.

    - `density`: the part of each matrix's elements that is sent, one at least.
    - `momentum`, `nesterov`: as torch.optim.SGD has them.
    - `clip_norm`: the length to which the whole batch's gradient may grow before each rank shortens its own.
    - `warmup_epochs`: over so many epochs the density falls to its value, by the same factor each (to 0.001 in 4: 0.25,
      0.063, 0.016, 0.004). It begins with epoch 0; call `begin_epoch` at each, and after a restart.
    - `masking`: forget the momentum of what is sent, or it would go on by what is stale by now.
    - `value_dtype`: float32 or float16; what rounding loses is remembered too.

    Vectors are sent as they are, and so is all at density 1 and where that takes fewer bytes than indices and values
    would, which is said once; momentum goes on there. Lin et al., Deep Gradient Compression, 2018, section 3.
    """

    name = "dgc"

    def __init__(
        self,
        density: float = 0.001,
        momentum: float = 0.9,
        nesterov: bool = False,
        clip_norm: float | None = None,
        warmup_epochs: int = 4,
        masking: bool = True,
        value_dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(density, value_dtype)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is from 0 to below 1, not {momentum}")
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm is a length above 0, or None, not {clip_norm}")
        if warmup_epochs < 0:
            raise ValueError(f"warmup_epochs is a number of epochs, not {warmup_epochs}")
        self.final_density, self.warmup_epochs = density, warmup_epochs
        self.momentum, self.nesterov, self.clip_norm, self.masking = momentum, nesterov, clip_norm, masking
        self.velocity = Memory()
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Set the density of this epoch, counted from 0."""
        self.density = self.final_density ** min(1.0, (epoch + 1) / (self.warmup_epochs + 1))

    def step(self, piece: Piece) -> Tensor:
        """The momentum as this gradient leaves it: each rank's own, so that it may be added up over ranks like V."""
        # In one pass the product would not be rounded, and at density 1 bits would differ from torch.optim.SGD's.
        velocity = self.velocity.of(piece).mul_(self.momentum).add_(piece.values)
        return piece.values.add(velocity, alpha=self.momentum) if self.nesterov else velocity

    def sent(self, piece: Piece, indices: Tensor) -> None:
        """Mask the momentum of what is on its way."""
        if self.masking:
            self.velocity.of(piece).view(-1).index_fill_(0, indices, 0)

    def memories(self) -> Iterator[tuple[str, Memory]]:
        """U and V of the paper."""
        yield "velocity", self.velocity
        yield from super().memories()


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a rank that takes over from others: what all of them remember, added up.

    For fewer ranks than before. The division by the ranks' number is inside what is remembered, so nothing is scaled.
    """
    if not states:
        raise ValueError("there are no states to merge")
    first, *others = states
    merged: dict[str, Any] = {}
    for name, mine in first.items():
        theirs = [other[name] for other in others]
        if isinstance(mine, Mapping):
            merged[name] = {key: value.clone() for key, value in mine.items()}
            for key, value in (pair for each in theirs for pair in each.items()):
                merged[name][key] = merged[name][key] + value if key in merged[name] else value.clone()
        else:
            if any(other != mine for other in theirs):
                raise ValueError(f"states of one run have the same {name}, not {[mine, *theirs]}")
            merged[name] = mine
    return merged
