"""A model whose parameters lie side by side in one vector, and their gradients in another, to be cut among servers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hpcdl.data import part


class Flat:
    """The vectors of a model; its own tensors are views of them from now on."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        if not named:
            raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
        first_name, first = named[0]
        for name, each in named:
            if each.dtype != first.dtype or each.device.type != "cpu":
                raise ValueError(
                    f"{name} is {each.dtype} on {each.device}, {first_name} {first.dtype} on {first.device}: "
                    "parameters that travel to a server as one vector have one type, on the CPU"
                )
        for name, module in model.named_modules():
            if isinstance(module, _NormBase) and module.track_running_stats:
                raise ValueError(
                    f"{name or type(module).__name__} keeps running statistics, which differ on each worker and never "
                    "reach the server: take GroupNorm or LayerNorm, or track_running_stats=False"
                )
        self.model = model
        self.shapes = [each.shape for _, each in named]
        self.values = torch.cat([each.detach().flatten() for _, each in named])
        self.gradients = torch.zeros_like(self.values)
        lengths = [each.numel() for _, each in named]
        vectors = torch.split(self.values, lengths), torch.split(self.gradients, lengths)
        for (_, each), values, gradient in zip(named, *vectors, strict=True):
            each.data = values.view(each.shape)
            each.grad = gradient.view(each.shape)

    def __len__(self) -> int:
        return len(self.values)

    def slices(self, count: int) -> list[slice]:
        """The vector in so many parts, one for each server."""
        if not 1 <= count <= len(self):
            raise ValueError(f"{len(self)} parameters can be cut among 1 to {len(self)} servers, not {count}")
        return [part(len(self), number, count) for number in range(count)]

    def pieces(self, where: slice) -> Pieces:
        """A copy of a part of the vector, as the pieces of parameters that lie in it."""
        return Pieces(self.values[where].clone(), self.shapes, where.start)


class Pieces(nn.Module):
    """A part of the parameters of a model, which an optimiser takes for a model of its own.

    A parameter that the part ends in is cut; a weight's piece has as many dimensions as the weight, as decay goes by
    them.
    """

    def __init__(self, values: Tensor, shapes: list[torch.Size], start: int) -> None:
        super().__init__()
        self.values, self.gradients = values, torch.zeros_like(values)
        self.parts = nn.ParameterList()
        lo, end = -start, len(values)
        for shape in shapes:
            inside = slice(max(lo, 0), min(lo + shape.numel(), end))
            length = inside.stop - inside.start
            if length > 0:
                here = shape if length == shape.numel() else (*(1,) * (len(shape) - 1), length)
                piece = nn.Parameter(values[inside].view(here))
                piece.grad = self.gradients[inside].view(here)
                self.parts.append(piece)
            lo += shape.numel()
