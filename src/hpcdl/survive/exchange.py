"""One exchange over a data communicator, bound: the schedule on a buffer, and beside it the copies for the backups.

Floor 5.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from mpi4py import MPI

from hpcdl import collectives
from hpcdl.buffers import Vector, segments
from hpcdl.channel import Channel
from hpcdl.collectives import Algorithm, Span
from hpcdl.execute import MESSAGE_BYTES, Job, Plan

EXCHANGE_TAG, COPY_TAG = 1, 2


class Tested(Protocol):
    """A request, or what behaves like one."""

    def Test(self) -> bool: ...


Wait: TypeAlias = Callable[[Tested], None]


class Move(NamedTuple):
    """`source` sends `destination` what `rank` has put in. All three are names, not places."""

    source: int
    destination: int
    rank: int


@dataclass
class Ground:
    """Where an exchange takes place. A Plan takes it for its channel."""

    wire: Any
    """The communicator, or what counts its messages."""
    rank: int
    """This rank's place."""
    members: Sequence[int]
    """The names, by place."""
    size: int
    """By how many a mean divides: how many inputs are in the sum."""
    segment_bytes: int | None = None
    plans: weakref.WeakSet[Plan] = field(default_factory=weakref.WeakSet)


def placement(
    holders: Mapping[int, Iterable[int]],
    preferred: Callable[[int], Sequence[int]],
    copies: int,
    speakers: Mapping[int, int],
) -> list[Move]:
    """Who sends whose input to whom, so that besides its rank, or who speaks for it, so many hold each.

    `preferred` tells who should hold what a rank puts in; all of these live.
    """
    moves = []
    for rank in sorted(holders):
        have = set(holders[rank])
        lacking = max(0, copies + 1 - len(have)) if have else 0
        new = [each for each in preferred(rank) if each not in have][:lacking]
        moves += [Move(speakers.get(rank, rank), each, rank) for each in new]
    return moves


class Copies:
    """Inputs on their way to those who are to hold them."""

    def __init__(self, ground: Ground, like: Vector, held: Mapping[int, Vector], moves: Iterable[Move]) -> None:
        me = ground.members[ground.rank]
        self._sends: list[Any] = []
        self._receives: dict[int, tuple[Vector, list[Any]]] = {}
        for source, destination, rank in moves:
            if me == source:
                place = ground.members.index(destination)
                self._sends += [ground.wire.Send_init(piece, place, COPY_TAG) for piece in _pieces(held[rank])]
            elif me == destination:
                slot = like.empty(like.size)
                place = ground.members.index(source)
                pieces = [ground.wire.Recv_init(piece, place, COPY_TAG) for piece in _pieces(slot)]
                self._receives[rank] = slot, pieces
        self._idle = True

    def start(self) -> None:
        """Post all of them."""
        self._idle = False
        for _, requests in self._receives.values():
            for request in requests:
                request.Start()
        for request in self._sends:
            request.Start()

    def there(self) -> dict[int, Vector]:
        """What has come by now; to be asked once, as an error is told once."""
        return {
            rank: slot for rank, (slot, requests) in self._receives.items() if all(_is_there(each) for each in requests)
        }

    def finish(self, wait: Wait) -> tuple[dict[int, Vector], bool]:
        """Wait for all of them; what has come, and whether that is all, and all has left."""
        well = {rank: _all_over(requests, wait) for rank, (_, requests) in self._receives.items()}
        self._idle = _all_over(self._sends, wait) and all(well.values())
        return {rank: slot for rank, (slot, _) in self._receives.items() if well[rank]}, self._idle

    def close(self) -> None:
        """Free the requests that are MPI's no more."""
        if self._idle:
            for request in [*(each for _, requests in self._receives.values() for each in requests), *self._sends]:
                request.Free()
        self._sends, self._receives = [], {}


class Exchange:
    """An all-reduce of `work`, which begins with what this rank puts in for itself and others."""

    def __init__(
        self,
        ground: Ground,
        algorithm: Algorithm,
        op: str,
        work: Vector,
        copies: Copies,
    ) -> None:
        self.work, self.copies = work, copies
        program = collectives.program(
            "allreduce", algorithm, range(len(ground.members)), ground.rank, Span(0, work.size)
        )
        channel = cast(Channel, ground)
        self.plan = Plan(channel, Job(work, op), program, tag=EXCHANGE_TAG, raw=algorithm.raw)

    def close(self) -> None:
        """Free what is MPI's no more."""
        self.plan.close()
        self.copies.close()


def _pieces(vector: Vector) -> list[list[Any]]:
    assert vector.host is not None
    spans = segments(Span(0, vector.host.size), MESSAGE_BYTES)
    return [[vector.host[lo:hi], hi - lo, MPI.BYTE] for lo, hi in spans]


def _is_there(request: Tested) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return False


def _all_over(requests: Iterable[Tested], wait: Wait) -> bool:
    """Wait for each; whether all have gone well."""
    well = True
    for request in requests:
        try:
            wait(request)
        except MPI.Exception:
            well = False
    return well
