"""Compressed gradients as a communication hook of DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hpcdl
from hpcdl.compress.method import Method, Piece
from hpcdl.compress.wire import Wire
from hpcdl.torch.hooks import GradBucket
from hpcdl.torch.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from mpi4py import MPI

EXCHANGES = ("flat", "by_node")


@dataclass
class Told:
    """What compression has come to, on this rank, since it was last asked."""

    steps: int = 0
    sent_bytes: int = 0
    dense_bytes: float = 0.0
    """What a ring all-reduce of float32 would have sent; with by_node of this rank's share, between the nodes."""
    seconds: float = 0.0
    """In all, the exchange included, but not the waiting for later ranks before it (with a scaler that is in it)."""
    exchange_seconds: float = 0.0
    error: float = math.nan
    """|exchanged - exact| / |exact| of the last gradient that was looked at."""
    plain_seconds: float = math.nan
    """How long the exact sum took that it was compared with."""


class Compression:
    """Has a method reduce the gradients of a wrapped module; made on all ranks, before the first step.

    Gradients are unscaled (if the module has a `scaler`), divided by the ranks where the module averages, shortened
    where the method clips, added up by the method and scaled again: what a method keeps is in true size. If any rank
    has an inf or nan, the method is left alone, and the gradients are nan on all ranks.

    - `exchange`: "flat", among all ranks; or "by_node": the ranks of a node add up densely, and each then compresses
      its share of the sum for its peers on the other nodes. Nodes must have equally many ranks. What is kept belongs to
      shares of buckets then, and is lost where a parameter is frozen or unfrozen on the way.

    Inside `join(divide_by_initial_world_size=False)` what was kept is multiplied with the rest.

    ValueError, on all ranks: a method that needs whole parameters, or unequal nodes, with "by_node".
    """

    def __init__(self, ddp: DistributedDataParallel, method: Method, *, exchange: str = "flat") -> None:
        from hpcdl.call import channel

        if exchange not in EXCHANGES:
            raise ValueError(f"exchange is one of {', '.join(EXCHANGES)}, not {exchange!r}")
        self.method, self._reducer = method, ddp.reducer
        comm: Any = ddp.reducer.comm
        self._inside: MPI.Intracomm | None = None
        if exchange == "by_node":
            nodes = channel(comm).nodes
            if method.needs_whole:
                raise ValueError(f"{method.name} needs whole matrices, by_node leaves each rank a share: take flat")
            if len(set(map(len, nodes))) > 1:
                raise ValueError(f"by_node needs equally many ranks on all nodes, not {[*map(len, nodes)]}: take flat")
            own = next(number for number, node in enumerate(nodes) if comm.rank in node)
            self._inside = comm.Split(own, comm.rank)
            comm = comm.Split(nodes[own].index(comm.rank), comm.rank)
        self.wire = Wire(comm)
        self.look = False
        """Compare the next reduction with the exact sum, which costs a dense all-reduce; on all ranks alike."""
        self._told, self._looked, self._shorten, self._spoilt = Told(), [0.0, 0.0, 0.0], 1.0, False
        self._late_s = 0.0
        ddp.register_comm_hook(self, Compression.reduce)

    # ---- one bucket ----------------------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> Tensor:
        """The hook: replace a bucket's gradients by their sum or mean over the ranks."""
        buffer, all_ranks = bucket.buffer(), self._reducer.comm
        began, waited = perf_counter(), self.wire.seconds
        scale = self._reducer.scaler.get_scale() if self._reducer.scaler else 1.0
        if bucket.index() == 0:
            self._begin(scale)
            began += self._late_s
        if self._spoilt and buffer.is_floating_point():
            for gradient in bucket.gradients():  # not the gaps between them, which stay zeros
                gradient.fill_(math.nan)
            self._end(bucket)
            return buffer
        if not _is_compressed(buffer):
            hpcdl.allreduce(buffer, all_ranks, op="mean" if self._reducer.average else "sum")
            self._end(bucket)
            return buffer
        buffer.mul_(self._shorten / (scale * (all_ranks.size if self._reducer.average else 1)))
        exact, between = None, perf_counter()
        if self.look:
            exact = hpcdl.allreduce(buffer.clone(), all_ranks)
            self._looked[2] += perf_counter() - between
            began += perf_counter() - between  # which is not the compression's
            between = perf_counter()
        if self._inside is None:
            self._between_nodes(list(_whole(bucket)), len(buffer))
        else:
            hpcdl.reduce_scatter(buffer, self._inside)
            share = hpcdl.share(len(buffer), self._inside)
            in_shared_memory = perf_counter() - between
            self._between_nodes(list(_shares(bucket, share)), share.stop - share.start)
            between = perf_counter()
            hpcdl.allgather(buffer, self._inside)
            self.wire.seconds += perf_counter() - between + in_shared_memory
        if exact is not None:
            self._looked[0] += float((buffer - exact).square().sum())
            self._looked[1] += float(exact.square().sum())
        buffer.mul_(scale)
        self._told.seconds += perf_counter() - began
        self._told.exchange_seconds += self.wire.seconds - waited
        self._end(bucket)
        return buffer

    def _between_nodes(self, pieces: list[Piece], n: int) -> None:
        """Have the method reduce so many numbers, and count what is sent: not what travels inside a node."""
        sent = hpcdl.sent_bytes()
        self.method.reduce(pieces, self.wire)
        self._told.sent_bytes += hpcdl.sent_bytes() - sent
        self._told.dense_bytes += 2 * (self.wire.size - 1) / self.wire.size * n * 4

    def _begin(self, scale: float) -> None:
        """All gradients are there, none is reduced yet."""
        self._looked, self._shorten, self._spoilt = [0.0, 0.0, 0.0], 1.0, not self._is_finite()
        if self.method.clip_norm is not None:
            size = self._reducer.comm.size
            flats = [each.flat for each in self._reducer.buckets if _is_compressed(each.flat)]
            lengths = [float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in flats]
            length = math.hypot(*lengths) / (scale * (size if self._reducer.average else 1))
            most = self.method.clip_norm / math.sqrt(size)
            self._shorten = most / length if length > most else 1.0

    def _end(self, bucket: GradBucket) -> None:
        if not bucket.is_last():
            return
        self._told.steps += 1
        if self.look and not self._spoilt:  # else the next one is looked at
            error, norm, self._told.plain_seconds = self._looked
            self._told.error = math.sqrt(error / norm) if norm else 0.0
            self.look = False

    def _is_finite(self) -> bool:
        """Are all gradients so, on all ranks? With a scaler that has been asked already."""
        if self._reducer.scaler is not None:
            return True
        # The sum is the cheapest look; it may overflow where nothing is wrong, and is then looked into.
        flats = [each.flat for each in self._reducer.buckets if each.flat.is_floating_point()]
        bad = any(not math.isfinite(each.sum().item()) and not bool(each.isfinite().all()) for each in flats)
        flag, began = torch.tensor([float(bad)]), perf_counter()
        hpcdl.allreduce(flag, self._reducer.comm, op="max")
        self._late_s = perf_counter() - began
        return not bool(flag)

    # ---- what came of it -----------------------------------------------------------------------------------------

    def told(self) -> Told:
        """What came of it since it was last asked, on this rank."""
        told, self._told = self._told, Told()
        return told

    def residual_norm(self) -> float:
        """The length of what all ranks have not sent yet (a collective call)."""
        squares = sum(float(each.square().sum(dtype=torch.float64)) for each in self.method.residuals())
        total = hpcdl.allreduce(torch.tensor([squares], dtype=torch.float64), self._reducer.comm)
        return math.sqrt(float(total))

    def state_dict(self) -> dict[str, Any]:
        """This rank's own: to be saved by every rank, as `extra` of `save_checkpoint`."""
        return {"method": self.method.name, **self.method.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. ValueError: it is another method's."""
        if state["method"] != self.method.name:
            raise ValueError(f"the state is of {state['method']}, not of {self.method.name}: go on with that one")
        self.method.load_state_dict(state)


def _is_compressed(flat: Tensor) -> bool:
    """What has 16 bits or less already is sent as it is."""
    return flat.is_floating_point() and flat.element_size() >= 4


def _whole(bucket: GradBucket) -> Iterator[Piece]:
    for name, gradient, parameter in zip(bucket.names(), bucket.gradients(), bucket.parameters(), strict=True):
        yield Piece(name, gradient, parameter.ndim > 1)


def _shares(bucket: GradBucket, share: slice) -> Iterator[Piece]:
    """What of each parameter lies in this rank's share of the bucket."""
    flat = bucket.buffer()
    for name, gradient, parameter in zip(bucket.names(), bucket.gradients(), bucket.parameters(), strict=True):
        start = gradient.storage_offset() - flat.storage_offset()
        low, high = max(start, share.start), min(start + gradient.numel(), share.stop)
        if low < high:
            yield Piece(f"{name}[{low - start}:{high - start}]", flat[low:high], parameter.ndim > 1)
