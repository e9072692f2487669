"""What a step of LARS costs beside one of torch's SGD: python benchmarks/lars_step.py

Both have momentum and take turns, each with parameters of its own. Only the optimiser's step is measured: the gradients
are the same ones each time.
"""

from __future__ import annotations

import argparse
import copy
from itertools import pairwise
from os import cpu_count, getloadavg
from platform import machine
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from hpcdl.torch.lars import LARS
from hpcdl.torch.models import transformer


def mlp() -> nn.Module:
    """10 million parameters in 8 tensors: 784-2048-2048-2048-10."""
    return nn.Sequential(*(nn.Linear(*widths) for widths in pairwise((784, 2048, 2048, 2048, 10))))


def cnn() -> nn.Module:
    """200,000 parameters in 120 tensors."""
    return nn.Sequential(*(nn.Conv2d(19, 19, 3) for _ in range(60)))


NETWORKS = {"mlp": mlp, "cnn": cnn, "transformer": lambda: transformer(63, 64)}


def made(network: nn.Module, kind: str, weight_decay: float) -> Optimizer:
    """An optimiser of a copy of the network, with gradients."""
    mine = copy.deepcopy(network)
    for parameter in mine.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    if kind == "LARS":
        return LARS(mine.parameters(), lr=1e-3, momentum=0.9, weight_decay=weight_decay)
    return SGD(mine.parameters(), lr=1e-3, momentum=0.9, weight_decay=weight_decay, foreach=True)


def measure(optimisers: dict[str, Optimizer], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a step, taking turns for so long."""
    times: dict[str, list[float]] = {name: [] for name in optimisers}
    for optimiser in [*optimisers.values()] * 3:
        optimiser.step()
    end = perf_counter() + seconds
    while perf_counter() < end:
        for name in [*times] if len(times["LARS"]) % 2 else [*times][::-1]:
            began = perf_counter()
            optimisers[name].step()
            times[name].append(1e3 * (perf_counter() - began))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for all measurements (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch (1 2)")
    options = parser.parse_args()
    cases = [(threads, name, decay) for threads in options.threads for name in NETWORKS for decay in (0.0, 1e-4)]
    print(f"torch {torch.__version__}, {cpu_count()} {machine()} cores, load {getloadavg()[0]:.1f} before")
    print("ms a step, median (best) of interleaved rounds after 3 to warm up; ratio of the medians, of the best\n")
    print("| network | parameters | tensors | threads | weight decay | LARS | SGD (foreach) | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for threads, name, decay in cases:
        torch.set_num_threads(threads)
        network = NETWORKS[name]()
        sizes = [each.numel() for each in network.parameters()]
        times = measure({kind: made(network, kind, decay) for kind in ("LARS", "SGD")}, options.seconds / len(cases))
        ours, theirs = times["LARS"], times["SGD"]
        print(
            f"| {name} | {sum(sizes):,} | {len(sizes)} | {threads} | {decay:g} "
            f"| {median(ours):.2f} ({min(ours):.2f}) | {median(theirs):.2f} ({min(theirs):.2f}) "
            f"| {median(ours) / median(theirs):.2f}, {min(ours) / min(theirs):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
