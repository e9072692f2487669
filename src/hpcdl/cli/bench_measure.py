"""Time competitors fairly and count what they get wrong: they take turns, on buffers rewritten each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, reduce
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpi4py import MPI

NumPyArray: TypeAlias = npt.NDArray[Any]
Key = TypeVar("Key", bound=Hashable)

UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}

# The contents repeat with this period. It is prime, so that no two ranks' shares of a buffer look alike.
PERIOD = 65521
LARGEST = 8
TILE_BYTES = 256 << 10


class Competitor(NamedTuple):
    """Something to be timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Rewrite the buffers, ahead of every block of calls."""
    wrong: Callable[[int], int] = lambda calls: 0
    """How many elements of this rank's result are wrong, after a block of so many calls."""
    clock: Callable[[], float] = perf_counter


class Timed(NamedTuple):
    """What was found out about a competitor; the same on all ranks."""

    seconds: list[float]
    """Of one call, in each round: the mean over the round's block of calls on the slowest rank."""
    wrong: int = 0
    """Wrong elements on all ranks together, in the worst round."""


def measure(
    comm: MPI.Intracomm,
    competitors: Mapping[Key, Competitor],
    rounds: int,
    repeat: int | Mapping[Key, int],
    warm_up: int = 2,
) -> dict[Key, Timed]:
    """Let the competitors take turns: in each round a block of `repeat` calls each, behind a barrier.

    A noisy machine is noisy for all of them, so their ratios hold. Warm-up rounds are checked, but not timed.
    """
    from mpi4py import MPI

    seconds = np.zeros((len(competitors), warm_up + rounds))
    wrong = np.zeros_like(seconds, np.int64)
    for number in range(warm_up + rounds):
        for row, (key, competitor) in enumerate(competitors.items()):
            call, clock = competitor.call, competitor.clock
            calls = repeat if isinstance(repeat, int) else repeat[key]
            competitor.prepare()
            comm.Barrier()
            began = clock()
            for _ in range(calls):
                call()
            seconds[row, number] = (clock() - began) / calls
            wrong[row, number] = competitor.wrong(calls)
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    return {key: Timed(seconds[row, warm_up:].tolist(), int(wrong[row].max())) for row, key in enumerate(competitors)}


class Percentiles(NamedTuple):
    """The median, and what nine in ten values are above and below."""

    median: float
    p10: float
    p90: float


def percentiles(values: Sequence[float]) -> Percentiles:
    """The median with the 10th and the 90th percentile, interpolated between neighbours."""
    return Percentiles(*np.percentile(values, (50, 10, 90)).tolist())


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the rounds' ratios: two times of one round have met the same noise."""
    return float(np.median(np.divide(seconds, reference)))


class Contents:
    """What each rank's buffer holds before a call and after several: small integers, whose sums are exact."""

    def __init__(self, comm: MPI.Intracomm, count: int, dtype: str, op: str) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.count, self.dtype, self.op = count, np.dtype(dtype), op
        self.nbytes = count * self.dtype.itemsize
        self.after = cache(self._after)

    def described(self) -> dict[str, Any]:
        """The beginning of a row."""
        return {"size": self.nbytes, "count": self.count, "type": self.dtype.name, "redop": self.op}

    def drawn(self, rank: int) -> NumPyArray:
        """One period of a rank's buffer."""
        numbers = np.random.default_rng(rank).integers(1, LARGEST, min(self.count, PERIOD), endpoint=True)
        if self.op == "prod":
            numbers = 1 - 2 * (numbers % 2)
        return numbers.astype(self.dtype)

    def _after(self, calls: int) -> NumPyArray:
        """One period of the result of so many calls in place: from the second on, all ranks put in the same."""
        result = self._combined([self.drawn(rank) for rank in range(self.size)])
        for _ in range(calls - 1):
            result = self._combined([result] * self.size)
        return result

    def _combined(self, parts: list[NumPyArray]) -> NumPyArray:
        wide = np.float32 if self.dtype == np.float16 else self.dtype  # rounded once, as the library does it
        return reduce(UFUNCS[self.op], (part.astype(wide) for part in parts)).astype(self.dtype)

    def exact_calls(self) -> float:
        """How many calls in place, one on the other's result, leave the sum exact."""
        if self.op != "sum" or self.dtype.kind != "f" or self.size == 1:
            return math.inf  # integers wrap alike everywhere; 1s, minima and maxima stay as they are
        float_type = np.finfo(self.dtype)
        doubles = self.size & (self.size - 1) == 0  # then only the exponent grows
        bits = float_type.maxexp - 1 if doubles else float_type.nmant + 1
        return max(1, int((bits - math.log2(LARGEST)) / math.log2(self.size)))

    def competitor(self, call: Callable[[], object], x: NumPyArray, out: NumPyArray | None = None) -> Competitor:
        """A call on x, in place or with its result in out, whose every result is checked."""
        mine, result = self.drawn(self.rank), x if out is None else out

        def prepare() -> None:
            for lo in range(0, x.size, len(mine)):
                piece = x[lo : lo + len(mine)]
                piece[:] = mine[: len(piece)]
            if out is not None:
                out.fill(0)  # which no result is

        return Competitor(call, prepare, lambda calls: count_wrong(result, self.after(calls if out is None else 1)))


def count_wrong(result: NumPyArray, period: NumPyArray) -> int:
    """How many elements differ from what they must be, the period over and over."""
    pieces = (result[lo : lo + len(period)] for lo in range(0, result.size, len(period)))
    return sum(int(np.count_nonzero(piece != period[: len(piece)])) for piece in pieces)


def add_and_copy(op: str, x: NumPyArray, out: NumPyArray, size: int) -> None:
    """What any all-reduce in shared memory must do for a rank: combine its slice of all buffers, hand it to all.

    Here on this rank's own memory, which stands for the slices of `size` buffers, tile by tile; x and out may be one.
    """
    ufunc, length, tile = UFUNCS[op], x.size // size, TILE_BYTES // x.itemsize
    sources = [x[rank * length : (rank + 1) * length] for rank in range(size)]
    targets = [out[rank * length : (rank + 1) * length] for rank in range(size)]
    for lo in range(0, length, tile):
        part = slice(lo, lo + tile)
        total = sources[0][part]
        for source in sources[1:]:
            total = ufunc(total, source[part], out=targets[0][part])
        for target in targets[1:]:
            target[part] = total


def floor(work: Timed, barriers: Timed, size: int, cores: int) -> Timed:
    """The least time of an all-reduce in memory: each rank's work, on so many cores for all, and two barriers."""
    share = size / min(size, cores)
    return Timed([share * mine + both for mine, both in zip(work.seconds, barriers.seconds, strict=True)])
