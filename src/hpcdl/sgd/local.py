"""Local SGD: each rank takes its own steps, and now and then all take the mean of their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

import hpcdl
from hpcdl.sgd.averaging import Averaging

if TYPE_CHECKING:
    from mpi4py import MPI


class LocalSGD(Averaging):
    """Every `every` steps all ranks go on from the mean of their parameters.

    With `every=1`, plain SGD and as many samples on each rank it is synchronous SGD, up to how the numbers are rounded:
    the mean of the steps is the step along the mean. It sends a message where that sends `every`. Of a momentum each
    rank has its own. After Stich 2018, Local SGD Converges Fast and Communicates Little, arXiv 1805.09767, algorithm 1.
    See Averaging for what is averaged.
    """

    def __init__(
        self, model: nn.Module, comm: MPI.Intracomm | None = None, *, every: int = 8, algorithm: str = "auto"
    ) -> None:
        super().__init__(model, comm, every=every, algorithm=algorithm)
        self._plans = [
            (vectors, [hpcdl.plan_allreduce(flat, comm, op="mean", algorithm=algorithm) for flat in vectors.flat])
            for vectors in (self._parameters, self._buffers)
        ]

    def average(self) -> None:
        """Have all ranks go on from the mean of their parameters now."""
        for vectors, plans in self._plans:
            vectors.gather()
            for plan in plans:
                plan()
            vectors.scatter()
