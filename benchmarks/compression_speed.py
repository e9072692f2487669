"""What compression does to a training step: mpiexec -n 4 python benchmarks/compression_speed.py

A network of 10 million parameters, 784-2048-2048-2048-10, takes the same step with each method in turn, in the same
ranks. On a network that is slow it pays, in the memory of a node it does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from step_overhead import IMAGE, mlp, stepper  # beside this file

import hpcdl.torch
from hpcdl.call import channel
from hpcdl.cli.bench import surroundings
from hpcdl.compress import DGC, Compression, Half, Method, OneBit, PowerSGD, TopK
from hpcdl.compress.wire import Wire
from hpcdl.torch import DistributedDataParallel

METHODS: dict[str, Callable[[], Method]] = {
    "bf16": lambda: Half(torch.bfloat16),
    "onebit": OneBit,
    "powersgd": PowerSGD,
    "topk": TopK,
    # The density as it is after the warm-up.
    "dgc": lambda: DGC(warmup_epochs=0),
}
DENSE = "ring"
AUTO = "auto"
"""On one node: in the memory that the ranks share."""


class Paced(Wire):
    """Has the ranks begin an exchange together when asked to, so that its time has no waiting for late ranks in it."""

    paced, alone = False, 0.0

    def _timed(self, call: Callable[[], object]) -> None:
        if self.paced:
            self.comm.Barrier()
        began = perf_counter()
        super()._timed(call)
        self.alone += perf_counter() - began


class Way(NamedTuple):
    """One way to add up gradients."""

    step: Callable[[], None]
    compression: Compression | None


def way(make: Callable[[], Method] | None, comm: MPI.Intracomm, batch: int, algorithm: str = DENSE) -> Way:
    """With a network, an optimiser and samples of its own."""
    torch.manual_seed(0)
    # What is compressed is reduced behind backward, so one bucket has the fewest messages.
    options: dict[str, Any] = {"bucket_cap_mb": 64, "first_bucket_mb": 64} if make else {"algorithm": algorithm}
    model = DistributedDataParallel(mlp(), comm, **options)
    compression = None
    if make:
        compression = Compression(model, make())
        compression.wire = Paced(compression.wire.comm)
    random = torch.Generator().manual_seed(comm.rank)
    images = torch.rand(batch, 1, IMAGE, IMAGE, generator=random)
    momentum = 0.0 if compression and compression.method.name == "dgc" else 0.9
    return Way(stepper(model, images, torch.arange(batch) % 10, momentum), compression)


def measure(comm: MPI.Intracomm, batch: int, seconds: float) -> dict[str, Any]:
    """All ways in turn, for about so long; times in seconds, of the last rank, bytes of all ranks on average."""
    dense = (DENSE, AUTO) if len(channel(comm).nodes) == 1 else (DENSE,)
    ways = {name: way(None, comm, batch, name) for name in dense}
    ways |= {name: way(make, comm, batch) for name, make in METHODS.items()}
    found: dict[str, Any] = {name: {"step_s": [], "exchange_s": [], "compressing_s": []} for name in ways}
    whole = hpcdl.torch.zeros(sum(each.numel() for each in mlp().parameters()), comm=comm)
    flag = torch.zeros(1)

    def alone(call: Callable[[], object]) -> float:
        comm.Barrier()
        began = perf_counter()
        call()
        return slowest(perf_counter() - began)

    def slowest(value: float) -> float:
        return float(comm.allreduce(value, op=MPI.MAX))

    for each in ways.values():
        each.step()
    names, rounds, end = list(ways), 0, perf_counter() + seconds
    while comm.bcast(rounds < 2 or perf_counter() < end):
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            one, to = ways[name], found[name]
            told = one.compression
            if told is None:
                to["exchange_s"].append(alone(partial(hpcdl.allreduce, whole, comm, algorithm=name)))
                to["step_s"].append(alone(one.step))
                continue
            wire: Any = told.wire
            wire.paced, wire.alone = True, 0.0
            one.step()
            # Ahead of each reduction ranks ask each other whether all gradients are finite.
            to["exchange_s"].append(slowest(wire.alone) + alone(lambda: hpcdl.allreduce(flag, comm, op="max")))
            wire.paced = False
            told.told()
            to["step_s"].append(alone(one.step))
            news = told.told()
            to["compressing_s"].append(slowest(news.seconds - news.exchange_seconds))
            to["sent_bytes"] = comm.allreduce(news.sent_bytes) / comm.size
            to["dense_bytes"] = news.dense_bytes
        rounds += 1
    return found


def show(found: dict[str, Any]) -> str:
    """A table, of medians."""
    lines = ["method     step ms  exchange ms  compressing ms   ratio"]
    for name, each in found.items():
        step, exchange, compressing = (
            1e3 * median(each[what]) if each[what] else 0.0 for what in ("step_s", "exchange_s", "compressing_s")
        )
        ratio = each["dense_bytes"] / each["sent_bytes"] if each.get("sent_bytes") else 1.0
        lines.append(f"{name:<9} {step:8.1f}  {exchange:11.1f}  {compressing:14.1f}  {ratio:6.1f}")
    return "\n".join(lines)


def main() -> None:
    """Measure; rank 0 writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="images of a rank in a step (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30, help="for all, two rounds at least (%(default)s)")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    found = {
        "header": surroundings(comm),
        "batch": options.batch,
        "ways": measure(comm, options.batch, options.seconds),
    }
    if comm.rank == 0:
        print(show(found["ways"]), flush=True)
        if options.output:
            Path(options.output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
