"""Who serves and who works: one call on all ranks, which come to the same verdict before any of them begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch import Tensor, nn

from hpcdl import verdict
from hpcdl.sgd.first import First, Others
from hpcdl.sgd.flat import Flat
from hpcdl.sgd.letters import Box, Line, Parting
from hpcdl.sgd.order import Order
from hpcdl.sgd.server import Passed, Report, Server
from hpcdl.sgd.shard import Shard
from hpcdl.sgd.worker import Loss, Worker
from hpcdl.survive import ending
from hpcdl.survive.pulse import TRUE, setting

if TYPE_CHECKING:
    from hpcdl.sgd.pace import Pace
    from hpcdl.torch.train import Scheduler

PARTING_S = 0.5
"""So long a rank stays where not all can be waited for, that its last words are read before it ends."""


@dataclass(frozen=True)
class Plan:
    """How a training with servers goes; see `parameter_server` and `backup_workers`."""

    servers: int
    order: Callable[[range, bool], Order]
    """For these workers, on the first server or another one."""
    samples: int
    every: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Scheduler | None]
    on_pass: Callable[[Passed], object]
    on_leave: Callable[[int, str], object]
    judge: Callable[[Report], int]
    timeout_s: float
    clip_norm: float | None
    pace: Pace | None
    n_fetch: int = 1
    n_push: int = 1
    by_version: bool = False
    rate: Callable[[int], float] | None = None
    compensate: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def check(self, ranks: int) -> None:
        """ValueError, which says what would be right, if it cannot go so."""
        if not 1 <= self.servers < ranks:
            raise ValueError(
                f"of {ranks} ranks 1 to {ranks - 1} can be servers, so that a worker is left, not {self.servers}"
                if ranks > 1
                else "a server and its workers are ranks of their own: start at least 2, as in mpiexec -n 2"
            )
        for name in ("samples", "every", "n_fetch", "n_push"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is a whole number from 1 upwards, not {value}")
        if not self.timeout_s > 0:
            raise ValueError(f"a worker is given up after more than 0 seconds of silence, not {self.timeout_s}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"gradients are clipped to a length above 0, not {self.clip_norm}")


def play(model: nn.Module, loss: Loss, comm: MPI.Intracomm | None, plan: Plan) -> Report:
    """This rank's part, from the parameters that rank 0 has; what it came to. ValueError on all ranks alike."""
    comm = MPI.COMM_WORLD if comm is None else comm
    role: Callable[[MPI.Intracomm], tuple[Report, Parting]] | None = None
    flat = shape = problem = None
    try:
        plan.check(comm.size)
        flat = Flat(model)
        shape = f"{len(flat)} parameters of {flat.values.dtype}"
        role = _server(plan, flat, comm) if comm.rank < plan.servers else _worker(plan, flat, comm, loss)
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem := verdict.agree(comm, problem) or verdict.difference(comm, "model", shape):
        raise ValueError(problem)
    assert flat is not None and role is not None
    if survives := has_ulfm():  # now an exception ends its rank alone
        ending.opened(flat)
    wire = comm.Dup()  # no letter can meet a message of the caller's
    wire.Bcast(flat.values.view(torch.uint8).numpy(), 0)
    report, parting = role(wire)
    if parting is Parting.WELL:
        wire.Free()
    elif survives:
        ending.lost()
        if parting is Parting.LOST:
            with suppress(MPI.Exception):  # which tells again who was lost
                wire.Agree(0)  # nobody ends while another still waits for its last word
        else:
            time.sleep(PARTING_S)
    if survives:
        ending.closed(flat)
    return report


def _server(plan: Plan, flat: Flat, comm: MPI.Intracomm) -> Callable[[MPI.Intracomm], tuple[Report, Parting]]:
    """What a server does, once all may begin."""
    slices, workers, first = flat.slices(plan.servers), range(plan.servers, comm.size), comm.rank == 0
    where, dtype = slices[comm.rank], flat.values.dtype
    order = plan.order(workers, first)
    shard = Shard(
        flat.pieces(where),
        plan.optimizer,
        rate=plan.rate,
        compensate=plan.compensate,
        scheduler=plan.scheduler,
    )

    def serve(wire: MPI.Intracomm) -> tuple[Report, Parting]:
        shard.values.copy_(flat.values[where])
        length = where.stop - where.start
        boxes = [Box(wire, worker, length, dtype) for worker in workers]
        if not first:
            server = Server(shard, order, boxes, timeout_s=plan.timeout_s, first=Box(wire, 0, length, dtype))
            return _serve(server), server.end.parting
        server = Server(shard, order, boxes, timeout_s=plan.timeout_s)
        others = [Box(wire, rank, other.stop - other.start, dtype) for rank, other in enumerate(slices) if rank]
        told = First(
            server,
            flat,
            Others(others),
            samples=plan.samples,
            every=plan.every,
            on_pass=plan.on_pass,
            on_leave=plan.on_leave,
        )
        return told.run(plan.judge), server.end.parting

    return serve


def _serve(server: Server) -> Report:
    """Serve until the first server says that it is enough."""
    began, cpu_s = perf_counter(), process_time()
    server.until(lambda: server.released)
    server.close()
    return server.report(perf_counter() - began, process_time() - cpu_s)._replace(status=server.end.status)


def _worker(
    plan: Plan, flat: Flat, comm: MPI.Intracomm, loss: Loss
) -> Callable[[MPI.Intracomm], tuple[Report, Parting]]:
    """What a worker does, once all may begin."""
    slices, dtype = flat.slices(plan.servers), flat.values.dtype

    def work(wire: MPI.Intracomm) -> tuple[Report, Parting]:
        began, cpu_s = perf_counter(), process_time()
        worker = Worker(
            flat,
            [(Line(wire, server, where.stop - where.start, dtype), where) for server, where in enumerate(slices)],
            n_fetch=plan.n_fetch,
            n_push=plan.n_push,
            by_version=plan.by_version,
            clip_norm=plan.clip_norm,
            pace=plan.pace,
            rank=wire.rank,
        )
        end = worker.work(loss)
        times = perf_counter() - began, process_time() - cpu_s
        return Report(worker.steps, worker.samples, *times, status=end.status), end.parting

    return work


def has_ulfm() -> bool:
    """Can the ranks go on where one is lost?"""
    return MPI.get_vendor()[0] == "Open MPI" and setting("enable").lower() in TRUE
