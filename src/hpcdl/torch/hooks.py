"""Communication hooks: what is done with a bucket of gradients instead of the plain all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hpcdl

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.torch.buckets import Bucket


class GradBucket:
    """A bucket of gradients as a communication hook sees it; the face of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, count: int) -> None:
        self._bucket, self._count = bucket, count

    def index(self) -> int:
        """Its place in the order in which buckets are reduced, from 0."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Is it the last one of this backward pass?"""
        return self._bucket.index == self._count - 1

    def buffer(self) -> Tensor:
        """All its gradients as one flat tensor, with gaps of zeros between them."""
        return self._bucket.flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Write other values into it; of the buffer's length."""
        self._bucket.flat.copy_(tensor.view(-1))

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient, as a view of the buffer."""
        return [slot.view for slot in self._bucket.slots]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the same order."""
        return [slot.parameter for slot in self._bucket.slots]

    def names(self) -> list[str]:
        """Their names, in the same order: what a hook may keep state by, as buckets can change."""
        return [slot.name for slot in self._bucket.slots]


def allreduce_hook(comm: MPI.Comm | None, bucket: GradBucket) -> Tensor:
    """The plain mean, as a hook: the baseline that others are compared with, and a part of them."""
    buffer: Tensor = hpcdl.allreduce(bucket.buffer(), comm, op="mean")
    return buffer


def has_a_wire(comm: MPI.Intracomm) -> bool:
    """Are there several nodes?"""
    from hpcdl.call import channel

    return len(channel(comm).nodes) > 1


def wire_hook(
    comm: MPI.Intracomm, dtype: torch.dtype, *, average: bool = True
) -> Callable[[object, GradBucket], Tensor]:
    """A hook that sends gradients of 32 or 64 bits as 16 bits between nodes, and adds them in float32.

    A node's ranks add up their gradients as they are. Each then rounds its share of that sum once, sends it to its
    peers on the other nodes, and rounds the mean once. Where the nodes have unequal numbers of ranks, every rank rounds
    its own gradients and sends them to all others.
    """
    from hpcdl.call import channel

    nodes = channel(comm).nodes
    own = next(number for number, node in enumerate(nodes) if comm.rank in node)
    lanes = len(set(map(len, nodes))) == 1
    inside = comm.Split(own if lanes else comm.rank, comm.rank)
    between = comm.Split(nodes[own].index(comm.rank) if lanes else 0, comm.rank)

    def reduce(_: object, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        if buffer.dtype not in (torch.float32, torch.float64):
            hpcdl.allreduce(buffer, comm, op="mean" if average else "sum")
            return buffer
        hpcdl.reduce_scatter(buffer, inside)
        mine = buffer[hpcdl.share(len(buffer), inside)]
        # The mean of a node first: a sum might leave what 16 bits can hold.
        short = mine.div_(inside.size).to(dtype)
        hpcdl.allreduce(short, between, op="mean", algorithm="direct")
        mine.copy_(short)
        hpcdl.allgather(buffer, inside)
        return buffer if average else buffer.mul_(comm.size)

    return reduce
