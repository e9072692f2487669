"""Sparse gradients: few elements are sent, of each the value and where it belongs; the rest waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from hpcdl.compress.dense import dense
from hpcdl.compress.method import Memory, Method, Piece
from hpcdl.compress.wire import Wire
from hpcdl.logs import logger

VALUE_TYPES = (torch.float32, torch.float16)
INDEX_BYTES = SCALE_BYTES = 4
MOST = 2**31 - 1

# Below this, sorting is as fast as looking at a sample.
FEW = 1 << 14
# So many of a sample lie above the threshold: it is known to an eighth then, and lands within the bounds below.
ABOVE = 64
ROUNDS = 10
# What is longer than 32 MiB, malloc gets from the system anew each time, and page by page: 40 ms for 10 million
# elements, as long as all the rest.
AT_ONCE = 1 << 22
# To find the largest of a row takes a third of the time of comparing each of its elements with the threshold.
ROW = 64


def count(density: float, n: int) -> int:
    """How many of n elements are sent: rounded up, so that it is never none of some."""
    # 0.07 * 100 is above 7 in floating point, and yet 7 are meant.
    return min(n, math.ceil(round(density * n, 6)))


def select(x: Tensor, k: int) -> Tensor:
    """The indices of about k elements of a vector with the largest magnitudes, and never more than k.

    A sample tells the threshold; sorting all would take longer than sending them. It is lowered where fewer than 0.8 k
    lie above it, and what is above k is cut off exactly. (Lin et al., Deep Gradient Compression, 2018, section 3.)
    """
    n = len(x)
    if k >= n:
        return torch.arange(n, device=x.device)
    if n < FEW:
        return x.abs().topk(k, sorted=False).indices
    sampled = min(max(n // 100, ABOVE * n // k), n // 10)
    # Odd, so that it does not meet the same columns of a matrix in each row.
    sample = x[:: n // sampled | 1].abs()
    threshold = float(sample.topk(max(1, k * len(sample) // n), sorted=False).values.min())
    find = _in_rows(x) if 2 * ROW * k <= n else partial(_above, x)
    for _ in range(ROUNDS):
        above = find(threshold)
        if len(above) >= 0.8 * k or not threshold:
            break
        threshold *= 0.8
    # A threshold alone would take all of what is equal.
    return above if len(above) <= k else above[x[above].abs().topk(k, sorted=False).indices]


def _above(x: Tensor, threshold: float) -> Tensor:
    """Where x is not 0 and as large as the threshold."""
    found = []
    for start in range(0, max(1, len(x)), AT_ONCE):
        part = x[start : start + AT_ONCE]
        found.append((part.abs() >= threshold if threshold else part != 0).nonzero().view(-1).add_(start))
    return torch.cat(found)


def _in_rows(x: Tensor) -> Callable[[float], Tensor]:
    """What `_above` gives for a threshold that few elements reach: only the rows with such a one are looked through."""
    whole = len(x) // ROW * ROW
    rows, rest = x[:whole].view(-1, ROW), x[whole:]
    largest = torch.maximum(rows.amax(1), rows.amin(1).neg_())

    def find(threshold: float) -> Tensor:
        row = _above(largest, threshold)
        at = _above(rows[row].view(-1), threshold)
        inside = row[at // ROW].mul_(ROW).add_(at % ROW)
        return torch.cat([inside, _above(rest, threshold).add_(whole)])

    return find


def payload_bytes(counts: Sequence[int], value_type: torch.dtype) -> int:
    """What one rank sends to each other in `exchange`."""
    nbytes = sum(counts) * (INDEX_BYTES + value_type.itemsize) + len(counts) * SCALE_BYTES
    return -(-nbytes // INDEX_BYTES) * INDEX_BYTES  # so that the next rank's indices are aligned


def exchange(
    pieces: Sequence[Piece], unsent: Sequence[Tensor], counts: Sequence[int], wire: Wire, value_type: torch.dtype
) -> list[Tensor]:
    """Take the largest elements out of what is unsent of each piece, as many as it counts, and sum them over the ranks.

    `unsent` are vectors; what the rounding to `value_type` loses stays in them. Gives the indices that were sent.
    """
    total, number = sum(counts), len(counts)
    payload = torch.zeros(payload_bytes(counts, value_type), dtype=torch.uint8, device=unsent[0].device)
    index, scale, value = _parts(payload, total, number, value_type)
    sent, starts = [], [*accumulate(counts, initial=0)]
    for which, (vector, most, start) in enumerate(zip(unsent, counts, starts, strict=False)):
        chosen = select(vector, most)
        sent.append(chosen)
        if not len(chosen):
            continue
        mine, here = vector[chosen], slice(start, start + len(chosen))
        index[here] = chosen
        scale[which] = _unit(mine)
        value[here] = mine / scale[which]
        vector.index_add_(0, chosen, value[here].to(vector.dtype) * scale[which], alpha=-1)
    rows = wire.gather(pieces[0].key, payload)
    lengths = torch.tensor(counts, device=payload.device)
    for values in (piece.values for piece in pieces):
        values.zero_()
    # In the order of the ranks everywhere: another order would round differently.
    for row in rows:
        index, scale, value = _parts(row, total, number, value_type)
        decoded = value.to(unsent[0].dtype) * scale.repeat_interleave(lengths, output_size=total)
        for piece, most, start in zip(pieces, counts, starts, strict=False):
            _add_at(piece.values, index[start : start + most], decoded[start : start + most])
    return sent


def _parts(payload: Tensor, total: int, number: int, value_type: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A payload's indices, the pieces' scales, and the values."""
    index, scale, value = payload.tensor_split([INDEX_BYTES * total, INDEX_BYTES * total + SCALE_BYTES * number])
    return index.view(torch.int32), scale.view(torch.float32), value.view(value_type)[:total]


def _unit(values: Tensor) -> Tensor:
    """The power of two to divide by, which costs no accuracy, so that float16 holds the largest and 2**-28 of it."""
    largest = values.abs().amax().float().clamp_(min=2.0**-100)
    exponent = largest.view(torch.int32) & 0x7F800000
    return exponent.view(torch.float32) * 2.0**-14


def _add_at(values: Tensor, index: Tensor, added: Tensor) -> None:
    """Add to a tensor by the places its elements have in a row; padding adds 0 to the first."""
    added = added.to(values.dtype)  # a module may have been converted since something was kept
    if values.is_contiguous():
        values.view(-1).index_add_(0, index, added)
    else:
        values.add_(added.new_zeros(values.numel()).index_add_(0, index, added).view(values.shape))


class Sparsifier(Method):
    """What methods have in common that send few elements of matrices and all of anything else."""

    def __init__(self, density: float) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density is the part of the elements that is sent, above 0 and up to 1, not {density}")
        self.density = density
        self.unsent = Memory()

    def memories(self) -> Iterator[tuple[str, Memory]]:
        """What it remembers, by names."""
        yield "unsent", self.unsent

    def residuals(self) -> Iterator[Tensor]:
        """What was not sent yet."""
        return iter(self.unsent.kept.values())

    def _send_all(self, piece: Piece) -> None:
        """Have what waits go along with a piece that is sent as it is."""
        waiting = self.unsent.kept.pop(piece.key, None)
        if waiting is not None:
            piece.values.add_(waiting)


class Chooser(Sparsifier):
    """What methods have in common that choose the largest elements, each rank its own."""

    def __init__(self, density: float, value_dtype: torch.dtype) -> None:
        super().__init__(density)
        if value_dtype not in VALUE_TYPES:
            raise ValueError(f"value_dtype is {' or '.join(map(str, VALUE_TYPES))}, not {value_dtype}")
        self.value_dtype = value_dtype
        self._told = False

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by the sum over the ranks of what they send of it."""
        few = [piece for piece in pieces if piece.is_matrix] if self._pays(pieces, wire) else []
        counts = [count(self.density, piece.values.numel()) for piece in few]
        chosen = {piece.key for piece in few}
        rest = [piece for piece in pieces if piece.key not in chosen]
        for piece in rest:
            piece.values.copy_(self.step(piece))
            self._send_all(piece)
        dense(rest, wire)
        if few:
            unsent = [self.unsent.of(piece).add_(self.step(piece)).view(-1) for piece in few]
            for piece, indices in zip(few, exchange(few, unsent, counts, wire, self.value_dtype), strict=True):
                self.sent(piece, indices)

    def step(self, piece: Piece) -> Tensor:
        """What a gradient adds to what is to be sent."""
        return piece.values

    def sent(self, piece: Piece, indices: Tensor) -> None:
        """These elements are on their way."""

    def _pays(self, pieces: Sequence[Piece], wire: Wire) -> bool:
        """Would fewer bytes travel than by a ring all-reduce of float32?"""
        lengths = [piece.values.numel() for piece in pieces if piece.is_matrix]
        if self.density == 1 or not lengths:
            return False
        if max(lengths) > MOST:
            raise ValueError(
                f"a parameter has {max(lengths)} elements, and {self.name} can tell {MOST} apart by 32-bit indices: "
                "split it, or send gradients as they are"
            )
        nbytes = payload_bytes([count(self.density, n) for n in lengths], self.value_dtype)
        # A gather sends the payload to size - 1 others, a ring 2 n (size - 1) / size elements of 4 bytes.
        pays = nbytes * wire.size < 8 * sum(lengths)
        if not pays and not self._told and wire.rank == 0:
            ring = 8 * sum(lengths) * (wire.size - 1) // wire.size
            logger.info(
                f"{self.name} at density {self.density:g} would have each of {wire.size} ranks send "
                f"{nbytes * (wire.size - 1)} bytes and a ring all-reduce {ring}, so everything is sent, by that"
            )
        self._told |= not pays
        return pays


class TopK(Chooser):
    """Send the largest elements of gradient and memory together, and remember the others.

    - `density`: the part of each matrix's elements that is sent, one at least.
    - `value_dtype`: float32 or float16; what rounding loses is remembered too.

    Vectors are sent as they are; so is all where that takes fewer bytes than indices and values would (float32: a
    density above 1 / ranks), which is said once. Aji and Heafield, Sparse Communication for Distributed Gradient
    Descent, 2017, section 3.
    """

    name = "topk"

    def __init__(self, density: float = 0.01, value_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(density, value_dtype)


class RandomK(Sparsifier):
    """Send random elements of gradient and memory together, on all ranks the same ones, and remember the others.

    - `density`: the part of each matrix's elements that is sent, one at least.
    - `seed`: what they are drawn by, from 0 to 2**32 - 1; the same on all ranks, so that no indices travel.

    Vectors are sent as they are. Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018, section 2.
    """

    name = "randomk"

    def __init__(self, density: float = 0.01, seed: int = 0) -> None:
        super().__init__(density)
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"seed is from 0 to 2**32 - 1, not {seed}")
        self.seed, self.calls = seed, 0
        self._agreed = False

    def reduce(self, pieces: Sequence[Piece], wire: Wire) -> None:
        """Replace each piece by the sum over the ranks of what they send of it."""
        self._agree(wire)
        # The generator takes 32 bits of a seed and no more.
        random = torch.Generator().manual_seed(crc32(f"{self.seed} {self.calls}".encode()))
        self.calls += 1
        travelling, drawn = [], []
        for piece in pieces:
            if not piece.is_matrix:
                travelling.append(piece)
                continue
            n = piece.values.numel()
            indices = draw(n, count(self.density, n), random).to(piece.values.device)
            unsent = self.unsent.of(piece).add_(piece.values).view(-1)
            travelling.append(Piece(piece.key, unsent[indices], True))
            drawn.append((piece, indices, travelling[-1].values))
            unsent.index_fill_(0, indices, 0)
        dense(travelling, wire)
        for piece, indices, values in drawn:
            piece.values.zero_()
            _add_at(piece.values, indices, values)

    def _agree(self, wire: Wire) -> None:
        """Ask once: what differs would be added up in the wrong places without a word."""
        if self._agreed:
            return
        mine = torch.tensor([self.seed, -self.seed, self.calls, -self.calls], dtype=torch.float64)
        most_seed, least_seed, most_calls, least_calls = wire.max(mine).abs().long().tolist()
        if (most_seed, most_calls) != (least_seed, least_calls):
            raise ValueError(
                f"ranks draw other elements: seeds are {least_seed} to {most_seed}, reductions so far {least_calls} to "
                f"{most_calls}; give all the same seed and each its state of the same step"
            )
        self._agreed = True

    def state_dict(self) -> dict[str, Any]:
        """This rank's, for a checkpoint."""
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.calls = state["calls"]


def draw(n: int, k: int, random: torch.Generator) -> Tensor:
    """k random indices below n in rising order: one of each k-th part, as a permutation of n would cost more than k."""
    borders = torch.arange(k + 1) * n // max(k, 1)
    return borders[:-1] + (torch.rand(k, dtype=torch.float64, generator=random) * borders.diff()).long()
