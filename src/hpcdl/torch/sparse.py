"""Sparse gradients: the rows that ranks have touched, collected and added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hpcdl

if TYPE_CHECKING:
    from mpi4py import MPI


def add_up(parameter: Tensor, comm: MPI.Intracomm, *, average: bool, joined: bool = False) -> None:
    """Replace a parameter's sparse gradient by the sum or mean of all ranks' (a collective call).

    Each rank sends the rows that it has touched, each row once. Where no rank has any, the gradient stays as it is.
    """
    gradient = None if joined else parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64), parameter.new_empty((0, *parameter.shape[1:])), parameter.shape
        )
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()

    counts = torch.zeros(comm.size, dtype=torch.int64)
    counts[comm.rank] = len(rows)
    hpcdl.allreduce(counts, comm)
    longest = int(counts.max())
    if not longest:
        return
    # All ranks send as many rows as the longest has: what is behind a rank's own is dropped again.
    all_rows, all_values = (_gathered(each, longest, comm) for each in (rows, values))
    kept = torch.cat([torch.arange(count) + rank * longest for rank, count in enumerate(counts.tolist())])
    values = all_values[kept] / comm.size if average else all_values[kept]
    total = torch.sparse_coo_tensor(all_rows[kept].unsqueeze(0), values, parameter.shape)
    parameter.grad = total.coalesce()


def _gathered(mine: Tensor, longest: int, comm: MPI.Intracomm) -> Tensor:
    share = mine.new_zeros((longest, *mine.shape[1:]))
    share[: len(mine)] = mine
    every = mine.new_empty((comm.size * longest, *mine.shape[1:]))
    hpcdl.allgather(share, comm, out=every)
    return every
