"""What ranks have in common that train each on its own and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hpcdl
from hpcdl.errors import MismatchError
from hpcdl.sgd.vectors import Vectors
from hpcdl.torch.objects import broadcast_parameters
from hpcdl.verdict import agree, difference

if TYPE_CHECKING:
    from mpi4py import MPI


class Averaging:
    """A model that is averaged over the ranks every so many steps: `step()` behind each `optimizer.step()`.

    At the start all ranks get rank 0's parameters and buffers. What is averaged are the parameters that want gradients
    then, and the buffers of floating point (running statistics); other buffers and the optimiser's state stay each
    rank's own. All ranks take as many steps. After `model.double()` or the like make another one.

    ValueError, on all ranks: a bad argument. MismatchError: the ranks' models or arguments differ.
    """

    def __init__(self, model: nn.Module, comm: MPI.Intracomm | None, *, every: int, **settings: Any) -> None:
        from hpcdl.call import channel

        own = channel(comm)
        self.model, self.comm, self.every = model, comm, every
        self.rank, self.size = own.rank, own.size
        self.steps = 0
        problem = None
        if type(every) is not int or every < 1:
            problem = f"every is a number of steps, 1 or more, not {every!r}"
        if found := agree(own.wire, problem or self._problem()):
            raise ValueError(found)
        if found := difference(own.wire, type(self).__name__, {"every": every, **settings}):
            raise MismatchError(found)
        broadcast_parameters(model, comm)
        self._parameters = Vectors((each for each in model.parameters() if each.requires_grad), comm)
        self._buffers = Vectors((each for each in model.buffers() if each.is_floating_point()), comm)

    def _problem(self) -> str | None:
        """What is wrong with further arguments."""
        return None

    def step(self) -> bool:
        """Count a step of the optimiser, and average if it is time for that; was it? All ranks call it alike."""
        self.steps += 1
        due = self.steps % self.every == 0
        if due:
            self.average()
        return due

    def average(self) -> None:
        """Bring the ranks together now."""
        raise NotImplementedError

    def _meet(self) -> None:
        """Have the model be what stands for all ranks."""
        self._take_mean(self._parameters)
        self._take_mean(self._buffers)

    def _take_mean(self, vectors: Vectors) -> None:
        vectors.gather()
        for flat in vectors.flat:
            hpcdl.allreduce(flat, self.comm, op="mean")
        vectors.scatter()

    def settle(self) -> None:
        """Give all ranks for good what stands for them all, such as the mean; a collective call."""
        self._meet()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is what stands for all ranks, the same on all of them: to be evaluated or saved.

        That is the mean of the ranks' models, or of ElasticAveraging the centre. To enter it is a collective call.
        """
        both = (self._parameters, self._buffers)
        before = [each.detach().clone() for vectors in both for each in vectors.tensors]
        self._meet()
        try:
            yield
        finally:
            with torch.no_grad():
                for each, own in zip((each for vectors in both for each in vectors.tensors), before, strict=True):
                    each.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of this rank's averaging."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = state["steps"]
