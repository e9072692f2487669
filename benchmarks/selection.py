"""What it takes to find the largest elements of a gradient, by a sample and by sorting: python benchmarks/selection.py

Both take turns on the same vector, of normally distributed numbers unless it says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from os import cpu_count, getloadavg
from platform import machine
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from hpcdl.compress.sparse import select


def normal(n: int) -> Tensor:
    """As one layer's gradients are, roughly."""
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def heavy(n: int) -> Tensor:
    """A few elements are far larger than the others."""
    return normal(n).pow_(5)


VECTORS: dict[str, Callable[[int], Tensor]] = {"normal": normal, "normal to the 5th": heavy}


def measure(x: Tensor, k: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds a call, taking turns for so long."""
    ways: dict[str, Callable[[], object]] = {"sample": lambda: select(x, k), "topk": lambda: x.abs().topk(k)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    end = perf_counter() + seconds
    while perf_counter() < end:
        for name, way in ways.items():
            began = perf_counter()
            way()
            times[name].append(1e3 * (perf_counter() - began))
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="for all measurements (%(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch (1 2)")
    parser.add_argument("--elements", type=int, default=10_000_000, help="of the vector (%(default)s)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01], help="to be found (0.001 0.01)")
    options = parser.parse_args()
    cases = [(threads, name, each) for threads in options.threads for name in VECTORS for each in options.densities]
    print(f"torch {torch.__version__}, {cpu_count()} {machine()} cores, load {getloadavg()[0]:.1f} before")
    print(f"{options.elements:,} elements; ms a call, median (best) of interleaved rounds after one to warm up\n")
    print("| elements are | sought | found | threads | sample | abs, topk | ratio of the medians, of the best |")
    print("|---|---|---|---|---|---|---|")
    for threads, name, density in cases:
        torch.set_num_threads(threads)
        x, k = VECTORS[name](options.elements), round(density * options.elements)
        times = measure(x, k, options.seconds / len(cases))
        ours, theirs = times["sample"], times["topk"]
        print(
            f"| {name} | {density:.1%} | {len(select(x, k)) / len(x):.2%} | {threads} "
            f"| {median(ours):.1f} ({min(ours):.1f}) | {median(theirs):.1f} ({min(theirs):.1f}) "
            f"| {median(ours) / median(theirs):.2f}, {min(ours) / min(theirs):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
