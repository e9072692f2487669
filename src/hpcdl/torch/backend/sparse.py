"""Sparse tensors all-reduced: every rank gets the elements of all, and adds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcdl.call import Call
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Steps
from hpcdl.record import Operation
from hpcdl.torch.backend.calls import op_of, scaled
from hpcdl.torch.backend.moves import Flat, agreed, exchange, name_of

if TYPE_CHECKING:
    from hpcdl.torch.backend.group import ProcessGroupHpcdl as Group


def all_reduce(group: Group, tensor: Tensor, op: Any, operation: Operation) -> Steps:
    """The sum or the mean of all ranks' sparse tensors, in place, coalesced."""
    size, me = group.channel.size, group.channel.rank

    def make() -> tuple[str, Tensor]:
        name, factor = op_of(op)
        if name not in ("sum", "mean") or tensor.layout != torch.sparse_coo:
            raise UnsupportedArrayError(
                f"{name} of a tensor of layout {tensor.layout}: of sparse ones those of layout torch.sparse_coo are "
                "added up, or averaged; make the others dense"
            )
        ours = tensor.detach().coalesce()
        return name, ours if factor is None else scaled(ours, factor).coalesce()

    dims = f"{tensor.sparse_dim()} dimensions sparse" if tensor.layout == torch.sparse_coo else "not COO"
    name, ours = yield from agreed(group, operation, f"all_reduce of sparse {name_of(tensor)}, {dims}", make)

    counts = torch.zeros(size, dtype=torch.int64)
    counts[me] = ours._nnz()
    yield from Call("allreduce", counts, group.comm, "sum").steps(operation)
    every = counts.tolist()
    parts = []
    for mine in (ours.indices().t().contiguous(), ours.values().contiguous()):  # a row for each element
        rows = [mine if rank == me else mine.new_empty((count, *mine.shape[1:])) for rank, count in enumerate(every)]
        sent, places = Flat(mine), {rank: Flat(each) for rank, each in enumerate(rows) if rank != me}
        yield from exchange(group, dict.fromkeys(places, sent), places)
        parts.append(torch.cat(rows))
    indices, values = parts
    if name == "mean":
        values = values / size
    with torch.no_grad():
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        tensor.copy_(total.coalesce())
