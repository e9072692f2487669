"""Numbers as a few bits each: the encodings of the quantising methods, which `PackedSum` works with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcdl.compress.bits import pack, unpack

SEEDS_APART = 65_537
"""So many ranks have random numbers of their own, which no rank has with the next seed."""


class Noise:
    """Uniform random numbers, each rank's own, that go on behind a checkpoint where they stood."""

    def __init__(self, seed: int) -> None:
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise ValueError(f"seed is a whole number from 0 to {2**32 - 1}, not {seed!r}")
        self._seed = seed
        self._state: Tensor | None = None
        self._generator: torch.Generator | None = None

    def begin(self, rank: int, device: torch.device) -> None:
        """Be rank's, on a device, from now on: ahead of the first numbers."""
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self._seed * SEEDS_APART + rank)
            if self._state is not None:
                self._generator.set_state(self._state)

    def like(self, x: Tensor) -> Tensor:
        """float32 numbers in [0, 1) in x's shape."""
        assert self._generator is not None
        return torch.rand(x.shape, generator=self._generator, device=x.device)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"state": self._state if self._generator is None else self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._state, self._generator = state["state"], None


class Means:
    """The sign of each number, and the two means of a block's numbers that are below zero and that are not."""

    def __init__(self, block: int) -> None:
        self.block = block

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """Two float32 values a block, then a bit a number."""
        blocks = x.view(*real.shape, self.block)
        high = blocks >= 0
        n_high = high.sum(-1, dtype=torch.float32) - (self.block - real)  # the zeros in a gap are no numbers
        means = torch.stack(
            (
                blocks.clamp(min=0).sum(-1) / n_high.clamp(min=1),
                blocks.clamp(max=0).sum(-1) / (real - n_high).clamp(min=1),
            ),
            -1,
        )
        return _payload(means, pack(high.view(x.shape), 1))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """To each number the mean of its kind."""
        means, codes = _parts(payload, 2 * (n // self.block))
        high, low = means.view(len(means), -1, 2).unbind(-1)
        values = unpack(codes, n, 1).float()
        # torch.where takes five times as long. The last bit may be another one, on all ranks the same.
        values.view(len(codes), -1, self.block).mul_((high - low)[..., None]).add_(low[..., None])
        return values


class Signs:
    """The sign of each number, that of 0 is +, times the mean magnitude of its block, or times 1."""

    def __init__(self, block: int, *, scaled: bool) -> None:
        self.block, self._scaled = block, scaled

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """A float32 value a block if it is scaled, then a bit a number."""
        bits = pack(x >= 0, 1)
        if not self._scaled:
            return bits
        return _payload(x.view(*real.shape, self.block).abs().sum(-1) / real.clamp(min=1), bits)

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """+ or - the scale."""
        scales, codes = _parts(payload, n // self.block if self._scaled else 0)
        signs = unpack(codes, n, 1).float().mul_(2).sub_(1)
        if self._scaled:
            signs.view(len(codes), -1, self.block).mul_(scales[..., None])
        return signs


class Levels:
    """Each number as one of 2**bits - 1 levels between - and + the 2-norm of its block, rounded up or down by chance.

    The chances are such that the mean is the number itself.
    """

    def __init__(self, bits: int, block: int, noise: Noise) -> None:
        if bits not in (2, 4, 8):
            raise ValueError(f"bits is 2, 4 or 8, not {bits!r}")
        self.block, self._bits, self._noise = block, bits, noise
        self.levels = 2 ** (bits - 1) - 1
        """How many there are above zero."""

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        """A float32 norm a block, then the levels, counted from the lowest."""
        blocks = x.view(*real.shape, self.block)
        # Relative to the largest: the squares of what float32 can hold it cannot.
        largest = blocks.abs().amax(-1, keepdim=True)
        ratios = blocks / torch.where(largest > 0, largest, 1)
        norm = torch.linalg.vector_norm(ratios, dim=-1, keepdim=True)
        exact = ratios.abs().mul_(self.levels / norm.clamp(min=1)).clamp_(max=self.levels)
        level = exact.floor()
        level += self._noise.like(exact) < exact.sub_(level)
        codes = level.copysign_(ratios).add_(self.levels).to(torch.uint8)
        return _payload((norm * largest).squeeze(-1), pack(codes.view(x.shape), self._bits))

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """The levels times the norm."""
        norms, codes = _parts(payload, n // self.block)
        values = unpack(codes, n, self._bits).float().sub_(self.levels)
        values.view(len(codes), -1, self.block).mul_((norms / self.levels)[..., None])
        return values


def _payload(scales: Tensor, codes: Tensor) -> Tensor:
    """Rows of float32 scales and of codes, as bytes."""
    return torch.cat((scales.reshape(len(codes), -1).contiguous().view(torch.uint8), codes), -1)


def _parts(payload: Tensor, scales: int) -> tuple[Tensor, Tensor]:
    """The scales and the codes of each row."""
    # A copy, as a row may begin where no float32 may; flat, as a row of none has no stride that would do.
    own = payload[:, : 4 * scales].clone(memory_format=torch.contiguous_format).view(-1)
    return own.view(torch.float32).view(len(payload), scales), payload[:, 4 * scales :]
