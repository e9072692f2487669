"""An all-reduce that goes on without the ranks that are lost in it.

Floor 5. Open MPI's ULFM finds failures and makes communicators of those who are left, `raft` decides who may go on, the
schedules of `collectives` move the data; here they are put together. One all-reduce:

1. Every rank keeps its input and sends copies of it to its backups; beside that the exchange runs, on another buffer.
2. One agreement over the data communicator: has everybody finished? If so, and nobody is missing, all return.
3. Else all revoke the communicator, shrink it, and wait until the consensus has committed just these members.
4. They tell each other who has finished and who holds whose input, decide alike, and either hand out the result, or
   run the exchange again, a stand-in speaking for each of the dead, or raise; behind one more agreement (2).

Why nobody returns what another does not, window by window:

- A rank dies before the agreement: whoever needs its messages sees an error, and revokes the communicator, which frees
  the others. All come to the agreement, and it is "no", also for those who had finished.
- It dies in the agreement: this is ULFM's own, which decides alike for all that live, and says to all or to none that
  somebody is missing. If it is "yes, but", all have the result, and hand it out when they know that they may go on.
- It dies behind it: the operation is over for all. The next one begins with its error.
- It dies in 3 or 4: the same again, with one member fewer. What was finished stays finished, what is held stays held.
- Two sides each take the other for dead: "yes, but" on both, or "no". One has a quorum at most. The other one raises,
  and its arrays are as they were.
- A rank knows the new members and another one not yet: the agreement that ends 3 is waited for while the consensus is
  polled, so whoever knows goes on answering until all know.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from zlib import crc32

import numpy as np
from mpi4py import MPI

from hpcdl import collectives
from hpcdl.buffers import HALVES, Array, Vector
from hpcdl.call import check_op, op_name
from hpcdl.collectives import Span
from hpcdl.errors import HpcdlError, MismatchError, RankFailedError, UnsupportedArrayError
from hpcdl.inside import UFUNCS
from hpcdl.survive import ending
from hpcdl.survive.control import Control
from hpcdl.survive.exchange import Copies, Exchange, Ground, Tested, placement
from hpcdl.survive.faults import Fault, Messages
from hpcdl.topology import group_by

Policy: TypeAlias = Literal["exact", "survivors", "raise"]

SHARE_TAG = 3
POLL_S = 1e-3
"""Who waits looks after the consensus so often."""
DOZE_S = 0.5
"""Who was away for so long while it waited, as no rank that computes is, may have been taken for dead: it asks."""
KEPT_EXCHANGES = 16
"""So many stay bound, the latest."""
REPEATS = 5
"""So often an exchange is run again though nobody was lost, before the network is given up."""
DROPPED_FOR = 10
"""So many operations later MPI has surely let go of the buffers of an exchange that was broken off."""

FINISHED = 1
DIGEST = 0x7FFF
MATCHED, HOPE = 1, 2


class Lost(NamedTuple):
    """A rank that was lost, in which all-reduce (from 1), and who spoke for it there: None if nobody did."""

    rank: int
    operation: int
    stand_in: int | None


@dataclass
class _Operation:
    """One all-reduce, until it is committed."""

    number: int
    contributors: tuple[int, ...]
    """The members when it began."""
    source: Vector | None = None
    op: str = ""
    signature: str = ""
    refusal: Exception | None = None
    first: Exchange | None = None
    held: dict[int, Vector] = field(default_factory=dict)
    """Whose inputs this rank has, all of them: its own, and those it got copies of."""
    result: Vector | None = None
    finished: int = -1
    """In which generation of the data communicator this rank has finished an exchange."""
    speakers: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"all-reduce {self.number}, {self.signature}"


class _Word(NamedTuple):
    """What the members tell each other behind a loss."""

    number: int
    signature: str
    refusal: Exception | None
    finished: int
    holds: tuple[int, ...]
    stand_ins: dict[int, int | None]


class _Kept(NamedTuple):
    """An exchange that is bound, to be used again for arrays of the same size and type, and the input of this one."""

    source: Vector
    exchange: Exchange


class _Coming:
    """A message whose length is not known yet."""

    def __init__(self, comm: MPI.Intracomm, place: int) -> None:
        self.comm, self.place, self.status = comm, place, MPI.Status()
        self.message: MPI.Message | None = None

    def Test(self) -> bool:
        self.message = self.comm.Improbe(self.place, SHARE_TAG, self.status)
        return self.message is not None


class Survivors:
    """All-reduces among the ranks of a communicator that live. Needs Open MPI, started with `mpiexec --with-ft ulfm`.

    Ranks are named by their numbers in `comm`, for ever. All ranks make it, with the same arguments, and call the same
    all-reduces in the same order. What is promised when ranks are lost is the policy:

    - "exact": the result is that of all ranks that were members when the all-reduce began, as long as each of them
      lives or one of its `copies` backups; else all raise `RankFailedError`, and the arrays are as they were.
    - "survivors": the result is that of the ranks that have finished it; a mean divides by their number.
    - "raise": all raise `RankFailedError` at each loss.

    Whoever has raised it may go on with the next all-reduce, among those who live. Not so where less than a quorum is
    left (more than half of the last members, or half with the lowest of them): there it is raised each time.

    An exception that nobody catches ends its rank only, and the others go on. `close` is called by all; a rank that
    ends without it is lost to them. Behind a loss a process must not end by MPI_Finalize: it does not, and where its
    exit status is to be another one than 0, it calls `hpcdl.survive.leave(status)`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        policy: Policy = "exact",
        copies: int = 1,
        algorithm: str = "binary_blocks",
        faults: Iterable[Fault] = (),
    ) -> None:
        _check_ulfm()
        comm = MPI.COMM_WORLD if comm is None else comm
        if policy not in get_args(Policy):
            raise ValueError(f"policy is one of {', '.join(get_args(Policy))}, not {policy!r}")
        if copies < 1 and policy == "exact":
            raise ValueError(f"policy exact needs at least one copy of each rank's input, not {copies}")
        try:
            collectives.find(algorithm, 3, nodes=((0,), (1,), (2,)))
        except ValueError as error:
            raise ValueError(f"any number of ranks may be left, which {algorithm} must serve: {error}") from None
        self.policy, self.algorithm = policy, algorithm
        self.lost: list[Lost] = []
        self._copies = min(copies, comm.size - 1) if policy == "exact" else 0
        self._rank, self._members = comm.rank, tuple(range(comm.size))
        self._hosts = comm.allgather(os.uname().nodename)
        self._data = _raising(comm.Dup())
        self._generation = 0
        self._control = Control(_raising(comm.Dup()), self._backups())
        faults = list(faults)
        self._messages = Messages(faults, comm.rank) if faults else None
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._dropped: list[tuple[int, object]] = []
        self._operations = 0
        self._seen = 0.0
        self._dozed = False
        self._broken: HpcdlError | None = None
        self._closed = False
        ending.opened(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are left, as far as is known."""
        return self._members

    @property
    def rank(self) -> int:
        """This rank's number in the communicator that all began with."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks are left."""
        return len(self._members)

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return self._control.node.committed.epoch

    @property
    def messages(self) -> int:
        """How many messages this rank has posted, as a `Fault` counts them; 0 where there are no faults."""
        return self._messages.posted if self._messages else 0

    # ---- the all-reduce ----------------------------------------------------------------------------------------------

    def allreduce(self, x: Array, op: str | MPI.Op = "sum", *, out: Array = None) -> Array:
        """Combine the x of all members, element by element; every one gets the result, in x or out, which is returned.

        As `hpcdl.allreduce`, of arrays in host memory. If it raises, x and out are as they were.
        """
        self._check_open()
        self._operations += 1
        self._seen, self._dozed = time.monotonic(), False
        operation = _Operation(self._operations, self._members)
        try:
            source, target, name = _checked(x, op, out)
        except (TypeError, ValueError) as error:
            # Of a plain kind, as it travels to the others.
            operation.refusal = (UnsupportedArrayError if isinstance(error, TypeError) else ValueError)(str(error))
        else:
            self._begin(operation, source, name)
        try:
            result = self._run(operation)
        except (HpcdlError, ValueError):
            raise
        except BaseException:
            self._broken = HpcdlError(f"{operation} was interrupted half-way: go on with new Survivors")
            raise
        finally:
            self._note(operation)
        target.put(Span(0, target.size), result.flat)
        target.unpack()
        return x if out is None else out

    def _begin(self, operation: _Operation, x: Vector, op: str) -> None:
        """Keep the input; bind the exchange, or take what was bound to the like of it."""
        shape = "x".join(map(str, x.look.shape)) or "()"
        operation.op, operation.signature = op, f"{op} of {x.dtype} {shape} by {self.algorithm}"
        key = op, x.dtype, x.size, x.family
        kept = self._kept.pop(key, None)
        if kept is None:
            source = x.empty(x.size if self._copies else 0)
            held = {self._rank: source}
            kept = _Kept(source, self._bound(op, source, x.empty(x.size), held, _own(self._members), {}, self.size))
        self._kept[key] = kept
        if len(self._kept) > KEPT_EXCHANGES:
            self._kept.pop(next(iter(self._kept))).exchange.close()
        whole = Span(0, x.size)
        source = x
        if self._copies:
            # The copies are sent from here, perhaps still when an error has given x back to the caller.
            source = kept.source
            source.put(whole, x.flat)
        kept.exchange.work.put(whole, source.flat)
        operation.source, operation.first, operation.held = source, kept.exchange, {self._rank: source}

    def _bound(
        self,
        op: str,
        source: Vector,
        work: Vector,
        held: Mapping[int, Vector],
        holders: Mapping[int, Iterable[int]],
        speakers: Mapping[int, int],
        inputs: int,
    ) -> Exchange:
        """An exchange over the data communicator as it is now."""
        wire = self._messages.through(self._data) if self._messages else self._data
        ground = Ground(wire, self._data.rank, self._members, inputs)
        nodes = group_by([self._hosts[rank] for rank in self._members])
        moves = placement(holders, self._preferred, self._copies, speakers)
        copies = Copies(ground, source, held, moves)
        return Exchange(ground, collectives.find(self.algorithm, self.size, nodes=nodes), op, work, copies)

    def _run(self, operation: _Operation) -> Vector:
        """Try until all have agreed; the result, or what all raise."""
        if operation.first is None:
            self._revoke()  # the others are on their way; they will be told
        done = operation.first is not None and self._tried(operation, operation.first)
        signature = operation.signature
        verdict: Exception | None = None
        repeats = 0
        while not self._committed(done, signature):
            before = self._members
            self._recover()
            repeats = repeats + 1 if before == self._members else 0
            done, verdict = self._again(operation, repeats)
            signature = ""  # they have been compared
        self._dropped = [each for each in self._dropped if each[0] + DROPPED_FOR > self._operations]
        if verdict is not None:
            raise verdict
        assert operation.result is not None
        return operation.result

    def _tried(self, operation: _Operation, exchange: Exchange) -> bool:
        """Run an exchange; whether it came to its end."""
        try:
            exchange.copies.start()
            for request in exchange.plan.steps():
                self._wait(request)
        except MPI.Exception:
            operation.held |= exchange.copies.there()
            self._revoke()
            self._dropped.append((self._operations, exchange))
            return False
        operation.result, operation.finished = exchange.work, self._generation
        # By now a copy that does not arrive is no matter, but the buffers must be free before the next operation.
        arrived, well = exchange.copies.finish(self._wait)
        operation.held |= arrived
        if not well:
            self._dropped.append((self._operations, exchange))
            self._kept = {key: kept for key, kept in self._kept.items() if kept.exchange is not exchange}
        return True

    def _committed(self, done: bool, signature: str) -> bool:
        """Has everybody finished the same call, and is nobody missing?"""
        digest = crc32(signature.encode()) & DIGEST
        # Each bit of the digest stands there twice, once turned round: where ranks differ in it, both become 0.
        bits, missing = self._agree(FINISHED | digest << 1 | (digest ^ DIGEST) << 16 if done else 0)
        alike = (bits >> 1 | bits >> 16) & DIGEST == DIGEST
        return bool(bits & FINISHED) and alike and not missing

    def _again(self, operation: _Operation, repeats: int) -> tuple[bool, Exception | None]:
        """Behind a recovery: decide alike what is to be done, and do it; whether it was, and what is to be raised."""
        try:
            words = self._share(operation)
            missing = [rank for rank in operation.contributors if rank not in self._members]
            holders = {
                rank: {holder for holder, word in words.items() if rank in word.holds}
                for rank in operation.contributors
            }
            if error := _quarrel(words) or self._failure(operation, missing, holders, words, repeats):
                return True, error
            if _all_finished(words):
                return True, None
            speakers = {}
            if self.policy == "exact":
                named = words[self._members[0]].stand_ins
                speakers = {rank: self._speaker(rank, named.get(rank), holders[rank]) for rank in missing}
            return self._repeated(operation, speakers, holders), None
        except MPI.Exception:
            self._revoke()
            return False, None

    def _failure(
        self,
        operation: _Operation,
        missing: Sequence[int],
        holders: Mapping[int, set[int]],
        words: Mapping[int, _Word],
        repeats: int,
    ) -> Exception | None:
        """What all raise because of who is lost, or because nothing helps."""
        if missing and self.policy == "raise":
            return RankFailedError(f"{_ranks(missing)} failed in {operation}", missing)
        if _all_finished(words):
            return None
        gone = [rank for rank in missing if not holders[rank]] if self.policy == "exact" else []
        if gone:
            lacking = f"nobody who lives holds all that {_ranks(gone)} put in"
            return RankFailedError(f"{_ranks(missing)} failed in {operation}, and {lacking}", missing)
        if repeats > REPEATS:
            return HpcdlError(
                f"{operation} was begun {repeats + 1} times and broke off, though no rank is lost: MPI cannot carry it"
            )
        return None

    def _repeated(self, operation: _Operation, speakers: dict[int, int], holders: Mapping[int, Iterable[int]]) -> bool:
        """Run the exchange among those who are left, each of whom speaks for those it stands in for."""
        source = operation.source
        assert source is not None
        # Halves are to be rounded once, and a stand-in's own sum would be rounded before.
        wide = bool(speakers) and source.dtype in HALVES and operation.op not in ("min", "max")
        work = source.empty(source.size, "float32" if wide else None)
        whole = Span(0, work.size)
        work.put(whole, source.flat)
        for rank, speaker in speakers.items():
            if speaker == self._rank:
                theirs = source.empty(source.size, work.dtype)
                theirs.put(whole, operation.held[rank].flat)
                work.combine(UFUNCS[operation.op], work.flat, theirs.flat, work.flat)()
        inputs = len(operation.contributors) if self.policy == "exact" else self.size
        operation.finished, operation.speakers = -1, speakers
        exchange = self._bound(operation.op, source, work, operation.held, holders, speakers, inputs)
        if not self._tried(operation, exchange):
            return False
        if wide:
            operation.result = source.empty(source.size)
            operation.result.put(whole, work.flat)
        exchange.close()
        return True

    def _speaker(self, rank: int, named: int | None, holders: set[int]) -> int:
        """Who speaks for the dead: whom the consensus has named, or else the next who can."""
        return named if named in holders else min(holders, key=lambda each: (each - rank) % len(self._hosts))

    def _note(self, operation: _Operation) -> None:
        missing = [rank for rank in operation.contributors if rank not in self._members]
        self.lost += [Lost(rank, operation.number, operation.speakers.get(rank)) for rank in missing]

    # ---- who is left -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Go on with those who are left: a new data communicator, whose members are committed, and all know it."""
        self._kept.clear()
        while True:
            self._revoke()
            before, members = self._data.Get_group(), self._members
            self._data = self._shrunk()
            self._seen = time.monotonic()
            self._generation += 1
            self._members = tuple(members[place] for place in self._data.Get_group().Translate_ranks(None, before))
            self._control.report(set(members) - set(self._members))
            if self._settled():
                self._control.node.backups = self._backups()
                return

    def _shrunk(self) -> MPI.Intracomm:
        if not self._dozed:
            return _raising(self._data.Shrink())
        # Those who have excluded this rank might not answer it.
        done: list[MPI.Intracomm] = []
        threading.Thread(target=lambda: done.append(_raising(self._data.Shrink())), daemon=True).start()
        while not done:
            self._look_after()
            time.sleep(POLL_S)
        return done[0]

    def _settled(self) -> bool:
        """Has the consensus committed just these members, and does each of them know it?"""
        node, members = self._control.node, set(self._members)
        word = HOPE
        while members <= set(node.committed.members) and not self._control.failed & members:
            if node.lost_quorum or node.excluded:
                word = 0
                break
            if members == set(node.committed.members):
                word |= MATCHED
                break
            self._control.poll()
            os.sched_yield()
        bits, missing = self._agree(word)
        if not bits & HOPE:
            raise self._no_quorum()
        return bool(bits & MATCHED) and not missing

    def _no_quorum(self) -> RankFailedError:
        """What is raised from now on."""
        node = self._control.node
        members = node.committed.members
        gone = [rank for rank in members if rank in self._control.failed]
        if node.excluded:
            reason = f"the others have gone on without rank {self._rank}, which did not answer in time"
        else:
            here = _ranks([rank for rank in members if rank not in gone])
            reason = (
                f"of the last members, {_ranks(members)}, no more than {here} can be reached from here; to go on takes "
                "more than half of them, or half with the lowest"
            )
        self._broken = error = RankFailedError(f"no quorum: {reason}", gone)
        ending.lost()
        return error

    def _share(self, operation: _Operation) -> dict[int, _Word]:
        """What every member says of the operation."""
        mine = _Word(
            operation.number,
            operation.signature,
            operation.refusal,
            operation.finished,
            tuple(operation.held),
            self._control.stand_ins,
        )
        data = pickle.dumps(mine)
        others = [place for place in range(self.size) if place != self._data.rank]
        leaving = [self._data.Isend([data, MPI.BYTE], place, SHARE_TAG) for place in others]
        words = {self._data.rank: mine}
        self._dropped.append((self._operations, (leaving, data)))  # should it be broken off
        for place in others:
            coming = _Coming(self._data, place)
            self._wait(coming)
            assert coming.message is not None
            buffer = np.empty(coming.status.Get_count(MPI.BYTE), np.uint8)
            self._dropped.append((self._operations, buffer))
            self._wait(coming.message.Irecv([buffer, MPI.BYTE]))
            words[place] = pickle.loads(buffer.tobytes())
        for request in leaving:
            self._wait(request)
        return {rank: words[place] for place, rank in enumerate(self._members)}

    def _preferred(self, rank: int) -> list[int]:
        """Who should hold a copy of what a rank puts in: those who follow it, those on other hosts first."""
        size = len(self._hosts)
        ring = [(rank + step) % size for step in range(1, size)]
        living = [each for each in ring if each in self._members]
        return sorted(living, key=lambda each: self._hosts[each] == self._hosts[rank])

    def _backups(self) -> dict[int, list[int]]:
        return {rank: self._preferred(rank)[: self._copies] for rank in self._members}

    # ---- MPI ---------------------------------------------------------------------------------------------------------

    def _agree(self, word: int) -> tuple[int, bool]:
        """The bits that are set on all members that live, and whether one of them is missing."""
        bits = np.array([word], np.int32)
        try:
            self._wait(self._data.Iagree(bits))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
            return int(bits[0]), True
        return int(bits[0]), False

    def _wait(self, request: Tested) -> None:
        """Test one request until it is over; never several at once, where an error in one of them aborts Open MPI."""
        while not request.Test():
            self._look_after()
            os.sched_yield()  # the rank waited for may need this core; time.sleep(0) takes 70 us

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
        self._control.poll()
        node = self._control.node
        if self._dozed and (node.excluded or node.lost_quorum):
            raise self._no_quorum()

    def _revoke(self) -> None:
        if not self._data.Is_revoked():
            self._data.Revoke()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say good-bye to the other members, who must call it too. If nobody was lost, all that MPI holds is freed."""
        if self._closed:
            return
        self._closed = True
        missing = True
        if self._broken is None:
            self._seen, self._dozed = time.monotonic(), False
            _, missing = self._agree(FINISHED)
        if missing or self.lost:
            ending.lost()
        else:
            for kept in self._kept.values():
                kept.exchange.close()
            self._data.Free()
            self._control.comm.Free()
        self._kept.clear()
        ending.closed(self)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this Survivors is closed: make another one")
        if self._broken is not None:
            raise self._broken

    def __enter__(self) -> Survivors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _check_ulfm() -> None:
    """Only Open MPI's ULFM lets ranks go on without a lost one, and only where it was asked for."""
    instead = "Without it: checkpoints, and a job that is requeued (docs/failures.md)"
    vendor, version = MPI.get_vendor()
    if vendor != "Open MPI" or version < (5,):
        raise RuntimeError(
            f"{vendor} {'.'.join(map(str, version))} ends the job with its first lost rank; going on without it takes "
            f"Open MPI 5, started with mpiexec --with-ft ulfm. {instead}"
        )
    if os.environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("1", "true", "yes", "enabled"):  # noqa: SIM112
        raise RuntimeError(f"Open MPI runs without ULFM here: start it with mpiexec --with-ft ulfm. {instead}")


def _checked(x: Array, op: str | MPI.Op, out: Array) -> tuple[Vector, Vector, str]:
    """The arrays and the reduction, if they can be served."""
    name = op_name(op)
    source = Vector(x, writable=out is None)
    target = source if out is None else Vector(out)
    check_op(name, source.dtype)
    if source.host is None or target.host is None:
        raise UnsupportedArrayError("an array in device memory; survivors sum in host memory: pass x.cpu()")
    if target.dtype != source.dtype:
        raise UnsupportedArrayError(f"out is of type {target.dtype} and x of type {source.dtype}: they must be alike")
    if target.look.shape != source.look.shape:
        raise ValueError(f"out has the shape {target.look.shape}, x {source.look.shape}: they must be equal")
    return source, target, name


def _quarrel(words: Mapping[int, _Word]) -> Exception | None:
    """What all raise because of the arguments of some."""
    for rank, word in words.items():
        if word.refusal is not None:
            return type(word.refusal)(f"rank {rank}: {word.refusal}")
    if len({(word.number, word.signature) for word in words.values()}) > 1:
        table = [f"rank {rank}: all-reduce {word.number}, {word.signature}" for rank, word in words.items()]
        return MismatchError("\n  ".join(["the ranks do not call the same all-reduce:", *table]), table)
    return None


def _all_finished(words: Mapping[int, _Word]) -> bool:
    """Have all finished the same exchange?"""
    finished = {word.finished for word in words.values()}
    return len(finished) == 1 and finished != {-1}


def _own(members: Iterable[int]) -> dict[int, set[int]]:
    """Who holds whose input when nothing has been sent yet."""
    return {rank: {rank} for rank in members}


def _raising(comm: Any) -> MPI.Intracomm:
    comm.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py raises
    return comm  # type: ignore[no-any-return]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks)) or 'none'}"
