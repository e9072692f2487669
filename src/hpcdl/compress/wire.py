"""What compressed gradients travel by: sums, gathered payloads and exchanged pieces, on one communicator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import hpcdl
from hpcdl.collectives import Program, Round, Send, Span
from hpcdl.collectives.schedule import Copy

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.execute import Plan


class Wire:
    """The collectives of a compressor; all ranks make the same calls in the same order.

    A plan is bound once for each key, shape and type. What `gather` and `swap` give is theirs: the next call with the
    same key writes over it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.seconds = 0.0
        """How long the collectives have taken, with the time that this rank waited for others."""
        self._bound: dict[Hashable, tuple[Tensor, Plan]] = {}

    def sum(self, x: Tensor, algorithm: str = "auto") -> Tensor:
        """Add up in place, densely."""
        self._timed(lambda: hpcdl.allreduce(x, self.comm, algorithm=algorithm))
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest of all ranks, element by element, in place."""
        self._timed(lambda: hpcdl.allreduce(x, self.comm, op="max"))
        return x

    def gather(self, key: Hashable, mine: Tensor) -> Tensor:
        """All ranks' payloads, one a row: equally long on all ranks, of one dimension."""
        rows, plan = self._plan(("gather", key), mine, (self.size, len(mine)), _plan_gather)
        rows[self.rank].copy_(mine)
        self._timed(plan)
        return rows

    def swap(self, key: Hashable, pieces: Tensor) -> Tensor:
        """Row r of `pieces` is for rank r; row r of what comes back is from rank r."""
        both, plan = self._plan(("swap", key), pieces, (2, *pieces.shape), _plan_swap)
        both[0].copy_(pieces)
        both[1, self.rank].copy_(pieces[self.rank])
        self._timed(plan)
        return both[1]

    def _plan(
        self,
        key: Hashable,
        like: Tensor,
        shape: tuple[int, ...],
        make: Callable[[Tensor, MPI.Intracomm], Plan],
    ) -> tuple[Tensor, Plan]:
        whole = (key, shape, like.dtype, like.device)
        if whole not in self._bound:
            buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._bound[whole] = buffer, make(buffer, self.comm)
        return self._bound[whole]

    def _timed(self, call: Callable[[], object]) -> None:
        began = perf_counter()
        call()
        self.seconds += perf_counter() - began

    def close(self) -> None:
        """Free what is bound."""
        for _, plan in self._bound.values():
            plan.close()
        self._bound.clear()


def _plan_gather(rows: Tensor, comm: MPI.Intracomm) -> Plan:
    return hpcdl.plan_allgather(rows, comm)


def _plan_swap(both: Tensor, comm: MPI.Intracomm) -> Plan:
    """One round: each rank's row to its peer, and the peer's in the second half."""
    from hpcdl.buffers import Vector
    from hpcdl.call import channel
    from hpcdl.channel import PLANS, TAGS
    from hpcdl.check import agree
    from hpcdl.execute import Job, Plan, finish
    from hpcdl.record import About

    own, (_, size, each) = channel(comm), both.shape
    call = f"plan_swap of {both.dtype} {size}x{each}"
    check = finish(agree(own, call))
    check.end()

    def row(half: int, rank: int) -> Span:
        start = (half * size + rank) * each
        return Span(start, start + each)

    others = [rank for rank in range(size) if rank != own.rank] if each else []
    steps: Round = (*(Send(peer, row(0, peer)) for peer in others), *(Copy(peer, row(1, peer)) for peer in others))
    program = Program([], Span(0, 0), [steps] if steps else [])
    plan = Plan(own, Job(Vector(both)), program, tag=PLANS + check.number % TAGS)
    plan.about, plan.number = About(call, own.key, both.nbytes, "direct"), check.number
    return plan
