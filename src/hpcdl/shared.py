"""Memory that all ranks of a node map: arrays in it, and ranks that meet in it.

Floor 2. It is a file in /dev/shm without a name: each rank reserves the pages of its own part, so that too little space
is an error here and not a bus error later, and the memory lives exactly as long as somebody maps it. Nothing can be
left behind in /dev/shm, not by a kill either.

Fences. Ranks meet by counters in this memory: a rank writes its data, then its counter; another sees the counter, then
reads the data. That order must hold for the compiler (each access is a call into the interpreter, which it cannot look
through) and for the processor: for it a fence stands before every counter that is written, and behind every wait.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Protocol

import numpy as np
from mpi4py import MPI

from hpcdl.errors import RankEndedError

# Counters are words; two ranks' never stand in one cache line, or the ranks would fight for it.
WORD, LINE = 8, 8

ROW_BYTES = 512

FENCE = threading.Lock()
"""`with FENCE: pass` lets no read or write cross the line, in either direction.

POSIX (Base Definitions 4.12) has taking and releasing a lock synchronise memory between threads of control, in one
process or in several; on every processor that CPython runs on that takes a barrier instruction.
"""


class Awaited(Protocol):
    """What a collective waits for: an MPI request, or a gate or check of our own that behaves like one."""

    def Start(self) -> None: ...

    def Test(self) -> bool: ...

    def Wait(self) -> object: ...


class Memory(mmap.mmap):
    """The memory of one node: a part for each of its ranks, in the order of their numbers, on pages of its own."""

    ranks: tuple[int, ...]
    """The node's ranks, as the communicator counts them."""
    part: int
    """Bytes of each part."""
    address: int
    token: int
    """The same number on all ranks of the communicator, and in no other memory."""
    members: tuple[str, ...] = ()
    """The processes of the communicator that it was made for, by rank."""

    def place(self, rank: int) -> int:
        """Where a rank's part begins, in bytes."""
        return self.ranks.index(rank) * self.part


_arrays: weakref.WeakSet[Memory] = weakref.WeakSet()


def register(memory: Memory, members: tuple[str, ...]) -> None:
    """Let `find` know of memory that users' arrays lie in, and of the communicator's processes."""
    memory.members = members
    _arrays.add(memory)


def find(address: int, nbytes: int) -> Memory | None:
    """The registered memory in which so many bytes lie, in one rank's part of it."""
    for memory in list(_arrays):
        offset = address - memory.address
        if 0 <= offset < len(memory) and offset % memory.part + nbytes <= memory.part:
            return memory
    return None


def label() -> str:
    """What is equal on ranks that can map the same file: they see one /dev/shm, and each other's open files."""
    try:
        shm = os.stat("/dev/shm")
        return f"{_boot()} {os.readlink('/proc/self/ns/pid')} {shm.st_dev} {shm.st_ino}"
    except OSError:
        return f"{os.uname().nodename} has no memory to share"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def exchange(wire: MPI.Intracomm, text: str) -> Generator[MPI.Request, None, list[str]]:
    """Every rank's text (512 bytes of it), by rank."""
    rows = np.zeros((wire.size, ROW_BYTES), np.uint8)
    mine = np.frombuffer(text.encode()[:ROW_BYTES].ljust(ROW_BYTES, b"\0"), np.uint8)
    yield wire.Iallgather(mine, rows)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def allocate(wire: MPI.Intracomm, ranks: tuple[int, ...], part: int) -> Generator[MPI.Request, None, Memory | str]:
    """New memory, zeroed, with a part of so many bytes for each of this node's ranks: a collective call.

    All ranks get one, or all get the reason why one of them could not.
    """
    part = max(1, -(-part // mmap.PAGESIZE)) * mmap.PAGESIZE
    file, problem, memory = -1, "", None
    try:
        announced = ""
        if wire.rank in (0, ranks[0]):
            try:
                if wire.rank == ranks[0]:
                    file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                    os.ftruncate(file, part * len(ranks))
                announced = json.dumps([os.getpid(), file, os.fstat(file).st_ino, secrets.randbits(62)])
            except OSError as error:
                problem = f"rank {wire.rank}: /dev/shm: {error}"
        rows = yield from exchange(wire, announced)
        try:
            if rows[ranks[0]]:
                process, number, inode, _ = json.loads(rows[ranks[0]])
                if file < 0:
                    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                if os.fstat(file).st_ino != inode:
                    raise OSError(f"/proc/{process} is another process here")
                os.posix_fallocate(file, ranks.index(wire.rank) * part, part)
                # With all pages mapped at once: else the first collective would fault on each page of every rank.
                memory = Memory(file, part * len(ranks), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            problem = f"rank {wire.rank}: {part * len(ranks):,} bytes in /dev/shm: {error}"
        # Also the barrier behind which the file may be closed.
        problems = [row for row in (yield from exchange(wire, problem)) if row]
    finally:
        if file >= 0:
            os.close(file)
    if problems or memory is None:
        return problems[0]
    memory.ranks, memory.part, memory.token = ranks, part, json.loads(rows[0])[3]
    memory.address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return memory


LOOKS = 30
"""How often to look before giving the core away between looks. With a core for every rank more looks gain nothing;
where ranks share cores, with each other or with anything else, they hold up those they wait for."""


PATIENCE_S, NAP_S = 3e-4, 5e-5
"""How long to yield before sleeping between looks. A rank that yields is ready to run, so where ranks outnumber cores
the system leaves two that wait on one core and two that compute on the other."""


class Meeting:
    """What behaves like a request and is in shared memory: other ranks' words, which are looked at."""

    poke: Callable[[], Collection[int]]
    """Lets MPI work on its messages: it does so only when it is called, and another rank may wait for one from here.
    Gives the ranks that have ended."""
    rank: int
    others: Sequence[int]
    """The other ranks that are waited for."""

    def there(self) -> bool:
        """Have all come?"""
        raise NotImplementedError

    def absent(self) -> list[int]:
        """The ranks that have not."""
        raise NotImplementedError

    def Test(self) -> bool:
        """Have all come? Else MPI gets its turn."""
        if self.there():
            return True
        self._look_round()
        return False

    def _look_round(self) -> None:
        ended = self.poke()
        if not ended:
            return
        # Asked behind that: who has come and then ended is missed by nobody.
        missed = [rank for rank in self.absent() if rank in ended]
        if missed:
            raise RankEndedError(
                f"rank {missed[0]} has ended its program, and will not come to the collective that is waited for here: "
                "all ranks must call the same collectives as often"
            )

    def Wait(self) -> None:
        """Wait until all have come."""
        looks, began, patient = 0, 0.0, True
        while not self.there():
            looks += 1
            if looks <= LOOKS:
                continue
            if patient:
                os.sched_yield()
            else:
                time.sleep(NAP_S)
            if looks % 16 == 0 or not patient:
                self._look_round()
                now = time.monotonic()
                began = began or now
                patient = now - began < PATIENCE_S


class Gate(Meeting):
    """A barrier of a node's ranks, at counters in memory that all map.

    A counter only grows, so a rank may come for the next time before another has seen that all came for this one.
    """

    def __init__(self, memory: Memory, offset: int, rank: int, poke: Callable[[], Collection[int]]) -> None:
        self._words = memoryview(memory).cast("q")
        self._mine = (memory.place(rank) + offset) // WORD
        self.rank, self.others = rank, [other for other in memory.ranks if other != rank]
        self._others = [(memory.place(other) + offset) // WORD for other in self.others]
        self.poke = poke
        self._count = 0

    def Start(self) -> None:
        """Arrive: who finds the gate open sees what this rank has written."""
        self._count += 1
        with FENCE:
            pass
        self._words[self._mine] = self._count

    def there(self) -> bool:
        """Have all arrived?"""
        words, count = self._words, self._count
        for other in self._others:
            if words[other] < count:
                return False
        with FENCE:
            pass
        return True

    def absent(self) -> list[int]:
        """The ranks that have not arrived."""
        places = zip(self.others, self._others, strict=True)
        return [rank for rank, other in places if self._words[other] < self._count]


class Board:
    """Where a node's ranks post what they call, by the number of the operation, and how far they have come in it.

    It has room for so many operations; an older one gives way when all ranks have done with it.
    """

    ROOM = 64
    # In words, in each rank's part. The first line is left to the gate of plain calls.
    DONE, ENDED, POSTS, STAGES, END = LINE, LINE + 1, 2 * LINE, 2 * LINE + 2 * ROOM, 2 * LINE + 3 * ROOM
    MOST_STAGES = 4

    def __init__(self, memory: Memory, rank: int, poke: Callable[[], Collection[int]]) -> None:
        self._words = memoryview(memory).cast("q")
        self._mine = memory.place(rank) // WORD
        self.rank, self.others = rank, [other for other in memory.ranks if other != rank]
        self._others = [memory.place(other) // WORD for other in self.others]
        self.poke = poke
        self._begun = self._done_by_all = 0
        self._open: set[int] = set()

    def begin(self, number: int) -> None:
        """An operation has its number; not yet posted."""
        self._begun = number
        self._open.add(number)

    def post(self, number: int, code: int) -> bool:
        """Post what this rank calls, if the operation before it in its place has been done with by all."""
        words = self._words
        if number - self.ROOM > self._done_by_all:
            self._done_by_all = min(words[other + self.DONE] for other in self._others)
            if number - self.ROOM > self._done_by_all:
                return False
        word = self._mine + self.POSTS + 2 * (number % self.ROOM)
        words[word + 1] = code
        with FENCE:
            pass
        words[word] = number
        return True

    def codes(self, number: int) -> list[int] | None:
        """What the other ranks have posted; None if one has not yet."""
        words, word = self._words, self.POSTS + 2 * (number % self.ROOM)
        for other in self._others:
            if words[other + word] != number:
                return None
        with FENCE:
            pass
        return [words[other + word + 1] for other in self._others]

    def without(self, number: int) -> list[int]:
        """The ranks that have not posted, or keep this one from it by an older operation that they have not ended."""
        words, word = self._words, self.POSTS + 2 * (number % self.ROOM)
        places = zip(self.others, self._others, strict=True)
        return [rank for rank, other in places if words[other + word] != number]

    def late(self, number: int, stage: int) -> list[int]:
        """The ranks that have not come so far."""
        words, word = self._words, self.STAGES + number % self.ROOM
        places = zip(self.others, self._others, strict=True)
        return [rank for rank, other in places if words[other + word] < number * self.MOST_STAGES + stage]

    def leave(self) -> None:
        """This rank ends its program: it comes to nothing that it has not come to yet."""
        with FENCE:
            pass
        self._words[self._mine + self.ENDED] = 1

    def ended(self) -> list[int]:
        """The ranks that have."""
        ended = [rank for rank, other in zip(self.others, self._others, strict=True) if self._words[other + self.ENDED]]
        with FENCE:
            pass
        return ended

    def arrive(self, number: int, stage: int) -> None:
        """This rank has come so far in the operation."""
        with FENCE:
            pass
        self._words[self._mine + self.STAGES + number % self.ROOM] = number * self.MOST_STAGES + stage

    def arrived(self, number: int, stage: int) -> bool:
        """Have all come so far?"""
        words, word = self._words, self.STAGES + number % self.ROOM
        for other in self._others:
            if words[other + word] < number * self.MOST_STAGES + stage:
                return False
        with FENCE:
            pass
        return True

    def end(self, number: int) -> None:
        """This rank has done with the operation."""
        self._open.discard(number)
        self._words[self._mine + self.DONE] = min(self._open) - 1 if self._open else self._begun


class OneGate(Meeting):
    """The gate of one operation, which may overlap with others: at the board."""

    def __init__(self, board: Board, number: int) -> None:
        self._board, self._number, self._stage = board, number, 0
        self.poke, self.rank, self.others = board.poke, board.rank, board.others

    def Start(self) -> None:
        """Arrive."""
        self._stage += 1
        self._board.arrive(self._number, self._stage)

    def there(self) -> bool:
        """Have all arrived?"""
        return self._board.arrived(self._number, self._stage)

    def absent(self) -> list[int]:
        """The ranks that have not arrived."""
        return self._board.late(self._number, self._stage)
