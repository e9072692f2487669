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

import pickle
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args
from zlib import crc32

import numpy as np
from mpi4py import MPI

from hpcdl import collectives, settings
from hpcdl.buffers import HALVES, Array, Vector
from hpcdl.call import check_op, op_name
from hpcdl.collectives import Span
from hpcdl.errors import HpcdlError, MismatchError, RankFailedError, UnsupportedArrayError
from hpcdl.inside import UFUNCS
from hpcdl.survive import ending
from hpcdl.survive.exchange import Copies, Exchange, Ground, placement
from hpcdl.survive.faults import Fault, Messages
from hpcdl.survive.members import Members, listed
from hpcdl.survive.pulse import TRUE, setting
from hpcdl.topology import group_by

Policy: TypeAlias = Literal["exact", "survivors", "raise"]

KEPT_EXCHANGES = 16
"""So many stay bound, the latest."""
REPEATS = 5
"""So often an exchange is run again though nobody was lost, before the network is given up."""

FINISHED = 1
DIGEST = 0x7FFF


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


class _Told(NamedTuple):
    """What a rank that joins is told."""

    policy: Policy
    algorithm: str
    operations: int
    lost: list[Lost]


class _Kept(NamedTuple):
    """An exchange that is bound, to be used again for arrays of the same size and type, and the input of this one."""

    source: Vector
    exchange: Exchange


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
        self._set_up(Members.begin(comm, copies if policy == "exact" else 0), policy, algorithm, faults)
        if settings.BEGUN and comm.rank == 0:
            Path(settings.BEGUN).touch()

    def _set_up(self, members: Members, policy: Policy, algorithm: str, faults: Iterable[Fault]) -> None:
        self.policy, self.algorithm = policy, algorithm
        self.lost: list[Lost] = []
        self._members = members
        faults = list(faults)
        self._messages = Messages(faults, members.rank) if faults else None
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._operations = 0
        self._closed = False
        ending.opened(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are left, as far as is known."""
        return self._members.names

    @property
    def rank(self) -> int:
        """This rank's number in the communicator that all began with."""
        return self._members.rank

    @property
    def size(self) -> int:
        """How many ranks are left."""
        return len(self._members.names)

    @property
    def has_quorum(self) -> bool:
        """May this side go on? If not, each call raises the `RankFailedError` that has told so."""
        return not isinstance(self._members.broken, RankFailedError)

    @property
    def epoch(self) -> int:
        """How often the members have changed."""
        return self._members.epoch

    @property
    def messages(self) -> int:
        """How many messages this rank has posted, as a `Fault` counts them; 0 where there are no faults."""
        return self._messages.posted if self._messages else 0

    # ---- the all-reduce ----------------------------------------------------------------------------------------------

    def allreduce(self, x: Array, op: str | MPI.Op = "sum", *, out: Array = None) -> Array:
        """Combine the x of all members, element by element; every one gets the result, in x or out, which is returned.

        As `hpcdl.allreduce`, of arrays in host memory. If it raises, x and out are as they were.
        """
        return self._combined(x, op, out)

    def _combined(self, x: Array, op: str | MPI.Op, out: Array = None, what: str = "") -> Array:
        self._check_open()
        self._operations += 1
        operation = _Operation(self._operations, self.members)
        try:
            source, target, name = _checked(x, op, out)
        except (TypeError, ValueError) as error:
            # Of a plain kind, as it travels to the others.
            operation.refusal = (UnsupportedArrayError if isinstance(error, TypeError) else ValueError)(str(error))
        else:
            shape = "x".join(map(str, source.look.shape)) or "()"
            operation.signature = what or f"{name} of {source.dtype} {shape} by {self.algorithm}"
            self._begin(operation, source, name)
        self._members.enter(operation.number, operation.signature)
        try:
            result = self._run(operation)
        except (HpcdlError, ValueError):
            raise
        except BaseException:
            self._members.broken = HpcdlError(f"{operation} was interrupted half-way: go on with new Survivors")
            raise
        finally:
            self._note(operation)
        target.put(Span(0, target.size), result.flat)
        target.unpack()
        return x if out is None else out

    def _begin(self, operation: _Operation, x: Vector, op: str) -> None:
        """Keep the input; bind the exchange, or take what was bound to the like of it."""
        operation.op = op
        key = op, x.dtype, x.size, x.family
        kept = self._kept.pop(key, None)
        copies = self._members.copies
        if kept is None:
            source = x.empty(x.size if copies else 0)
            held, holders = {self.rank: source}, {rank: {rank} for rank in self.members}
            kept = _Kept(source, self._bound(op, source, x.empty(x.size), held, holders, {}, self.size))
        self._kept[key] = kept
        if len(self._kept) > KEPT_EXCHANGES:
            self._kept.pop(next(iter(self._kept))).exchange.close()
        whole = Span(0, x.size)
        source = x
        if copies:
            # The copies are sent from here, perhaps still when an error has given x back to the caller.
            source = kept.source
            source.put(whole, x.flat)
        kept.exchange.work.put(whole, source.flat)
        operation.source, operation.first, operation.held = source, kept.exchange, {self.rank: source}

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
        members = self._members
        wire = self._messages.through(members.wire) if self._messages else members.wire
        ground = Ground(wire, members.wire.rank, members.names, inputs)
        nodes = group_by(members.hosts)
        moves = placement(holders, members.preferred, members.copies, speakers)
        copies = Copies(ground, source, held, moves)
        return Exchange(ground, collectives.find(self.algorithm, self.size, nodes=nodes), op, work, copies)

    def _run(self, operation: _Operation) -> Vector:
        """Try until all have agreed; the result, or what all raise."""
        if operation.first is None:
            self._members.revoke()  # the others are on their way; they will be told
        done = operation.first is not None and self._tried(operation, operation.first)
        signature = operation.signature
        verdict: Exception | None = None
        repeats = 0
        while not self._committed(done, signature):
            before = self.members
            self._kept.clear()
            self._members.recover()
            repeats = repeats + 1 if before == self.members else 0
            done, verdict = self._again(operation, repeats)
            signature = ""  # they have been compared
        if verdict is not None:
            raise verdict
        assert operation.result is not None
        return operation.result

    def _tried(self, operation: _Operation, exchange: Exchange) -> bool:
        """Run an exchange; whether it came to its end."""
        try:
            exchange.copies.start()
            for request in exchange.plan.steps():
                self._members.wait(request)
        except MPI.Exception:
            operation.held |= exchange.copies.there()
            self._members.revoke()
            self._members.keep(exchange)
            return False
        operation.result, operation.finished = exchange.work, self._members.generation
        # By now a copy that does not arrive is no matter, but the buffers must be free before the next operation.
        arrived, well = exchange.copies.finish(self._members.wait)
        operation.held |= arrived
        if not well:
            self._members.keep(exchange)
            self._kept = {key: kept for key, kept in self._kept.items() if kept.exchange is not exchange}
        return True

    def _committed(self, done: bool, signature: str) -> bool:
        """Has everybody finished the same call, and is nobody missing?"""
        digest = crc32(signature.encode()) & DIGEST
        # Each bit of the digest stands there twice, once turned round: where ranks differ in it, both become 0.
        bits, missing = self._members.agree(FINISHED | digest << 1 | (digest ^ DIGEST) << 16 if done else 0)
        alike = (bits >> 1 | bits >> 16) & DIGEST == DIGEST
        return bool(bits & FINISHED) and alike and not missing

    def _again(self, operation: _Operation, repeats: int) -> tuple[bool, Exception | None]:
        """Behind a recovery: decide alike what is to be done, and do it; whether it was, and what is to be raised."""
        try:
            words = self._members.tell(self._word(operation))
            missing = [rank for rank in operation.contributors if rank not in self.members]
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
                named = words[self.members[0]].stand_ins
                speakers = {rank: self._speaker(rank, named.get(rank), holders[rank]) for rank in missing}
            return self._repeated(operation, speakers, holders), None
        except MPI.Exception:
            self._members.revoke()
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
            return RankFailedError(f"{listed(missing)} failed in {operation}", missing)
        if _all_finished(words):
            return None
        gone = [rank for rank in missing if not holders[rank]] if self.policy == "exact" else []
        if gone:
            lacking = f"nobody who lives holds all that {listed(gone)} put in"
            return RankFailedError(f"{listed(missing)} failed in {operation}, and {lacking}", missing)
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
            if speaker == self.rank:
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
        return named if named in holders else min(holders, key=partial(self._members.distance, rank))

    def _word(self, operation: _Operation) -> _Word:
        return _Word(
            operation.number,
            operation.signature,
            operation.refusal,
            operation.finished,
            tuple(operation.held),
            self._members.stand_ins,
        )

    def _note(self, operation: _Operation) -> None:
        missing = [rank for rank in operation.contributors if rank not in self.members]
        self.lost += [Lost(rank, operation.number, operation.speakers.get(rank)) for rank in missing]

    # ---- joins -------------------------------------------------------------------------------------------------------

    def grow(self, count: int, command: str = sys.executable, arguments: Sequence[str] = ()) -> tuple[int, ...]:
        """Start `count` processes of a program, which become members by `Survivors.join()`; the ranks' numbers.

        All members call it, with the same arguments, where they might call an all-reduce. The new ranks have numbers
        that nobody has had, and go on with the members' next call. HpcdlError on all: they could not be started, and
        the members go on as they are. RankFailedError, as of an all-reduce: nothing was started. A process that has not
        joined in a minute ends.
        """
        if count < 1:
            raise ValueError(f"at least one rank joins, not {count}")
        if not shutil.which(command):
            raise ValueError(f"there is no program {command} that could be started")
        what = f"grow by {count}: {' '.join([command, *arguments])}"
        self._combined(np.zeros(1, np.uint8), "max", what=what)
        self._operations += 1
        self._kept.clear()
        self._members.enter(self._operations, what)
        before = self.members
        told = _Told(self.policy, self.algorithm, self._operations, self.lost)
        new = self._members.grow(count, command, arguments, told)
        self.lost += [Lost(rank, self._operations, None) for rank in (*before, *new) if rank not in self.members]
        if not new:
            raise HpcdlError(f"no ranks have joined: {command} could not be started, or ended before it called join()")
        return tuple(rank for rank in new if rank in self.members)

    @classmethod
    def join(cls, *, faults: Iterable[Fault] = ()) -> Survivors:
        """Become a member, in a process that the members' `grow` has started."""
        _check_ulfm()
        if MPI.Comm.Get_parent() == MPI.COMM_NULL:
            raise RuntimeError("nobody waits for this process: only one that Survivors.grow() has started can join")
        members, told = Members.join()
        survivors = cls.__new__(cls)
        survivors._set_up(members, told.policy, told.algorithm, faults)
        survivors._operations, survivors.lost = told.operations, [*told.lost]
        return survivors

    def broadcast(self, value: object) -> Any:
        """What the lowest member passes, on all members: any object that can be pickled; what others pass is ignored.

        If the lowest one is lost in it, and what it passed with it, the next lowest takes its place.
        """
        while True:
            data = pickle.dumps(value) if self.rank == self.members[0] else b""
            length = int(self._combined(np.array([len(data)]), "max", what="broadcast: length")[0])
            passed = np.zeros(length, np.uint8)
            passed[: len(data)] = bytearray(data)
            self._combined(passed, "max", what=f"broadcast: {length} bytes")
            if passed.any():  # as any pickle has a byte that is not 0
                return pickle.loads(passed.tobytes())

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say good-bye to the other members, who must call it too. If nobody was lost, all that MPI holds is freed."""
        if self._closed:
            return
        self._closed = True
        missing = True
        if self._members.broken is None:
            self._members.enter(self._operations + 1, "close")
            _, missing = self._members.agree(FINISHED)
        if missing or self.lost:
            ending.lost()
        else:
            for kept in self._kept.values():
                kept.exchange.close()
            self._members.free()
        self._kept.clear()
        ending.closed(self)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this Survivors is closed: make another one")
        if self._members.broken is not None:
            raise self._members.broken

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
    if setting("enable").lower() not in TRUE:
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
