"""The cases of hpcdl selftest: what is called, on which arrays, and what must come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np

import hpcdl
from hpcdl import collectives, settings
from hpcdl.buffers import HALVES, INTEGERS, TYPES
from hpcdl.cli.bench_measure import UFUNCS, NumPyArray
from hpcdl.collectives import Span
from hpcdl.collectives.catalogue import FLAT
from hpcdl.device import mpi_reads_devices
from hpcdl.errors import HpcdlError, UnsupportedArrayError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.channel import Channel

OPS = ("sum", "mean", "min", "max", "prod")
FORMS = ("plain", "i", "plan")
OTHERS = ("reduce_scatter", "allgather", "broadcast", "reduce")

# Where the elements lie, or what they are: of hpcdl.empty, the result in an array of its own, numbers of all sizes.
NUMPY = ("contiguous", "strided", "fortran", "reversed", "empty", "out", "random")
TORCH = ("torch", "torch_fortran", "torch_empty")
DEVICES = ("cuda", "cupy")
LAYOUTS = (*NUMPY, *TORCH, *DEVICES)
SHARED = ("empty", "torch_empty")

LONG_BYTES = 1 << 20
GUARD, EDGE = 77, 3
"""What stands around an array in its memory, so many elements of it on each side."""

# Contents repeat with this period: a prime, so that no two ranks' shares and no two segments look alike.
PERIOD = 1021

LATE_S = 0.05
"""How late one rank comes to a barrier."""


class Case(NamedTuple):
    """One call."""

    collective: str
    algorithm: str = ""
    dtype: str = ""
    op: str = ""
    layout: str = ""
    length: int = 0
    form: str = "plain"

    def words(self) -> str:
        """What names it on the command line."""
        return ",".join(str(word) for word in self if word != "") if self.algorithm else f"barrier,{self.form}"

    def __str__(self) -> str:
        form = {"plain": "", "i": "i", "plan": "plan_"}[self.form]
        if not self.algorithm:
            return f"{form}{self.collective}"
        op = f"{self.op} " if self.op else ""
        return f"{form}{self.collective} {op}of {self.length} {self.dtype}, {self.layout}, by {self.algorithm}"


class Plain(NamedTuple):
    """A case that leaves the length and the form open."""

    collective: str
    algorithm: str
    dtype: str
    op: str
    layout: str


class Here(NamedTuple):
    """What the cases depend on, the same on all ranks."""

    ranks: int
    nodes: int
    layouts: Sequence[str]
    dtypes: Sequence[str]
    torch_dtypes: Sequence[str]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """All there are; on several nodes also what else may run between them."""
        flat = [name for name in FLAT if name != "ring"] if self.nodes > 1 else []
        return (*hpcdl.algorithms(), *(f"by_node:{name}" for name in flat))


def lengths(ranks: int, dtype: str) -> list[int]:
    """None, one, fewer than ranks, odd ones, and one above 1 MiB."""
    long = LONG_BYTES // (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize) + 7
    return sorted({0, 1, ranks - 1, ranks, ranks + 1, 17 * ranks + 3, long})


class Finding(NamedTuple):
    """What a rank has found in a case."""

    refused: bool = False
    bits: int = 0
    """A check sum of what all ranks must have alike."""
    problem: str = ""
    place: int | None = None
    """The first wrong element, what it is, and what it should be."""
    got: str = ""
    expected: str = ""
    broken: bool = False
    """Was the collective left half-way, so that the communicator is of no more use?"""


# ---- which cases there are -------------------------------------------------------------------------------------------


def cases(here: Here, words: Sequence[str]) -> list[Case]:
    """All that hold these words; a number is a length. So ordered that every beginning has a bit of everything."""
    length = next((int(word) for word in words if word.isdecimal()), None)
    form = next((word for word in words if word in FORMS), None)
    asked = {word for word in words if not word.isdecimal() and word not in FORMS}
    found = []
    for plain in dict.fromkeys(_in_turns(here, every=bool(words))):
        if asked <= set(plain):
            # Neither follows the order, so that a case is the same one whatever else is asked for.
            *short, long = lengths(here.ranks, plain.dtype)
            several, seed = [*short, *short, long], crc32(" ".join(plain).encode())  # a long one takes long
            one = several[seed % len(several)] if length is None else length
            found.append(Case(*plain, one, form or FORMS[seed // len(several) % len(FORMS)]))
    return found


def barriers(words: Sequence[str]) -> list[Case]:
    """Those that hold these words."""
    return [Case("barrier", form=form) for form in FORMS if {*words} <= {"barrier", form}]


def _in_turns(here: Here, every: bool) -> Iterator[Plain]:
    """In each turn every algorithm meets every type, each time with another operation and layout.

    Of the collectives that are halves of an all-reduce there is only some of it, unless every one is wanted.
    """
    pairs = list(product(OPS, here.layouts))
    meetings = list(product(here.algorithms, here.dtypes))
    for each in (pairs, meetings):
        Random(0).shuffle(each)  # the same on all ranks
    for turn in range(len(pairs)):
        for number, (algorithm, dtype) in enumerate(meetings):
            op, layout = pairs[(turn + 13 * number) % len(pairs)]  # 13 divides none of 5 times the layouts
            if not _makes_sense(here, dtype, op, layout):
                continue
            yield Plain("allreduce", algorithm, dtype, op, layout)
            some = [OTHERS[(turn + number) % len(OTHERS)]] if (turn + number) % 3 == 0 else []
            for collective in OTHERS if every else some:
                if layout != "random":
                    yield Plain(collective, algorithm, dtype, op if "reduce" in collective else "", layout)


def _makes_sense(here: Here, dtype: str, op: str, layout: str) -> bool:
    """Is there such a case at all? What is refused makes sense, too."""
    if layout == "random":
        return op in ("sum", "mean") and dtype.startswith(("float", "complex"))
    if layout in (*TORCH, "cuda"):
        if dtype not in here.torch_dtypes:
            return False
    elif dtype == "bfloat16":
        return False
    # A device divides complex numbers by another formula than NumPy, so the last bit may differ.
    exact = not here.ranks & (here.ranks - 1) or layout not in DEVICES
    return exact or op != "mean" or not dtype.startswith("complex")


def refusals(case: Case, here: Here, own: Channel) -> list[tuple[type[Exception], str]]:
    """Why the library must refuse a case: the error, and words of its message. It gives one reason of several."""
    name, form = case.algorithm, case.form
    _, colon, between = name.partition(":")
    parties = here.nodes if colon else here.ranks
    device, started = case.layout in DEVICES, form == "i" and here.ranks > 1 and not own.no_memory
    meets = case.layout in SHARED and own.board is not None and settings.CHECK
    meets &= case.length > 0 or case.layout == "empty"  # torch's empty tensor lies nowhere
    whole = name in ("native", "shared") or "doubling" in (name, between)
    reasons = (
        (case.op == "mean" and case.dtype in (*INTEGERS, "bool"), UnsupportedArrayError, "would have to be rounded"),
        (case.op in ("min", "max") and "complex" in case.dtype, UnsupportedArrayError, "have no order"),
        ("halving" in (name, between) and parties & (parties - 1) != 0, ValueError, "needs 2**k"),
        (whole and case.collective != "allreduce", ValueError, "serves allreduce only"),
        (name == "native" and case.dtype in HALVES, UnsupportedArrayError, "native cannot add it"),
        (name == "native" and device and not mpi_reads_devices(), UnsupportedArrayError, "not CUDA-aware"),
        (name == "shared" and device, UnsupportedArrayError, "in host memory"),
        (name == "shared" and here.nodes > 1, ValueError, "of one node"),
        (name == "shared" and started and not meets, ValueError, "arrays of hpcdl.empty only"),
        (case.layout == "cuda" and case.dtype in ("uint16", "uint32", "uint64"), UnsupportedArrayError, case.dtype),
    )
    return [(kind, text) for applies, kind, text in reasons if applies]


# ---- what the arrays hold --------------------------------------------------------------------------------------------


def drawn(dtype: str, op: str, random: bool, rank: int, size: int) -> NumPyArray:
    """One period of what a rank holds: integers so small that every order gives the same sum; float32 for bfloat16."""
    place = np.arange(PERIOD)
    small = (place * 5 + place // 7 + rank * (place // 2 + 1)) % 4
    twos = np.where((place + rank) % max(4, size // 2) == 0, 2, 1)
    values: NumPyArray
    if random:
        numbers = np.random.default_rng(rank).standard_normal((2, PERIOD)) * np.exp2(place % 9)
        values = numbers[0] + (1j * numbers[1] if dtype.startswith("complex") else 0)
    elif dtype == "bool":  # of nearly every element one rank decides
        rare = (place + rank) % (size + 1) == 0
        values = ~rare if op in ("min", "prod") else rare
    elif dtype.startswith("complex"):
        values = twos * np.array([1, 1j, -1, -1j])[(place + rank) % 4] if op == "prod" else small + 1j * (small % 3)
    elif op in ("min", "max"):
        extreme = 100 + place % 20 if op == "max" else place % 50
        values = np.where(place % size == rank, extreme, 60 + (place * 7 + rank * 5) % 13)
    else:
        values = twos if op == "prod" else small
    return values.astype("float32" if dtype == "bfloat16" else dtype)


@lru_cache(maxsize=256)
def combined(dtype: str, op: str, random: bool, size: int) -> NumPyArray:
    """One period of the result, rounded once."""
    wide = "float32" if dtype in HALVES else dtype
    if random:
        wide = "complex128" if dtype.startswith("complex") else "float64"
    parts = (drawn(dtype, op, random, rank, size).astype(wide) for rank in range(size))
    total: NumPyArray = reduce(np.add if op == "mean" else UFUNCS[op], parts)
    if op == "mean" and total.dtype.kind in "fc":
        total = total / np.asarray(size, wide)
    if dtype == "bfloat16":
        import torch

        total = torch.from_numpy(total).bfloat16().float().numpy()
    rounded: NumPyArray = total if random or dtype == "bfloat16" else total.astype(dtype)
    return rounded


def tile(period: NumPyArray, lo: int, hi: int) -> NumPyArray:
    """The elements from lo to hi of the period over and over."""
    return np.resize(np.roll(period, -lo), hi - lo)


class Expectation(NamedTuple):
    """What a rank passes and what it must get: None for what is not looked at."""

    given: NumPyArray
    result: NumPyArray | None
    tolerance: NumPyArray | float = 0.0


def expectation(case: Case, rank: int, size: int) -> Expectation:
    """Of this rank."""
    n, op, random = case.length, case.op or "sum", case.layout == "random"
    shares = collectives.cut(Span(0, n), size)
    mine = shares[rank]
    given = tile(drawn(case.dtype, op, random, rank, size), 0, n)
    if case.collective == "broadcast":
        return Expectation(given, tile(drawn(case.dtype, op, random, root(case, size), size), 0, n))
    if case.collective == "allgather":
        parts = [tile(drawn(case.dtype, op, random, other, size), *share) for other, share in enumerate(shares)]
        return Expectation(parts[rank] if case.layout == "out" else given, np.concatenate(parts))
    if case.collective == "reduce" and rank != root(case, size):
        return Expectation(given, None)
    lo, hi = mine if case.collective == "reduce_scatter" else (0, n)
    tolerance: NumPyArray | float = 0.0
    if random:
        # Every one of the additions may round, by half a unit of the last place of what is there by then.
        sizes = sum(np.abs(drawn(case.dtype, op, random, other, size).astype("complex128")) for other in range(size))
        tolerance = tile(np.finfo(case.dtype).eps * 2 * size * np.asarray(sizes), lo, hi)
    return Expectation(given, tile(combined(case.dtype, op, random, size), lo, hi), tolerance)


def root(case: Case, size: int) -> int:
    """Who has or gets it, in a reduce or a broadcast."""
    return (case.length + 1) % size


# ---- where they lie --------------------------------------------------------------------------------------------------


class Arranged:
    """An array in some layout, in the middle of memory that nobody may touch."""

    def __init__(self, base: Any, x: Any, around: NumPyArray) -> None:
        self.base, self.x, self._around = base, x, around

    def write(self, values: NumPyArray | None) -> None:
        """Rewrite the elements, in C order, and what is around them; with None that is all."""
        self.base[...] = GUARD
        if values is not None:
            put(self.x, values.reshape(tuple(self.x.shape)))

    def untouched(self) -> bool:
        """Is what is around it as it was?"""
        kept = read(self.base)[self._around]
        return bool((kept == np.asarray(GUARD).astype(kept.dtype)).all())


class Shelf:
    """Arrays for the cases; those that all ranks of a node map are made once, as that is a collective call."""

    def __init__(self, comm: MPI.Intracomm, ranks: int) -> None:
        self.comm, self.ranks, self._shared = comm, ranks, dict[tuple[str, str], Any]()

    def arrange(self, layout: str, dtype: str, n: int) -> Arranged:
        """An array of so many elements."""
        kind, _, order = layout.partition("_")
        base = self._base(layout, dtype, 2 * n if layout == "strided" else n)
        size = int(base.shape[0])
        at = {"strided": slice(EDGE, EDGE + 2 * n, 2), "reversed": slice(EDGE + n - 1, EDGE - 1, -1)}.get(
            layout, slice(EDGE, EDGE + n)
        )
        around = np.ones(size, bool)
        around[at] = False
        x = base[at]
        if "fortran" in (kind, order) and n:
            width = next(width for width in (3, 2, 7, 1) if n % width == 0)
            x = x.reshape((width, n // width))
            x = x.t() if kind == "torch" else x.T
        return Arranged(base, x, around)

    def _base(self, layout: str, dtype: str, n: int) -> Any:
        size = n + 2 * EDGE
        if layout in SHARED:
            key = (layout, dtype)
            longest = max(size, lengths(self.ranks, dtype)[-1] + 2 * EDGE)
            if key not in self._shared or self._shared[key].shape[0] < size:
                self._shared[key] = self._allocate(layout, dtype, longest)
            return self._shared[key][:size]
        if layout in (*TORCH, "cuda"):
            import torch

            return torch.empty(size, dtype=getattr(torch, dtype), device="cuda" if layout == "cuda" else "cpu")
        if layout == "cupy":
            import cupy

            return cupy.empty(size, dtype)
        return np.empty(size, dtype)

    def _allocate(self, layout: str, dtype: str, size: int) -> Any:
        if layout == "empty":
            return hpcdl.empty(size, dtype, self.comm)
        import torch

        from hpcdl.torch import empty

        return empty(size, getattr(torch, dtype), self.comm)


def put(x: Any, values: NumPyArray) -> None:
    """Write NumPy's elements into anybody's array."""
    if isinstance(x, np.ndarray):
        x[...] = values
    elif hasattr(x, "copy_"):
        import torch

        x.copy_(torch.from_numpy(np.ascontiguousarray(values)).to(x.dtype))
    else:
        x[...] = type(x)(values)


def read(x: Any) -> NumPyArray:
    """The elements as NumPy's, flat and in C order; of bfloat16 as float32."""
    if hasattr(x, "cpu"):
        x = (x.float() if "bfloat16" in str(x.dtype) else x).cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).reshape(-1)


# ---- running one -----------------------------------------------------------------------------------------------------


def check(case: Case, here: Here, shelf: Shelf) -> Finding:
    """Run a case on this rank; nothing is raised but what nobody foresees: a KeyboardInterrupt, say."""
    try:
        return _check(case, here, shelf) if case.algorithm else check_barrier(case, shelf.comm)
    except Exception as error:
        return Finding(problem=f"raised {_named(error)}", broken=True)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check(case: Case, here: Here, shelf: Shelf) -> Finding:
    from hpcdl.call import channel

    comm = shelf.comm
    wanted = expectation(case, comm.rank, comm.size)
    x = shelf.arrange(case.layout, case.dtype, wanted.given.size)
    out = shelf.arrange("out", case.dtype, _out_length(case, comm)) if case.layout == "out" else None
    options: dict[str, Any] = {"algorithm": case.algorithm, "out": out and out.x}
    if case.op:
        options["op"] = case.op
    if case.collective in ("reduce", "broadcast"):
        options["root"] = root(case, comm.size)
    reasons = refusals(case, here, channel(comm))

    def write() -> None:
        x.write(wanted.given)
        if out:
            out.write(None)

    write()
    finding = Finding()
    try:
        for result in _results(case, x.x, comm, write, options):
            finding = judged(case, wanted, x, out, result)
            if finding.problem:
                return finding
    except (TypeError, ValueError, HpcdlError) as error:
        if not any(isinstance(error, kind) and text in str(error) for kind, text in reasons):
            raise
        if not ((read(x.x) == wanted.given).all() and x.untouched()):
            return Finding(problem=f"was refused as it should be, but the array has changed ({_named(error)})")
        return Finding(refused=True)
    if reasons:
        return Finding(problem=f"should have been refused: {' or '.join(text for _, text in reasons)}")
    return finding


def _out_length(case: Case, comm: MPI.Intracomm) -> int:
    lo, hi = collectives.cut(Span(0, case.length), comm.size)[comm.rank]
    return hi - lo if case.collective == "reduce_scatter" else case.length


def _results(
    case: Case, x: Any, comm: MPI.Intracomm, write: Callable[[], object], options: dict[str, Any]
) -> Iterator[Any]:
    """What the call returns; of a plan, what it returns twice, called and started."""
    if case.form == "plan":
        with getattr(hpcdl, f"plan_{case.collective}")(x, comm, **options) as plan:
            yield plan()
            write()
            yield plan.start().result()
    elif case.form == "i":
        yield getattr(hpcdl, f"i{case.collective}")(x, comm, **options).result()
    else:
        yield getattr(hpcdl, case.collective)(x, comm, **options)


def judged(case: Case, wanted: Expectation, x: Arranged, out: Arranged | None, result: Any) -> Finding:
    """Is it what it must be?"""
    if not x.untouched() or (out and not out.untouched()):
        return Finding(problem="something was written outside of the array")
    if (out or wanted.result is None) and (read(x.x) != wanted.given).any():
        return Finding(problem="x has changed, and should not: the result is another array's, or another rank's")
    if wanted.result is None:
        return Finding(problem="" if result is None else "should return None on this rank")
    returned = x if out is None else out
    if case.collective != "reduce_scatter" and result is not returned.x:
        return Finding(problem="should return the array that holds the result")
    found = read(result)
    if found.size != wanted.result.size:
        return Finding(problem=f"has {found.size} elements, not {wanted.result.size}")
    exact = case.layout != "random"
    wrong = found != wanted.result if exact else ~(np.abs(found - wanted.result) <= wanted.tolerance)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        got, expected = str(found[index]), str(wanted.result[index])
        problem = f"element {index} is {got}, not {expected} ({np.count_nonzero(wrong)} of {wrong.size} are wrong)"
        return Finding(False, 0, problem, index, got, expected)
    # MPI does not promise its own all-reduce to give all ranks the same bits.
    alike = case.collective not in ("reduce", "reduce_scatter") and case.algorithm != "native"
    return Finding(bits=crc32(found.tobytes()) if alike else 0)


def check_barrier(case: Case, comm: MPI.Intracomm) -> Finding:
    """Nobody may leave before the last comes: it sends its word before it does, and all must have it soon after."""
    late, word = comm.size - 1, np.zeros(1)
    plan = hpcdl.plan_barrier(comm) if case.form == "plan" else None
    comm.Barrier()
    if comm.rank == late:
        time.sleep(LATE_S)
        sent = [comm.Isend(word, other) for other in range(late)]
    else:
        sent = [comm.Irecv(word, late)]
    if plan:
        plan()
        plan.close()
    elif case.form == "i":
        hpcdl.ibarrier(comm).wait()
    else:
        hpcdl.barrier(comm)
    left = time.monotonic()
    problem = ""
    for request in sent:
        while not request.Test():
            if time.monotonic() - left > LATE_S / 2 and comm.rank != late:
                problem = f"was left before rank {late} had come"
                request.Wait()
                break
            time.sleep(0)
    return Finding(problem=problem)


def able(words: Sequence[str], *, torch: bool) -> tuple[list[str], list[str]]:
    """Of torch's or all other layouts those that can be tried in this process; and the types that torch has."""
    if not torch:
        return [*NUMPY, *(["cupy"] if _has_cupy() else [])], []
    if {*NUMPY, "cupy", "barrier"} & {*words}:  # then nobody asks for torch, which takes seconds to import
        return [], []
    try:
        import torch as library
    except ImportError:
        return [], []
    return [*TORCH, *(["cuda"] if library.cuda.is_available() else [])], [
        each for each in TYPES if hasattr(library, each)
    ]


def _has_cupy() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # without a driver it is one of CUDA's own
        return False


def use_device(layouts: Sequence[str], local_rank: int) -> None:
    """Make this rank's device the current one."""
    if "cuda" in layouts:
        import torch

        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if "cupy" in layouts:
        import cupy

        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()


def known_words(here: Here) -> dict[str, Sequence[str]]:
    """What --only takes, beside lengths; on these ranks there need not be all of them."""
    return {
        "collectives": ("allreduce", *OTHERS, "barrier"),
        "algorithms": here.algorithms,
        "types": TYPES,
        "operations": OPS,
        "layouts": LAYOUTS,
        "forms": FORMS,
    }
