"""torch's plugin: `import torch` calls `register`, so that `init_process_group("hpcdl")` takes no import of hpcdl.

It stands outside the package, whose import would give every program that imports torch NumPy and an excepthook.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "hpcdl"


def register() -> None:
    """Let torch.distributed know of the backend. Loads nothing, and never raises: that would break `import torch`."""
    with suppress(Exception):
        from torch import distributed

        if distributed.is_available() and NAME not in distributed.Backend.backend_list:
            distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(wanted: Any, options: Any) -> ProcessGroup:
    """A group, when the first is asked for: this starts MPI."""
    from hpcdl.torch.backend.start import create

    return create(wanted, options)
