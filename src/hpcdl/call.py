"""From a call to a plan: check the arguments, ask whether the ranks agree, bind.

Floor 3. Importing this starts MPI, so the public functions do it when the first of them is called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mpi4py import MPI

from hpcdl import collectives
from hpcdl.buffers import (
    FAMILIES,
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
from hpcdl.channel import CALLS, PLAIN, PLANS, TAGS, Channel, channel
from hpcdl.check import agree
from hpcdl.choice import choose_for
from hpcdl.collectives import Program, Span
from hpcdl.device import mpi_reads_devices
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Job, Kept, Native, Plan, Steps, Work, finish

OPS = ("sum", "mean", "min", "max", "prod")

# Binding costs some 100 us, which for a short array is more than all the rest. A kept plan keeps its array alive: 2 MiB
# a communicator at most.
KEPT_PLANS, KEPT_BYTES = 32, 64 << 10


@dataclass(frozen=True)
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
        """The plain form: agree, bind, run, free. The plan of a small array is kept for the next call on it."""
        own = channel(self.comm)
        plan = self._kept(own)
        keep = plan is not None
        if plan is None:
            bound, _ = finish(self._agreed(own, ""))
            plan = bound.plan(own, PLAIN)
            keep = self._keep(own, plan, str(bound))
        try:
            return plan()
        except BaseException:
            own.interrupted = True
            raise
        finally:
            if not keep:
                plan.close()

    def start(self) -> Work:
        """The i form."""
        own = channel(self.comm)
        if self.algorithm == "native":
            # MPI matches its own collectives by their order, so this one must be posted now, not when the rank comes to
            # wait for it: only the agreement on it is waited for.
            bound, _ = finish(self._agreed(own, "i"))
            return bound.plan(own, CALLS).start()
        results: list[Any] = []

        def steps() -> Steps:
            bound, number = yield from self._agreed(own, "i")
            with bound.plan(own, CALLS + number % TAGS) as plan:
                yield from plan.steps()
                results.append(plan.result())

        return Work(steps(), lambda: results[0])

    def plan(self) -> Plan:
        """The plan form: agree and bind."""
        own = channel(self.comm)
        bound, number = finish(self._agreed(own, "plan_"))
        return bound.plan(own, PLANS + number % TAGS)

    def _agreed(self, own: Channel, form: str) -> Generator[MPI.Request, None, tuple[Bound, int]]:
        """The call, checked, once the ranks agree on it and on its form; what any rank must refuse, all raise."""
        bound, refusal = None, None
        try:
            bound = Bound(self, own)
        except (TypeError, ValueError) as error:
            refusal = error
        number = yield from agree(own, f"{form}{bound}", refusal)
        assert bound is not None  # a refusal has been raised
        return bound, number

    def _key(self) -> tuple[object, ...] | None:
        """What tells the plans of an array apart; None for a call whose plan is not kept."""
        plain = self.out is None and isinstance(self.op, (str, type(None))) and isinstance(self.algorithm, str)
        return (self.collective, id(self.x), self.op, self.algorithm, self.root) if plain else None

    def _kept(self, own: Channel) -> Plan | None:
        """The plan of an earlier call like this one, if its array is as it was then; agreed on anew."""
        kept = own.kept.get(self._key())
        if kept is None or kept.plan.state != "idle" or kept.look != _look(kept.family, self.x):
            return None
        finish(agree(own, kept.name))
        return kept.plan

    def _keep(self, own: Channel, plan: Plan, name: str) -> bool:
        """Keep the plan, if that keeps little memory alive."""
        key, known = self._key(), next((known for known in FAMILIES if known.owns(self.x)), None)
        if key is None or known is None or known.holds(self.x) > KEPT_BYTES:
            return False
        own.kept[key] = Kept(plan, name, known, _look(known, self.x), self.x)
        if len(own.kept) > KEPT_PLANS:
            own.kept.pop(next(iter(own.kept))).plan.close()
        return True


def _look(known: Family, x: Array) -> Look | None:
    """What x is; None for what has become something that cannot be served since it was kept."""
    try:
        return known.look(x)
    except UnsupportedArrayError:
        return None


class Bound:
    """A call whose arguments are in order: the vector it works on, what happens before and after."""

    def __init__(self, call: Call, own: Channel) -> None:
        self.collective, self.root = call.collective, call.root
        if not 0 <= call.root < own.size:
            raise ValueError(f"root {call.root} is no rank of the communicator, which has {own.size}")
        at_root = own.rank == call.root
        self.op = None if call.op is None else _op_name(call.op)

        # The root alone gets a reduce's result, and only its arrays are written to.
        keeps_x = call.out is not None or (call.collective == "reduce" and not at_root)
        x = Vector(call.x, writable=not keeps_x)
        _check_op(self.op, x.dtype)
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

        self.algorithm = _algorithm(call, self.vector, self.op, own.size)

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

    def plan(self, own: Channel, tag: int) -> Plan:
        """Bind the program; the ranks have agreed."""
        job = Job(self.vector, self.op, self.before, self.after, self.result)
        if self.algorithm == "native":
            return Native(own, job)
        program = _program(self.collective, self.algorithm, own.size, own.rank, self.vector.size, self.root)
        return Plan(own, job, program, tag=tag, raw=collectives.find(self.algorithm).raw)


@lru_cache(maxsize=256)
def _program(collective: str, algorithm: str, size: int, rank: int, n: int, root: int) -> Program:
    return collectives.program(collective, collectives.find(algorithm), range(size), rank, Span(0, n), root)


def _share(n: int, own: Channel) -> Span:
    return collectives.cut(Span(0, n), own.size)[own.rank]


def _place(vector: Vector) -> Family | None:
    """Where a vector lies: in host memory, or on a device as some library's array."""
    return vector.family if vector.device else None


def _op_name(op: str | MPI.Op) -> str:
    if isinstance(op, MPI.Op):
        known = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
        name = next((name for name, ours in known.items() if op == ours), None)
        if name is None:
            raise ValueError(f"op is one of MPI.SUM, MPI.MIN, MPI.MAX and MPI.PROD, or {', '.join(OPS)}; not {op!r}")
        return name
    if op not in OPS:
        raise ValueError(f"op is one of {', '.join(OPS)}, not {op!r}")
    return op


def _check_op(op: str | None, dtype: str) -> None:
    if op == "mean" and dtype in (*INTEGERS, "bool"):
        raise UnsupportedArrayError(f"the mean of {dtype} would have to be rounded: convert it, or sum and divide")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise UnsupportedArrayError(f"complex numbers have no order, so no {op} of {dtype}")


def _check_length(vector: Vector, length: int, what: str, name: str = "out") -> None:
    if vector.size != length:
        raise ValueError(f"{name} has {vector.size} elements; {what} has {length}")


def _algorithm(call: Call, vector: Vector, op: str | None, size: int) -> str:
    """The algorithm's own name: `auto` and aliases resolved, and sure to serve the call."""
    if call.algorithm == "auto":
        return choose_for(call.collective, vector.size * vector.itemsize, size)
    if call.algorithm != "native":
        return collectives.find(call.algorithm, size, call.collective).name
    if call.collective != "allreduce":
        others = ", ".join(collectives.names(size, call.collective))
        raise ValueError(f"native is MPI's allreduce; for {call.collective} take one of {others}")
    if vector.dtype in HALVES:
        raise UnsupportedArrayError(f"MPI has no {vector.dtype}, so native cannot add it; every other algorithm can")
    if vector.device is not None and not mpi_reads_devices():
        raise UnsupportedArrayError("this MPI is not CUDA-aware, so native cannot take a device array")
    return "native"
