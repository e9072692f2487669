"""What does not pay to compress: all pieces of a call side by side in one vector, added up as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpcdl.compress.method import Piece
from hpcdl.compress.wire import Wire


def dense(pieces: Sequence[Piece], wire: Wire) -> None:
    """Replace each piece by the sum over the ranks; a collective call, unless there is nothing to add."""
    filled = [piece.values for piece in pieces if piece.values.numel()]
    if not filled:
        return
    flat = torch.cat([values.reshape(-1) for values in filled])
    wire.sum(flat)
    for values, part in zip(filled, flat.split_with_sizes([values.numel() for values in filled]), strict=True):
        values.copy_(part.view(values.shape))
