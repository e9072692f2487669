"""The backend "hpcdl" of torch.distributed: programs that use nothing but torch, over MPI and hpcdl's collectives.

`import hpcdl.torch` makes it known, and where hpcdl is installed `import torch` does. Importing this starts no MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcdl_backend import register

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Options", "monitored_barrier", "options", "register"]


@dataclass(frozen=True)
class Options:
    """What a process group is made with."""

    algorithm: str


def options(*, algorithm: str | None = None) -> Options:
    """For `init_process_group("hpcdl", pg_options=...)` and `new_group(pg_options=...)`.

    `algorithm` is one of `hpcdl.algorithms()`: what the group all-reduces by, and does its other collectives by where
    they have it. By default it is what HPCDL_ALGORITHM says, else "auto".
    """
    from hpcdl import settings

    return Options(settings.ALGORITHM if algorithm is None else algorithm)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that fails on all ranks, and says which rank has not come, when it takes longer than the timeout.

    torch.distributed's function of this name takes no group but gloo's. By default the timeout is the group's. With
    `wait_all_ranks` all that are missing are named, else the first.
    """
    from hpcdl.torch.backend.monitored import barrier

    barrier(group, timeout, wait_all_ranks)


def __getattr__(name: str) -> Any:
    # Its module starts MPI.
    if name == "ProcessGroupHpcdl":
        from hpcdl.torch.backend.group import ProcessGroupHpcdl

        return ProcessGroupHpcdl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
