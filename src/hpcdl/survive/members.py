"""Those who are left: the communicator they share, and the consensus on who they are.

Floor 5. Communicators come and go, with each loss and each join; the control communicator is never revoked, and the
names of the ranks stay what they were at the beginning.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from hpcdl.errors import HpcdlError, RankFailedError
from hpcdl.survive import ending
from hpcdl.survive.control import Call, Control, Letter
from hpcdl.survive.exchange import Tested
from hpcdl.survive.pulse import Pulse, given_up_s
from hpcdl.survive.raft import Node

TELL_TAG = 3
POLL_S = 1e-3
"""Who waits looks after the consensus so often."""
DOZE_S = 0.5
"""Who was away for so long while it waited, as no rank that computes is, may have been taken for dead: it asks."""
ASK_S = 1.0
"""Who waits for so long in one call tells the others which: it may be another one than theirs."""

JOIN_S = 60
"""A rank that was started to join, and by then has not, ends: those who have started it may be lost."""
PATIENT = "import os, signal, sys; signal.alarm(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"

MATCHED, HOPE = 1, 2

Kind = TypeVar("Kind", bound=MPI.Comm)


class Welcome(NamedTuple):
    """What a rank that joins must know."""

    first: tuple[int, ...]
    """The members of the very beginning."""
    names: tuple[int, ...]
    """Of all that are to be members, by place."""
    hosts: tuple[str, ...]
    """Of all that ever were."""
    copies: int
    call: Call
    """In which it joins."""
    more: Any = None


class _Coming:
    """A message whose length is not known yet."""

    def __init__(self, comm: MPI.Intracomm, place: int) -> None:
        self.comm, self.place, self.status = comm, place, MPI.Status()
        self.message: MPI.Message | None = None

    def Test(self) -> bool:
        self.message = self.comm.Improbe(self.place, TELL_TAG, self.status)
        return self.message is not None


class Members:
    """The ranks that are left, by their names in the order of their places in `wire`."""

    def __init__(self, wire: MPI.Intracomm, control: MPI.Intracomm, welcome: Welcome) -> None:
        self.copies = welcome.copies
        """How many others should hold what each puts in."""
        self.wire = wire
        """The data communicator."""
        self.names, self.rank = welcome.names, welcome.names[wire.rank]
        self.generation = 0
        """How often the data communicator has been another one."""
        self.broken: HpcdlError | None = None
        """Why this rank cannot go on."""
        self._hosts = welcome.hosts
        node = Node(self.rank, welcome.first, Random(self.rank), self.backups())
        self._control = Control(control, self.names, node)
        self._kept: list[object] = []
        self._call = welcome.call
        self._seen, self._dozed = 0.0, False
        self._ask_at: float | None = None
        self._given_up_s, self._was_given_up = given_up_s(), False
        self._pulse = Pulse() if self._given_up_s < math.inf else None

    @classmethod
    def begin(cls, comm: MPI.Intracomm, copies: int) -> Members:
        """All ranks of a communicator, named by their numbers in it."""
        names = tuple(range(comm.size))
        welcome = Welcome(names, names, tuple(comm.allgather(os.uname().nodename)), copies, Call(0, ""))
        return cls(raising(comm.Dup()), raising(comm.Dup()), welcome)

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return self._control.node.committed.epoch

    @property
    def hosts(self) -> list[str]:
        """Of the members, in their order."""
        return [self._hosts[name] for name in self.names]

    @property
    def stand_ins(self) -> dict[int, int | None]:
        """Who was to speak for a rank when it was excluded."""
        return self._control.stand_ins

    def distance(self, rank: int, other: int) -> int:
        """How far the other one follows behind the rank, in the ring of all that ever were members."""
        return (other - rank) % len(self._hosts)

    def preferred(self, rank: int) -> list[int]:
        """Who should hold a copy of what a rank puts in: those who follow it, those on other hosts first."""
        living = sorted((each for each in self.names if each != rank), key=lambda each: self.distance(rank, each))
        return sorted(living, key=lambda each: self._hosts[each] == self._hosts[rank])

    def backups(self) -> dict[int, list[int]]:
        """Whom each member should have."""
        return {rank: self.preferred(rank)[: self.copies] for rank in self.names}

    # ---- waiting, agreeing, telling ----------------------------------------------------------------------------------

    def enter(self, number: int, what: str) -> None:
        """A call begins in which ranks wait for each other."""
        self._call = Call(number, what)
        self._seen = time.monotonic()
        self._dozed, self._ask_at = False, self._seen + ASK_S

    def keep(self, what: object) -> None:
        """Never let go of it: MPI may read from it, or write to it, when a frozen rank wakes."""
        self._kept.append(what)

    def wait(self, request: Tested) -> None:
        """Test one request until it is over; never several at once, where an error in one of them aborts Open MPI."""
        while not request.Test():
            self._look_after()
            os.sched_yield()  # the rank waited for may need this core; time.sleep(0) takes 70 us

    def agree(self, word: int, comm: MPI.Intracomm | None = None) -> tuple[int, bool]:
        """The bits that are set on all members that live, and whether one of them is missing."""
        bits = np.array([word], np.int32)
        try:
            self.wait((comm or self.wire).Iagree(bits))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
            return int(bits[0]), True
        return int(bits[0]), False

    def tell(self, word: Any) -> dict[int, Any]:
        """What every member says, by its name; MPI.Exception if one of them is lost."""
        data = pickle.dumps(word)
        others = [place for place in range(len(self.names)) if place != self.wire.rank]
        leaving = [Letter(self.wire, data, place, TELL_TAG) for place in others]
        words = {self.wire.rank: word}
        buffers = []
        try:
            for place in others:
                coming = _Coming(self.wire, place)
                self.wait(coming)
                assert coming.message is not None
                buffers.append(np.empty(coming.status.Get_count(MPI.BYTE), np.uint8))
                self.wait(coming.message.Irecv([buffers[-1], MPI.BYTE]))
                words[place] = pickle.loads(buffers[-1].tobytes())
            for letter in leaving:
                self.wait(letter)
        except BaseException:
            self.keep((leaving, buffers))
            raise
        return {rank: words[place] for place, rank in enumerate(self.names)}

    def revoke(self) -> None:
        """Free all who wait on the data communicator: it cannot be used any more."""
        if not self.wire.Is_revoked():
            self.wire.Revoke()

    def free(self) -> None:
        """Give back what MPI holds; all members call it, where nobody was ever lost."""
        self.wire.Free()
        self._control.comm.Free()

    def _look_after(self) -> None:
        """While waiting: let the consensus go on."""
        now = time.monotonic()
        away = now - self._seen
        if away < POLL_S:
            return
        self._seen = now
        if away > DOZE_S:
            self._dozed = True
            self._control.inquire()
        if self._ask_at is not None and now > self._ask_at:
            self._ask_at = math.inf
            self._control.tell(self._call)
        self._control.poll()
        if self._ask_at is not None and self._control.is_contradicted(self._call):
            self._ask_at = None
            self.revoke()  # they wait for each other in different calls, and will find out in which
        node = self._control.node
        # Who was frozen for longer than the detector waits was given up. To ask would take the time in which its own
        # detector, which has missed the others as well, tells them that one of them is dead.
        if self._pulse and away > self._given_up_s and self._pulse.pause() > self._given_up_s / 2:
            self._was_given_up = True
        if self._was_given_up or (self._dozed and (node.excluded or node.lost_quorum)):
            raise self._no_quorum()

    # ---- losses ------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Go on with those who are left: a new data communicator, whose members are committed, and all know it."""
        # Whoever still makes a new communicator, in Shrink, crashes if it is revoked. So nobody may ask any more, and
        # all agree before the next round.
        self._ask_at = None
        while True:
            self.revoke()
            before, names = self.wire.Get_group(), self.names
            self.wire = self._shrunk()
            self._seen = time.monotonic()
            self.generation += 1
            self.names = tuple(names[place] for place in self.wire.Get_group().Translate_ranks(None, before))
            self._control.report(set(names) - set(self.names))
            if self._settled():
                return

    def _shrunk(self) -> MPI.Intracomm:
        done: list[Any] = []
        if not self._dozed:
            done.append(self.wire.Shrink())
        else:
            # Those who have excluded this rank might not answer it.
            threading.Thread(target=lambda: done.append(self.wire.Shrink()), daemon=True).start()
        while not done:
            self._look_after()
            time.sleep(POLL_S)
        wire: MPI.Intracomm = raising(done[0])
        return wire

    def _settled(self) -> bool:
        """Has the consensus committed just these members, and does each of them know it?"""
        node, members = self._control.node, set(self.names)
        word = HOPE
        while not members & (node.former | self._control.failed):
            if node.lost_quorum:
                word = 0
                break
            if members == set(node.committed.members):
                word |= MATCHED
                break
            self._control.poll()
            os.sched_yield()
        bits, missing = self.agree(word)
        if not bits & HOPE:
            raise self._no_quorum()
        if not bits & MATCHED or missing:
            return False
        node.backups = self.backups()
        return True

    def _no_quorum(self) -> RankFailedError:
        """What is raised from now on."""
        node = self._control.node
        members = node.committed.members
        gone = [rank for rank in members if rank in self._control.failed]
        if node.excluded or self._was_given_up:
            reason = f"the others have gone on without rank {self.rank}, which did not answer in time"
        else:
            here = listed([rank for rank in members if rank not in gone])
            reason = (
                f"of the last members, {listed(members)}, no more than {here} can be reached from here; to go on takes "
                "more than half of them, or half with the lowest"
            )
        self.broken = error = RankFailedError(f"no quorum: {reason}", gone)
        ending.lost()
        return error

    # ---- joins -------------------------------------------------------------------------------------------------------

    def grow(self, count: int, command: str, arguments: Sequence[str], more: Any) -> tuple[int, ...]:
        """Start so many ranks, which join, and are told `more`; their names, none if they could not be started."""
        ending.lost()  # MPI_Finalize would wait for them too
        merged = self._started(count, command, arguments)
        all_have, missing = self.agree(merged is not None)
        if merged is None or not all_have or missing:
            if merged is not None:
                merged.Revoke()
            self.recover()
            return ()
        new = tuple(range(len(self._hosts), len(self._hosts) + count))
        names = (*self.names, *new)
        welcome = Welcome(self._control.node.first, names, self._hosts, self.copies, self._call, more)
        welcomed = _welcomed(merged, welcome)
        if welcomed is None:
            self.recover()
            return ()
        control, welcome = welcomed
        self.keep((self.wire, self._control))
        self.wire, self.names, self._hosts = merged, welcome.names, welcome.hosts
        self.generation += 1
        self._control.node.backups = self.backups()
        self._control = self._control.moved(control, self.names)
        for name in new:
            self._control.join(name)
        self._settle()
        return new

    def _started(self, count: int, command: str, arguments: Sequence[str]) -> MPI.Intracomm | None:
        """The members and so many processes, on one communicator; None if that failed, or took too long."""
        found: list[MPI.Intracomm | None] = []

        def start() -> None:
            # The alarm outlives exec, and ends who waits in vain for those who have started it.
            words = ["-c", PATIENT, str(JOIN_S), command, *arguments]
            try:
                found.append(raising(raising(self.wire.Spawn(sys.executable, words, count)).Merge(high=False)))
            except MPI.Exception:
                found.append(None)

        # Where a member or a new rank dies in it, it may wait for ever.
        threading.Thread(target=start, daemon=True).start()
        end = time.monotonic() + JOIN_S
        while not found and not self.wire.Is_revoked():
            self._look_after()
            if time.monotonic() > end or self._control.failed.intersection(self.names):
                self.revoke()
            time.sleep(POLL_S)
        return found[0] if found else None

    @classmethod
    def join(cls) -> tuple[Members, Any]:
        """Become a member, in a process that `grow` has started; and what it was told."""
        ending.lost()
        merged = raising(raising(MPI.Comm.Get_parent()).Merge(high=True))
        welcomed = _welcomed(merged, None)
        if welcomed is None:
            raise RankFailedError("those who have started this rank have gone on without it", ())
        control, welcome = welcomed
        signal.alarm(0)
        members = cls(merged, control, welcome)
        members.enter(*welcome.call)
        members._settle()
        return members, welcome.more

    def _settle(self) -> None:
        """Wait until the consensus has committed the new members, or those who are left of them."""
        while not self._settled():
            self.recover()


def _welcomed(merged: MPI.Intracomm, welcome: Welcome | None) -> tuple[MPI.Intracomm, Welcome] | None:
    """On all, old and new, with the welcome of the first: the control communicator and the welcome; None if it failed.

    mpi4py's collectives, which would hang at a loss if whoever is told of it did not revoke the communicator.
    """
    found: tuple[MPI.Intracomm, Welcome] | None = None
    try:
        hosts = tuple(merged.allgather(os.uname().nodename))
        welcome = merged.bcast(welcome)
        assert welcome is not None
        new = sum(name >= len(welcome.hosts) for name in welcome.names)
        ever = (*welcome.hosts, *hosts[len(hosts) - new :])
        found = raising(merged.Dup()), welcome._replace(hosts=ever)
    except MPI.Exception:
        merged.Revoke()
    try:
        return found if merged.Agree(found is not None) else None
    except MPI.Exception:
        return None


def raising(comm: Kind) -> Kind:
    """The communicator, which tells of errors from now on."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py raises
    return comm


def listed(ranks: Sequence[int]) -> str:
    """These ranks, in words."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks)) or 'none'}"
