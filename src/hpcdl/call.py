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
from hpcdl.buffers import HALVES, INTEGERS, Action, Array, Family, Vector, same_memory, shares_memory
from hpcdl.channel import CALLS, PLANS, TAGS, Channel, channel
from hpcdl.check import agree
from hpcdl.choice import choose_for
from hpcdl.collectives import Program, Span
from hpcdl.device import mpi_reads_devices
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Job, Native, Plan, Steps, Work, finish

OPS = ("sum", "mean", "min", "max", "prod")


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
        """The plain form: agree, bind, run, free."""
        steps, result = self._once()
        finish(steps)
        return result()

    def start(self) -> Work:
        """The i form."""
        if self.algorithm == "native":
            # MPI matches its own collectives by their order, so this one must be posted now, not when the rank comes to
            # wait for it: only the agreement on it is waited for.
            return self.plan().start()
        return Work(*self._once())

    def plan(self) -> Plan:
        """The plan form: agree and bind."""
        own = channel(self.comm)
        made: list[Plan] = []

        def make() -> Steps:
            made.append((yield from self._agreed(own, PLANS)))

        finish(make())
        return made[0]

    def _once(self) -> tuple[Steps, Callable[[], Any]]:
        own = channel(self.comm)
        results: list[Any] = []

        def steps() -> Steps:
            with (yield from self._agreed(own, CALLS)) as plan:
                yield from plan.steps()
                results.append(plan.result())

        return steps(), lambda: results[0]

    def _agreed(self, own: Channel, tags: int) -> Generator[MPI.Request, None, Plan]:
        """The plan, once the ranks agree on the call; what any rank must refuse, all raise."""
        bound, refusal = None, None
        try:
            bound = Bound(self, own)
        except (TypeError, ValueError) as error:
            refusal = error
        number = yield from agree(own, str(bound), refusal)
        assert bound is not None  # a refusal has been raised
        return bound.plan(own, tags + number % TAGS)


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
