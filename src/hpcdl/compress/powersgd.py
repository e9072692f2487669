"""PowerSGD: a matrix of gradients travels as two thin ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import torch
from torch import Tensor

from hpcdl.compress.dense import dense
from hpcdl.compress.method import Memory, Method, Piece
from hpcdl.compress.wire import Wire


class PowerSGD(Method):
    """Sends a matrix, and what was not sent of it before, as the product of two matrices of `rank` columns.

    They come from one step of the power method, which goes on from the step before: as long as gradients change little
    they near the best ones that there are. Parameters of more than two dimensions are matrices of the first by all the
    others. Biases, batch norms and what would not become smaller are added up as they are.

    - `rank`: how many columns; the two are `rank` (n + m) numbers instead of n m.
    - `seed`: of the columns that the first step begins with; the same on all ranks.

    Vogels, Karimireddy and Jaggi 2019, PowerSGD, arXiv 1905.13727, algorithms 1 and 2.
    """

    name = "powersgd"
    needs_whole = True

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank is a whole number from 1 upwards, not {rank!r}")
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise ValueError(f"seed is a whole number from 0 to {2**32 - 1}, not {seed!r}")
        self.rank, self.seed = rank, seed
        self.error, self.right = Memory(), Memory()
        self._drawn: dict[tuple[str, int], Tensor] = {}
        self._vectors: dict[tuple[str, str, int], Tensor] = {}

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by what the ranks' matrices have in the columns that are found in common."""
        dense([piece for piece in pieces if not self._pays(piece)], wire)
        pieces = [piece for piece in pieces if self._pays(piece)]
        if not pieces:
            return
        # What is left of these in the end is the error.
        matrices = [self.error.of(piece).add_(piece.values).flatten(1) for piece in pieces]
        shorts = [matrix.float() for matrix in matrices]
        begun = [self._begin(piece.key, short) for piece, short in zip(pieces, shorts, strict=True)]
        key = pieces[0].key
        lefts = self._sum("left", key, [short @ right for short, right in zip(shorts, begun, strict=True)], wire)
        # Of the same bits, on each rank alike.
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        own = [short.T @ left for short, left in zip(shorts, lefts, strict=True)]
        rights = self._sum("right", key, own, wire)
        for piece, matrix, left, mine, right in zip(pieces, matrices, lefts, own, rights, strict=True):
            matrix.sub_(left @ mine.T)
            piece.values.copy_((left @ right.T).view(piece.values.shape))
            self.right.kept[piece.key] = right.clone()

    def _pays(self, piece: Piece) -> bool:
        if not piece.is_matrix or not piece.values.numel():
            return False
        n = len(piece.values)
        m = piece.values.numel() // n
        return self.rank * (n + m) < n * m

    def _begin(self, key: str, matrix: Tensor) -> Tensor:
        """The columns to begin with, their largest number 1, as products would leave float32's range otherwise."""
        m = matrix.shape[1]
        if (key, m) not in self._drawn:
            random = torch.Generator().manual_seed(crc32(f"{self.seed} {key}".encode()))
            self._drawn[key, m] = torch.randn(m, self.rank, generator=random).to(matrix.device)
        drawn, last = self._drawn[key, m], self.right.kept.get(key)
        if last is None or last.shape != drawn.shape:
            return drawn
        # Behind a gradient of zeros, say, a column is zero, and would stay so for ever.
        largest = last.abs().amax(0)
        return torch.where(largest > 0, last / largest, drawn)

    def _sum(self, side: str, key: str, mine: Sequence[Tensor], wire: Wire) -> list[Tensor]:
        """All of them added up as one vector, which is the same one in each step: its plan is bound once."""
        lengths = [each.numel() for each in mine]
        place = (side, key, sum(lengths))
        if place not in self._vectors:
            self._vectors[place] = mine[0].new_empty(place[2])
        vector = self._vectors[place]
        torch.cat([each.reshape(-1) for each in mine], out=vector)
        wire.sum(vector)
        return [part.view(each.shape) for part, each in zip(torch.split(vector, lengths), mine, strict=True)]

    def memories(self) -> Iterator[tuple[str, Memory]]:
        """What was not sent, and the right columns."""
        yield "error", self.error
        yield "right", self.right

    def residuals(self) -> Iterator[Tensor]:
        """The errors."""
        return iter(self.error.kept.values())
