"""The backend hpcdl of torch.distributed beside gloo: mpiexec -n 2 python benchmarks/torch_backend.py

In the same ranks take turns: all_reduce over either, by size, called and as works; and a training step of a network of
10 million parameters without synchronisation, under torch's DistributedDataParallel over gloo, and over hpcdl. Two
launches differ by more than what is to be measured. `python benchmarks/standard.py --only backend` makes the tables.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcdl.torch  # noqa: F401
from hpcdl.cli.bench import surroundings

SIZES = (64, 1 << 10, 1 << 14, *(1 << power for power in range(16, 27, 2)))
BATCH, WIDTHS = 64, (784, 2048, 2048, 2048, 10)


def network() -> nn.Module:
    """10 million parameters in 4 layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def in_turns(comm: MPI.Intracomm, ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each way in each round, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-3, rounds):
        # The same on all ranks, and no way always behind the same other, whose threads may still be at work.
        for name in random.Random(number).sample(list(ways), len(ways)):
            comm.Barrier()
            began = perf_counter()
            ways[name]()
            took_us = comm.allreduce(1e6 * (perf_counter() - began), op=MPI.MAX)
            if number >= 0:
                times[name].append(took_us)
    return times


def all_reduces(comm: MPI.Intracomm, groups: dict[str, Any], repeats: int, largest: int) -> list[dict[str, Any]]:
    """The time of every round of every size, over either group, called and as a work."""
    rows = []
    for nbytes in (nbytes for nbytes in SIZES if nbytes <= largest):
        # Zeros stay zeros, however often they are added up.
        tensors = {name: torch.zeros(nbytes // 4) for name in groups}
        ways: dict[str, Callable[[], object]] = {}
        for name, group in groups.items():
            x = tensors[name]
            ways[name] = lambda x=x, group=group: dist.all_reduce(x, group=group)
            ways[f"{name}, a work"] = lambda x=x, group=group: dist.all_reduce(x, group=group, async_op=True).wait()
        rounds = max(10, min(100, (64 << 20) // nbytes))
        found = [in_turns(comm, ways, rounds) for _ in range(repeats)]
        for name in ways:
            times = [each[name] for each in found]
            rows.append({"size": nbytes, "model": "", "algorithm": name, "repeats_us": times})
    return rows


def steps(comm: MPI.Intracomm, groups: dict[str, Any], rounds: int, repeats: int) -> list[dict[str, Any]]:
    """The time of every training step, without synchronisation and under torch's DDP over either group."""
    torch.manual_seed(0)
    model = network()
    images = torch.rand(BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(comm.rank))
    labels = torch.arange(BATCH) % 10
    models = {"local": copy.deepcopy(model)}
    for name, group in groups.items():
        models[name] = DistributedDataParallel(copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True)

    def stepper(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    ways: dict[str, Callable[[], object]] = {name: stepper(each) for name, each in models.items()}
    found = [in_turns(comm, ways, rounds) for _ in range(repeats)]
    for one, other in zip(models["hpcdl"].parameters(), models["gloo"].parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    size = sum(each.numel() for each in model.parameters())
    return [
        {"size": size, "model": "mlp", "algorithm": name, "repeats_us": [each[name] for each in found]} for name in ways
    ]


def main() -> None:
    """Measure; rank 0 writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each in one repeat (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=SIZES[-1], metavar="BYTES", help="to all-reduce (%(default)s)")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    folder = comm.bcast(tempfile.mkdtemp(prefix="hpcdl-bench-") if comm.rank == 0 else None)
    store = dist.FileStore(os.path.join(folder, "store"), comm.size)
    dist.init_process_group("hpcdl", store=store, rank=comm.rank, world_size=comm.size, timeout=timedelta(seconds=300))
    groups = {"hpcdl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = all_reduces(comm, groups, options.repeats, options.largest)
    rows += steps(comm, groups, options.rounds, options.repeats)
    text = json.dumps({"header": surroundings(comm), "results": rows})
    if comm.rank == 0:
        if options.output:
            Path(options.output).write_text(text)
        else:
            print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
