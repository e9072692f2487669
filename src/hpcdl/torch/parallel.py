"""Synchronous data-parallel training of any PyTorch module: every rank has a copy, and all apply the same gradients."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

import hpcdl
from hpcdl.environment import cores_per_rank, under_launcher
from hpcdl.errors import HpcdlError, MismatchError
from hpcdl.torch.hooks import has_a_wire, wire_hook
from hpcdl.torch.norm import SyncBatchNorm
from hpcdl.torch.objects import broadcast_parameters
from hpcdl.torch.reducer import CommHook, Reducer
from hpcdl.torch.scaler import GradScaler, nothing
from hpcdl.verdict import difference

if TYPE_CHECKING:
    from mpi4py import MPI

WIRE_TYPES = (torch.bfloat16, torch.float16)

LEFT, REDUCES, UNSCALES = range(3)
"""What a rank does next inside join()."""


class DistributedDataParallel(nn.Module):
    """A module whose backward pass ends with the same averaged gradients on all ranks.

    At the start the parameters and buffers of rank 0 are copied to all ranks. The gradients lie side by side in buckets
    (on one node in memory that its ranks share), which are all-reduced in a fixed order; when `backward` returns, all
    is done. So clipping acts on the averaged gradients, every optimiser works, and all ranks stay equal to the last
    bit. Making one, `forward` in training after parameters were frozen, and every synchronising `backward` are
    collective calls; `forward` on its own, in training or evaluation, is not.

    - `comm`: an mpi4py intracommunicator, COMM_WORLD by default.
    - `bucket_cap_mb`, `first_bucket_mb`: how many MiB of gradients are reduced at once; the first bucket is small, so
      that it is ready soon.
    - `algorithm`: one of `hpcdl.algorithms()`.
    - `average`: the mean over the ranks, else the sum.
    - `overlap`: reduce each bucket on a thread as soon as its gradients are there. "auto" does so only where that pays:
      where a rank has a core to spare, or on a GPU. Otherwise all buckets are reduced at the end of backward.
    - `broadcast_buffers`: behind every synchronising backward the buffers (running statistics) become rank 0's.
    - `wire_dtype`: torch.bfloat16 or torch.float16: what 32-bit gradients travel as between nodes; they are added in
      float32. Inside a node there is no wire, and it changes nothing.
    - `scaler`: the `hpcdl.torch.GradScaler` in use. It looks at each rank's gradients before they are reduced, so as to
      tell where an inf or nan began. If there is one, communication hooks are not called, and all ranks get nan.
    - `ignore`: names of parameters and buffers that stay each rank's own.

    Of torch's own DistributedDataParallel it takes besides: `find_unused_parameters` (unused parameters always work;
    with it rank 0 warns of those that no rank has used), `static_graph` (the same parameters are used in every step:
    saves one small exchange), `device_ids` and `output_device` (the module's own device), `gradient_as_bucket_view`
    (always so). `process_group`, `mixed_precision` and others are refused.

    ValueError, TypeError: an argument is wrong. HpcdlError: the ranks' modules differ, or the processes do not know of
    each other. After Li et al. 2020, PyTorch Distributed, arXiv 2006.15704; tensor fusion: Sergeev and Del Balso 2018,
    Horovod, arXiv 1802.05799, section 4.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: MPI.Intracomm | None = None,
        *,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        algorithm: str = "auto",
        average: bool = True,
        overlap: bool | str = "auto",
        broadcast_buffers: bool = True,
        wire_dtype: torch.dtype | None = None,
        scaler: GradScaler | None = None,
        ignore: Collection[str] = (),
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        gradient_as_bucket_view: bool = True,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.module, self._comm = module, comm
        self._options: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "first_bucket_mb": first_bucket_mb,
            "algorithm": algorithm,
            "average": average,
            "overlap": overlap,
            "broadcast_buffers": broadcast_buffers,
            "wire_dtype": wire_dtype,
            "scaler": scaler,
            "ignore": tuple(ignore),
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
        }
        _check_arguments(unknown, wire_dtype, overlap, bucket_cap_mb, first_bucket_mb)
        _check_scaler(scaler, comm)
        _check_module(module, device_ids, output_device)
        _check_launch()
        self._ignored = {*ignore, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        self._synchronise, self._told = True, frozenset[str]()
        self._joining = self._among_present = False
        self._last_present, self._next = [0], LEFT

        named = [(name, each) for name, each in module.named_parameters() if name not in self._ignored]
        broadcast_parameters([*named, *self._buffers_named()], comm)
        self.reducer = Reducer(
            named,
            comm,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            algorithm=algorithm,
            average=average,
            overlap=_pays(comm, module) if overlap == "auto" else bool(overlap),
            sparse=frozenset(_sparse(module)),
            static=static_graph,
        )
        self.scaler = self.reducer.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        me = weakref.ref(self)

        def unannounced() -> None:
            """The inner module was called on its own."""
            if (ddp := me()) is not None:
                ddp._begin(ddp._synchronise, None)

        self.reducer.unannounced = unannounced
        if wire_dtype is not None and has_a_wire(self.reducer.comm):
            self.reducer.hook = None, wire_hook(self.reducer.comm, wire_dtype, average=average)

    # ---- forward and backward ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint computes it again, in the midst of backward
            if self.reducer.running:  # the last backward pass raised
                self.reducer.reset()
            self.reducer.refresh()
        outputs = self.module(*args, **kwargs)
        # A hook of a parameter could not tell when backward has ended: under reentrant checkpoints a small backward
        # pass of its own ends for every block. The outputs' gradients come ahead of all others, in the outermost one.
        tensors = [each for each in _tensors(outputs) if each.grad_fn is not None]
        if tensors:
            register_multi_grad_hook(tensors, partial(self._begin, self._synchronise), mode="any")
        return outputs

    def _begin(self, synchronise: bool, _: Tensor | None) -> None:
        self.reducer.begin(synchronise=synchronise, then=self._end)

    def _end(self) -> None:
        """Backward is over, but has not returned yet."""
        if not self.reducer.end():
            self.reducer.reset()
            return
        present = self._who_is_there(REDUCES) if self._joining else None
        self._reduce(present)

    def _reduce(self, present: list[int] | None, *, joined: bool = False) -> None:
        """The gradients and the buffers, with those ranks that still have data (all, if None)."""
        self.reducer.reduce(joined=joined)
        if present and self._among_present:
            self.reducer.scale(self.reducer.comm.size / len(present))
        if self._options["broadcast_buffers"]:
            _share_buffers([each for _, each in self._buffers_named()], self.reducer.comm, present[0] if present else 0)
        if self._options["find_unused_parameters"]:
            self._tell_of_unused()

    def _tell_of_unused(self) -> None:
        unused = frozenset(self.reducer.unused)
        if unused - self._told and self.reducer.comm.rank == 0:
            names = ", ".join(name for name in self.reducer.unused if name not in self._told)
            warnings.warn(f"no rank used these parameters in this step: {names}", RuntimeWarning, stacklevel=2)
        self._told |= unused

    @property
    def unused_parameters(self) -> list[str]:
        """The parameters that no rank used before the last reduction, by name: their gradients stayed as they were."""
        return list(self.reducer.unused)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on each rank alone; the next backward pass outside reduces the sum."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have `hook(state, bucket)` reduce each bucket instead of the all-reduce; on all ranks, before the first step.

        It gets a `GradBucket` and gives the reduced tensor or a torch.futures.Future of it; nothing is divided behind
        it. The hooks are called in the order of the buckets, on the thread of backward, at its end.
        """
        if not callable(hook):
            raise TypeError(f"hook is a function of a state and a bucket, not {hook!r}")
        if self.reducer.hook is not None:
            raise RuntimeError("there is a communication hook (or wire_dtype) already: make a new wrapper for another")
        self.reducer.hook = state, hook

    # ---- ranks with fewer batches --------------------------------------------------------------------------------

    @contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Inside, ranks may have different numbers of batches: who has done with his helps the others.

        Gradients are averaged over all ranks, those without data putting in zeros, so that each sample counts alike to
        the end; with `divide_by_initial_world_size=False` over those that still have data. At the end all ranks get the
        parameters and buffers of one that had data last (an optimiser's state stays each rank's own). A collective
        call; the user's own collectives in the loop have no such help, only `scaler` has. ValueError, on all ranks, for
        a module with synchronised batch normalisation, whose forward pass would wait for the ranks that have none.
        """
        if any(isinstance(each, SyncBatchNorm | nn.SyncBatchNorm) for each in self.module.modules()):
            raise ValueError(
                "join() cannot help a module with SyncBatchNorm, whose forward pass needs all ranks: give all ranks as "
                "many batches (torch's DistributedSampler does), or use BatchNorm"
            )
        self._joining, self._among_present = True, not divide_by_initial_world_size
        if self.scaler is not None:
            self.scaler.announce = partial(self._who_is_there, UNSCALES)
        try:
            yield
            while present := self._who_is_there(LEFT):
                if self.scaler is not None and self._next == UNSCALES:
                    self.scaler.take_part()
                else:
                    self._reduce(present, joined=True)
        finally:
            self._joining = self._among_present = False
            if self.scaler is not None:
                self.scaler.announce = nothing
        if self.scaler is not None:
            self.scaler.follow(self.reducer.comm, self._last_present[0])
        for _, tensor in (*self.reducer.named, *self._buffers_named()):
            hpcdl.broadcast(tensor.detach(), self.reducer.comm, root=self._last_present[0])

    def _who_is_there(self, doing: int) -> list[int]:
        """The ranks that have data for a step; `_next` is what they do now."""
        there = torch.zeros(self.reducer.comm.size, dtype=torch.uint8)
        there[self.reducer.comm.rank] = doing
        hpcdl.allreduce(there, self.reducer.comm, op="max")
        ranks = [rank for rank, theirs in enumerate(there.tolist()) if theirs != LEFT]
        self._last_present, self._next = ranks or self._last_present, int(there.max())
        return ranks

    # ---- a module like any other ---------------------------------------------------------------------------------

    def _buffers_named(self) -> list[tuple[str, Tensor]]:
        return [(name, each) for name, each in self.module.named_buffers() if name not in self._ignored]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with its plain keys: what is saved can be loaded without this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Plain keys, or those that torch's own wrapper writes, which begin with "module."."""
        if state_dict and all(name.startswith("module.") for name in state_dict):
            plain = {name.removeprefix("module."): value for name, value in state_dict.items()}
            own = self.module.state_dict().keys()
            state_dict = state_dict if own & state_dict.keys() else plain
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Another wrapper of a copy of the module, on the same communicator, its `scaler` a copy: a collective call."""
        options = {**self._options, "scaler": copy.deepcopy(self._options["scaler"], memo)}
        wrapper = type(self)(copy.deepcopy(self.module, memo), self._comm, **options)
        return wrapper.train(self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled it is the module and the options; unpickled, which is a collective call, it is on COMM_WORLD."""
        return _unpickled, (type(self), self.module, self._options, self.training)


def _unpickled(kind: type[DistributedDataParallel], module: nn.Module, options: dict[str, Any], training: bool) -> Any:
    return kind(module, None, **options).train(training)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, field.name))


def _sparse(module: nn.Module) -> Iterator[str]:
    """The parameters whose gradients are sparse: a place in a bucket would make them dense."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield f"{name}.weight" if name else "weight"


def _share_buffers(buffers: list[Tensor], comm: MPI.Intracomm, root: int) -> None:
    """Give all ranks the root's, those of one type as one message."""
    kinds: dict[object, list[Tensor]] = {}
    for buffer in buffers:
        kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for alike in kinds.values():
            flat = torch.cat([each.reshape(-1) for each in alike])
            hpcdl.broadcast(flat, comm, root=root)
            pieces = torch.split(flat, [each.numel() for each in alike])
            for each, piece in zip(alike, pieces, strict=True):
                each.copy_(piece.view_as(each))


def _pays(comm: MPI.Intracomm | None, module: nn.Module) -> bool:
    """Does a thread that reduces beside backward pay? It was measured to cost more than it hides without a core."""
    from mpi4py import MPI

    cores = cores_per_rank(MPI.COMM_WORLD if comm is None else comm)
    on_gpu = any(each.is_cuda for each in module.parameters())
    return on_gpu or cores > 1


def _check_arguments(
    unknown: Mapping[str, Any], wire_dtype: torch.dtype | None, overlap: bool | str, cap: float, first: float
) -> None:
    for name, value in unknown.items():
        if name not in ("process_group", "mixed_precision", "device_mesh", "init_sync", "check_reduction", "dim"):
            raise TypeError(f"DistributedDataParallel has no argument {name}")
        if value is not None:
            a_group = name in ("process_group", "device_mesh")
            instead = "pass an mpi4py communicator as comm" if a_group else "leave it out"
            raise ValueError(f"{name}={value!r} means nothing here: {instead}")
    if wire_dtype is not None and wire_dtype not in WIRE_TYPES:
        raise ValueError(f"wire_dtype is one of {', '.join(map(str, WIRE_TYPES))}, or None, not {wire_dtype}")
    if overlap not in (True, False, "auto"):
        raise ValueError(f"overlap is True, False or 'auto', not {overlap!r}")
    if not (cap > 0 and first > 0):
        raise ValueError(f"bucket_cap_mb and first_bucket_mb are above 0, not {cap} and {first}")


def _check_scaler(scaler: GradScaler | None, comm: MPI.Comm | None) -> None:
    from hpcdl.call import channel

    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"scaler is an hpcdl.torch.GradScaler, whose verdict all ranks share, not {type(scaler).__module__}."
            f"{type(scaler).__qualname__}: make it by hpcdl.torch.GradScaler(comm, device=...)"
        )
    own = "none" if scaler is None else "an enabled one" if scaler.is_enabled() else "one that is not enabled"
    if found := difference(channel(comm).wire, "scaler", own):
        raise MismatchError(found)


def _check_module(module: nn.Module, device_ids: list[Any] | None, output_device: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        raise ValueError("the module is wrapped already: wrap what is in its .module")
    parameters = list(module.parameters())
    for each in parameters:
        if isinstance(each, nn.parameter.UninitializedParameter):
            raise ValueError("a lazy module has no shapes yet: run it once on a sample before it is wrapped")
    devices = {each.device for each in parameters}
    for device in [*(device_ids or []), *([] if output_device is None else [output_device])]:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if devices and named not in devices:
            raise ValueError(
                f"device_ids and output_device are the module's own device, {', '.join(map(str, devices))}, not "
                f"{named}: move the module there first"
            )


def _check_launch() -> None:
    """torchrun tells processes who they are by variables, and starts no MPI."""
    from mpi4py import MPI

    world, size = os.environ.get("WORLD_SIZE", ""), MPI.COMM_WORLD.size
    if not world.isdecimal() or int(world) == size:
        return
    if size == 1 and not under_launcher():
        raise HpcdlError(
            f"{world} processes (WORLD_SIZE), each MPI rank 0 of 1: torchrun starts no MPI, so each would train alone. "
            f"Start them by mpiexec -n {world} python ..., or by srun"
        )
    if MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            f"WORLD_SIZE={world} contradicts MPI, which knows of {size} processes: MPI's ranks count here",
            RuntimeWarning,
            stacklevel=3,
        )
