"""Which parameters are decayed: the weights, not the biases nor the scales and shifts of normalisation."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def one_dimensional(parameter: Tensor) -> bool:
    """Biases, and what batch and layer normalisation scale and shift by."""
    if is_lazy(parameter):
        raise ValueError(
            "a lazy module has no shape yet, by which to tell weights from biases: run a batch through first"
        )
    return parameter.ndim <= 1


def decay_groups(
    model_or_named_parameters: nn.Module | Iterable[tuple[str, Tensor]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two parameter groups for any optimiser of torch: what is decayed, and the 1-D parameters, which are not.

    Decay would pull the scales of batch normalisation to 0 and with them what the layer gives. Frozen parameters are
    left out. After Goyal et al. 2017, arXiv 1706.02677, section 5.1.
    """
    if not 0 <= weight_decay < inf:
        raise ValueError(f"weight_decay is {weight_decay}: it must be a number from 0 on")
    given = model_or_named_parameters
    named = list(given.named_parameters() if isinstance(given, nn.Module) else given)
    if strange := [each for each in named if not (isinstance(each, tuple) and len(each) == 2)]:
        raise TypeError(
            f"decay_groups takes a module or (name, parameter) pairs, not {type(strange[0]).__name__}s: "
            "give the model or model.named_parameters()"
        )
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    if not trained:
        raise ValueError(f"none of the {len(named)} parameters has requires_grad: there is nothing to train")
    return [
        {"params": [each for each in trained if not one_dimensional(each)], "weight_decay": weight_decay},
        {"params": [each for each in trained if one_dimensional(each)], "weight_decay": 0.0},
    ]
