"""The all-reduce among the ranks of one node, in memory that all of them map: what each does between two gates.

Floor 2. Arrays that lie in node-shared memory are summed in place. Others pass, chunk by chunk, through a staging area
that stays in the processor's cache. Either way the numbers of the ranks are added in the order of the ranks, so that
all get the same bits, and always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from hpcdl.buffers import HALVES, Action, Array, Vector, segments
from hpcdl.channel import Channel
from hpcdl.collectives import Span, cut
from hpcdl.shared import LINE, WORD, Awaited, Gate, Memory, allocate

UFUNCS = {
    "sum": "add",
    "mean": "add",
    "prod": "multiply",
    "min": "minimum",
    "max": "maximum",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
}

TILES_BYTES = 1 << 20
"""In place the ranks' vectors are added up and written back tile by tile: the tiles of all ranks are so long together.
A core's second-level cache has about that size, and in shorter tiles the calls' own time counts."""

CHUNK_BYTES = 2 << 20
"""Through the staging area a vector goes in chunks of this length, which cost a gate each. Shorter ones were slower:
what another core has just written comes more slowly from its own cache than from the shared one."""

WHOLE_BYTES = 16 << 10
"""Up to here every rank adds up everything: one gate and more adding is quicker than two gates."""

BUFFERS = 3

Ticks = list[list[Action]]
"""What to do before the first gate, between the first and the second, ..., and behind the last."""


class Summing:
    """Adds up arrays in the order given; 16-bit floats in float32, to be rounded once."""

    def __init__(self, vector: Vector, op: str, size: int, longest: int) -> None:
        self._vector, self._size, self._mean = vector, size, op == "mean"
        self._ufunc = UFUNCS[op]
        self.wide = vector.dtype in HALVES and op not in ("min", "max")
        if self.wide:
            self._sum, self._term = vector.empty(longest, "float32").flat, vector.empty(longest, "float32").flat

    def __call__(self, sources: Sequence[Array], target: Array, *, last: bool = True) -> list[Action]:
        """Bound: put the sum of the sources in the target, which may be the first or second of them, or another.

        If it is the last one, and a mean, divide it.
        """
        combine, put, (first, *others) = self._vector.combine, self._vector.family.copying, sources
        total = target
        actions: list[Action] = []
        if self.wide:
            total, term = self._sum[: len(first)], self._term[: len(first)]
            actions.append(put(total, first))
            for other in others:
                actions += [put(term, other), combine(self._ufunc, total, term, total)]
        elif others:
            for other in others:
                actions.append(combine(self._ufunc, first, other, total))
                first = total
        elif first is not target:
            actions.append(put(target, first))
        if self._mean and last:
            actions.append(combine("true_divide", total, self._size, total))
        if total is not target:
            actions.append(put(target, total))
        return actions


class Staging:
    """Shared memory that private arrays pass through: a gate and three buffers for each rank of the node."""

    def __init__(self, memory: Memory, rank: int, buffer_bytes: int, poke: Callable[[], Collection[int]]) -> None:
        self.memory, self.buffer_bytes = memory, buffer_bytes
        self.ranks, self.me = memory.ranks, memory.ranks.index(rank)
        self.gate = Gate(memory, 0, rank, poke)
        self._turn = 0

    def turn(self) -> int:
        """0 and 1 in turn: who is early for the next short call must not write where others still read."""
        self._turn ^= 1
        return self._turn

    def buffers(self, vector: Vector, number: int) -> list[Array]:
        """Every rank's buffer of that number, as arrays of the vector's type."""
        offset = LINE * WORD + number * self.buffer_bytes
        length = self.buffer_bytes // vector.itemsize
        return [vector.at(self.memory, self.memory.place(rank) + offset, length) for rank in self.ranks]


def new_staging(channel: Channel, nbytes: int) -> Generator[Any, None, Staging | str]:
    """A staging area for vectors of so many bytes, or why there is none: a collective call."""
    buffer_bytes = buffer_for(nbytes)
    memory = yield from allocate(channel.wire, channel.node, LINE * WORD + BUFFERS * buffer_bytes)
    return memory if isinstance(memory, str) else Staging(memory, channel.rank, buffer_bytes, channel.poke)


def buffer_for(nbytes: int) -> int:
    """How long a buffer a vector of so many bytes needs, in whole cache lines: a power of two, a chunk at most."""
    return min(CHUNK_BYTES, max(LINE * WORD, 1 << (nbytes - 1).bit_length())) if nbytes else LINE * WORD


def new_gate(channel: Channel) -> Generator[Any, None, Gate | str]:
    """A gate, or why there is none: a collective call."""
    memory = yield from allocate(channel.wire, channel.node, WORD)
    return memory if isinstance(memory, str) else Gate(memory, 0, channel.rank, channel.poke)


class Within:
    """What a plan does inside its node: in the arrays themselves, or through a staging area."""

    def __init__(
        self,
        channel: Channel,
        gate: Awaited,
        *,
        place: tuple[Memory, int] | None = None,
        area: Staging | None = None,
        entered: bool = False,
    ) -> None:
        self.gate, self._place, self._area, self._entered = gate, place, area, entered
        self.alone = len(channel.nodes) == 1
        self.turn = area.turn if area else lambda: 0
        self._size, self._me = channel.size, channel.node.index(channel.rank)
        self._ranks = len(channel.node)
        self._lanes = min(map(len, channel.nodes))

    def bind_alone(self, vector: Vector, op: str) -> list[Ticks]:
        """The whole all-reduce, on the communicator's only node."""
        summing = Summing(vector, op, self._size, self._longest(vector))
        if self._area is not None:
            return staged(summing, vector, self._area)
        assert self._place is not None
        between = in_place(summing, vector, peers(vector, *self._place), self._me)
        return [self._open([between, []])]

    def bind_lane(self, vector: Vector, work: Vector, op: str) -> tuple[Ticks, Ticks]:
        """What comes before the nodes reduce my lane in `work` among each other, and after it."""
        summing = Summing(vector, op, self._size, self._longest(vector))
        lanes = cut(Span(0, vector.size), self._lanes)
        if self._area is not None:
            return lanes_staged(summing, vector, self._area, lanes, work)
        assert self._place is not None
        mine = lanes[self._me] if self._me < len(lanes) else Span(0, 0)
        reducing, handing = lane_in_place(summing, vector, peers(vector, *self._place), self._me, mine, work)
        return self._open([reducing]), [handing, []]

    def _open(self, ticks: Ticks) -> Ticks:
        """Behind a first gate, where it is not known yet that all ranks have come."""
        return ticks if self._entered else [[], *ticks]

    def _longest(self, vector: Vector) -> int:
        if self._area is None:
            return min(vector.size, tile_length(vector, self._ranks))
        return min(vector.size, max(1, self._area.buffer_bytes // vector.itemsize))


def peers(vector: Vector, memory: Memory, offset: int) -> list[Array]:
    """The node's vectors that stand at this place of their ranks' parts."""
    return [vector.at(memory, memory.place(rank) + offset, vector.size) for rank in memory.ranks]


def tile_length(vector: Vector, ranks: int) -> int:
    """The elements in a tile."""
    return max(1, TILES_BYTES // ranks // vector.itemsize)


def in_place(summing: Summing, vector: Vector, parts: Sequence[Array], me: int) -> list[Action]:
    """Between two gates: add up my slice of all vectors, and write it to all, tile by tile."""
    actions: list[Action] = []
    mine = cut(Span(0, vector.size), len(parts))[me]
    for tile in segments(mine, tile_length(vector, len(parts))):
        first, *others = [part[tile.lo : tile.hi] for part in parts]
        actions += summing([first, *others], first)
        actions += [vector.copying(other, first) for other in others]
    return actions


def staged(summing: Summing, vector: Vector, area: Staging) -> list[Ticks]:
    """The whole all-reduce through the staging area; two bindings to take in turns where there is but one chunk.

    In tick t a rank hands in chunk t, adds up its piece of chunk t - 1 and takes chunk t - 2 out. Three buffers do:
    what is in a buffer was taken out two gates before the buffer's next chunk comes in. Behind several chunks a last
    gate keeps the next call away from what is still being taken out.
    """
    longest = max(1, area.buffer_bytes // vector.itemsize)
    chunks = list(segments(Span(0, vector.size), longest))
    if not chunks:
        return [[[]]]
    if len(chunks) > 1:
        return [[*_pipelined(summing, vector, area, chunks, 2), []]]
    if vector.size * vector.itemsize <= WHOLE_BYTES:
        return [_at_once(summing, vector, area.buffers(vector, turn), area.me) for turn in (0, 1)]
    return [_pipelined(summing, vector, area, chunks, turn) for turn in (0, 1)]


def _at_once(summing: Summing, vector: Vector, buffers: list[Array], me: int) -> Ticks:
    """All hand in all they have, and each adds up everything."""
    places = [buffer[: vector.size] for buffer in buffers]
    return [[vector.copying(places[me], vector.flat)], summing(places, vector.flat)]


def _pipelined(summing: Summing, vector: Vector, area: Staging, chunks: Sequence[Span], first: int) -> Ticks:
    """Every chunk is handed in, added up by pieces, and taken out, the next one close behind it."""
    put, me = vector.copying, area.me
    every = [area.buffers(vector, number) for number in range(BUFFERS)]
    ticks: Ticks = [[] for _ in range(len(chunks) + 2)]
    for number, chunk in enumerate(chunks):
        buffers = every[(first + number) % BUFFERS]
        pieces = cut(Span(0, chunk.size), len(area.ranks))
        mine = vector[chunk]

        def at(rank: int, piece: Span, buffers: list[Array] = buffers) -> Array:
            return buffers[rank][piece.lo : piece.hi]

        own = pieces[me]
        others = [rank for rank in range(len(pieces)) if rank != me and pieces[rank].size]
        for gap in (Span(0, own.lo), Span(own.hi, chunk.size)):
            if gap.size:
                ticks[number].append(put(at(me, gap), mine[gap.lo : gap.hi]))
        if own.size:
            own_numbers = mine[own.lo : own.hi]
            sources = [own_numbers if rank == me else at(rank, own) for rank in range(len(pieces))]
            ticks[number + 1] += [*summing(sources, at(me, own)), put(own_numbers, at(me, own))]
        ticks[number + 2] += [put(mine[pieces[r].lo : pieces[r].hi], at(r, pieces[r])) for r in others]
    return ticks


# ---- one node of several: the vector has as many lanes as the smallest node has ranks; the owner of a lane adds it up
# here, and then the owners of that lane on all nodes do


def lane_in_place(
    summing: Summing, vector: Vector, parts: Sequence[Array], me: int, lane: Span, work: Vector
) -> tuple[list[Action], list[Action]]:
    """Add up the lane that I own, and hand it out; between the two the nodes do their part."""
    reducing: list[Action] = []
    handing: list[Action] = []
    for tile in segments(lane, tile_length(vector, len(parts))):
        pieces = [part[tile.lo : tile.hi] for part in parts]
        target = work[tile]
        if me > 1 and not summing.wide:  # my numbers would be written over before it is their turn
            reducing += [*summing(pieces, pieces[0], last=False), vector.copying(target, pieces[0])]
        else:
            reducing += summing(pieces, target, last=False)
        handing += [vector.copying(piece, pieces[me]) for place, piece in enumerate(pieces) if place != me]
    return reducing, handing


def lanes_staged(
    summing: Summing, vector: Vector, area: Staging, every: Sequence[Span], work: Vector
) -> tuple[Ticks, Ticks]:
    """The same through the staging area: every rank hands in a segment of each lane that another owns.

    A last gate keeps the next call, whose lanes may lie elsewhere, away from what is still being taken out.
    """
    put, me = vector.copying, area.me
    longest = max(1, area.buffer_bytes // vector.itemsize // len(every))
    rows = [list(segments(lane, longest)) for lane in every]  # by lane: its segments
    count = max(map(len, rows))
    reducing: Ticks = [[] for _ in range(count + 1)]
    handing: Ticks = [[] for _ in range(count + 1)]
    for number in range(count):
        buffers = area.buffers(vector, number % BUFFERS)
        for lane, row in enumerate(rows):
            if number >= len(row):
                continue
            segment, place = row[number], slice(lane * longest, lane * longest + row[number].size)
            if lane != me:
                reducing[number].append(put(buffers[me][place], vector[segment]))
                handing[number + 1].append(put(vector[segment], buffers[lane][place]))
                continue
            sources = [vector[segment] if rank == me else buffers[rank][place] for rank in range(len(area.ranks))]
            if summing.wide:
                reducing[number + 1] += summing(sources, work[segment], last=False)
            else:
                total = buffers[me][place]
                reducing[number + 1] += [*summing(sources, total, last=False), put(work[segment], total)]
            handing[number].append(put(buffers[me][place], vector[segment]))
    return reducing, [*handing, []]
