"""Loss scaling for 16-bit training: all ranks skip a step or none does, and all have the same scale."""

from __future__ import annotations

import cmath
import copy
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

import hpcdl
from hpcdl.errors import MismatchError
from hpcdl.logs import logger
from hpcdl.torch.optimizer import Synchroniser, places

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.torch.buckets import Bucket, Named
    from hpcdl.torch.reducer import Reducer


# A scale is kept in 32 bits.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Culprit(NamedTuple):
    """Where a step's first gradient that was not finite came from."""

    step: int
    """The number of update() calls before it."""
    rank: int | None
    """None if it was in no rank's own gradients, but in their sum; or if nobody has looked ahead of the sum."""
    parameter: str


class Seen(NamedTuple):
    """A gradient that was not finite ahead of a reduction."""

    reduction: int
    """How many there were before since the last update()."""
    place: int
    """In the order of registration."""
    name: str


class Evidence(NamedTuple):
    """What one rank knows about gradients that are not finite: the first of each kind."""

    ahead: Seen | None
    """Seen on this rank ahead of a reduction that adds up all ranks' gradients."""
    reduced: str | None
    """Found in a gradient that was looked at ahead of its reduction, and is the same on all ranks now."""
    other: str | None
    """Found in any other gradient: reduced or this rank's own, who knows."""


class Row(NamedTuple):
    """Steps skipped one after the other."""

    skips: int = 0
    first: str = ""
    """What was wrong in the first of them."""


class GradScaler(TorchGradScaler):
    """torch's GradScaler for several ranks: what is not finite on any of them has all skip the step and scale alike.

    It is used as torch's, on every rank of `comm` (an mpi4py communicator, COMM_WORLD by default) for the same losses
    and optimisers. `unscale_`, and so the first `step` of an optimiser behind a backward pass, is a collective call: it
    asks, by one small all-reduce, whether any rank has found an inf or nan, also in gradients that are not reduced.
    What a rank does not use may have no gradient there, down to all that it has. Clip between `unscale_` and `step`.

    With an `hpcdl.torch.DistributedOptimizer`, `step` does all in the right order: it reduces the gradients unless
    `synchronize()` has, unscales them, and steps. Pass the scaler to `DistributedDataParallel(..., scaler=scaler)` to
    have it told on which rank, and in which parameter, a non-finite gradient began, and to keep such gradients out of
    the state of communication hooks.

    - `device`, `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`: as torch's, by name, and
      on the CPU by default.
    - `min_scale`: the scale does not fall below it. A step that is skipped there has rank 0 log a warning, once until
      the scale has grown again: a smaller scale would not help.

    `skipped` tells whether the last `step` left the optimiser alone: step a scheduler only if it did not. `culprit` is
    the (step, rank, parameter) of the last skipped step, and rank 0 logs each; both are for humans, see `hpcdl.logs`.

    ValueError: an argument is wrong. MismatchError, on all ranks: their scales differ.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        device: str = "cpu",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        enabled: bool = True,
    ) -> None:
        _check_arguments(comm, device, init_scale, growth_factor, backoff_factor, growth_interval, min_scale)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.skipped = False
        self.culprit: Culprit | None = None
        self._min_scale, self._steps = _as_kept(min_scale), 0
        self._row, self._warned, self._blamed = Row(), False, ""
        self._at(comm)

    def _at(self, comm: MPI.Comm | None) -> None:
        """Be on this communicator, with nothing looked at."""
        self._comm = comm
        self._asked: Tensor | None = None
        self._reductions = 0
        self._seen: list[Seen] = []
        self._watched: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self.announce: Callable[[], object] = nothing
        """Called ahead of the question to all ranks: some may have to be called to it."""

    @property
    def min_scale(self) -> float:
        """What the scale does not fall below."""
        return self._min_scale

    # ---- one step --------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimiser's gradients by the scale, and ask all ranks for an inf or nan (a collective call)."""
        if not self._enabled:
            return
        scale = None if self._scale is None else self.get_scale()
        self._begin()
        synchroniser = _synchroniser(optimizer)
        if synchroniser is not None and self._stage(optimizer) is OptState.READY:
            synchroniser.ensure(self)
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        self.announce()
        found = self._ask(self._found(state), scale, partial(self._evidence, optimizer))
        assert self._scale is not None
        state["found_inf_per_device"] = {self._scale.device: torch.full_like(self._scale, found)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, unless that is done, and step the optimiser on all ranks or on none."""
        if not self._enabled:
            return cast("float | None", optimizer.step(*args, **kwargs))
        if "closure" in kwargs or any(map(callable, args)):
            raise RuntimeError("a closure cannot be given to step() of a GradScaler: its losses would not be scaled")
        if self._stage(optimizer) is OptState.STEPPED:
            raise RuntimeError("step() was called for this optimiser already: call update() once a step, behind it")
        if self._stage(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        self.skipped = self._found(state)
        synchroniser = _synchroniser(optimizer)
        # Entered if nothing is done there too, since the gradients are not to be taken for the next step's.
        with nullcontext() if synchroniser is None else synchroniser.skip_synchronize():
            result = None if self.skipped else optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Make the scale smaller behind a skipped step, larger behind many that were not, or set it; on all ranks."""
        if not self._enabled:
            return
        if new_scale is not None:
            wanted = float(new_scale)
            if not self._min_scale <= wanted <= LARGEST:
                raise ValueError(f"new_scale is from min_scale={self._min_scale:g} to {LARGEST:g}, not {wanted:g}")
            new_scale = new_scale if isinstance(new_scale, Tensor) else wanted
        self._begin()
        before = self.get_scale()
        skipped = any(map(self._found, self._per_optimizer_states.values()))
        super().update(new_scale)
        assert self._scale is not None
        self._scale.clamp_(min=self._min_scale)
        after = self.get_scale()
        self._row = Row(self._row.skips + 1, self._row.first or self._blamed) if skipped else Row()
        if skipped:
            self._tell(before, after)
        if after > self._min_scale:
            self._warned = False
        self._steps += 1
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._blamed, self._reductions = "", 0
        self._seen.clear()

    def _tell(self, before: float, after: float) -> None:
        at_floor = before <= self._min_scale and not self._warned
        self._warned |= at_floor
        if _wire(self._comm).rank != 0:
            return
        logger.info(
            "step %d was skipped: %s; the loss scale was %g and is %g", self._steps, self._blamed, before, after
        )
        if at_floor:
            logger.warning(
                "the loss scale has come down to its floor, min_scale=%g, and steps are skipped still, %d in a row. In "
                "the first of them, step %d, %s. A smaller scale would not help: look at the loss of that step (log or "
                "division by 0, a learning rate too large, bad samples), or whether the model fits into 16 bits",
                self._min_scale,
                self._row.skips,
                self._steps - self._row.skips + 1,
                self._row.first,
            )

    def _begin(self) -> None:
        """Have a scale, also on a rank that has scaled no loss."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def _stage(self, optimizer: Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    @staticmethod
    def _found(state: Mapping[str, Any]) -> bool:
        return any(map(bool, state["found_inf_per_device"].values()))

    # ---- one verdict -----------------------------------------------------------------------------------------------

    def take_part(self) -> None:
        """Answer what the others ask in unscale_, on a rank that has no more data (a collective call)."""
        self._ask(False, None, lambda: None)

    def _ask(self, found: bool, scale: float | None, evidence: Callable[[], Evidence | None]) -> bool:
        """Has any rank found an inf or nan? Refuse scales that differ; a rank that has scaled nothing has None yet."""
        if self._asked is None:
            self._asked = torch.zeros(3, dtype=torch.float64)
        # 2 if nobody knows yet where it came from: all ranks find that out together, also those that only take part.
        says = found * (1 if self._blamed else 2)
        both = (-math.inf, -math.inf) if scale is None else (scale, -scale)
        self._asked.copy_(torch.tensor((says, *both), dtype=torch.float64))
        hpcdl.allreduce(self._asked, self._comm, op="max")
        says, largest, smallest = self._asked.tolist()
        if largest == -math.inf:
            self._scale = self._growth_tracker = None
            raise RuntimeError("no rank has scaled a loss: call scaler.scale(loss).backward(), not loss.backward()")
        if largest != -smallest:
            raise self._mismatch(scale)
        if says == 2:
            self._blame(evidence() if found else None)
        return bool(says)

    def _mismatch(self, scale: float | None) -> MismatchError:
        every = [(theirs, rank) for rank, theirs in enumerate(_wire(self._comm).allgather(scale)) if theirs is not None]
        told = [
            f"{theirs:g} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            for theirs in sorted({each for each, _ in every})
            if (ranks := [str(rank) for each, rank in every if each == theirs])
        ]
        return MismatchError(
            f"all ranks must have the same loss scale, it is {'; '.join(told)}: load the same state on all ranks, and "
            "call update() alike on all",
            told,
        )

    def _blame(self, evidence: Evidence | None) -> None:
        """Find the culprit, the same on all ranks (a collective call)."""
        every: list[Evidence | None] = _wire(self._comm).allgather(evidence)
        found = [(rank, each) for rank, each in enumerate(every) if each]
        # By the reduction first: behind the first one it is seen on all ranks ahead of the next.
        ahead = min([(each.ahead.reduction, rank, each.ahead.name) for rank, each in found if each.ahead], default=None)
        summed = next((each.reduced for _, each in found if each.reduced), None)
        others = [(rank, each.other) for rank, each in found if each.other]
        rank: int | None = None
        if ahead:
            _, rank, name = ahead
        elif others and (len(others) < len(every) or len(every) == 1):  # what is reduced would be so on all ranks
            rank, name = others[0]
        else:
            name = summed or others[0][1]
        self.culprit = Culprit(self._steps, rank, name)
        if rank is not None:
            self._blamed = f"rank {rank} had a non-finite gradient of {name}"
        elif summed:
            self._blamed = (
                f"the gradient of {name} is not finite, which came from the sum over the ranks (or its 16 bits), as no "
                "rank's own was so"
            )
        else:
            self._blamed = (
                f"the gradient of {name} is not finite on all ranks (DistributedDataParallel(..., scaler=scaler) tells "
                "where it began)"
            )

    def _evidence(self, optimizer: Optimizer) -> Evidence:
        names = {id(each): name for reducer in self._watched for name, each in reducer.named}
        bad = [(place, each) for place, each in places(optimizer) if each.grad is not None and not is_finite(each.grad)]
        return Evidence(
            min(self._seen, default=None),
            next((names[id(each)] for _, each in bad if id(each) in names), None),
            next((place for place, each in bad if id(each) not in names), None),
        )

    # ---- ahead of a reduction --------------------------------------------------------------------------------------

    def look(self, reducer: Reducer, buckets: Iterable[Bucket]) -> None:
        """Keep which gradients are not finite on this rank ahead of a reduction, behind which all ranks' are so."""
        # Of 10 million float32 the sum takes 3 ms on one core, as fast as memory is read; isfinite().all() takes 42. It
        # may overflow where all are finite: then they are looked at one by one for nothing.
        slots = [slot for each in buckets if not cmath.isfinite(each.flat.sum().item()) for slot in each.slots]
        self._keep(reducer, {slot.name for slot in slots if not is_finite(slot.view)})

    def look_at_rest(self, reducer: Reducer, buckets: Iterable[Bucket], sparse: Iterable[Named]) -> bool:
        """The same for all that a reduction has not begun with, once in each. Was any seen in the whole of it?"""
        self.look(reducer, buckets)
        self._keep(reducer, {name for name, each in sparse if each.grad is not None and not is_finite(each.grad)})
        self._reductions += 1
        return any(seen.reduction == self._reductions - 1 for seen in self._seen)

    def _keep(self, reducer: Reducer, names: Collection[str]) -> None:
        self._watched.add(reducer)
        if names:
            order = enumerate(name for name, _ in reducer.named)
            self._seen += [Seen(self._reductions, place, name) for place, name in order if name in names]

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and "step": the number of update() calls. torch's own scaler can load it."""
        return {**super().state_dict(), "step": self._steps} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from such a state, or one of torch's own scaler."""
        scale = state_dict.get("scale")
        if self._enabled and scale is not None and not self._min_scale <= scale <= LARGEST:
            raise ValueError(
                f"the state's scale, {scale:g}, is not between min_scale={self._min_scale:g} and {LARGEST:g}"
            )
        super().load_state_dict(state_dict)
        self._steps, self._row, self._warned = state_dict.get("step", 0), Row(), False

    def follow(self, comm: MPI.Intracomm, root: int) -> None:
        """Become what the scaler of that rank is (a collective call)."""
        own = self.state_dict(), self.culprit, self._row, self._warned
        state, self.culprit, row, warned = comm.bcast(own, root)
        if state:
            self.load_state_dict(state)
        self._row, self._warned = row, warned
        self._begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled it is without its communicator: unpickled it is on COMM_WORLD."""
        ours = ("_comm", "_asked", "_reductions", "_seen", "_watched", "announce")
        return {name: value for name, value in super().__getstate__().items() if name not in ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._at(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:
        """Another one, on the same communicator."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._comm = self._comm
        return twin


def nothing() -> None:
    """Announce nothing."""


def is_finite(gradient: Tensor) -> bool:
    """Is there no inf and no nan in it?"""
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


def _synchroniser(optimizer: Optimizer) -> Synchroniser | None:
    """What makes the optimiser a distributed one."""
    return getattr(optimizer, "_synchroniser", None)


def _wire(comm: MPI.Comm | None) -> MPI.Intracomm:
    from hpcdl.call import channel  # starts MPI

    return channel(comm).wire


def _as_kept(scale: float) -> float:
    """The number that torch has of it, as it keeps scales in 32 bits."""
    return torch.tensor(scale, dtype=torch.float32).item()


def _check_arguments(
    comm: Any, device: str, init_scale: float, growth: float, backoff: float, interval: int, min_scale: float
) -> None:
    if comm is not None and not hasattr(comm, "allgather"):
        raise TypeError(f"comm is an mpi4py communicator, not {comm!r}: pass all else by name, as device={comm!r}")
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is the type of a device, 'cpu' or 'cuda', not {device!r}") from None
    if not SMALLEST <= min_scale <= LARGEST:
        raise ValueError(f"min_scale is from {SMALLEST:g} to {LARGEST:g}, not {min_scale}")
    if not min_scale <= init_scale <= LARGEST:
        raise ValueError(f"init_scale is from min_scale={min_scale} to {LARGEST:g}, not {init_scale}")
    if not 1 < growth < math.inf:
        raise ValueError(f"growth_factor is above 1, not {growth}")
    if not 0 < backoff < 1:
        raise ValueError(f"backoff_factor is between 0 and 1, not {backoff}")
    if type(interval) is not int or interval < 1:
        raise ValueError(f"growth_interval is a number of steps, 1 or more, not {interval!r}")
