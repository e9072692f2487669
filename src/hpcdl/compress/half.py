"""Gradients of 16 bits on the wire, added in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcdl.compress.method import Method, Piece
from hpcdl.compress.wire import Wire

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Half(Method):
    """Sends every number in 16 bits: each rank rounds its own, they are added in float32, and the sum is rounded once.

    float16 has a narrow range: each parameter is multiplied by a power of two, the same on all ranks, so that the
    largest sums just fit, and small numbers are not lost in silence. There is no memory of what rounding loses.

    - `dtype`: torch.float16 or torch.bfloat16.

    Micikevicius et al. 2017, Mixed precision training, arXiv 1710.03740, has the types and the reason to scale.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in NAMES:
            raise ValueError(f"dtype is one of {', '.join(map(str, NAMES))}, not {dtype}")
        self.dtype, self.name = dtype, NAMES[dtype]
        self._vectors: dict[tuple[str, int], Tensor] = {}

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by the sum of what the ranks' round to, rounded."""
        pieces = [piece for piece in pieces if piece.values.numel()]
        if not pieces:
            return
        lengths = [piece.values.numel() for piece in pieces]
        place = (pieces[0].key, sum(lengths))
        if place not in self._vectors:
            self._vectors[place] = pieces[0].values.new_empty(place[1], dtype=self.dtype)
        vector = self._vectors[place]
        parts = [part.view(each.values.shape) for part, each in zip(torch.split(vector, lengths), pieces, strict=True)]
        scales = self._scales(pieces, wire) if self.dtype is torch.float16 else None
        for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            part.copy_(piece.values if scales is None else piece.values * scales[number])
        # The one algorithm of which every message has 16 bits; the others send partial sums in float32.
        wire.sum(vector, algorithm="direct")
        for number, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            piece.values.copy_(part)
            if scales is not None:
                piece.values.div_(scales[number])

    @staticmethod
    def _scales(pieces: Sequence[Piece], wire: Wire) -> Tensor:
        """Powers of two, which round nothing: no sum of the ranks' numbers comes to 2**15, float16 ends at 2**16."""
        largest = wire.max(torch.stack([piece.values.abs().amax().float() for piece in pieces]))
        room = 15 - (wire.size - 1).bit_length() - torch.frexp(largest).exponent
        return torch.ldexp(torch.ones_like(largest), room.clamp(-126, 126))
