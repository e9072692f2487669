"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

import hpcdl
from hpcdl.torch.functional import refuse
from hpcdl.torch.reducer import own_communicator

if TYPE_CHECKING:
    from mpi4py import MPI


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of which the mean and the variance are those of the batches of all ranks together.

    The input is of shape (N, C, ...), with C the same on all ranks and the rest the rank's own: N may differ, and be 0.
    It is of a floating-point type; 16-bit types are computed in float32. Training costs one all-gather of 2 C + 1
    numbers a rank in forward and one all-reduce of 2 C in backward, so all ranks must do both; eval mode talks to
    nobody. The running statistics are the same on all ranks, with the variance of the global batch made unbiased, as
    in torch's BatchNorm. The gradients of weight and bias are the rank's own share: what averages the other
    gradients sums them. Gradients cannot be differentiated again.

    In training all ranks get the same ValueError where all their inputs together hold one value a channel, or where a
    rank's input is of another shape, and the same TypeError where it is of another type.

    Ioffe & Szegedy, 2015, with the statistics of the parts put together as in Chan, Golub & LeVeque, 1979: a sum of
    squares, which one all-reduce could add up, cancels where the mean is large.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        comm: MPI.Comm | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training a collective call."""
        if not self.training:
            return super().forward(input)
        # Where the gradients travel too: so that a rank that comes there without having come here is noticed.
        comm = own_communicator(self.comm)
        if (error := self._refusal(input)) is not None:
            refuse(error, comm)
        batch = _statistics(input.detach(), comm)
        if batch.values == 1:
            raise ValueError(
                "training needs more than 1 value a channel, and the inputs of all ranks together hold 1: "
                f"this rank's is of shape {tuple(input.shape)}"
            )
        self._track(batch)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, batch, self.eps, comm
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if (error := self._refusal(input)) is not None:
            raise error

    def _refusal(self, input: Tensor) -> ValueError | TypeError | None:
        """What is wrong with an input, if anything is."""
        if input.dim() < 2 or input.shape[1] != self.num_features:
            return ValueError(
                f"the input must be of shape (N, {self.num_features}, ...), and is of shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            return TypeError(f"the input must be of a floating-point type, not {input.dtype}")
        return None

    @torch.no_grad()
    def _track(self, batch: _Batch) -> None:
        """Take the batch into the running statistics; one of nothing changes none, as in torch."""
        if not self.track_running_stats:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if batch.values == 0 or self.running_mean is None or self.running_var is None:
            return
        if self.momentum is not None:
            share = self.momentum
        else:  # the mean over all batches
            share = 1 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        unbiased = batch.variance * (batch.values / (batch.values - 1))
        self.running_mean.mul_(1 - share).add_(batch.mean.to(self.running_mean.dtype), alpha=share)
        self.running_var.mul_(1 - share).add_(unbiased.to(self.running_var.dtype), alpha=share)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        # A communicator is not copied: the copy talks over the same one.
        memo[id(self.comm)] = self.comm
        new = memo[id(self)] = self.__class__.__new__(self.__class__)
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


def convert_sync_batchnorm(module: nn.Module, comm: MPI.Comm | None = None) -> nn.Module:
    """Put a SyncBatchNorm in place of every BatchNorm in the module, which is returned; a BatchNorm gives a new module.

    Parameters, buffers, their names, hooks and the training flag are kept, and shared with what was replaced; modules
    of other kinds are left alone. An optimiser made before goes on to work. A lazy BatchNorm must have seen its first
    batch, else it is a ValueError. Not a collective call.
    """
    found = list(module.named_modules(remove_duplicate=False))  # one that is used twice has two names
    if lazy := [path for path, one in found if isinstance(one, _BatchNorm) and any(map(is_lazy, one.parameters()))]:
        raise ValueError(f"{lazy[0]!r} does not know its number of features yet: run one batch through it first")
    converted: dict[nn.Module, nn.Module] = {
        one: _converted(one, comm) for _, one in found if isinstance(one, _BatchNorm)
    }
    for path, one in found:
        if path and one in converted:
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).add_module(name, converted[one])
    return converted.get(module, module)


def _converted(module: nn.Module, comm: MPI.Comm | None) -> SyncBatchNorm:
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    new.__dict__.update({name: copy.copy(kept) if type(kept) is dict else kept for name, kept in vars(module).items()})
    new.comm = comm
    return new


class _Batch(NamedTuple):
    """The global batch: how many values a channel, and each channel's mean and (biased) variance, in float64."""

    values: int
    mean: Tensor
    variance: Tensor


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _others(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, x.dim())]


def _statistics(x: Tensor, comm: MPI.Comm | None) -> _Batch:
    """The statistics of the x of all ranks, by one all-gather: of each part its mean, M2 and count."""
    from hpcdl.call import channel

    own = channel(comm)
    channels = x.shape[1]
    parts = torch.zeros(own.size, 2 * channels + 1, dtype=torch.float64, device=x.device)
    mine = parts[own.rank]
    if channels and (count := x.numel() // channels):
        variance, mean = torch.var_mean(x.to(_accumulator(x.dtype)), _others(x), correction=0)
        mine[:channels], mine[channels:-1], mine[-1] = mean, variance.double() * count, count
    hpcdl.allgather(parts, comm)
    means, squares, counts = parts[:, :channels], parts[:, channels:-1], parts[:, -1:]
    total = int(counts.sum())
    mean = (means * counts).sum(0) / max(total, 1)
    m2 = squares.sum(0) + ((means - mean).square_() * counts).sum(0)
    return _Batch(total, mean, m2 / max(total, 1))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: _Batch,
        eps: float,
        comm: MPI.Comm | None,
    ) -> Tensor:
        kind, shape = _accumulator(x.dtype), [1, -1] + [1] * (x.dim() - 2)
        mean, deviation = batch.mean.to(kind).view(shape), (batch.variance + eps).rsqrt().to(kind).view(shape)
        ctx.save_for_backward(x, weight, mean, deviation)
        ctx.values, ctx.comm, ctx.bias_kind = batch.values, comm, None if bias is None else bias.dtype
        # The mean comes off first: x * scale + shift would cancel where it is large.
        output = (x - mean).mul_(deviation if weight is None else deviation * weight.view(shape))
        if bias is not None:
            output.add_(bias.view(shape))
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, deviation = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normal = (x - mean).mul_(deviation)
        mine = torch.stack([gradient.sum(_others(x)), (gradient * normal).sum(_others(x))])
        # Also where this rank needs no gradient of x: another one may, and waits.
        both = hpcdl.allreduce(mine.clone(), ctx.comm) / max(ctx.values, 1)
        of_input = None
        if ctx.needs_input_grad[0]:
            flat, slope = both.view(2, *mean.shape)
            scale = deviation if weight is None else deviation * weight.view(mean.shape)
            of_input = normal.mul_(-slope).add_(gradient).sub_(flat).mul_(scale).to(x.dtype)
        of_weight = None if weight is None else mine[1].to(weight.dtype)
        of_bias = None if ctx.bias_kind is None else mine[0].to(ctx.bias_kind)
        return of_input, of_weight, of_bias, None, None, None
