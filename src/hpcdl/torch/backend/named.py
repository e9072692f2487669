"""What torch asks of a process group besides its operations: names, the store, the timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:

    class Base:
        """torch's stubs give most methods two signatures each, which no method of ours could have."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    Base = dist.ProcessGroup


class NamedGroup(Base):
    """A process group of this backend that has no operations yet."""

    def __init__(self, rank: int, size: int, timeout_s: float, store: Any) -> None:
        super().__init__(rank, size)
        self.timeout_s, self._store = timeout_s, store
        self._name, self._desc = "", "undefined"

    supports_splitting = supports_coalescing = supports_time_estimate = False
    _device_types = property(lambda self: [torch.device("cpu"), torch.device("cuda")])
    # C++ asks by the method; without a name the functional collectives do not find the group.
    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def _get_backend(self, device: object) -> NamedGroup:
        return self

    def getBackendName(self) -> str:
        """The name that it is registered under."""
        return "hpcdl"

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """torch gives the group its name."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        """What the user calls the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """The user calls the group so."""
        self._desc = desc

    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on operations may take so long."""
        self.timeout_s = timeout.total_seconds()

    setTimeout = _set_default_timeout = set_timeout

    def _has_hooks(self) -> bool:
        return False
