"""What synchronisation adds to a training step: mpiexec -n 2 python benchmarks/step_overhead.py

The same step without synchronisation, under torch's DistributedDataParallel over gloo and under ours take turns in the
same ranks: two launches differ by more than what is to be measured.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from mpi4py import MPI
from torch import Tensor, nn

from hpcdl.cli.bench import gloo, surroundings
from hpcdl.torch import DistributedDataParallel

BATCH, IMAGE = 64, 28


def mlp() -> nn.Module:
    """10 million parameters in 4 layers: 784-2048-2048-2048-10."""
    widths = (IMAGE * IMAGE, 2048, 2048, 2048, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """60 small convolutions with 200,000 parameters in 120 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(1, 19, 7, stride=7), nn.ReLU()]
    for _ in range(59):
        layers += [nn.Conv2d(19, 19, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))


MODELS = {"mlp": mlp, "cnn": cnn}


def stepper(model: nn.Module, images: Tensor, labels: Tensor, momentum: float = 0.9) -> Callable[[], None]:
    """One step of SGD with momentum."""
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum)

    def step() -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()

    return step


def main() -> None:
    """Measure; rank 0 writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each in one repeat (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    comm, rows = MPI.COMM_WORLD, []
    torch.set_num_threads(1)
    images = torch.rand(BATCH, 1, IMAGE, IMAGE, generator=torch.Generator().manual_seed(comm.rank))
    labels = torch.arange(BATCH) % 10
    with gloo(comm, argparse.Namespace(op="sum", dtype="float32")):
        for name, make in MODELS.items():
            torch.manual_seed(0)
            model = make()
            model(images)
            wrapped = {
                "local": copy.deepcopy(model),
                "gloo": nn.parallel.DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True),
                "ours": DistributedDataParallel(copy.deepcopy(model), comm),
            }
            steps = {who: stepper(each, images, labels) for who, each in wrapped.items()}
            repeats: dict[str, list[list[float]]] = {who: [] for who in steps}
            for step in [*steps.values()] * 5:
                step()
            for _ in range(options.repeats):
                rounds: dict[str, list[float]] = {who: [] for who in steps}
                for number in range(options.rounds):
                    order = list(steps)
                    for who in order[number % 3 :] + order[: number % 3]:
                        comm.Barrier()
                        began = perf_counter()
                        steps[who]()
                        rounds[who].append(comm.allreduce(1e6 * (perf_counter() - began), op=MPI.MAX))
                for who, times in rounds.items():
                    repeats[who].append(times)
            ours, theirs = (list(wrapped[who].parameters()) for who in ("ours", "gloo"))
            wrong = sum(not torch.allclose(*pair, rtol=1e-3, atol=1e-5) for pair in zip(ours, theirs, strict=True))
            size = sum(each.numel() for each in ours)
            for who, times in repeats.items():
                rows.append({"size": size, "model": name, "algorithm": who, "repeats_us": times, "wrong": wrong})
    found = {"header": surroundings(comm), "results": rows}
    if comm.rank == 0:
        text = json.dumps(found)
        if options.output:
            Path(options.output).write_text(text)
        else:
            print(text)


if __name__ == "__main__":
    main()
