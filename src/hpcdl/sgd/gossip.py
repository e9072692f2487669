"""Gossip: every rank averages with one other, chosen by chance, and nobody waits for all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hpcdl.sgd.averaging import Averaging
from hpcdl.sgd.pairs import matching

if TYPE_CHECKING:
    from mpi4py import MPI

NAPS_S = 5e-5, 1e-3
"""Who waits for a partner sleeps between looks, at first and at most so long."""
SEGMENT = 1 << 26
"""Elements of a message: MPI counts bytes in 31 bits."""


class Gossip(Averaging):
    """Every `every` steps the ranks pair off by chance, and both of a pair go on from the mean of their parameters.

    A pair's exchange is symmetric, and both compute the same bits, so the mean over all ranks stays what it was (where
    halves are exact, to the last bit). A rank waits for one other, and no message crosses more than one link. After
    Boyd et al. 2006, Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), and for training Jin
    et al. 2016, How to scale distributed deep learning?, arXiv 1611.04581. See Averaging for what is averaged.
    """

    def __init__(self, model: nn.Module, comm: MPI.Intracomm | None = None, *, every: int = 1, seed: int = 0) -> None:
        from hpcdl.call import channel
        from hpcdl.channel import PLAIN

        super().__init__(model, comm, every=every, seed=seed)
        self.seed = seed
        self._wire, self._tag = channel(comm).wire, PLAIN + 4
        self._theirs = [torch.empty_like(flat, device="cpu") for flat in self._flats()]

    def _flats(self) -> list[Tensor]:
        return [*self._parameters.flat, *self._buffers.flat]

    @torch.no_grad()
    def average(self) -> None:
        """Average with this step's partner now."""
        partner = matching(self.size, self.steps, self.seed)[self.rank]
        if partner == self.rank:
            return
        self._parameters.gather()
        self._buffers.gather()
        self._exchange(partner, mine := [flat.cpu() for flat in self._flats()])  # itself, where it is a CPU's
        for flat, own, theirs in zip(self._flats(), mine, self._theirs, strict=True):
            flat.copy_(_mean(own, theirs))
        self._parameters.scatter()
        self._buffers.scatter()

    def _exchange(self, partner: int, mine: list[Tensor]) -> None:
        """Send mine, and receive theirs, asleep until it is there."""
        requests = []
        for own, theirs in zip(mine, self._theirs, strict=True):
            for sent, received in zip(torch.split(own, SEGMENT), torch.split(theirs, SEGMENT), strict=True):
                requests.append(self._wire.Irecv(_bytes(received), partner, self._tag))
                requests.append(self._wire.Isend(_bytes(sent), partner, self._tag))
        nap_s, most_s = NAPS_S
        for request in requests:
            while not request.Test():
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, most_s)


def _bytes(vector: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return vector.view(torch.uint8).numpy()  # NumPy has no bfloat16


def _mean(one: Tensor, other: Tensor) -> Tensor:
    """Both partners get the same bits, as adding commutes; 16 bits are added in 32, where no sum overflows."""
    if one.itemsize == 2:
        return (one.float() + other.float()).div_(2)
    return (one + other).div_(2)
