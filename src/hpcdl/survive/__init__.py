"""Going on after a failure: who is still there, and whether this side may continue."""

from hpcdl.survive.raft import Membership, Node, State, stand_ins

__all__ = ["Membership", "Node", "State", "stand_ins"]
