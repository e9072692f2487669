"""The public collectives. Each comes in three forms: call it, start it (i...), or plan it once for a loop (plan_...).

Common to all of them:

- `x` is a NumPy array, a torch tensor, a CuPy array, or anything that shows its memory through the buffer protocol or
  DLPack; of type float16, bfloat16, float32, float64, (u)int8 to (u)int64, bool, complex64 or complex128; of any
  shape and layout, the same shape and type on all ranks.
- `comm` is an mpi4py intracommunicator, MPI.COMM_WORLD if not given.
- They work in place, unless an `out` array is given: then x is left as it is.
- `algorithm` is one of `hpcdl.algorithms()`.
- All ranks call the same collectives in the same order. Those that disagree get the same `MismatchError`; where an
  array cannot be served all ranks get the same `UnsupportedArrayError` (also a TypeError), for another bad argument the
  same ValueError; each before any data has moved.
- The bits of the result are the same on all ranks, and from run to run for the same ranks, sizes and algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from hpcdl import collectives
from hpcdl.buffers import Array, lengths_of
from hpcdl.collectives import Span
from hpcdl.record import traffic

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import NDArray

    from hpcdl.call import Call
    from hpcdl.choice import Explanation
    from hpcdl.execute import Plan, Work


def allreduce(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Array:
    """Combine the x of all ranks, element by element; every rank gets the result, in x or out, which is returned.

    `op` is "sum", "mean" (not of integers or bool), "min", "max" (not of complex numbers; NaN spreads), "prod", "band",
    "bor", "bxor" (bit by bit, of integers and bool), or the MPI.Op of one. Of bool, sum is or, prod is and. Integers
    wrap as NumPy's do. float16 and bfloat16 are summed and multiplied in float32 and rounded once.
    """
    return _call()("allreduce", x, comm, op, algorithm, out).run()


def iallreduce(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Work:
    """Start an `allreduce`. The arrays belong to the library until `wait()`, `result()` or `is_completed()` says so."""
    return _call()("allreduce", x, comm, op, algorithm, out).start()


def plan_allreduce(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Plan:
    """Bind an `allreduce` to x, to be called often: the ranks' agreement is checked once, here."""
    return _call()("allreduce", x, comm, op, algorithm, out).plan()


def reduce_scatter(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Array:
    """Combine the x of all ranks; each gets its share, `share(x.size, comm)` of x in C order, and returns it.

    In place the result is in that share of x (returned flat; a view where x is in C order), and the rest of x holds
    partial results. With `out`, an array of the share's size, x is left as it is.
    """
    return _call()("reduce_scatter", x, comm, op, algorithm, out).run()


def ireduce_scatter(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Work:
    """Start a `reduce_scatter`."""
    return _call()("reduce_scatter", x, comm, op, algorithm, out).start()


def plan_reduce_scatter(
    x: Array, comm: MPI.Comm | None = None, *, op: str | MPI.Op = "sum", algorithm: str = "auto", out: Array = None
) -> Plan:
    """Bind a `reduce_scatter` to x, to be called often."""
    return _call()("reduce_scatter", x, comm, op, algorithm, out).plan()


def allgather(x: Array, comm: MPI.Comm | None = None, *, algorithm: str = "auto", out: Array = None) -> Array:
    """Collect every rank's share on all ranks: what `reduce_scatter` has left, whole again.

    In place x is the whole array, of which this rank has filled in `share(x.size, comm)`. With `out`, x is this rank's
    share alone and out the whole.
    """
    return _call()("allgather", x, comm, None, algorithm, out).run()


def iallgather(x: Array, comm: MPI.Comm | None = None, *, algorithm: str = "auto", out: Array = None) -> Work:
    """Start an `allgather`."""
    return _call()("allgather", x, comm, None, algorithm, out).start()


def plan_allgather(x: Array, comm: MPI.Comm | None = None, *, algorithm: str = "auto", out: Array = None) -> Plan:
    """Bind an `allgather` to x, to be called often."""
    return _call()("allgather", x, comm, None, algorithm, out).plan()


def reduce(
    x: Array,
    comm: MPI.Comm | None = None,
    *,
    op: str | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    out: Array = None,
) -> Array:
    """Combine the x of all ranks on the root, which returns the result, in x or out; the others return None.

    The x of the other ranks is left as it is.
    """
    return _call()("reduce", x, comm, op, algorithm, out, root).run()


def ireduce(
    x: Array,
    comm: MPI.Comm | None = None,
    *,
    op: str | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    out: Array = None,
) -> Work:
    """Start a `reduce`."""
    return _call()("reduce", x, comm, op, algorithm, out, root).start()


def plan_reduce(
    x: Array,
    comm: MPI.Comm | None = None,
    *,
    op: str | MPI.Op = "sum",
    root: int = 0,
    algorithm: str = "auto",
    out: Array = None,
) -> Plan:
    """Bind a `reduce` to x, to be called often."""
    return _call()("reduce", x, comm, op, algorithm, out, root).plan()


def broadcast(
    x: Array, comm: MPI.Comm | None = None, *, root: int = 0, algorithm: str = "auto", out: Array = None
) -> Array:
    """Give every rank the root's x, in x or out, which is returned."""
    return _call()("broadcast", x, comm, None, algorithm, out, root).run()


def ibroadcast(
    x: Array, comm: MPI.Comm | None = None, *, root: int = 0, algorithm: str = "auto", out: Array = None
) -> Work:
    """Start a `broadcast`."""
    return _call()("broadcast", x, comm, None, algorithm, out, root).start()


def plan_broadcast(
    x: Array, comm: MPI.Comm | None = None, *, root: int = 0, algorithm: str = "auto", out: Array = None
) -> Plan:
    """Bind a `broadcast` to x, to be called often."""
    return _call()("broadcast", x, comm, None, algorithm, out, root).plan()


def barrier(comm: MPI.Comm | None = None) -> None:
    """Wait until all ranks have called it."""
    from hpcdl import call

    call.barrier(comm)


def ibarrier(comm: MPI.Comm | None = None) -> Work:
    """Start a `barrier`: its work is complete when all ranks have started theirs."""
    from hpcdl import call

    return call.start_barrier(comm)


def plan_barrier(comm: MPI.Comm | None = None) -> Plan:
    """Bind a `barrier`, to be called often."""
    return _call()("allreduce", bytearray(1), comm, "max", "doubling").plan()


def empty(shape: int | Sequence[int], dtype: str | type = "float32", comm: MPI.Comm | None = None) -> NDArray[Any]:
    """A NumPy array in memory that all ranks of the node map: an all-reduce on it copies nothing. A collective call.

    All ranks ask for the same shape and type. The array is this rank's own, to be used like any other, for as long as
    somebody holds it or a view of it, also after the communicator was freed. During a collective on it the other ranks
    of the node read and write it. It begins on a page, and holds zeros. Where /dev/shm has too little room for it,
    rank 0 warns once and all ranks get arrays of their own, which are reduced through messages.
    """
    import numpy as np

    from hpcdl.call import Wanted, allocate_array

    def wanted() -> Wanted:
        kind = np.dtype(dtype)
        name, lengths = lengths_of(shape, kind.name if kind.isnative else kind.str)
        size = math.prod(lengths)
        return Wanted(
            size * kind.itemsize,
            f"{name} {lengths}",
            lambda memory, place: np.frombuffer(memory, kind, size, place).reshape(lengths),
            lambda: np.zeros(lengths, kind),
        )

    return allocate_array(wanted, comm)  # type: ignore[no-any-return]


def zeros(shape: int | Sequence[int], dtype: str | type = "float32", comm: MPI.Comm | None = None) -> NDArray[Any]:
    """An `empty` array, which holds zeros from the start."""
    return empty(shape, dtype, comm)


def rank(comm: MPI.Comm | None = None) -> int:
    """This process's number in the communicator, from 0."""
    return _comm(comm).rank


def size(comm: MPI.Comm | None = None) -> int:
    """How many ranks the communicator has."""
    return _comm(comm).size


def local_rank(comm: MPI.Comm | None = None) -> int:
    """This rank's number among those of its node, from 0: which GPU is its own.

    The first call on a communicator is a collective one.
    """
    from hpcdl.channel import channel

    own = channel(comm)
    return own.node.index(own.rank)


def local_size(comm: MPI.Comm | None = None) -> int:
    """How many ranks of the communicator this node has. The first call on a communicator is a collective one."""
    from hpcdl.channel import channel

    return len(channel(comm).node)


def sent_bytes() -> int:
    """How many bytes of arrays this process has sent to other ranks since it began, by all collectives together.

    They are counted where they are sent. What ranks of a node read in each other's memory is not sent; what "native"
    sends MPI does not tell, nor what a plain sum of 1 KiB or less sends on 2 ranks, which MPI adds. Not collective.
    """
    return traffic.sent_bytes


def share(n: int, comm: MPI.Comm | None = None) -> slice:
    """This rank's share of n elements: the first n % size ranks have one more than the others."""
    from hpcdl.channel import channel

    own = channel(comm)
    return slice(*collectives.cut(Span(0, n), own.size)[own.rank])


def algorithms() -> tuple[str, ...]:
    """The names that `algorithm=` takes.

    "auto" chooses; "native" is MPI's own all-reduce, for comparison; "shared" sums in memory that the ranks of one node
    share; "by_node:X" runs X between nodes, with X any of the names before by_node.
    """
    return (*collectives.ALGORITHMS, "shared", "native", "auto")


def choose(
    nbytes: int,
    comm: MPI.Comm | None = None,
    *,
    collective: str = "allreduce",
    dtype: str = "float32",
    kind: str = "private",
) -> str:
    """The algorithm that `auto` takes for so many bytes in arrays of a kind: "private", "shared" or "device".

    The first call on a communicator is a collective one.
    """
    from hpcdl.call import channel, shape_of
    from hpcdl.choice import choose_for

    own = channel(comm)
    return choose_for(collective, nbytes, shape_of(own), dtype, kind, own.table)


def explain(
    nbytes: int,
    comm: MPI.Comm | None = None,
    *,
    collective: str = "allreduce",
    dtype: str = "float32",
    kind: str = "private",
) -> Explanation:
    """What `auto` takes and why, with every candidate's predicted and, if it was tuned, measured time. Print it.

    The first call on a communicator is a collective one.
    """
    from hpcdl.call import channel, shape_of
    from hpcdl.choice import explained

    own = channel(comm)
    return explained(collective, nbytes, shape_of(own), dtype, kind, own.table)


def _comm(comm: MPI.Comm | None) -> MPI.Comm:
    from mpi4py import MPI

    return MPI.COMM_WORLD if comm is None else comm


@cache
def _call() -> type[Call]:
    # Importing mpi4py.MPI starts MPI. It is put off until here, the first collective: a data loader's worker process
    # that imports this module must not start it.
    from hpcdl.call import Call

    return Call
