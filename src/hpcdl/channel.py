"""What the library keeps for a communicator: a private duplicate, who shares memory, and a count of the operations.

Our messages travel on the duplicate, so they never meet the user's. It is an MPI attribute of the communicator and
is freed with it.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpi4py import MPI

from hpcdl import settings, watch
from hpcdl.environment import wrong_size
from hpcdl.errors import HpcdlError
from hpcdl.record import ENDED, About, begin, now
from hpcdl.shared import WORD, Board, Gate, Memory, allocate, exchange, label
from hpcdl.topology import group_by, parse_nodes

if TYPE_CHECKING:
    from hpcdl.call import Kept
    from hpcdl.execute import Plan
    from hpcdl.inside import Staging
    from hpcdl.tuning import Table

Result = TypeVar("Result")

# MPI promises tags up to 32767, and what is in flight at once needs a tag of its own: works, plans, and the
# tables of ranks that disagree count through a range each, by the number of the operation.
TAGS = 8192
CALLS, PLANS, TABLES = 0, TAGS, 2 * TAGS
PLAIN = 3 * TAGS
"""The tag of all plain calls: a rank makes one after the other, and messages between two ranks keep their order."""


CLOSED_PLANS = 1000
"""So many are remembered, the latest."""

ALONE = '[0,"",0,0,"",[]]'
"""What a rank that has nobody to be asked by says of itself."""


class Channel:
    """The private side of one communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        own = watch.watch() if MPI.COMM_WORLD.size > 1 or settings.TRACE else None
        # Here a rank is first waited for, and nobody knows yet how to ask it.
        operation = begin(About(f"the first collective on a communicator of {comm.size} ranks", ""), 0, 0, None)
        self.wire: MPI.Intracomm = comm.Dup()
        self.training: MPI.Intracomm | None = None
        """Another duplicate, for gradients, once there are any."""
        self.rank, self.size = comm.rank, comm.size
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self.kept: dict[tuple[object, ...], Kept] = {}
        self.interrupted = False
        self.lock = threading.Lock()
        self._closed: dict[int, int] = {}
        self.begun = 0
        """The number of the last operation."""

        card = own.card() if own else ALONE
        rows = [row.split("\n") for row in _now(exchange(self.wire, f"{os.getpid()} {_node()}\n{card}"))]
        operation[ENDED] = now()
        self.peers: Sequence[watch.Peer] = [watch.parse(card) for _, card in rows]
        self.key = f"{self.peers[0].rank}.{self.peers[0].serial}"
        """The same on all ranks of the communicator, and on no other one."""
        self.members = tuple(member for member, _ in rows)
        self.nodes: tuple[tuple[int, ...], ...] = group_by([member.partition(" ")[2] for member in self.members])
        """The ranks of each node."""
        self.node = next(ranks for ranks in self.nodes if self.rank in ranks)
        self.board: Board | None = None
        self.no_memory = "" if settings.SHARED else "HPCDL_SHARED=0"
        """Why the ranks of a node share no memory; empty if they do, or nobody has tried yet."""
        # What the plain calls share: they come one after the other.
        self.gate: Gate | None = None
        self.staging: Staging | None = None
        if len(self.nodes) == 1 < self.size and settings.SHARED:
            memory = _now(allocate(self.wire, self.node, Board.END * WORD))
            if isinstance(memory, Memory):
                self.board = Board(memory, self.rank, self.poke)
                self.gate = Gate(memory, 0, self.rank, self.poke)
            else:
                self.refuse_memory(memory)
        self.table: Table | None = None
        self.tuned = False
        """Has the table been looked for?"""
        self.segment_bytes: int | None = None
        """How long the segments of messages are by that table; the same on all ranks, as they are cut alike."""

    def refuse_memory(self, reason: str) -> None:
        """Go on without shared memory: all ranks have been given this reason."""
        self.no_memory = reason
        self.forget_plans()  # which meet in the memory; a rank whose array is new would not come
        if self.rank == 0:
            warnings.warn(
                f"no memory is shared between the ranks, so all goes through messages, which are slower ({reason})",
                RuntimeWarning,
                stacklevel=2,
            )

    def poke(self) -> Collection[int]:
        """Let MPI work on the messages of others; the ranks of this node that have ended, where that can be seen."""
        self.wire.Iprobe()
        return self.board.ended() if self.board else ()

    def operation(self) -> int:
        """The number of this operation: equal on all ranks, as they start their collectives in one order."""
        self.begun += 1
        return self.begun

    def runs(self, number: int) -> int | None:
        """How often the plan of that operation was run; None if there is none."""
        return self.plan_runs().get(number)

    def remember(self, number: int, runs: int) -> None:
        """A plan that has run so often is closed: if this rank ends, others must know that it runs no more."""
        self._closed[number] = runs
        if len(self._closed) > CLOSED_PLANS:
            del self._closed[next(iter(self._closed))]

    def plan_runs(self) -> dict[int, int]:
        """How often each plan was run, by the number of the operation that made it."""
        while True:
            try:
                return self._closed | {plan.number: plan.runs for plan in self.plans if plan.about}
            except RuntimeError:  # another thread makes one
                continue

    def close(self) -> None:
        """Free what is bound to the duplicate, and the duplicate itself (a collective call)."""
        self.release()
        self.board = self.gate = self.staging = None
        if self.training is not None:
            self.training.Free()
        self.wire.Free()

    def leave(self) -> None:
        """The program ends."""
        self.release()
        if self.board is not None:
            self.board.leave()

    def release(self) -> None:
        """Free what can be freed without the other ranks."""
        for plan in list(self.plans):
            plan.close()
        self.kept.clear()

    def forget_plans(self) -> None:
        """Close the kept plans: the next plain calls bind theirs anew."""
        for kept in self.kept.values():
            kept.plan.close()
        self.kept.clear()


def _node() -> str:
    """What is equal on the ranks of one node, whether it is a real one or pretended."""
    pretended = parse_nodes(settings.NODES, MPI.COMM_WORLD.size) if settings.NODES else ()
    number = next((number for number, ranks in enumerate(pretended) if MPI.COMM_WORLD.rank in ranks), "")
    return f"{label()} {number}"


def _now(steps: Generator[MPI.Request, None, Result]) -> Result:
    """Drive steps to their end, on a communicator that nobody uses yet."""
    while True:
        try:
            next(steps).Wait()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_keyval = MPI.KEYVAL_INVALID


def channel(comm: MPI.Comm | None = None) -> Channel:
    """The channel of a communicator (COMM_WORLD by default); the first call on it is collective."""
    if comm is None:
        comm = MPI.COMM_WORLD
    elif isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this rank is not in the communicator, so it must not call")
    elif not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is an mpi4py intracommunicator, not {comm!r}")
    if _keyval == MPI.KEYVAL_INVALID:
        _first_use()
    known = comm.Get_attr(_keyval)
    if not isinstance(known, Channel):
        known = Channel(comm)
        comm.Set_attr(_keyval, known)
        _channels.add(known)
        watch.follow(known)
    if known.interrupted:
        raise HpcdlError(
            "a collective on this communicator was interrupted half-way, so the messages of one call could be taken "
            "for another's: go on with a new communicator, as from comm.Dup()"
        )
    return known


def _first_use() -> None:
    global _keyval
    # No copy function: a duplicate of the communicator starts without our attribute, and gets its own.
    _keyval = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, known: known.close())
    # At an implicit finalize no attribute is deleted: MPICH would complain of persistent requests. Only what is local
    # is freed here, since a dead rank would let a collective call hang.
    atexit.register(_at_exit)
    if wrong := wrong_size(MPI.COMM_WORLD.size, vendor=MPI.get_vendor()[0]):
        warnings.warn(wrong, RuntimeWarning, stacklevel=2)


def _at_exit() -> None:
    if os.getpid() != _process:
        return  # a forked child's end is not the rank's
    watch.leave()
    for known in list(_channels):
        known.leave()


_process = os.getpid()
