"""An optimiser whose step first reduces the gradients of all ranks: Horovod's way to train."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import hpcdl
from hpcdl.torch.buckets import Slot
from hpcdl.torch.objects import compare_kinds, kinds_of
from hpcdl.torch.reducer import Reducer
from hpcdl.verdict import agree

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.torch.scaler import GradScaler

OPS = ("mean", "sum")


def DistributedOptimizer(  # the name that people know
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    comm: MPI.Comm | None = None,
    op: str = "mean",
    backward_passes_per_step: int = 1,
    sparse_as_dense: bool = False,
    bucket_cap_mb: float = 25,
    algorithm: str = "auto",
) -> Any:
    """Have every `step()` of the optimiser begin with the all-reduce of its gradients; gives back the same object.

    So it stays an optimiser of its class: schedulers, hooks, checkpoints and groups are what they were, also those made
    before. A copy of it, or what comes out of its pickle, is a plain one again. It gets two methods: `synchronize()`
    reduces now, to look at or clip what all ranks have alike; behind it step under
    `with optimizer.skip_synchronize():`, or the step reduces once more. A closure that is given to `step` is called as
    by torch, each time with a reduction behind it; the loss it returns, if a tensor, is reduced like the gradients,
    so that LBFGS decides alike on all ranks.

    All parameters start as each rank has them: call `broadcast_parameters` first. `step()` and `synchronize()` are
    collective calls, also on a rank that had no samples, which counts with zeros. A parameter that no rank has used
    keeps its gradient as it was. What is added by `add_param_group`, on all ranks, is reduced from the next time on.

    - `named_parameters`: the names for messages and for comparing the ranks, as `model.named_parameters()` gives them.
    - `op`: "mean" or "sum" over the ranks. With "sum" call `zero_grad()` between steps.
    - `backward_passes_per_step`: the gradients of up to so many backward passes are added up on each rank before they
      are reduced, not divided by their number. A step after fewer passes reduces what there is; one pass more is a
      RuntimeError.
    - `sparse_as_dense`: sparse gradients become dense ones. Otherwise only the rows that were touched travel.
    - `bucket_cap_mb`, `algorithm`: as in DistributedDataParallel.

    Nothing travels before `step` or `synchronize`, since an optimiser cannot know when backward has ended: to reduce
    beside backward take DistributedDataParallel. With an `hpcdl.torch.GradScaler`, `scaler.step` does all. With torch's
    own call `synchronize()`, then `scaler.unscale_`, then `scaler.step` under `skip_synchronize()`: all ranks then skip
    alike. `scaler.step` of that one without this is a RuntimeError on all ranks, as each would look at its own
    gradients.

    ValueError, on all ranks: a bad argument, a name given twice, parameters of the optimiser without a name.
    MismatchError: the ranks' parameters differ. After Sergeev and Del Balso 2018, Horovod, arXiv 1802.05799.
    """
    from hpcdl.call import channel

    names = None if named_parameters is None else list(named_parameters)
    problem = _problem(optimizer, names, op, backward_passes_per_step, bucket_cap_mb)
    if found := agree(channel(comm).wire, problem):
        raise ValueError(found)
    hpcdl.allreduce(torch.zeros(1), comm, algorithm=algorithm)  # which refuses a wrong name here, not in a loop

    own = Synchroniser(
        optimizer,
        {parameter: name for name, parameter in reversed(names or [])},
        comm,
        sparse_as_dense=sparse_as_dense,
        passes=backward_passes_per_step,
        bucket_cap_mb=bucket_cap_mb,
        first_bucket_mb=bucket_cap_mb,
        algorithm=algorithm,
        average=op == "mean",
        overlap=False,
    )
    optimizer.register_step_pre_hook(own.before_step)
    wrapped: Any = optimizer
    wrapped.synchronize, wrapped.skip_synchronize = own.synchronize, own.skip_synchronize
    wrapped.zero_grad, wrapped._synchroniser = own.zero_grad, own
    return wrapped


class Synchroniser:
    """When an optimiser's gradients are reduced."""

    def __init__(
        self,
        optimizer: Optimizer,
        names: dict[Tensor, str],
        comm: MPI.Comm | None,
        *,
        sparse_as_dense: bool,
        **options: Any,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names, self._comm, self._options = names, comm, options
        self._sparse_as_dense = sparse_as_dense
        self._gradients: Gradients | None = None
        self._scaler: GradScaler | None = None
        self._synchronised = self._skipping = False
        self._scales_itself = bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # a fused one
        self._tell_scalers()
        self._compared()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce all gradients now (a collective call): to clip them, or to look at them."""
        parameters = [parameter for _, parameter in self._named()]
        before = [] if self._gradients is None else [each.parameter for each in self._gradients.named]
        if self._gradients is None or list(map(id, before)) != list(map(id, parameters)):
            if self._gradients is not None:
                self._gradients.close()
            self._gradients = self._made()
        self._gradients.refresh()
        self._gradients.scaler = self._scaler
        self._gradients.reduce()
        self._synchronised = True
        self._tell_scalers()

    def ensure(self, scaler: GradScaler) -> None:
        """Reduce, unless that is done or not wanted, ahead of a scaler's look at the gradients."""
        self._scaler = scaler
        if not (self._synchronised or self._skipping):
            self.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step()` takes the gradients as they are."""
        before, self._skipping = self._skipping, True
        self._tell_scalers()
        try:
            yield
        finally:
            self._skipping = before
            self._done()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        optimizer = self._whole()
        type(optimizer).zero_grad(optimizer, set_to_none)
        if self._gradients is not None:
            self._gradients.begin_anew()
        self._done()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Reduce, or have the closure do it."""
        if self._skipping:
            return None
        if hasattr(optimizer, "found_inf") and not self._synchronised:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            raise RuntimeError(
                "GradScaler has looked at the gradients of this rank alone: call optimizer.synchronize() first, then "
                "scaler.unscale_(optimizer), then scaler.step(optimizer) under `with optimizer.skip_synchronize():`. "
                "Or take hpcdl.torch.GradScaler, whose step does all that"
            )
        _, *others = args
        closure = others[0] if others else kwargs.get("closure")
        if closure is not None:
            reducing = partial(self._run, closure)
            return ((args[0], reducing), kwargs) if others else (args, {**kwargs, "closure": reducing})
        if self._synchronised:
            warnings.warn(
                "step() behind synchronize() reduces once more: call it under `with optimizer.skip_synchronize():`",
                RuntimeWarning,
                stacklevel=3,
            )
        self.synchronize()
        self._done()
        return None

    def _run(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        self._done()
        if not isinstance(loss, Tensor):
            return loss
        op = "mean" if self._options["average"] else "sum"
        return hpcdl.allreduce(loss.detach().clone(), self._comm, op=op)

    def _done(self) -> None:
        """The gradients are no longer those that synchronize() has left."""
        self._synchronised = False
        self._tell_scalers()

    def _tell_scalers(self) -> None:
        """Have a GradScaler call `step` on every rank, to be refused there, where it has seen this rank's part alone.

        Else it would skip the step of the ranks with an inf, while the others wait for them.
        """
        ready = self._synchronised or self._skipping
        optimizer: Any = self._whole()
        optimizer._step_supports_amp_scaling = self._scales_itself or not ready

    def _whole(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None  # it holds this
        return optimizer

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(self._names.get(parameter, place), parameter) for place, parameter in places(self._whole())]

    def _compared(self) -> list[tuple[str, Tensor]]:
        """The parameters with their names, which are the same on all ranks, or all raise (a collective call)."""
        from hpcdl.call import channel

        named = self._named()
        compare_kinds(channel(self._comm), kinds_of(named), 0)
        return named

    def _made(self) -> Gradients:
        """The buckets. They are made for the first reduction: by then it is seen which gradients are sparse."""
        from hpcdl.call import channel

        named = self._compared()
        mine = [name for name, each in named if each.grad is not None and each.grad.is_sparse]
        sparse = frozenset[str]().union(*channel(self._comm).wire.allgather(mine))
        return Gradients(
            named,
            self._comm,
            sparse=frozenset() if self._sparse_as_dense else sparse,
            to_dense=self._sparse_as_dense,
            **self._options,
        )


class Gradients(Reducer):
    """A reducer that counts the backward passes in each gradient."""

    def __init__(self, *args: Any, passes: int, to_dense: bool, **kwargs: Any) -> None:
        self._passes, self._to_dense = passes, to_dense
        self._reduced: set[int] = set()
        super().__init__(*args, **kwargs)

    def _build(self) -> None:
        super()._build()
        self._reduced.clear()
        for slot in self.slots:  # what was there before the bucket
            slot.used = slot.parameter.grad is not None

    def arrived(self, slot: Slot) -> None:
        """A parameter's gradient has been added up."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            if not self._to_dense:
                raise RuntimeError(
                    f"{slot.name} has a sparse gradient now and had none in the first step: use it there too, or pass "
                    "sparse_as_dense=True"
                )
            gradient = slot.parameter.grad = gradient.to_dense()
        if not slot.holds(gradient):  # a new one: what was in the bucket has been thrown away
            self._counts[slot.number] = 0
            self._reduced.discard(slot.number)
        super().arrived(slot)
        if self._counts[slot.number] > self._passes:
            raise RuntimeError(
                f"{slot.name} has got gradients from more than backward_passes_per_step={self._passes} backward passes "
                "before step(): pass a larger number to add up more, or call optimizer.zero_grad() to begin anew"
            )

    def reduce(self, *, joined: bool = False) -> None:
        """Reduce all gradients (a collective call)."""
        if not self.average:
            self._refuse_reduced()
        super().reduce(joined=joined)
        self._reduced = {slot.number for slot in self.slots if self._is_in(slot)}

    def _refuse_reduced(self) -> None:
        """What was summed over the ranks would be summed once more. For a mean that changes nothing."""
        again = [slot.name for slot in self.slots if slot.number in self._reduced and self._is_in(slot)]
        if again:
            raise RuntimeError(
                f"the sums of {', '.join(again)} over the ranks are there from the last reduction, and would be summed "
                "once more: call optimizer.zero_grad() between steps, and step() behind synchronize() under `with "
                "optimizer.skip_synchronize():`"
            )

    @staticmethod
    def _is_in(slot: Slot) -> bool:
        return slot.parameter.grad is not None and slot.holds(slot.parameter.grad)

    def begin_anew(self) -> None:
        """All gradients are zero."""
        self._reduced.clear()
        self.reset()
        for slot in self.slots:
            slot.used = False

    def close(self) -> None:
        """Leave the parameters alone."""
        self._release()


def places(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The parameters, by the names that the optimiser has for them, or else by their places."""
    for number, group in enumerate(optimizer.param_groups):
        places = [f"group {number}, parameter {place}" for place in range(len(group["params"]))]
        yield from zip(group.get("param_names", places), group["params"], strict=True)


def _problem(
    optimizer: Optimizer, named: list[tuple[str, Tensor]] | None, op: str, passes: int, cap: float
) -> str | None:
    """What is wrong with the arguments."""
    if not isinstance(optimizer, Optimizer):
        return f"optimizer is a torch.optim.Optimizer, not {optimizer!r}"
    if hasattr(optimizer, "skip_synchronize"):
        return "the optimiser is a distributed one already"
    if op not in OPS:
        return f"op is one of {', '.join(OPS)}, not {op!r}"
    if type(passes) is not int or passes < 1:
        return f"backward_passes_per_step is a number of backward passes, 1 or more, not {passes!r}"
    if not cap > 0:
        return f"bucket_cap_mb is above 0, not {cap}"
    if named is None:
        return None
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return f"several parameters have the same name: {', '.join(twice)}"
    known = {id(parameter) for _, parameter in named}
    if missing := [
        f"{place} {tuple(parameter.shape)}" for place, parameter in places(optimizer) if id(parameter) not in known
    ]:
        return f"named_parameters lacks parameters of the optimiser: {'; '.join(missing)}"
    return None
