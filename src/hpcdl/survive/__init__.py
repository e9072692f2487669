"""Going on after a failure: who is still there, and whether this side may continue.

Importing this starts no MPI, so that the consensus can be tried without; the first use of `Survivors` does.
"""

from typing import TYPE_CHECKING

from hpcdl.survive.faults import Fault
from hpcdl.survive.raft import Membership, Node, State, stand_ins

if TYPE_CHECKING:
    from hpcdl.survive.ending import leave
    from hpcdl.survive.survivors import Lost, Survivors

__all__ = ["Fault", "Lost", "Membership", "Node", "State", "Survivors", "leave", "stand_ins"]


def __getattr__(name: str) -> object:
    if name == "leave":
        from hpcdl.survive import ending

        return ending.leave
    if name in ("Lost", "Survivors"):
        from hpcdl.survive import survivors

        return getattr(survivors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
