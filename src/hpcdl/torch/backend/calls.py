"""The collectives of a process group that are hpcdl's own: all_reduce, reduce, broadcast, all_gather, reduce_scatter.

Each function gives the steps of one operation, for a lane to drive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hpcdl.buffers import TYPES
from hpcdl.call import Call
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Steps
from hpcdl.record import Operation
from hpcdl.torch.backend import moves
from hpcdl.torch.backend.moves import Flat, kind_of

if TYPE_CHECKING:
    from hpcdl.torch.backend.group import ProcessGroupHpcdl as Group

# Compared one by one: a ReduceOp is equal to one of its kinds, and is found neither in a tuple nor in a dictionary.
OPS = [
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "mean"),
    (ReduceOp.PRODUCT, "prod"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.BAND, "band"),
    (ReduceOp.BOR, "bor"),
    (ReduceOp.BXOR, "bxor"),
]


def op_of(op: Any) -> tuple[str, Any]:
    """Our name of a ReduceOp, and what to multiply by ahead of it: a number, a tensor of one, or None."""
    for theirs, ours in OPS:
        if op == theirs:
            return ours, None
    if op == ReduceOp.PREMUL_SUM:
        return "sum", op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # before torch 2.13
    raise ValueError(f"op is one of torch's ReduceOps, such as ReduceOp.SUM, not {op!r}")


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """The tensor times the factor, in its own type."""
    return tensor * (factor.to(tensor.device) if isinstance(factor, Tensor) else factor)


def numbers(tensor: Tensor, op: str) -> Tensor:
    """The tensor as one of a type that is added up."""
    if tensor.dtype != torch.complex32:
        return tensor
    if op not in ("sum", "mean"):
        raise UnsupportedArrayError(f"of complex32 there are the sum and the mean, and no {op}: convert to complex64")
    return torch.view_as_real(tensor)


def all_reduce(group: Group, tensor: Tensor, op: Any, operation: Operation) -> Steps:
    """Combine all ranks' tensors, in place."""
    name, factor = op_of(op)
    target = numbers(tensor, name)
    work = target if factor is None else scaled(target, factor)
    yield from Call("allreduce", work, group.comm, name, group.algorithm("allreduce")).steps(operation)
    if work is not target:
        put(target, work)


def all_reduce_together(group: Group, tensors: Sequence[Tensor], op: Any, operation: Operation) -> Steps:
    """Combine several tensors each: those of a type and device as one message."""
    alike: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in alike.values():
        flat = torch.cat([each.detach().reshape(-1) for each in members])
        yield from all_reduce(group, flat, op, operation)
        for each, piece in zip(members, torch.split(flat, [one.numel() for one in members]), strict=True):
            put(each, piece)


def reduce(group: Group, tensor: Tensor, op: Any, root: int, operation: Operation) -> Steps:
    """Combine all ranks' tensors in the root's; the others' stay as they are."""
    name, factor = op_of(op)
    target = numbers(tensor, name)
    work = target if factor is None else scaled(target, factor)
    yield from Call("reduce", work, group.comm, name, group.algorithm("reduce"), None, root).steps(operation)
    if work is not target and group.channel.rank == root:
        put(target, work)


def broadcast(group: Group, tensor: Tensor, root: int, operation: Operation) -> Steps:
    """Give all ranks the root's tensor."""
    algorithm = group.algorithm("broadcast")
    if kind_of(tensor) in TYPES:
        yield from Call("broadcast", tensor, group.comm, None, algorithm, None, root).steps(operation)
        return
    flat = Flat(tensor)
    yield from Call("broadcast", flat.bytes, group.comm, None, algorithm, None, root).steps(operation)
    flat.hand_back()


def all_gather(group: Group, outputs: Tensor | Sequence[Tensor], mine: Tensor, operation: Operation) -> Steps:
    """Collect all ranks' tensors, in one behind each other, or in one each."""
    size = group.channel.size
    if not isinstance(outputs, Tensor):
        if len(outputs) != size or any(each.numel() != mine.numel() or each.dtype != mine.dtype for each in outputs):
            yield from moves.all_gather_uneven(group, outputs, mine, operation)
            return
        whole = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device)
        yield from all_gather(group, whole, mine, operation)
        for output, piece in zip(outputs, torch.split(whole, mine.numel()) if mine.numel() else (), strict=False):
            put(output, piece)
        return
    algorithm = group.algorithm("allgather")
    given, handed_back = mine.detach(), outputs.detach()
    if kind_of(mine) not in TYPES:
        given, flat = torch.from_numpy(Flat(given).bytes), Flat(handed_back)
        yield from Call("allgather", given, group.comm, None, algorithm, torch.from_numpy(flat.bytes)).steps(operation)
        flat.hand_back()
        return
    if share_storage(given, outputs):  # as its own part of the whole, above all
        given = given.clone()
    yield from Call("allgather", given, group.comm, None, algorithm, outputs).steps(operation)


def reduce_scatter(
    group: Group, output: Tensor, inputs: Tensor | Sequence[Tensor], op: Any, operation: Operation
) -> Steps:
    """Combine all ranks' tensors; this rank gets its own part of them, which may be of a length of its own."""
    size, me = group.channel.size, group.channel.rank
    name, factor = op_of(op)
    target = numbers(output, name)
    if isinstance(inputs, Tensor):
        parts = [target.numel()] * size
        work = numbers(inputs, name).detach().resolve_conj().reshape(-1)
        work = work.clone() if factor is None else scaled(work, factor)
    else:
        moves.check_count(inputs, size, "input_list")
        parts = [numbers(each, name).numel() for each in inputs]
        work = torch.cat([numbers(each, name).detach().reshape(-1) for each in inputs])
        work = work if factor is None else scaled(work, factor)
    if sum(parts) != work.numel() or parts[me] != target.numel() or target.dtype != work.dtype:
        raise ValueError(
            f"the input has {work.numel()} elements of {work.dtype} for {size} ranks, of which this one gets "
            f"{parts[me]}, and the output {target.numel()} of {target.dtype}"
        )
    if len(set(parts)) == 1:
        algorithm = group.algorithm("reduce_scatter")
        yield from Call("reduce_scatter", work, group.comm, name, algorithm).steps(operation)
        put(target, work[me * parts[me] : (me + 1) * parts[me]])
        return
    for root, part in enumerate(torch.split(work, parts)):
        yield from Call("reduce", part, group.comm, name, group.algorithm("reduce"), None, root).steps(operation)
        if root == me:
            put(target, part)


@torch.no_grad()
def put(tensor: Tensor, flat: Tensor) -> None:
    """Give a tensor its elements."""
    tensor.copy_(flat.view(tensor.shape))


def share_storage(one: Tensor, other: Tensor) -> bool:
    """May two tensors have memory in common?"""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
