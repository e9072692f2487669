"""Every mode of hpcdl train on 4 ranks, without a slow rank and with one that is 5 times as slow: make sgd-variants

An MLP 784-256-10 on Fashion-MNIST (MNIST-5k where that is not installed). Each step of a rank lasts at least 20 ms, of
which it sleeps what it has not computed, so that 4 ranks find room on 2 cores; the slow rank's last 100 ms. Writes
sgd-variants.md and the numbers behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from hpcdl import data

RANKS, SLOW_RANK, SLOW_FACTOR = 4, 2, 5
STEP_MS = 20
EPOCHS, BATCH = 6, 128
TARGETS = {"fashion": 0.84, "mnist5k": 0.9}
KEPT, POINTS = 0.6, 1.5
"""What asynchronous and backup-worker modes must keep of their speed, and how far accuracies may lie apart."""
ASYNCHRONOUS = ("parameter-server", "backup-workers")


class Variant(NamedTuple):
    """A mode as it is run."""

    name: str
    words: str
    note: str


VARIANTS = (
    Variant("sync", "--mode sync", "all-reduce of every gradient"),
    Variant("parameter-server", "--mode parameter-server", "1 server, 3 workers, no momentum"),
    Variant("backup-workers", "--mode backup-workers --backups 1", "1 server, the first 2 gradients of 3 workers"),
    Variant("elastic", "--mode elastic --every 4", "EAMSGD, a centre every 4 steps"),
    Variant("gossip", "--mode gossip", "pairs by chance, every step"),
    Variant("local", "--mode local --every 8", "the mean every 8 steps"),
    Variant(
        "federated",
        "--mode federated --clients 16 --fraction 0.5 --skew labels:1",
        "8 of 16 clients a round, labels skewed",
    ),
    Variant("pipeline", "--mode pipeline --stages 2 --micro-batches 4", "2 replicas x 2 stages, 1F1B"),
)

COUNTED = """
import sys, time
from mpi4py import MPI
from hpcdl.cli.main import main
began = time.perf_counter(), time.process_time()
status = main(["train", *sys.argv[1:]])
busy = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
everybody = MPI.COMM_WORLD.gather(busy)
if MPI.COMM_WORLD.rank == 0:
    print("busy", *everybody)
sys.exit(status)
"""


class Outcome(NamedTuple):
    """What one training came to."""

    accuracies: list[float]  # after each epoch, in percent
    per_s: float  # images, over all epochs
    seconds: list[float]  # of training, up to the end of each epoch
    epochs: list[int]  # their numbers: a round of federated averaging may be more than one
    busy: list[float]  # the share of the time in which each rank has computed
    header: str


def train(variant: Variant, slow: bool, source: str, epochs: int) -> Outcome:
    """Run hpcdl train once."""
    words = [*variant.words.split(), "--data", source, "--epochs", str(epochs), "--batch-size", str(BATCH)]
    words += ["--step-time", f"{STEP_MS}ms"]
    if slow:
        words += ["--slow-rank", str(SLOW_RANK), "--slow-factor", str(SLOW_FACTOR)]
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(COUNTED)
        script.flush()
        launcher = [Path(sys.executable).parent / "mpiexec", "-n", str(RANKS), sys.executable, script.name]
        done = subprocess.run(
            [*launcher, *words, "--log-dir", folder],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"hpcdl train {' '.join(words)} failed: {done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "epoch"]
    images = len(data.load(source).train.labels)
    seconds, before = [0.0], 0
    for line in told:
        seconds.append(seconds[-1] + (line["epoch"] - before) * images / line["images_per_s"])
        before = line["epoch"]
    busy = next(line for line in done.stdout.splitlines() if line.startswith("busy "))
    return Outcome(
        accuracies=[round(100 * line["accuracy"], 2) for line in told],
        per_s=before * images / seconds[-1],
        seconds=seconds[1:],
        epochs=[line["epoch"] for line in told],
        busy=[float(word) for word in busy.split()[1:]],
        header=done.stdout.splitlines()[0],
    )


# ---- the report ------------------------------------------------------------------------------------------------------


def to_target(outcome: dict[str, Any], target: float) -> tuple[int, float] | None:
    """Epochs and seconds up to the target accuracy."""
    for number, seconds, accuracy in zip(outcome["epochs"], outcome["seconds"], outcome["accuracies"], strict=True):
        if accuracy >= 100 * target:
            return number, seconds
    return None


def bars(numbers: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """What was to be reached, what was, and whether it was."""
    runs = numbers["runs"]
    kept = {name: pair["slow"]["per_s"] / pair["even"]["per_s"] for name, pair in runs.items()}
    found = [
        (f"sync falls to about a fifth (15 to 30 %) with a rank {SLOW_FACTOR} x slower", kept["sync"], 0.15, 0.3),
        *((f"{name} keeps {KEPT:.0%} or more", kept[name], KEPT, 9.0) for name in ASYNCHRONOUS if name in kept),
    ]
    rows = [(what, f"{share:.0%}", least <= share <= most) for what, share, least, most in found]
    if "parameter-server" in runs:
        busy = runs["parameter-server"]["slow"]["busy"][0]
        rows.append(("the server waits asleep: it computes for less than half of the time", f"{busy:.0%}", busy < 0.5))
    best = runs["sync"]["even"]["accuracies"][-1]
    ends = [(name, how, outcome["accuracies"][-1]) for name, pair in runs.items() for how, outcome in pair.items()]
    name, how, worst = min(ends, key=lambda end: end[2])
    found_worst = f"the worst is {name} ({how}) with {worst:.2f} against {best:.2f} %"
    rows.append((f"every accuracy within {POINTS} points of sync's", found_worst, worst >= best - POINTS))
    return rows


def row(outcome: dict[str, Any], target: float) -> list[str]:
    """Its speed, the epochs and seconds to the target, and the accuracy at the end."""
    reached = to_target(outcome, target)
    way = ["-", "-"] if reached is None else [str(reached[0]), f"{reached[1]:.1f}"]
    return [f"{outcome['per_s']:.0f}", *way, f"{outcome['accuracies'][-1]:.2f}"]


def table(names: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def report(numbers: dict[str, Any]) -> str:
    """The page."""
    target, runs = numbers["target"], numbers["runs"]
    notes = {variant.name: variant.note for variant in VARIANTS}
    even = [[f"{name}: {notes[name]}", *row(pair["even"], target)] for name, pair in runs.items()]
    slow = []
    for name, pair in runs.items():
        speed, *rest = row(pair["slow"], target)
        kept = f"{pair['slow']['per_s'] / pair['even']['per_s']:.0%}"
        busy = " ".join(f"{share:.0%}" for share in pair["slow"]["busy"])
        slow.append([name, speed, kept, *rest, busy])
    checks = [[what, found, "yes" if reached else "**no**"] for what, found, reached in bars(numbers)]
    headers = "\n".join(f"- {pair['slow']['header']}" for pair in runs.values())
    names = ["images/s", "epochs", "seconds", "accuracy"]
    return f"""# Ways to train on {RANKS} ranks, and a rank that is {SLOW_FACTOR} times as slow

Written by `make sgd-variants` on {numbers["date"]} in {numbers["minutes"]:.0f} minutes: {numbers["machine"]}. Data:
{numbers["data"]}; {numbers["epochs"]} epochs, batches of {BATCH} a rank. A step of a rank lasts {STEP_MS} ms or more,
of the slow one {STEP_MS * SLOW_FACTOR} ms; ranks sleep what they do not compute. `epochs` and `seconds` are what it
took to an accuracy of {target:.0%}: looked at after each epoch, and of training alone. All is of one run with one seed.

All ranks alike:

{table(["", *names], even)}

Rank {SLOW_RANK} is {SLOW_FACTOR} times as slow. `kept` is the share of the speed above; `busy` the share of the time in
which each rank computed, from its start to its end; rank 0 is the server where there is one:

{table(["", "images/s", "kept", *names[1:], "busy"], slow)}

With one server of four ranks {(2 + 1 / SLOW_FACTOR) / 3:.0%} is the ideal: of three workers two are as fast as before.
Ranks of elastic, gossip, local and federated training have their samples dealt out beforehand, so that the slow one
holds up all at the end of every epoch or round, as it does in every step of sync and pipeline. Only a server gives more
to do to who is fast, or goes on without who is late.

{table(["what was to be reached", "found", "reached"], checks)}

The slow runs, each as it says itself:

{headers}
"""


def main() -> None:
    """Train, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=tuple(TARGETS), help="fashion if it is installed, else mnist5k")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--only", help="modes, with commas between")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="the folder to write to")
    parser.add_argument("--report", action="store_true", help="write the report anew from sgd-variants.json")
    arguments = parser.parse_args()
    file = arguments.output / "sgd-variants.json"
    if not arguments.report:
        source = arguments.data or ("fashion" if data.FASHION.is_dir() else "mnist5k")
        wanted = arguments.only.split(",") if arguments.only else [variant.name for variant in VARIANTS]
        file.write_text(json.dumps(measured(source, arguments.epochs, wanted), indent=1) + "\n")
    (arguments.output / "sgd-variants.md").write_text(report(json.loads(file.read_text())))


def measured(source: str, epochs: int, wanted: list[str]) -> dict[str, Any]:
    """All trainings, as what JSON can hold."""
    began, runs = time.perf_counter(), dict[str, dict[str, Any]]()
    for variant in VARIANTS:
        if variant.name not in wanted:
            continue
        for how in ("even", "slow"):
            outcome = train(variant, how == "slow", source, epochs)
            runs.setdefault(variant.name, {})[how] = outcome._asdict()
            spent = time.perf_counter() - began
            print(f"{spent:6.0f} s  {variant.name}, {how}: {outcome.per_s:.0f}/s, {outcome.accuracies}", flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    images = data.load(source)
    return {
        "machine": f"{cores} cores, Python {platform.python_version()}, torch {version('torch')}",
        "date": time.strftime("%Y-%m-%d"),
        "data": f"{images.name} ({images.counts})",
        "epochs": epochs,
        "target": TARGETS[source],
        "minutes": (time.perf_counter() - began) / 60,
        "runs": runs,
    }


if __name__ == "__main__":
    main()
