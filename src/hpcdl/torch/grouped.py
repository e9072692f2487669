"""Many tensors as few long vectors: one all-reduce for each type (tensor fusion), for code outside a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hpcdl
from hpcdl.errors import UnsupportedArrayError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.execute import Steps, Work
    from hpcdl.record import Operation


def grouped_allreduce(
    tensors: Sequence[Tensor], comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto"
) -> list[Tensor]:
    """`hpcdl.allreduce` of each tensor, in place, as one message for all of a type and device; gives the tensors.

    They are dense tensors of any types, shapes and layouts, empty ones too, the same on all ranks in the same order;
    else all ranks get the same `MismatchError`. What cannot be served is the same `UnsupportedArrayError` (a TypeError)
    or ValueError on all ranks. Like all collectives but the gradients' it sums; Horovod's default is the mean.
    """
    from hpcdl.execute import finish

    fused = _Fused(tensors, comm, op, algorithm)
    finish(fused.agreed()).end()
    for flat in fused.flats:
        hpcdl.allreduce(flat, comm, op=op, algorithm=algorithm)
    return fused.handed_back()


def grouped_iallreduce(
    tensors: Sequence[Tensor], comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto"
) -> Work:
    """Start a `grouped_allreduce`. The tensors get their results when it is complete, and are not to be touched before.

    For one tensor there is `hpcdl.iallreduce`, which copies nothing.
    """
    from hpcdl.execute import Work
    from hpcdl.record import About, begin

    fused = _Fused(tensors, comm, op, algorithm)

    nbytes = sum(flat.nbytes for flat in fused.flats)
    operation = begin(About("grouped_iallreduce", fused.channel.key, nbytes, algorithm), 0, 0, 1)

    def steps() -> Steps:
        check = yield from fused.agreed(operation)
        try:
            for bound in fused.bounds:
                with (yield from bound.plan(fused.channel, check, "i")) as plan:
                    yield from plan.steps()
            fused.handed_back()
        finally:
            check.end()

    work = Work(steps(), lambda: fused.tensors, operation)
    if algorithm == "native":
        work.wait()  # MPI matches its own collectives by their order, so another may not come between
    return work


def poll(work: Work) -> bool:
    """Is it complete? Does not wait. The same as `work.is_completed()`."""
    return work.is_completed()


class _Fused:
    """The tensors of each type and device behind each other in one vector."""

    def __init__(self, tensors: Sequence[Tensor], comm: MPI.Comm | None, op: str | MPI.Op, algorithm: str) -> None:
        # Importing it starts MPI, which a data loader's worker must not.
        from hpcdl.call import Bound, Call, channel

        self.channel, self.tensors = channel(comm), list(tensors)
        self.flats: list[Tensor] = []
        self.bounds: list[Bound] = []
        self._refusal: ValueError | TypeError | None = None
        alike: dict[object, list[Tensor]] = {}
        try:
            for number, each in enumerate(self.tensors):
                _check(number, each)
                alike.setdefault((each.dtype, each.device), []).append(each)
            self._members = list(alike.values())
            self.flats = [_flat(members) for members in self._members]
            self.bounds = [Bound(Call("allreduce", flat, comm, op, algorithm), self.channel) for flat in self.flats]
        except (TypeError, ValueError) as error:
            self._refusal = error

    def agreed(self, operation: Operation | None = None) -> Any:
        """The steps in which all ranks see that they want the same, or all raise."""
        from hpcdl.check import PRIVATE, agree

        kinds = ""
        if self._refusal is None:
            kinds = ", ".join(
                f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)} on {each.device.type}"
                for each in self.tensors
            )
            kinds = f"{'; '.join(map(str, self.bounds))}; together the tensors {kinds}"
        return agree(self.channel, f"grouped {kinds}", PRIVATE, self._refusal, operation)

    @torch.no_grad()
    def handed_back(self) -> list[Tensor]:
        """The tensors, with what the vectors hold."""
        for members, flat in zip(self._members, self.flats, strict=True):
            pieces = torch.split(flat, [each.numel() for each in members])
            for each, piece in zip(members, pieces, strict=True):
                each.copy_(piece.view(each.shape))
        return self.tensors


@torch.no_grad()
def _flat(members: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.resolve_conj().resolve_neg().reshape(-1) for each in members])


def _check(number: int, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise UnsupportedArrayError(f"tensor {number} is of type {type(tensor).__name__}, no torch tensor")
    if tensor.layout != torch.strided:
        raise UnsupportedArrayError(f"tensor {number} is no dense tensor but one of layout {tensor.layout}")
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UnsupportedArrayError(f"tensor {number} is expanded: several of its elements are one in memory")
