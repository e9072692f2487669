"""Model parallelism with torch's own parts: layers in stages on several ranks, one layer split among several."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from hpcdl.torch.models import Transformer

if TYPE_CHECKING:
    from hpcdl.sgd.pace import Pace

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity)
"""Between two layers of which one is split by columns and the other by rows, each rank keeps its own part."""


class Mesh(NamedTuple):
    """Where a rank stands among replicas, stages, and the parts of split layers."""

    mesh: DeviceMesh
    replica: int
    stage: int
    part: int

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are of each."""
        return tuple(self.mesh.shape)


def mesh_of(stages: int, split: int = 1) -> Mesh:
    """The ranks of the default process group as replicas x stages x parts; the parts of a layer lie side by side."""
    size = dist.get_world_size()
    if stages < 1 or split < 1 or size % (stages * split):
        raise ValueError(
            f"{size} ranks are no multiple of {stages} stages x {split} parts of a layer: start a multiple of "
            f"{max(1, stages) * max(1, split)} ranks"
        )
    mesh = init_device_mesh("cpu", (size // (stages * split), stages, split), mesh_dim_names=("data", "stage", "part"))
    replica, stage, own = mesh.get_coordinate() or [0, 0, 0]
    return Mesh(mesh, replica, stage, own)


# ---- stages ------------------------------------------------------------------------------------------------------


def layers(model: nn.Module) -> list[nn.Module]:
    """A model as layers of which each is handed what the one before it gives."""
    if isinstance(model, nn.Sequential):
        return list(model)
    if isinstance(model, Transformer):
        return [_Entrance(model), *model.blocks, *model.scores]
    raise ValueError(f"a {type(model).__name__} is no sequence of layers: make it an nn.Sequential")


class _Entrance(nn.Module):
    """A transformer up to its blocks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.characters, self.places = model.characters, model.places

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        found: Tensor = self.characters(characters) + self.places(places)
        return found


def cut(parts: Sequence[nn.Module], stages: int) -> list[nn.Sequential]:
    """Layers in so many stages of neighbours, such that the largest has as few parameters as can be.

    A layer without parameters stays with the one before it; each stage has at least one with some.
    """
    units: list[list[nn.Module]] = [[]]
    for layer in parts:
        learns = any(True for _ in layer.parameters())
        if learns and any(True for each in units[-1] for _ in each.parameters()):
            units.append([])
        units[-1].append(layer)
    if not 1 <= stages <= len(units):
        raise ValueError(f"{len(units)} layers with parameters make 1 to {len(units)} stages, not {stages}")
    sizes = [sum(each.numel() for layer in unit for each in layer.parameters()) for unit in units]
    ends = _ends(sizes, stages)
    return [
        nn.Sequential(*(layer for unit in units[lo:hi] for layer in unit))
        for lo, hi in zip([0, *ends], ends, strict=False)
    ]


def _ends(sizes: Sequence[int], stages: int) -> list[int]:
    """Where each stage ends."""
    n = len(sizes)
    # Of the first `hi` units in so many stages: the largest, and where the stages end.
    best: dict[int, tuple[int, list[int]]] = {hi: (sum(sizes[:hi]), [hi]) for hi in range(1, n + 1)}
    for stage in range(2, stages + 1):
        best = {
            hi: min((max(best[lo][0], sum(sizes[lo:hi])), [*best[lo][1], hi]) for lo in range(stage - 1, hi))
            for hi in range(stage, n + 1)
        }
    return best[n][1]


# ---- split layers ------------------------------------------------------------------------------------------------


def split_plan(module: nn.Module, parts: int) -> dict[str, ParallelStyle]:
    """How each linear layer of the sequences in a module is split among so many ranks, by name.

    Two with nothing but functions of single numbers between them are a pair: the first by columns, the second by rows,
    with one sum behind it (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3). One without a partner is
    split by its outputs, as were the layers of AlexNet (Krizhevsky et al. 2012), or where these cannot be dealt out
    evenly by its inputs, and all ranks get its whole result. ValueError: there is none, or one cannot be split evenly.
    """
    plan: dict[str, ParallelStyle] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Sequential):
            waiting: tuple[str, nn.Linear] | None = None
            for name, layer in part.named_children():
                path = f"{prefix}.{name}" if prefix else name
                if isinstance(layer, nn.Linear):
                    if waiting is not None and waiting[1].out_features % parts == 0:
                        plan[waiting[0]], plan[path], waiting = ColwiseParallel(), RowwiseParallel(), None
                    else:
                        plan[path], waiting = _alone(path, layer, parts), (path, layer)
                elif not isinstance(layer, ELEMENTWISE):
                    waiting = None
    if not plan:
        raise ValueError(f"{module} has no linear layer to be split: take fewer stages, or do not split")
    return plan


def _alone(path: str, layer: nn.Linear, parts: int) -> ParallelStyle:
    if layer.out_features % parts == 0:
        return ColwiseParallel(output_layouts=Replicate())
    if layer.in_features % parts == 0:
        return RowwiseParallel(input_layouts=Replicate())
    raise ValueError(
        f"layer {path}, from {layer.in_features} to {layer.out_features} numbers, cannot be split evenly among {parts} "
        "ranks: take a number that divides one of them"
    )


def split(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the linear layers of a module among the ranks of a mesh of one dimension, in place."""
    parallelize_module(module, mesh, split_plan(module, mesh.size()))


def own(tensor: Tensor) -> Tensor:
    """This rank's part of what may be split among several."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- training ----------------------------------------------------------------------------------------------------


class _Stage(PipelineStage):
    """Knows how long it has computed, and keeps to a pace."""

    def __init__(self, *args: Any, pace: Pace | None, rank: int, chunks: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace, self._rank, self._chunks = pace, rank, chunks
        self.computed_s, self._done = 0.0, 0

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        result = super().forward_one_chunk(*args, **kwargs)
        self._hold(began, 1 / 3)
        return result

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        result = super().backward_one_chunk(*args, **kwargs)
        self._hold(began, 2 / 3)
        self._done += 1
        return result

    def _hold(self, began: float, share: float) -> None:
        """Backward takes twice what forward does; one that only looks is not held up."""
        if self._pace and self.has_backward:
            step_s = self._pace.late(self._rank, self._done // self._chunks)
            left = began + share * step_s / self._chunks - perf_counter()
            if left > 0:
                sleep(left)
        self.computed_s += perf_counter() - began


class Pipeline:
    """One rank's stage of a model, which with those of others learns what the whole would learn on one rank.

    `model` is whole, and the same on all ranks; of it this rank keeps its own stage, in `stage`. A batch is cut into
    `micro_batches`, which follow each other through the stages by torch's schedule: "gpipe" (Huang et al. 2018, arXiv
    1811.06965: all forward, then all backward) or "1f1b" (Narayanan et al. 2020, arXiv 2006.09503, PipeDream-Flush:
    forward and backward in turns, so that it keeps less). `loss(output, labels)` is a sum, so that the gradients are
    those of the whole batch; over replicas they are summed too. All micro-batches are of one size. ValueError, on all
    ranks: a bad argument, or a model that cannot be cut or split so.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        loss: Any,
        micro_batches: int,
        schedule: str = "1f1b",
        pace: Pace | None = None,
    ) -> None:
        replicas, stages, parts = mesh.shape
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, not {schedule!r}")
        least = stages if schedule == "1f1b" else 1
        if micro_batches < least:
            raise ValueError(f"{schedule} on {stages} stages needs {least} micro-batches or more, not {micro_batches}")
        self.mesh, self.micro_batches = mesh, micro_batches
        cuts = cut(layers(model), stages)
        self.stage = cuts[mesh.stage]
        if parts > 1:
            for each in cuts:  # so that all ranks refuse what one of them would have to
                split_plan(each, parts)
            split(self.stage, mesh.mesh["part"])
        self._pipe = _Stage(
            self.stage,
            mesh.stage,
            stages,
            torch.device("cpu"),
            group=mesh.mesh.get_group("stage"),
            pace=pace,
            rank=dist.get_rank(),
            chunks=micro_batches,
        )
        self._schedule = SCHEDULES[schedule](self._pipe, micro_batches, loss_fn=loss, scale_grads=False)
        self._data = mesh.mesh.get_group("data") if replicas > 1 else None

    @property
    def first(self) -> bool:
        """Is it this rank's stage that is given the inputs?"""
        return self.mesh.stage == 0

    @property
    def last(self) -> bool:
        """Is it this rank's stage that is given the labels, and has the result?"""
        return self.mesh.stage == self.mesh.shape[1] - 1

    @property
    def computed_s(self) -> float:
        """How long this rank has computed so far; the rest of its steps it has waited for others."""
        return self._pipe.computed_s

    def step(self, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        """Forward and backward of this replica's batch; the losses of the micro-batches, on the last stage.

        The gradients, which must be None or zero before, are then those of all replicas' batches together. Each rank is
        given both, and needs what its stage takes.
        """
        losses: list[Tensor] = []
        given = (inputs,) if self.first else ()
        self._schedule.step(*given, target=labels if self.last else None, losses=losses, return_outputs=False)
        if self._data is not None:
            self._add_up()
        return losses

    @torch.no_grad()
    def look(self, inputs: Tensor, labels: Tensor) -> Tensor | None:
        """Forward alone, of a batch of the usual size; what comes out, on the last stage."""
        given = (inputs,) if self.first else ()
        result: Tensor | None = self._schedule.eval(*given, target=labels if self.last else None)
        return result

    @torch.no_grad()
    def _add_up(self) -> None:
        """The gradients of all replicas of this stage."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for each in self.stage.parameters():
            if each.requires_grad:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
                kinds.setdefault(each.dtype, []).append(own(each.grad))
        for gradients in kinds.values():
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self._data)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
