"""The consensus over MPI: messages between named peers on a duplicate of the communicator that is never revoked.

Floor 5. Nothing here waits: `poll` does what can be done now, so that it runs beside whatever the rank waits for.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcdl.survive.raft import Message, Node

TICK_S = 1e-3
"""Some 20 times what a message takes between hosts: what was not answered by then is sent again after three of them."""
UNANSWERED, PAUSE_S = 16, 0.05
"""To a rank that has not answered so many messages the next ones are sent as seldom as this. It may be computing, and
will have to read them all; that some are never sent the consensus does not mind."""
TAG = 1


class Call(NamedTuple):
    """What a rank waits in: the number of the call, and what it is."""

    number: int
    what: str


class Letter:
    """A message on its way, which behaves like a request.

    Persistent and synchronous, and freed only if it has arrived. Of other requests Open MPI says that they are over, or
    have failed, and frees them, while the message still waits for a connection; where that is refused later, it ends
    this process: "Send error after request freed".
    """

    def __init__(self, comm: MPI.Intracomm, data: bytes, place: int, tag: int) -> None:
        self._data = data
        request: Any = comm.Ssend_init([data, MPI.BYTE], place, tag)
        request.Start()
        self._request = request

    def Test(self) -> bool:
        if not self._request.Test():
            return False
        self._request.Free()
        return True


class Control:
    """One rank's node, and its post. `names` are those of the communicator's ranks, in their order."""

    def __init__(self, comm: MPI.Intracomm, names: Sequence[int], node: Node) -> None:
        self.comm, self.node = comm, node
        self.failed: set[int] = set()
        """What MPI has said, or others have found out."""
        self.stand_ins: dict[int, int | None] = {}
        """Who was to speak for a rank when it was excluded."""
        self._calls: dict[int, Call] = {}
        """What others have waited in for long."""
        self._names, self._group = names, comm.Get_group()
        self._places = {name: place for place, name in enumerate(names)}
        self._others = [name for name in names if name != node.rank]
        self._arriving: dict[int, tuple[MPI.Request, npt.NDArray[np.uint8]]] = {}
        self._unanswered = dict.fromkeys(self._others, (0, 0.0))
        self._leaving: list[Letter] = []
        self._undeliverable: list[Letter] = []
        self._next_tick = 0.0

    def moved(self, comm: MPI.Intracomm, names: Sequence[int]) -> Control:
        """The same node, and what it knows, on another communicator; what was on its way here is lost."""
        moved = Control(comm, names, self.node)
        moved.failed, moved.stand_ins = self.failed, self.stand_ins
        return moved

    def poll(self) -> None:
        """Take what has come, answer it, and let time pass for the node. Never waits."""
        for rank in self._others:
            if rank not in self.failed:
                self._receive(rank)
        self._leaving = [each for each in self._leaving if not self._is_over(each)]
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._look_for_failures()
            if self.node.wants_ticks:
                self._send(self.node.tick())
        for membership in self.node.decisions():
            self.stand_ins |= dict(membership.stands_in)

    def report(self, ranks: Iterable[int]) -> None:
        """These have failed: MPI has said so on another communicator."""
        if new := set(ranks) - self.failed:
            self.failed |= new
            self._send(self.node.report(new))

    def join(self, rank: int) -> None:
        """This rank, which is on the communicator, is to become a member."""
        self._send(self.node.propose_join(rank))

    def tell(self, call: Call) -> None:
        """Let the others know what this rank waits in."""
        self._send([(rank, call) for rank in self._others])

    def is_contradicted(self, call: Call) -> bool:
        """Has another rank told of another call of the same number?"""
        return any(call.number == number and call.what != what for number, what in self._calls.values())

    def inquire(self) -> None:
        """This rank has been away: is it still a member?"""
        self._send(self.node.inquire())

    def _look_for_failures(self) -> None:
        failed = self.comm.Get_failed()
        if failed.size > len(self.failed & self._places.keys()):
            self.comm.Ack_failed()
            self.report(self._names[place] for place in failed.Translate_ranks(None, self._group))
        failed.Free()

    def _receive(self, rank: int) -> None:
        try:
            while True:
                if rank not in self._arriving:
                    status = MPI.Status()
                    message = self.comm.Improbe(self._places[rank], TAG, status)
                    if message is None:
                        return
                    buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    self._arriving[rank] = message.Irecv([buffer, MPI.BYTE]), buffer
                request, buffer = self._arriving[rank]
                if not request.Test():
                    return
                del self._arriving[rank]
                self._unanswered[rank] = 0, 0.0
                word: Message | Call = pickle.loads(buffer.tobytes())
                if isinstance(word, Call):
                    self._calls[rank] = word
                else:
                    self._send(self.node.receive(rank, word))
        except MPI.Exception:
            # It is dead, or taken for it: MPI will say so. A message that was half there is of no use.
            self._arriving.pop(rank, None)

    def _send(self, outgoing: Iterable[tuple[int, Message | Call]]) -> None:
        for rank, message in outgoing:
            if rank in self._places and rank not in self.failed and self._may_send(rank):
                try:
                    self._leaving.append(Letter(self.comm, pickle.dumps(message), self._places[rank], TAG))
                except MPI.Exception:
                    continue  # it is dead

    def _may_send(self, rank: int) -> bool:
        count, next_at = self._unanswered[rank]
        now = time.monotonic()
        if count >= UNANSWERED and now < next_at:
            return False
        self._unanswered[rank] = count + 1, now + PAUSE_S
        return True

    def _is_over(self, letter: Letter) -> bool:
        try:
            return letter.Test()
        except MPI.Exception:
            self._undeliverable.append(letter)  # MPI may still have it
            return True
