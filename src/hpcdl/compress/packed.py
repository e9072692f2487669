"""The exchange of packed gradients: each rank adds up one part of them for all, and hands it out packed again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hpcdl.compress.method import Memory, Piece
from hpcdl.compress.wire import Wire


class Codec(Protocol):
    """What makes blocks of numbers small; rows are worked on side by side, a row a payload."""

    block: int
    """How many numbers share what is told of them together (a norm, two means)."""

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """float32 rows of whole blocks as uint8 rows, equally long for equally long rows.

        Of each block the first `real` numbers count, a float32 value a row and block; behind them there are zeros.
        """

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """What n numbers a row have become; what stands behind the real ones means nothing."""


class Layout:
    """Where pieces lie in one flat vector of whole blocks, cut into a part for each rank.

    Each piece begins a block: what becomes of it does not depend on the pieces that travel with it.
    """

    def __init__(self, pieces: Sequence[Piece], block: int, wire: Wire) -> None:
        device, blocks = pieces[0].values.device, [-(-each.values.numel() // block) for each in pieces]
        in_part = -(-sum(blocks) // wire.size)  # blocks
        self.part = in_part * block
        real = torch.zeros(wire.size * in_part)
        self.starts, begin = list[int](), 0
        for piece, number in zip(pieces, blocks, strict=True):
            self.starts.append(begin * block)
            real[begin : begin + number] = block
            if number:
                real[begin + number - 1] -= number * block - piece.values.numel()
            begin += number
        self.real = real.view(wire.size, in_part).to(device)
        self.mine = slice(wire.rank * self.part, (wire.rank + 1) * self.part)
        places = torch.arange(block, device=device)
        self.gaps = (places >= self.real[wire.rank, :, None]).view(-1)
        """Which numbers of this rank's part belong to no piece?"""

    def of_mine(self, number: int, piece: Piece) -> slice:
        """What of a piece lies in this rank's part, in the piece's own numbers."""
        start, n = self.starts[number], piece.values.numel()
        return slice(min(max(self.mine.start - start, 0), n), min(max(self.mine.stop - start, 0), n))


class PackedSum:
    """Adds up pieces over the ranks: encode, all-to-all, decode and add in the order of ranks, encode, all-gather.

    With `feedback`, what a rank's own numbers lose by the first encoding and what the sum loses by the second is
    remembered, and given again to the same encoding in the next call.
    """

    def __init__(self, codec: Codec, *, feedback: bool) -> None:
        self.codec, self.feedback = codec, feedback
        self.own, self.summed = Memory(), Memory()
        """What was lost of this rank's pieces, and of the sum of its part: zeros elsewhere."""
        self._layouts: dict[Hashable, Layout] = {}
        self._settled: dict[str, tuple[Tensor, slice]] = {}

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by what came of the sum, the same bits on all ranks (a collective call)."""
        if not any(each.values.numel() for each in pieces):
            return
        layout, codec = self._layout(pieces, wire), self.codec
        flat = self._given(pieces, layout, wire)
        rows = flat.view(wire.size, layout.part)
        sent = codec.encode(rows, layout.real)
        if self.feedback:
            lost = rows.sub_(codec.decode(sent, layout.part)).view(-1)
            for piece, start in zip(pieces, layout.starts, strict=True):
                _remember(self.own.of(piece).view(-1), lost[start : start + piece.values.numel()])
        del flat, rows

        key = pieces[0].key
        parts = wire.swap(key, sent)
        total = codec.decode(parts[:1], layout.part)
        for rank in range(1, wire.size):
            total += codec.decode(parts[rank : rank + 1], layout.part)
        total.view(-1).masked_fill_(layout.gaps, 0)
        if self.feedback:
            for number, piece in enumerate(pieces):
                mine, place = self._mine(number, piece, layout)
                total[0, place] += self.summed.of(piece).view(-1)[mine]
        again = codec.encode(total, layout.real[wire.rank : wire.rank + 1])
        if self.feedback:
            lost = total.sub_(codec.decode(again, layout.part)).view(-1)
            for number, piece in enumerate(pieces):
                mine, place = self._mine(number, piece, layout)
                _remember(self.summed.of(piece).view(-1)[mine], lost[place])

        whole = codec.decode(wire.gather(key, again[0]), layout.part).view(-1)
        for piece, start in zip(pieces, layout.starts, strict=True):
            piece.values.copy_(whole[start : start + piece.values.numel()].view(piece.values.shape))

    def _layout(self, pieces: Sequence[Piece], wire: Wire) -> Layout:
        key = tuple((each.key, each.values.numel(), each.values.device) for each in pieces), wire.rank, wire.size
        if key not in self._layouts:
            self._layouts[key] = Layout(pieces, self.codec.block, wire)
        return self._layouts[key]

    def _given(self, pieces: Sequence[Piece], layout: Layout, wire: Wire) -> Tensor:
        """The pieces in one vector, with what was not sent of them."""
        flat = torch.zeros(wire.size * layout.part, device=pieces[0].values.device)
        for number, (piece, start) in enumerate(zip(pieces, layout.starts, strict=True)):
            place = flat[start : start + piece.values.numel()]
            place.copy_(piece.values.reshape(-1))
            if self.feedback:
                self._settle(piece, layout.of_mine(number, piece))
                place += self.own.of(piece).view(-1)
        return flat

    def _settle(self, piece: Piece, mine: slice) -> None:
        """What was lost of sums that another rank makes by now, in other buckets or among others, is given as ours."""
        summed = self.summed.of(piece)
        before, place = self._settled.get(piece.key, (None, mine))
        if before is summed and place == mine:
            return
        given, lost = self.own.of(piece).view(-1), summed.view(-1)
        for others in (slice(0, mine.start), slice(mine.stop, None)):
            given[others] += lost[others]
            lost[others] = 0
        self._settled[piece.key] = summed, mine

    @staticmethod
    def _mine(number: int, piece: Piece, layout: Layout) -> tuple[slice, slice]:
        """This rank's numbers of a piece: where they are in the piece, and where in the rank's part."""
        mine = layout.of_mine(number, piece)
        shift = layout.starts[number] - layout.mine.start
        return (mine, slice(mine.start + shift, mine.stop + shift)) if mine.start < mine.stop else (mine, slice(0, 0))


def _remember(kept: Tensor, lost: Tensor) -> None:
    # Where numbers were too large for their sum the result says so; kept, it would spoil all later ones.
    kept.copy_(lost).nan_to_num_(0, 0, 0)
