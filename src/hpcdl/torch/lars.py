"""A rate for every layer, by the norms of its weights and gradient: large batches need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hpcdl.torch.decay import one_dimensional

# Three arrays of so many float32 stay in a processor's cache from one operation to the next: 10 million parameters took
# 25 ms of one core in place of 27, with decay 29 in place of 33; with blocks of 1 << 14 it was 44, as each operation
# costs some microseconds. For one thread alone: several wait for each other behind every operation, and where they had
# to share their cores a step in blocks took 7 times one of SGD.
BLOCK = 1 << 19
# Where a norm is first taken of each row: summed up in one go, that of 10 million float32 is 0.04 % off.
LONG = 1 << 16

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("a number from 0 on", lambda value: 0 <= value < inf),
    "exclude_lr": ("a number from 0 on, or None for a hundredth of lr", lambda value: 0 <= value < inf),
    "momentum": ("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "weight_decay": ("a number from 0 on", lambda value: 0 <= value < inf),
    "trust_coefficient": ("a number above 0, or None to adapt nothing", lambda value: 0 < value < inf),
    "eps": ("a number from 0 on", lambda value: 0 <= value < inf),
}


class LARS(Optimizer):
    """SGD with momentum that scales each layer's step to its weights: layer-wise adaptive rate scaling.

    For each parameter w with gradient g, where both norms are above 0 (else the ratio is 1):

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + eps)
        v = momentum v + lr ratio (g + weight_decay w)
        w = w - v

    The rate stands inside the momentum, so that a change of it leaves the steps gone before as they were. Norms are
    in float32, or float64 for float64, and so is the arithmetic of 16-bit parameters.

    The gradient must be the average over all ranks, of the whole parameter, and not scaled for fp16: call
    `scaler.unscale_(optimizer)`, then clip, then `scaler.step(optimizer)`.

    - `exclude`: tells of a parameter whether it is left out of this. By default those of one dimension are: biases and
      batch normalisation. They get plain momentum without decay, at a rate of their own:
    - `exclude_lr`: by default a hundredth of `lr`. At the full rate of a large run they spoil it: 87.3 against 88.4 %
      on Fashion-MNIST with a batch of 8,192 and lr 40.

    Each group that is given becomes two, the adapted parameters' and the excluded ones', of which an empty one is left
    out; so a scheduler that multiplies rates treats both alike. One that sets rates (max_lr of OneCycleLR and CyclicLR,
    eta_min) needs a list of one value a group of `param_groups`. The excluded group has `trust_coefficient` None. A
    group that is given with that is taken as it is, with its own rate and decay. A group may set each of the arguments
    for itself.

    TypeError, ValueError: a bad argument. After You, Gitman and Ginsburg 2017, arXiv 1708.03888.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0,
        trust_coefficient: float | None = 0.001,
        eps: float = 1e-8,
        exclude: Callable[[Tensor], bool] = one_dimensional,
        exclude_lr: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "exclude": exclude,
            "exclude_lr": exclude_lr,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, which then is cut into adapted and excluded parameters."""
        super().add_param_group({**param_group})
        # Not left there: both parts are added, or none.
        whole = self.param_groups.pop()
        _check(whole)
        self.param_groups += _cut(whole, whole.pop("exclude"), whole.pop("exclude_lr"))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move all parameters that have a gradient; a closure computes gradients and loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_sparse(self.param_groups)
        for group in self.param_groups:
            for parameters in _alike(group["params"]):
                # Without momentum what is added up is the weight itself.
                buffers = [self._buffer(each) for each in parameters] if group["momentum"] else parameters
                _move(parameters, [each.grad for each in parameters], buffers, group)  # type: ignore[misc]
        return loss

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _check(group: dict[str, Any]) -> None:
    for name, (right, fits) in RANGES.items():
        value = group[name]
        if value is None and "None" in right:
            continue
        if not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: LARS takes {right}")
        if not fits(float(value)):
            raise ValueError(f"{name} is {value}: LARS takes {right}")
    if not callable(group["exclude"]):
        raise TypeError(
            f"exclude is {group['exclude']!r}: it must be a function that tells of a parameter whether it is excluded"
        )


def _cut(
    whole: dict[str, Any], exclude: Callable[[Tensor], bool], exclude_lr: float | None
) -> Iterator[dict[str, Any]]:
    """The adapted and the excluded part of a group."""
    if whole["trust_coefficient"] is None or not whole["params"]:
        yield whole
        return
    out = [bool(exclude(each)) for each in whole["params"]]
    plain: dict[str, Any] = {"weight_decay": 0, "trust_coefficient": None}
    for name in ("lr", "initial_lr"):  # which a scheduler that resumes takes in place of lr
        if name in whole:
            plain[name] = whole[name] / 100 if exclude_lr is None else exclude_lr
    for excluded, differs in (False, {}), (True, plain):
        if excluded in out:
            part = {**whole, **differs}
            for name in ("params", "param_names"):
                if name in whole:
                    part[name] = [each for each, is_out in zip(whole[name], out, strict=True) if is_out == excluded]
            yield part


def _refuse_sparse(groups: Sequence[dict[str, Any]]) -> None:
    """Before anything has moved."""
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                name = group["param_names"][place] if "param_names" in group else f"{place} of group {number}"
                raise RuntimeError(
                    f"parameter {name} of shape {tuple(parameter.shape)} has a sparse gradient, and LARS takes dense "
                    "ones, as it needs the norm of the whole: make its layer with sparse=False"
                )


def _alike(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that have a gradient, in lists of one device and of one type."""
    found: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
    for each in parameters:
        if each.grad is not None:
            found.setdefault((each.device, each.dtype, each.grad.dtype), []).append(each)
    return list(found.values())


def _move(weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], group: dict[str, Any]) -> None:
    """A step of weights that are alike."""
    if min(torch.finfo(each.dtype).bits for each in (weights[0], gradients[0])) < 32:
        for narrow in zip(weights, gradients, buffers, strict=True):  # one by one, since copies take room
            weight, gradient, buffer = (each.float() for each in narrow)
            _move([weight], [gradient], [buffer], group)
            narrow[0].copy_(weight)
            narrow[2].copy_(buffer)  # last, as it may be the weight
        return
    momentum, weight_decay = group["momentum"], group["weight_decay"]
    sign = 1 if momentum else -1
    in_blocks = weights[0].device.type == "cpu" and torch.get_num_threads() == 1
    size = BLOCK if in_blocks else max(1, sum(each.numel() for each in weights))
    for block in _blocks(weights, gradients, buffers, _rates(weights, gradients, group), size):
        some_weights, some_gradients, sums, rates = zip(*block, strict=True)
        if momentum:
            torch._foreach_mul_(sums, momentum)
        if weight_decay:
            torch._foreach_addcmul_(sums, some_weights, rates, value=sign * weight_decay)
        torch._foreach_addcmul_(sums, some_gradients, rates, value=sign)
        if momentum:
            torch._foreach_sub_(some_weights, sums)


def _blocks(
    weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], rates: Sequence[Tensor], size: int
) -> Iterator[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Whole parameters, or slices of large ones, with about so many elements in all."""
    block: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    filled = 0
    for *whole, rate in zip(weights, gradients, buffers, rates, strict=True):
        pieces = -(-whole[0].numel() // size)
        cut = zip(*(each.chunk(pieces) for each in whole), strict=True) if pieces > 1 else [whole]
        for weight, gradient, buffer in cut:
            if block and filled + weight.numel() > size:
                yield block
                block, filled = [], 0
            block.append((weight, gradient, buffer, rate))
            filled += weight.numel()
    yield block


def _rates(weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> Sequence[Tensor]:
    """What each gradient is multiplied by, as 0-dimensional tensors: nothing waits for the device."""
    if group["trust_coefficient"] is None:
        return [weights[0].new_full((), group["lr"])] * len(weights)
    of_weights, of_gradients = _norms(weights), _norms(gradients)
    both = of_gradients + group["weight_decay"] * of_weights + group["eps"]
    ratios = torch.where((of_weights > 0) & (of_gradients > 0), group["trust_coefficient"] * of_weights / both, 1.0)
    rates: Tensor = group["lr"] * ratios
    return rates.unbind()


def _norms(tensors: list[Tensor]) -> Tensor:
    parts = [
        each if each.numel() < LONG else torch.linalg.vector_norm(each, dim=tuple(range(1, each.ndim)))
        for each in tensors
    ]
    return torch.stack(torch._foreach_norm(parts))
