"""What a way to compress gradients is: it adds up what all ranks have, by sending less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdl.compress.wire import Wire


class Piece(NamedTuple):
    """A parameter's gradient, or the part of it that this rank sees to."""

    key: str
    """What state is kept by: the parameter's name, and the part of it."""
    values: Tensor
    """float32 or float64, unscaled, to be replaced by the sum over the ranks; a view, which need not be contiguous."""
    is_matrix: bool
    """Has the parameter more than one dimension? Biases and batch norms have not."""


class Memory:
    """What was not sent, to be sent later: a tensor of zeros for each piece, until something is kept."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def of(self, piece: Piece) -> Tensor:
        """What is kept of it, in its shape."""
        if piece.key not in self.kept:
            self.kept[piece.key] = torch.zeros_like(piece.values, memory_format=torch.contiguous_format)
        elif self.kept[piece.key].device != piece.values.device:  # as it came from a checkpoint
            self.kept[piece.key] = self.kept[piece.key].to(piece.values.device)
        return self.kept[piece.key]


class Method:
    """One technique. Its state is each rank's own, by parameter, so that buckets may be made anew."""

    name = ""
    needs_whole = False
    """Does it need whole parameters, and so cannot work on a node's shares of them?"""
    clip_norm: float | None = None
    """The length of the whole batch's gradient beyond which each rank shortens its own (by the square root of the
    ranks' number less), ahead of anything else."""

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by the sum over the ranks, the same bits on all of them (a collective call)."""
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, counted from 0: for what changes with time."""

    def memories(self) -> Iterator[tuple[str, Memory]]:
        """What it remembers, by names."""
        return iter(())

    def residuals(self) -> Iterator[Tensor]:
        """What was not sent yet."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """This rank's, for a checkpoint."""
        return {name: dict(memory.kept) for name, memory in self.memories()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name, memory in self.memories():
            memory.kept = {key: value.clone() for key, value in state[name].items()}
