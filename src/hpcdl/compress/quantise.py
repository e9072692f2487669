"""Methods that send every number of a gradient, in a few bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hpcdl.compress.codecs import Levels, Means, Noise, Signs
from hpcdl.compress.dense import dense
from hpcdl.compress.method import Memory, Method, Piece
from hpcdl.compress.packed import PackedSum
from hpcdl.compress.wire import Wire

MOST_RANKS = 127
"""Of so many ranks an int8 holds the sum of -1, 0 and 1."""


class _Packed(Method):
    """A method that packs matrices for a `PackedSum`, and has the others added up as they are."""

    sum: PackedSum

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by what the bits of all ranks come to."""
        dense([each for each in pieces if not each.is_matrix], wire)
        self.sum.reduce([each for each in pieces if each.is_matrix], wire)

    def memories(self) -> Iterator[tuple[str, Memory]]:
        """What was lost of this rank's numbers, and of the sums that it makes."""
        if self.sum.feedback:
            yield "own", self.sum.own
            yield "summed", self.sum.summed

    def residuals(self) -> Iterator[Tensor]:
        """Both are of the size of a sum."""
        return chain.from_iterable(memory.kept.values() for _, memory in self.memories())


class OneBit(_Packed):
    """Sends the sign of each number and two means a column, of the numbers below zero and of the others.

    What is lost is remembered and given in the next step: of each rank's numbers, and of the sum, which its owner
    encodes alike before it hands it out. Biases and batch norms are added up as they are.

    - `column`: how many numbers of a parameter, one behind the other, have their means together.

    Seide et al. 2014, 1-bit stochastic gradient descent, Interspeech.
    """

    name = "onebit"

    def __init__(self, column: int = 512) -> None:
        self.sum = PackedSum(Means(_checked("column", column)), feedback=True)


class QSGD(_Packed):
    """Sends each number as one of a few levels of its bucket's 2-norm, rounded at random so that the mean is right.

    The owner of a part of the sum rounds it in the same way before handing it out. There is no memory of what is lost.
    Biases and batch norms are added up as they are.

    - `bits`: 8, 4 or 2 for each number: 127, 7 or 1 levels above zero, and as many below.
    - `bucket`: how many numbers of a parameter, one behind the other, have their norm together.
    - `seed`: of the rounding; each rank has random numbers of its own.

    Alistarh et al. 2017, QSGD, arXiv 1610.02132, section 3; without its coding of variable length.
    """

    name = "qsgd"

    def __init__(self, bits: int = 8, bucket: int = 512, seed: int = 0) -> None:
        self._noise = Noise(seed)
        self.sum = PackedSum(Levels(bits, _checked("bucket", bucket), self._noise), feedback=False)

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by a sum whose mean is the exact one."""
        if pieces:
            self._noise.begin(wire.rank, pieces[0].values.device)
        super().reduce(pieces, wire)

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers stand."""
        return {"noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._noise.load_state_dict(state["noise"])


class TernGrad(Method):
    """Sends -1, 0 or 1 for each number, at random so that the mean is right; the ranks share a scale a parameter.

    So the sum is one of integers, of 8 bits, for 127 ranks at most. The scale is the largest magnitude on any rank.
    There is no memory of what is lost. Biases and batch norms are added up as they are.

    - `clip`: numbers of more than so many standard deviations (about zero) are cut to that, which makes the scale
      smaller and the mean wrong; None leaves them. The paper has 2.5.
    - `seed`: of the rounding; each rank has random numbers of its own.

    Wen et al. 2017, TernGrad, arXiv 1705.07878, section 3.
    """

    name = "terngrad"

    def __init__(self, clip: float | None = 2.5, seed: int = 0) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is a number of standard deviations above 0, or None, not {clip!r}")
        self.clip = clip
        self._noise = Noise(seed)
        self._codes: dict[tuple[str, int], Tensor] = {}

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by the scale times a sum of integers. ValueError: there are too many ranks."""
        if wire.size > MOST_RANKS:
            raise ValueError(f"terngrad adds up in 8 bits, which serves {MOST_RANKS} ranks, not {wire.size}")
        dense([each for each in pieces if not each.is_matrix], wire)
        pieces = [each for each in pieces if each.is_matrix and each.values.numel()]
        if not pieces:
            return
        self._noise.begin(wire.rank, pieces[0].values.device)
        given = [self._clipped(each.values.reshape(-1).float()) for each in pieces]
        scales = wire.max(torch.stack([each.abs().amax() for each in given]))
        lengths = [len(each) for each in given]
        place = (pieces[0].key, sum(lengths))
        if place not in self._codes:
            self._codes[place] = given[0].new_empty(place[1], dtype=torch.int8)
        codes = self._codes[place]
        parts = torch.split(codes, lengths)
        for x, scale, part in zip(given, scales, parts, strict=True):
            chance = x.abs().div_(torch.where(scale > 0, scale, 1))
            part.copy_(x.sign().mul_(self._noise.like(x) < chance))
        wire.sum(codes)
        for piece, scale, part in zip(pieces, scales, parts, strict=True):
            piece.values.copy_((part * scale).view(piece.values.shape))

    def _clipped(self, x: Tensor) -> Tensor:
        if self.clip is None:
            return x
        # Relative to the largest, as squares may leave float32's range. About zero, and not about the mean: a single
        # number, or equal ones, would be cut to nothing.
        largest = x.abs().amax()
        most = self.clip * largest * (x / torch.where(largest > 0, largest, 1)).square().mean().sqrt()
        return x.clamp(-most, most)

    def state_dict(self) -> dict[str, Any]:
        """Where the random numbers stand."""
        return {"noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._noise.load_state_dict(state["noise"])


class SignSGD(_Packed):
    """Sends the sign of each number, and has the ranks vote: the result is 1 or -1, not a sum.

    So the rate that it is multiplied by is the whole length of a step, some hundred times smaller than usual. The sign
    of 0 is +, and so is what as many ranks are for as against. Of biases and batch norms, which are added up as they
    are, it is the sign as well, so that one rate serves all.

    - `feedback`: the sign times the mean magnitude of its block instead, added up and encoded again; what is lost both
      times is remembered and given in the next step. The result is a sum then, for usual rates, and biases and batch
      norms keep theirs.
    - `block`: how many numbers of a parameter, one behind the other, have their mean magnitude together.

    Bernstein et al. 2018, signSGD, arXiv 1802.04434, algorithm 3; with feedback: Karimireddy et al. 2019, arXiv
    1901.09847, algorithm 1, of which the error here is one of gradients and not of steps; for several ranks and in
    blocks Zheng, Huang and Kwok 2019, arXiv 1905.10936.
    """

    name = "signsgd"

    def __init__(self, feedback: bool = False, block: int = 512) -> None:
        self.feedback = feedback
        self.sum = PackedSum(Signs(_checked("block", block), scaled=feedback), feedback=feedback)

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by what most ranks are for, or with feedback by a sum."""
        super().reduce(pieces, wire)
        for piece in pieces:
            if not self.feedback and not piece.is_matrix:
                piece.values.copy_(torch.where(piece.values >= 0, 1.0, -1.0))


def _checked(name: str, block: int) -> int:
    """A length of blocks. ValueError: it is none."""
    if type(block) is not int or block < 1:
        raise ValueError(f"{name} is a whole number from 1 upwards, not {block!r}")
    return block
