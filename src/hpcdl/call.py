"""From a call to a plan: check the arguments, ask whether the ranks agree, bind.

Floor 4. Importing this starts MPI, so the public functions do it when the first of them is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

from mpi4py import MPI

from hpcdl import channel as channels
from hpcdl import collectives, settings, tuning
from hpcdl.buffers import (
    HALVES,
    INTEGERS,
    Action,
    Array,
    Family,
    Look,
    Vector,
    same_memory,
    shares_memory,
)
from hpcdl.channel import CALLS, PLAIN, PLANS, TAGS, Channel
from hpcdl.check import DEVICE, KINDS, PRIVATE, Check, agree, disagree
from hpcdl.choice import Shape, choose_for
from hpcdl.collectives import Algorithm, Nodes, Program, Span
from hpcdl.collectives.catalogue import resolve
from hpcdl.device import mpi_reads_devices
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Job, Native, Plan, Steps, Work, finish, wait
from hpcdl.inside import WHOLE_BYTES, Within, buffer_for, new_gate, new_staging
from hpcdl.record import ABOUT, CAME, ENDED, NUMBER, About, Operation, begin, now
from hpcdl.shared import Gate, Memory, OneGate, allocate, find, register

BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "mean", "min", "max", "prod", *BITWISE)

# Binding costs some 100 us. A kept plan holds no array, only its scratch: 256 MiB a communicator at the very most.
KEPT_PLANS, KEPT_BYTES = 32, 8 << 20


TINY_BYTES = 1 << 10


def channel(comm: MPI.Comm | None = None) -> Channel:
    """The channel of a communicator, with the tuning table that holds for it; the first call on it is collective."""
    own = channels.channel(comm)
    if not own.tuned:
        own.table, own.tuned = tuning.load(own.wire, own.size), True
        if own.table is not None:
            own.segment_bytes = own.table.segments.get(shape_of(own).sizes)
    return own


class Watched(NamedTuple):
    """An array that a kept plan works on and does not keep alive, and what it looked like."""

    array: weakref.ref[Array]
    family: Family
    look: Look

    def is_still(self, x: Array) -> bool:
        """Is this the array, and does it look the same? Its id alone may be a new array's."""
        return self.array() is x and self.family.unchanged(x, self.look)


class Kept(NamedTuple):
    """A plan kept for the next plain call on the same arrays."""

    plan: Plan
    check: Check
    arrays: Sequence[Watched]


@dataclass(slots=True)
class Call:
    """What somebody asked for."""

    collective: str
    x: Array
    comm: MPI.Comm | None = None
    op: str | MPI.Op | None = None
    algorithm: str = "auto"
    out: Array = None
    root: int = 0

    def run(self) -> Any:
        """The plain form: agree, bind, run. The plan is kept for the next call on the same array."""
        own = channel(self.comm)
        kept = self._kept(own)
        operation = begin((kept and kept.plan.about) or About(self.collective, own.key), 0, 0, 2)
        try:
            if kept is None:
                return self._run_new(own, operation)
            check = kept.check
            check.Start()
            operation[NUMBER] = check.number
            wait(check)
            operation[CAME] = now()
            if not check.equal:
                finish(disagree(check))
            check.end()
            if not check.alike:  # another rank's array is of another kind by now
                return self._run_plan(own, Bound(self, own), check)
            _complete(own, kept.plan)
            return self._changed(kept.arrays[-1].family)
        finally:
            operation[ENDED] = now()

    def steps(self, operation: Operation) -> Generator[Any, None, Any]:
        """The plain form, for somebody who waits in his own way: it yields what it cannot go on without.

        What it does is what `run` does, so one rank may run and another take the steps. A communicator's plain calls
        come one after the other, also these.
        """
        own = channel(self.comm)
        kept = self._kept(own)
        if kept is None:
            bound, check = yield from self._agreed(own, "", operation)
            check.end()
        else:
            operation[ABOUT] = kept.plan.about
            check = kept.check
            check.Start()
            operation[NUMBER] = check.number
            yield check
            operation[CAME] = now()
            if not check.equal:
                yield from disagree(check)
            check.end()
            if check.alike:
                yield from _completing(own, kept.plan)
                return self._changed(kept.arrays[-1].family)
            bound = Bound(self, own)
        key = self._key()
        if key is None or not check.alike or not bound.can_be_kept:
            with (yield from bound.plan(own, check, "")) as plan:
                yield from _completing(own, plan)
                return plan.result()
        plan = yield from bound.plan(own, check, "", borrows=True)
        yield from _completing(own, plan)
        self._keep_or_close(own, plan, bound, key)
        return self._changed(bound.vector.owner)

    def start(self) -> Work:
        """The i form."""
        own = channel(self.comm)
        if self.algorithm == "native":
            # MPI matches its own collectives by their order, so this one must be posted now, not when the rank comes to
            # wait for it: only the agreement on it is waited for.
            bound, check = finish(self._agreed(own, "i"))
            check.end()
            return finish(bound.plan(own, check, "i")).start()
        results: list[Any] = []
        operation = begin(About(f"i{self.collective}", own.key), 0, 0, 2)

        def steps() -> Steps:
            bound, check = yield from self._agreed(own, "i", operation)
            try:
                with (yield from bound.plan(own, check, "i")) as plan:
                    yield from plan.steps()
                    results.append(plan.result())
            finally:
                check.end()

        return Work(steps(), lambda: results[0], operation)

    def plan(self) -> Plan:
        """The plan form: agree and bind."""
        own = channel(self.comm)
        bound, check = finish(self._agreed(own, "plan_"))
        check.end()
        return finish(bound.plan(own, check, "plan_"))

    def _agreed(
        self, own: Channel, form: str, operation: Operation | None = None
    ) -> Generator[Any, None, tuple[Bound, Check]]:
        """The call, checked, once the ranks agree on it and on its form; what any rank must refuse, all raise."""
        bound, refusal = None, None
        try:
            bound = Bound(self, own)
        except (TypeError, ValueError) as error:
            refusal = error
        if bound and operation:
            operation[ABOUT] = bound.about
            bound.about.call = f"{form}{bound.about.call}"
        check = yield from agree(own, f"{form}{bound}", bound.kind if bound else PRIVATE, refusal, operation)
        assert bound is not None  # a refusal has been raised
        return bound, check

    def _run_new(self, own: Channel, operation: Operation) -> Any:
        bound, check = finish(self._agreed(own, "", operation))
        check.end()
        return self._run_plan(own, bound, check)

    def _run_plan(self, own: Channel, bound: Bound, check: Check) -> Any:
        """Bind and run, and keep the plan if it may be of use again."""
        key = self._key()
        if key is None or not check.alike or not bound.can_be_kept:
            with finish(bound.plan(own, check, "")) as plan:
                return _complete(own, plan)
        plan = finish(bound.plan(own, check, "", borrows=True))
        _complete(own, plan)
        self._keep_or_close(own, plan, bound, key)
        return self._changed(bound.vector.owner)

    def _changed(self, family: Family) -> Array:
        """The array with the result, whose library has been told."""
        result = self.x if self.out is None else self.out
        family.mark_changed(result)
        return result

    def _key(self) -> tuple[object, ...] | None:
        """What tells the plans of an array apart; None for a call whose plan is not kept."""
        if (self.op is None or type(self.op) is str) and type(self.algorithm) is str:
            return (self.collective, id(self.x), id(self.out), self.op, self.algorithm, self.root)
        return None

    def _kept(self, own: Channel) -> Kept | None:
        """The plan of an earlier call like this one, if its arrays are as they were then."""
        if not own.kept or (key := self._key()) not in own.kept:
            return None
        kept = own.kept[key]
        try:
            # Where the arrays lie and what they look like is all that the plan depends on.
            same = kept.arrays[0].is_still(self.x) and (self.out is None or kept.arrays[1].is_still(self.out))
        except UnsupportedArrayError:  # they have become what cannot be served
            same = False
        if same and kept.plan.state == "idle":
            return kept
        own.kept.pop(key)
        kept.plan.close()
        return None

    def _keep_or_close(self, own: Channel, plan: Plan, bound: Bound, key: tuple[object, ...]) -> None:
        """Keep the plan for as long as its arrays live, if it takes no great scratch."""
        if plan.scratch_bytes > KEPT_BYTES:
            plan.close()
            return

        def forget(_: object) -> None:
            if (kept := own.kept.get(key)) is not None and kept.plan is plan:
                del own.kept[key]
                plan.close()

        arrays = [Watched(weakref.ref(each.given, forget), each.owner, each.look) for each in bound.arrays]
        own.kept[key] = Kept(plan, Check(own, str(bound), bound.kind), arrays)
        if len(own.kept) > KEPT_PLANS:
            own.kept.pop(next(iter(own.kept))).plan.close()


def _complete(own: Channel, plan: Plan) -> Any:
    """Run a plan of the plain form to its end; what ends it half-way ends the communicator's use."""
    try:
        plan.run()
        return plan.result()
    except BaseException:
        own.interrupted = True
        raise


def _completing(own: Channel, plan: Plan) -> Steps:
    """Take the steps of a plan of the plain form to their end, as `_complete` does."""
    try:
        yield from plan.steps()
    except BaseException:
        own.interrupted = True
        raise


def barrier(comm: MPI.Comm | None) -> None:
    """All ranks have called it: that is what every check finds out."""
    finish(met(channel(comm), ""))


def start_barrier(comm: MPI.Comm | None) -> Work:
    """The i form."""
    own = channel(comm)
    operation = begin(About("ibarrier", own.key), 0, 0, 2)
    return Work(met(own, "i", operation), lambda: None, operation)


class Wanted(NamedTuple):
    """An array to be made in shared memory."""

    nbytes: int
    what: str
    """What all ranks must ask for alike."""
    make: Callable[[Memory, int], Array]
    """From the memory and the place in it."""
    private: Callable[[], Array]
    """Where there is no shared memory."""


def allocate_array(wanted: Callable[[], Wanted], comm: MPI.Comm | None) -> Array:
    """An array in new node-shared memory, or a private one where that cannot be had; all ranks ask for the same."""
    own = channel(comm)
    array, refusal = None, None
    try:
        array = wanted()
    except (TypeError, ValueError) as error:
        refusal = error
    check = finish(agree(own, f"empty of {array and array.what}", PRIVATE, refusal))
    check.end()
    assert array is not None  # a refusal has been raised
    if own.no_memory:
        return array.private()
    memory = finish(allocate(own.wire, own.node, array.nbytes))
    if isinstance(memory, str):
        own.refuse_memory(memory)
        return array.private()
    register(memory, own.members)
    return array.make(memory, memory.place(own.rank))


def met(own: Channel, form: str, operation: Operation | None = None) -> Steps:
    """The steps until all ranks have come."""
    check = yield from agree(own, f"{form}barrier", operation=operation)
    check.end()
    if not settings.CHECK and own.size > 1:
        yield own.wire.Ibarrier()


class Bound:
    """A call whose arguments are in order: the vector it works on, what happens before and after."""

    def __init__(self, call: Call, own: Channel) -> None:
        self.collective, self.root = call.collective, call.root
        if not 0 <= call.root < own.size:
            raise ValueError(f"root {call.root} is no rank of the communicator, which has {own.size}")
        at_root = own.rank == call.root
        self.op = None if call.op is None else op_name(call.op)

        # The root alone gets a reduce's result, and only its arrays are written to.
        keeps_x = call.out is not None or (call.collective == "reduce" and not at_root)
        x = Vector(call.x, writable=not keeps_x)
        check_op(self.op, x.dtype)
        out = None if call.out is None or (call.collective == "reduce" and not at_root) else Vector(call.out)
        self.before: list[Action] = [x.pack]
        self.after: list[Action] = []
        self.shape: Sequence[int] = x.look.shape

        if out is None and not keeps_x:
            self.vector, self.after, result = x, [x.unpack], call.x
            if call.collective == "reduce_scatter":
                whole, mine = x.array, slice(*_share(x.size, own))
                self.result: Callable[[], Any] = lambda: whole.reshape(-1)[mine]
            else:
                self.result = lambda: result
        elif out is None:
            self.vector = x.empty(x.size)
            self.before.append(lambda: self.vector.put(Span(0, x.size), x.flat))
            self.result = lambda: None
        else:
            self._bind_out(x, out, call, own)

        self.algorithm = _algorithm(call, self.vector, own)
        """Its own name, or "auto"."""
        self.in_place = call.out is None
        self.kind, self._place = _kind(self.vector, own, self.in_place)
        self.about = About(str(self), own.key, self.vector.look.nbytes, self.algorithm)
        self.arrays = [x] if out is None else [x, out]
        # A reduce-scatter's result is not x itself; a copy is nobody's to be watched.
        usual = (
            call.collective in ("allreduce", "allgather", "broadcast")
            if out is None
            else call.collective == "allreduce"
        )
        self.can_be_kept = (
            usual and self.vector is self.arrays[-1] and all(each.can_be_borrowed for each in self.arrays)
        )

    def _borrowed(self) -> Job:
        """The same job on the bare memory of the arrays."""
        *source, vector = [each.borrowed() for each in self.arrays]
        return Job(vector, self.op, [vector.copying(vector.flat, each.flat) for each in source])

    def _bind_out(self, x: Vector, out: Vector, call: Call, own: Channel) -> None:
        """x is left as it is, the result goes to out."""
        if out.dtype != x.dtype or _place(out) is not _place(x):
            raise UnsupportedArrayError(
                f"out is of type {out.dtype} and x of type {x.dtype}: they must be alike, and both in host memory or "
                "both one library's device arrays"
            )
        result, whole = call.out, Span(0, x.size)
        self.result = lambda: result
        if call.collective == "reduce_scatter":
            mine = _share(x.size, own)
            _check_length(out, mine.size, "this rank's share of x")
            self.vector = vector = x.empty(x.size)
            self.before.append(lambda: vector.put(whole, x.flat))
            self.after = [lambda: out.put(Span(0, mine.size), vector[mine]), out.unpack]
        elif call.collective == "allgather":
            mine = _share(out.size, own)
            _check_length(x, mine.size, "this rank's share of out", "x")
            self.vector, self.shape = out, out.look.shape
            self.before.append(lambda: out.put(mine, x.flat))
            self.after = [out.unpack]
        else:
            if out.look.shape != x.look.shape:
                raise ValueError(f"out has the shape {out.look.shape}, x {x.look.shape}: they must be equal")
            self.vector, self.after = out, [out.unpack]
            if same_memory(x, out):
                self.before = [out.pack]
                return
            if call.collective != "broadcast" or own.rank == call.root:
                self.before.append(lambda: out.put(whole, x.flat))
        if shares_memory(x, out):
            raise ValueError("out overlaps x: pass an array that does not, or leave out away to work in place")

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "()"
        op = f"{self.op} " if self.op else ""
        root = f", root {self.root}" if self.collective in ("reduce", "broadcast") else ""
        return f"{self.collective} {op}of {self.vector.dtype} {shape} by {self.algorithm}{root}"

    def plan(self, own: Channel, check: Check, form: str, *, borrows: bool = False) -> Generator[Any, None, Plan]:
        """Bind the program; the ranks have agreed. What it borrows it does not keep alive."""
        plan = yield from self._planned(own, check, form, borrows)
        plan.about, plan.number = self.about, check.number
        return plan

    def _planned(self, own: Channel, check: Check, form: str, borrows: bool) -> Generator[Any, None, Plan]:
        job = Job(self.vector, self.op, self.before, self.after, self.result)
        if borrows:
            job = self._borrowed()
        kind = self._served_as(own, check, form)
        name = self.algorithm
        if name == "auto":
            name = "native" if form == "plan_" and self._is_tiny(own) else self._chosen(own, kind)
        self.about.algorithm = name
        if name == "native":
            return Native(own, job, often=form == "plan_")
        tag = PLAIN if form == "" else (CALLS if form == "i" else PLANS) + check.number % TAGS
        if self.collective == "allreduce" and own.size > 1 and name.startswith(("shared", "by_node")):
            within = yield from self._within(own, check, kind, form)
            if within is not None:
                program = NOTHING if within.alone else _lane_program(name, own.nodes, own.rank, self.vector.size)
                return Plan(own, job, program, tag=tag, within=within)
        if name == "shared":
            if form == "i" and not own.no_memory and own.size > 1:
                raise ValueError(
                    "shared can be started on the arrays of hpcdl.empty only, and under HPCDL_CHECK=1; for others take "
                    "allreduce, plan_allreduce or another algorithm"
                )
            name = self.about.algorithm = self._chosen(own, "mixed")
        algorithm = collectives.find(name, own.size, self.collective, own.nodes)
        program = _program(self.collective, algorithm, own.size, own.rank, self.vector.size, self.root)
        return Plan(own, job, program, tag=tag, raw=algorithm.raw)

    def _served_as(self, own: Channel, check: Check, form: str) -> str:
        """The kind of the array, as far as it matters: "mixed" is served by messages only."""
        if not check.alike or own.no_memory:
            return "mixed"
        if self.kind == DEVICE:
            return "device"
        kind = "shared" if self._place else "private"
        # What is started may overlap with others, and ends when it likes: it cannot use the staging area of the plain
        # calls, and to make one takes a collective of its own.
        meets = form != "i" or (kind == "shared" and own.board is not None and settings.CHECK)
        return kind if meets else "mixed"

    def _is_tiny(self, own: Channel) -> bool:
        """Is it best left to MPI, whose persistent all-reduce needs no Python in the middle?

        MPI does not promise equal bits on all ranks; but two ranks can only add a + b or b + a, which is the same.
        """
        vector = self.vector
        plain = vector.device is None and vector.dtype not in HALVES
        adds = self.collective == "allreduce" and self.op in ("sum", "mean")
        return own.size == 2 and plain and adds and vector.look.nbytes <= TINY_BYTES

    def _chosen(self, own: Channel, kind: str) -> str:
        nbytes = self.vector.look.nbytes
        return choose_for(self.collective, nbytes, shape_of(own), self.vector.dtype, kind, own.table)

    def _within(self, own: Channel, check: Check, kind: str, form: str) -> Generator[Any, None, Within | None]:
        """The node's part of the collective, in shared memory; None where that cannot be had, behind a warning."""
        if kind not in ("shared", "private"):
            return None
        # Who has asked has come, and with an array that is ready, unless x is still to be copied to out.
        entered = settings.CHECK and form != "plan_" and self.in_place
        if form == "i":
            assert own.board is not None
            return Within(own, OneGate(own.board, check.number), place=self._place, entered=entered)
        nbytes = self.vector.look.nbytes
        # Through a staging area a short array needs one gate, in place two, unless the check was one of them.
        short = nbytes <= WHOLE_BYTES and not entered and len(own.nodes) == 1
        if self._place and not short:
            gate = (own.gate if form == "" else None) or (yield from new_gate(own))
            if isinstance(gate, Gate):
                own.gate = gate if form == "" else own.gate
                return Within(own, gate, place=self._place, entered=entered)
            own.refuse_memory(gate)
        else:
            # A plan has an area of its own: two plans may be in flight. The plain calls have one that grows with need.
            area = own.staging if form == "" else None
            if area is None or area.buffer_bytes < buffer_for(nbytes):
                if form == "":
                    own.forget_plans()  # which meet in the old one
                made = yield from new_staging(own, nbytes)
                if isinstance(made, str):
                    own.refuse_memory(made)
                    return None
                area = made
            own.staging = area if form == "" else own.staging
            return Within(own, area.gate, area=area)
        return None


NOTHING = Program([], Span(0, 0), [])


def shape_of(own: Channel) -> Shape:
    """The communicator's, as the choice of an algorithm needs it."""
    return Shape(tuple(map(len, own.nodes)), not own.no_memory)


@lru_cache(maxsize=256)
def _program(collective: str, algorithm: Algorithm, size: int, rank: int, n: int, root: int) -> Program:
    return collectives.program(collective, algorithm, range(size), rank, Span(0, n), root)


@lru_cache(maxsize=256)
def _lane_program(name: str, nodes: Nodes, rank: int, n: int) -> Program:
    """Between the nodes: what the owners of one lane of the vector do, one on each node."""
    mine = next(node for node in nodes if rank in node)
    lanes = collectives.cut(Span(0, n), min(map(len, nodes)))
    member = mine.index(rank)
    if member >= len(lanes):
        return NOTHING
    between = collectives.find(resolve(name)[1], len(nodes))
    owners = [node[member] for node in nodes]
    return collectives.program("allreduce", between, owners, nodes.index(mine), lanes[member])


def _kind(vector: Vector, own: Channel, in_place: bool) -> tuple[int, tuple[Memory, int] | None]:
    """What the ranks must have alike, as a number; and where in node-shared memory the vector lies, if it does.

    In such memory it counts whether there is an x to be copied in first: it decides where the ranks meet.
    """
    if vector.device is not None:
        return DEVICE, None
    memory = None if vector.packed else find(vector.look.address, vector.look.nbytes)
    if memory is None or memory.members != own.members or memory.ranks != own.node:
        return PRIVATE, None
    offset = vector.look.address - memory.address - memory.place(own.rank)
    if not 0 <= offset < memory.part:  # another rank's part, which a view made by hand can reach
        return PRIVATE, None
    return KINDS + crc32(f"{memory.token} {offset} {in_place}".encode()) % ((1 << 31) - KINDS), (memory, offset)


def _share(n: int, own: Channel) -> Span:
    return collectives.cut(Span(0, n), own.size)[own.rank]


def _place(vector: Vector) -> Family | None:
    """Where a vector lies: in host memory, or on a device as some library's array."""
    return vector.family if vector.device else None


def op_name(op: str | MPI.Op) -> str:
    """Our name of a reduction. ValueError: it has none."""
    if isinstance(op, MPI.Op):
        known = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
        known |= {"band": MPI.BAND, "bor": MPI.BOR, "bxor": MPI.BXOR}
        name = next((name for name, ours in known.items() if op == ours), None)
        if name is None:
            theirs = ", ".join(f"MPI.{name.upper()}" for name in known)
            raise ValueError(f"op is one of {theirs}, or {', '.join(OPS)}; not {op!r}")
        return name
    if op not in OPS:
        raise ValueError(f"op is one of {', '.join(OPS)}, not {op!r}")
    return op


def check_op(op: str | None, dtype: str) -> None:
    """TypeError: numbers of this type cannot be reduced so."""
    if op == "mean" and dtype in (*INTEGERS, "bool"):
        raise UnsupportedArrayError(f"the mean of {dtype} would have to be rounded: convert it, or sum and divide")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise UnsupportedArrayError(f"complex numbers have no order, so no {op} of {dtype}")
    if op in BITWISE and dtype not in (*INTEGERS, "bool"):
        raise UnsupportedArrayError(f"{op} combines the bits of integers and of bool, not of {dtype}")


def _check_length(vector: Vector, length: int, what: str, name: str = "out") -> None:
    if vector.size != length:
        raise ValueError(f"{name} has {vector.size} elements; {what} has {length}")


def _algorithm(call: Call, vector: Vector, own: Channel) -> str:
    """The algorithm's own name: aliases resolved, and sure to serve the call."""
    name = call.algorithm
    if name == "auto":
        return "auto"
    if name not in ("native", "shared"):
        return collectives.find(name, own.size, call.collective, own.nodes).name
    if call.collective != "allreduce":
        others = ", ".join(collectives.names(own.size, call.collective))
        raise ValueError(f"{name} serves allreduce only; for {call.collective} take one of {others}")
    if name == "shared":
        if vector.device is not None:
            raise UnsupportedArrayError(
                "shared is for arrays in host memory; every other algorithm takes device arrays"
            )
        if len(own.nodes) > 1:
            sizes = "+".join(str(len(node)) for node in own.nodes)
            raise ValueError(f"shared is for the ranks of one node, and here are nodes of {sizes}: take by_node")
        return name
    if vector.dtype in HALVES:
        raise UnsupportedArrayError(f"MPI has no {vector.dtype}, so native cannot add it; every other algorithm can")
    if vector.device is not None and not mpi_reads_devices():
        raise UnsupportedArrayError("this MPI is not CUDA-aware, so native cannot take a device array")
    return name
