"""A model's numbers side by side in long vectors, one for each type, which can be averaged at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdl.torch.memory import empty

if TYPE_CHECKING:
    from mpi4py import MPI


class Vectors:
    """Copies of tensors in one vector for each type and device; those of a CPU lie in the memory of the node.

    Making one is a collective call: all ranks have the same tensors.
    """

    def __init__(self, tensors: Iterable[Tensor], comm: MPI.Comm | None) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for each in tensors:
            kinds.setdefault((each.dtype, each.device), []).append(each)
        self.tensors = [each for alike in kinds.values() for each in alike]
        self.flat: list[Tensor] = []
        self.views: list[Tensor] = []
        """Each tensor's place, in the order of `tensors`."""
        for (dtype, device), alike in kinds.items():
            length = sum(each.numel() for each in alike)
            on_cpu = device.type == "cpu"
            flat = empty(length, dtype, comm) if on_cpu else torch.zeros(length, dtype=dtype, device=device)
            self.flat.append(flat)
            pieces = torch.split(flat, [each.numel() for each in alike])
            self.views += [piece.view(each.shape) for piece, each in zip(pieces, alike, strict=True)]

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the tensors in."""
        for view, tensor in zip(self.views, self.tensors, strict=True):
            if view.dtype != tensor.dtype:
                raise RuntimeError(
                    f"a parameter was {view.dtype} when its vector was made and is {tensor.dtype} now: change the "
                    "model before it is averaged"
                )
            view.copy_(tensor)

    @torch.no_grad()
    def scatter(self) -> None:
        """Copy them back."""
        for view, tensor in zip(self.views, self.tensors, strict=True):
            tensor.copy_(view)
