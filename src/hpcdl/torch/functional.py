"""An all-reduce that autograd can go through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

import hpcdl
from hpcdl.errors import UnsupportedArrayError

if TYPE_CHECKING:
    from mpi4py import MPI

OPS = ("sum", "mean")


def all_reduce(x: Tensor, comm: MPI.Comm | None = None, *, op: str = "sum", algorithm: str = "auto") -> Tensor:
    """The sum or mean of the x of all ranks, element by element, in a new tensor that gradients flow through.

    `x` is a strided tensor of any shape and layout, of the same shape and type on all ranks: floating-point or complex,
    for a sum also of integers. The gradient of x is the all-reduce, by the same op, of the gradients of the results:
    that of the sum (or mean) of all ranks' losses. It can be differentiated again. So every rank that calls this
    must go backward through it as often as the others, or the others wait.

    All ranks get the same ValueError for another op, the same `UnsupportedArrayError` (a TypeError) for an x that
    cannot be served, and the same `MismatchError` if they disagree.

    The same rule as in torch.distributed.nn.functional.all_reduce, which has it from the chain rule: each rank's x adds
    to every rank's result.
    """
    if op not in OPS:
        refuse(ValueError(f"op is one of {', '.join(OPS)}, since others have no such gradient, not {op!r}"), comm)
    if not isinstance(x, Tensor):
        refuse(UnsupportedArrayError(f"x is a torch tensor, not {type(x).__name__}"), comm)
    if x.layout != torch.strided:
        refuse(UnsupportedArrayError(f"x is a dense tensor, not one of layout {x.layout}: use x.to_dense()"), comm)
    result: Tensor = _AllReduce.apply(x, comm, op, algorithm)  # type: ignore[no-untyped-call]
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Comm | None, op: str, algorithm: str) -> Tensor:
        ctx.arguments = comm, op, algorithm
        # A clone is dense also where x is expanded: sum() hands back a gradient that is one element in memory.
        result = x.detach().resolve_conj().resolve_neg().clone()
        hpcdl.allreduce(result, comm, op=op, algorithm=algorithm)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        comm, op, algorithm = ctx.arguments
        return all_reduce(gradients[0], comm, op=op, algorithm=algorithm), None, None, None


def refuse(error: ValueError | TypeError, comm: MPI.Comm | None) -> NoReturn:
    """Raise the error on all ranks: those that have started a collective get it in place of a result."""
    # Importing these starts MPI, which a data loader's worker must not.
    from hpcdl.call import channel
    from hpcdl.check import agree
    from hpcdl.execute import finish

    finish(agree(channel(comm), "", refusal=error))
    raise AssertionError("a refusal is always raised")
