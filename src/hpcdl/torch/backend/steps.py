"""What is put around the steps of every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hpcdl.check import PRIVATE, agree
from hpcdl.execute import Steps
from hpcdl.record import NUMBER, Operation

if TYPE_CHECKING:
    from hpcdl.torch.backend.group import ProcessGroupHpcdl as Group

Start: TypeAlias = Callable[[Operation], Steps]


def together(group: Group, operation: Operation, start: Start) -> Steps:
    """The steps; where this rank refuses its arguments, all ranks get its error, for the others would wait for it."""
    operation[NUMBER] = 0
    try:
        yield from start(operation)
    except (TypeError, ValueError) as error:
        if operation[NUMBER]:
            raise  # all have it
        yield from agree(group.channel, "", PRIVATE, error, operation)


def on_devices(steps: Steps, tensors: Sequence[Any]) -> Steps:
    """The steps, once the caller's kernels on these tensors have ended; behind the last step those of the steps have.

    Whatever thread drives the steps, and whatever stream is current there, they see what was launched before the call.
    """
    flat = [each for one in tensors for each in ([one] if isinstance(one, Tensor) else one)]
    devices = {each.device for each in flat if each.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()

    def driven() -> Steps:
        yield from steps
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    return driven()
