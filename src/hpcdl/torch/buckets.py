"""Gradients side by side in a few long vectors: one all-reduce for many parameters (tensor fusion)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcdl.torch.memory import empty

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.execute import Plan

# Every gradient begins where vector instructions and cache lines do.
ALIGNED_BYTES = 64


class Named(NamedTuple):
    """A parameter and what the user calls it."""

    name: str
    parameter: Tensor


class Slot:
    """One parameter's place in a bucket."""

    def __init__(self, number: int, named: Named, bucket: Bucket, start: int) -> None:
        self.number, (self.name, self.parameter), self.bucket = number, named, bucket
        self.view = _like(self.parameter, bucket.flat, start)
        self._address, self._strides = self.view.data_ptr(), self.view.stride()
        self.used = False
        """Has it got a gradient since the last reduction?"""

    def holds(self, gradient: Tensor) -> bool:
        """Does the gradient lie here? Its identity says nothing: model.double() exchanges the memory of a tensor."""
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self._address
            and gradient.dtype is self.view.dtype
            and gradient.stride() == self._strides
        )

    def take(self, gradient: Tensor) -> None:
        """Copy a gradient in, and have the parameter's be here."""
        if self.view.dtype != gradient.dtype or self.view.shape != gradient.shape:
            raise RuntimeError(
                f"the gradient of {self.name} was {self.view.dtype} {tuple(self.view.shape)} when its bucket was made "
                f"and is {gradient.dtype} {tuple(gradient.shape)} now: change the module before it is wrapped, or call "
                "the wrapped module's forward once more, which makes the buckets anew"
            )
        self.view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
        self.parameter.grad = self.view


class Bucket:
    """A vector of gradients of one type, on one device, and their all-reduce."""

    def __init__(self, index: int, members: Sequence[Named], numbers: Iterable[int], comm: MPI.Comm) -> None:
        first = members[0].parameter
        starts, length = [], 0
        for _, parameter in members:
            starts.append(length)
            length += _padded(parameter)
        self.index = index
        if first.device.type == "cpu":
            self.flat = empty(length, first.dtype, comm)  # in the memory of the node: nothing is copied to reduce it
        else:
            self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.slots = [Slot(*row) for row in zip(numbers, members, [self] * len(starts), starts, strict=True)]
        self.plan: Plan | None = None

    def bind(self, plan: Callable[[Tensor], Plan]) -> None:
        """Prepare its all-reduce."""
        self.plan = plan(self.flat)

    def close(self) -> None:
        """Free what was bound."""
        if self.plan is not None:
            self.plan.close()
            self.plan = None


def group(parameters: Sequence[Tensor], cap_bytes: int, first_bytes: int) -> list[list[int]]:
    """Which parameters share a bucket, by their numbers; the buckets in the order in which they are reduced.

    Gradients arrive roughly in the reverse order of registration, so buckets are filled in that order, one type and
    device each. The first one is small: the sooner it is full, the sooner something can travel. A parameter longer than
    the cap has a bucket of its own.
    """
    filled: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        nbytes, kind = _padded(parameter) * parameter.element_size(), (parameter.dtype, parameter.device)
        members, length = open_.get(kind, ([], 0))
        cap = cap_bytes if filled else first_bytes
        if members and length + nbytes > cap:
            filled.append(members)
            members, length = [], 0
        open_[kind] = [*members, number], length + nbytes
    filled += [members for members, _ in open_.values()]
    # By the last one to come, which is what a bucket waits for.
    return sorted(filled, key=lambda members: -members[-1])


def _padded(parameter: Tensor) -> int:
    """The elements that a parameter takes, with the gap behind it."""
    line = max(1, ALIGNED_BYTES // parameter.element_size())
    return -(-parameter.numel() // line) * line


def _like(parameter: Tensor, flat: Tensor, start: int) -> Tensor:
    """A piece of a bucket in the parameter's shape and, where that is dense, with its strides.

    torch's fused optimisers take for granted that a gradient lies as its parameter does, as in channels_last.
    """
    strides = torch.empty_like(parameter, device="meta").stride()  # as autograd would lay it out
    # On the storage and no view to autograd, so that a user may call detach_() on it.
    piece = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return piece.set_(flat.untyped_storage(), flat.storage_offset() + start, parameter.shape, strides)
