"""Tensors in memory that all ranks of a node map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpcdl.buffers import lengths_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.call import Wanted


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None, comm: MPI.Comm | None = None) -> torch.Tensor:
    """A CPU tensor in node-shared memory, as `hpcdl.empty` makes arrays; of torch's default type unless given one."""
    # Importing it starts MPI, which a data loader's worker must not.
    from hpcdl.call import Wanted, allocate_array

    kind = torch.get_default_dtype() if dtype is None else dtype

    def wanted() -> Wanted:
        name, lengths = lengths_of(shape, str(kind).removeprefix("torch."))
        size = math.prod(lengths)
        return Wanted(
            size * kind.itemsize,
            f"{name} {lengths}",
            # frombuffer refuses to make a tensor of nothing.
            lambda memory, place: torch.frombuffer(memory, dtype=kind, count=max(size, 1), offset=place)[:size].view(
                lengths
            ),
            lambda: torch.zeros(lengths, dtype=kind),
        )

    tensor: torch.Tensor = allocate_array(wanted, comm)
    return tensor


def zeros(shape: int | Sequence[int], dtype: torch.dtype | None = None, comm: MPI.Comm | None = None) -> torch.Tensor:
    """An `empty` tensor, which holds zeros from the start."""
    return empty(shape, dtype, comm)
