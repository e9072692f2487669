"""The consensus over MPI: messages between named peers on a duplicate of the communicator that is never revoked.

Floor 5. Nothing here waits: `poll` does what can be done now, so that it runs beside whatever the rank waits for.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpcdl.survive.raft import Node, Outgoing

TICK_S = 1e-3
"""Some 20 times what a message takes between hosts: what was not answered by then is sent again after three of them."""
UNANSWERED, PAUSE_S = 16, 0.05
"""To a rank that has not answered so many messages the next ones are sent as seldom as this. It may be computing, and
will have to read them all; that some are never sent the consensus does not mind."""
TAG = 1


class Control:
    """One rank's node, and its post. Ranks are those of the communicator it was made from."""

    def __init__(self, comm: MPI.Intracomm, backups: Mapping[int, Sequence[int]]) -> None:
        self.comm = comm
        self.node = Node(comm.rank, range(comm.size), Random(comm.rank), backups)
        self.failed: set[int] = set()
        """What MPI has said, or others have found out."""
        self.stand_ins: dict[int, int | None] = {}
        """Who was to speak for a rank when it was excluded."""
        self._group = comm.Get_group()
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._arriving: dict[int, tuple[MPI.Request, npt.NDArray[np.uint8]]] = {}
        self._unanswered = dict.fromkeys(self._others, (0, 0.0))
        self._leaving: list[tuple[MPI.Request, bytes]] = []
        self._next_tick = 0.0

    def poll(self) -> None:
        """Take what has come, answer it, and let time pass for the node. Never waits."""
        for rank in self._others:
            if rank not in self.failed:
                self._receive(rank)
        self._leaving = [each for each in self._leaving if not _is_over(each[0])]
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

    def inquire(self) -> None:
        """This rank has been away: is it still a member?"""
        self._send(self.node.inquire())

    def _look_for_failures(self) -> None:
        failed = self.comm.Get_failed()
        if failed.size > len(self.failed):
            self.comm.Ack_failed()
            self.report(failed.Translate_ranks(None, self._group))
        failed.Free()

    def _receive(self, rank: int) -> None:
        try:
            while True:
                if rank not in self._arriving:
                    status = MPI.Status()
                    message = self.comm.Improbe(rank, TAG, status)
                    if message is None:
                        return
                    buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    self._arriving[rank] = message.Irecv([buffer, MPI.BYTE]), buffer
                request, buffer = self._arriving[rank]
                if not request.Test():
                    return
                del self._arriving[rank]
                self._unanswered[rank] = 0, 0.0
                self._send(self.node.receive(rank, pickle.loads(buffer.tobytes())))
        except MPI.Exception:
            # It is dead, or taken for it: MPI will say so. A message that was half there is of no use.
            self._arriving.pop(rank, None)

    def _send(self, outgoing: Outgoing) -> None:
        for rank, message in outgoing:
            if rank not in self.failed and self._may_send(rank):
                data = pickle.dumps(message)
                try:
                    self._leaving.append((self.comm.Isend([data, MPI.BYTE], rank, TAG), data))
                except MPI.Exception:
                    continue  # it is dead

    def _may_send(self, rank: int) -> bool:
        count, next_at = self._unanswered[rank]
        now = time.monotonic()
        if count >= UNANSWERED and now < next_at:
            return False
        self._unanswered[rank] = count + 1, now + PAUSE_S
        return True


def _is_over(request: MPI.Request) -> bool:
    """Has the message left, or can it not?"""
    try:
        return request.Test()
    except MPI.Exception:
        return True
