"""Large batches, LARS, growing batches, cyclical rates and 16 bits on one small network: make large-batch

An MLP 784-128-10 on Fashion-MNIST (MNIST-5k where that is not installed), 25 epochs, each training in a process of its
own on one core. Rates are chosen on a sixth of the training images that is held out; then all of them are trained on,
and the test images are looked at once. Writes large-batch.md, its plots and the numbers behind them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hpcdl import data

EPOCHS, HIDDEN, MOMENTUM = 25, 128, 0.9
WARMUP = 5.0
"""Epochs, as by Goyal et al. 2017."""
SEEDS = (0, 1, 2)
HELD_OUT = 1 / 6
GROWTH_FACTOR, MILESTONES = 5, (8, 15, 20)
"""Where the rate falls or the batch grows: about a third, 60 % and 80 % of the epochs, by 5 (Smith et al. 2017)."""
CYCLE_EPOCHS = (5, 10, 15)
FP16_BATCH = 2048
SGD_RATES = {128: 0.025, 1024: 0.1, 8192: 0.2, 16384: 0.2}
LARS_RATES = {128: 2.5, 1024: 20.0, 8192: 80.0, 16384: 120.0}
"""Where the search for a rate begins, found by hand."""


@dataclass(frozen=True)
class Run:
    """One training."""

    kind: str = "sgd"
    batch: int = 128
    lr: float = 0.05
    schedule: str = "polynomial"
    warmup: float = 0.0
    exclude: float | None = None  # LARS: of the rate, for biases
    grow: bool = False
    precision: str = "fp32"
    epochs: int = EPOCHS
    seed: int = 0
    tuning: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    accuracies: list[float]  # after each epoch, in percent; fewer if it diverged
    losses: list[float]
    updates: int
    seconds: float
    skipped: int = 0

    @property
    def accuracy(self) -> float:
        """At the end; 10 % is chance, which is what a diverged network comes to."""
        return self.accuracies[-1] if self.accuracies else 10.0


@dataclass(frozen=True)
class Plan:
    """What is tried, which depends on how many images there are."""

    batches: tuple[int, ...]
    large: int  # the batch of the main comparison
    limit: int  # of a growing batch: a tenth of the images


def plan_for(images: int) -> Plan:
    """The global batches from 128 to 16,384, as far as an epoch has three of them."""
    batches = tuple(batch for batch in LARS_RATES if batch <= images / 3)
    return Plan(batches, max(batch for batch in batches if batch <= 8192), images // 10)


# ---- one training ----------------------------------------------------------------------------------------------------


def trained(run: Run, source: str | None) -> Outcome:
    """Train once, in this process, on one core."""
    import torch
    from mpi4py import MPI

    from hpcdl.torch.growth import BatchGrowth
    from hpcdl.torch.models import mlp
    from hpcdl.torch.recipe import Schedule, optimizer, scheduler
    from hpcdl.torch.tasks import image_task
    from hpcdl.torch.train import Trainer

    torch.set_num_threads(1)
    images = data.load(source)
    if run.tuning:
        images = data.ImageSet(images.name, *data.hold_out(images.train, HELD_OUT))
    task = image_task(images)
    torch.manual_seed(run.seed)
    model = mlp(*task.shape, hidden=HIDDEN)
    exclude_lr = None if run.exclude is None else run.exclude * run.lr
    chosen = optimizer(run.kind, model, lr=run.lr, momentum=MOMENTUM, exclude_lr=exclude_lr)
    growth = BatchGrowth(run.batch, MILESTONES, factor=GROWTH_FACTOR, limit=max(run.batch, task.train_count // 10))
    trainer = Trainer(
        task,
        model,
        chosen,
        MPI.COMM_SELF,
        batch_size=run.batch,
        seed=run.seed,
        growth=growth if run.grow else None,
        most=2048 if run.grow else None,
        precision=run.precision,
        overlap=False,
    )
    # torch's own names; cycles and steps need no warm-up.
    schedule = Schedule(
        run.schedule,
        milestones=MILESTONES,
        gamma=1 / GROWTH_FACTOR,
        warmup_epochs=run.warmup,
        start_factor=min(1.0, 128 / run.batch),
    )
    trainer.scheduler = scheduler(schedule, chosen, epochs=run.epochs, updates=trainer.updates, growth=trainer.growth)
    began, accuracies, losses, skipped = time.perf_counter(), [], [], 0
    for epoch in trainer.train(run.epochs):
        if not math.isfinite(epoch.loss + epoch.test_loss):
            accuracies.append(10.0)
            break
        accuracies.append(round(100 * epoch.accuracy, 2))
        losses.append(epoch.loss)
        skipped += epoch.skipped
    return Outcome(accuracies, losses, trainer.steps, time.perf_counter() - began, skipped)


# ---- many trainings --------------------------------------------------------------------------------------------------


class Farm:
    """Trains side by side, one training to a core, and remembers what came of each."""

    def __init__(self, source: str | None, workers: int) -> None:
        self._source = source
        # Fresh processes: MPI must not be there before a fork.
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.outcomes: dict[Run, Outcome] = {}
        self._began = time.perf_counter()

    def train(self, runs: Iterable[Run]) -> None:
        """Those that have not been, the longest first."""
        wanted = [run for run in dict.fromkeys(runs) if run not in self.outcomes]
        # A small batch takes more steps, and 16 bits take longer on most CPUs.
        wanted.sort(key=lambda run: (run.precision == "fp32", run.batch * (1 + run.grow), -run.epochs))
        futures = {self._pool.submit(trained, run, self._source): run for run in wanted}
        for done in as_completed(futures):
            run, outcome = futures[done], done.result()
            self.outcomes[run] = outcome
            elapsed = time.perf_counter() - self._began
            print(f"{elapsed:6.0f} s  {outcome.accuracy:5.2f} %  {show(run)}", flush=True)

    def best(self, runs: Sequence[Run]) -> Run:
        """The one with the highest accuracy, of those that have been trained."""
        return max((run for run in runs if run in self.outcomes), key=lambda run: self.outcomes[run].accuracy)


def show(run: Run) -> str:
    """What differs from the usual."""
    usual = Run()
    return " ".join(f"{name}={value}" for name, value in asdict(run).items() if value != getattr(usual, name))


def rates(first: Run) -> list[Run]:
    """This rate and twice it."""
    return [replace(first, lr=first.lr * factor) for factor in (1, 2)]


def further(runs: list[Run], best: Run) -> None:
    """Go on behind the better one of the ends."""
    if best.lr == runs[0].lr:
        runs.insert(0, replace(best, lr=best.lr / 2))
    else:
        runs.append(replace(best, lr=best.lr * 2))


def study(farm: Farm, plan: Plan) -> dict[str, Any]:
    """All trainings; which ones belong to which question."""
    small, large = plan.batches[0], plan.large
    # ---- rates, on held-out training images ----
    tried: dict[str, dict[int, list[Run]]] = {"SGD": {}, "SGD with warm-up": {}, "LARS": {}}
    for batch in plan.batches:
        plain = Run(batch=batch, lr=SGD_RATES[batch], tuning=True)
        tried["SGD"][batch] = rates(plain)
        tried["LARS"][batch] = rates(replace(plain, kind="lars", lr=LARS_RATES[batch], warmup=WARMUP, exclude=0.01))
    tried["SGD with warm-up"][large] = rates(Run(batch=large, lr=SGD_RATES[large], warmup=WARMUP, tuning=True))
    cycles = rates(Run(lr=0.2, schedule="onecycle", epochs=CYCLE_EPOCHS[1], tuning=True))
    farm.train([*(run for each in tried.values() for runs in each.values() for run in runs), *cycles])
    for each in tried.values():
        further(each[large], farm.best(each[large]))
    farm.train(each[large][end] for each in tried.values() for end in (0, -1))

    def found(runs: Sequence[Run]) -> Run:
        return replace(farm.best(runs), tuning=False)

    # ---- the trainings themselves ----
    base = found(tried["SGD"][small])
    methods: dict[str, dict[int, Run]] = {
        "SGD, linear scaling": {
            batch: replace(base, batch=batch, lr=base.lr * batch / small) for batch in plan.batches
        },
        "SGD, linear scaling and warm-up": {
            batch: replace(base, batch=batch, lr=base.lr * batch / small, warmup=WARMUP) for batch in plan.batches[1:]
        },
        "SGD, tuned": {batch: found(runs) for batch, runs in tried["SGD"].items()},
        "SGD with warm-up, tuned": {batch: found(runs) for batch, runs in tried["SGD with warm-up"].items()},
        "LARS, tuned": {batch: found(runs) for batch, runs in tried["LARS"].items()},
    }
    lars = methods["LARS, tuned"][large]
    down = replace(base, schedule="step")
    cycle = found(cycles)
    questions = {
        "biases": {
            "a hundredth of it": lars,
            "a tenth": replace(lars, exclude=0.1),
            "the full rate": replace(lars, exclude=1.0),
        },
        "growth": {"rate decay": down, "batch growth": replace(down, grow=True)},
        "cycles": {
            "step decay": down,
            **{f"1cycle of {epochs} epochs": replace(cycle, epochs=epochs) for epochs in CYCLE_EPOCHS},
        },
        "precision": {
            "fp32": lars,
            "bf16": replace(lars, precision="bf16"),
        },
        "fp16": {
            name: Run(batch=min(FP16_BATCH, large), lr=0.2, schedule="constant", precision=name, epochs=1)
            for name in ("fp32", "fp16")
        },
    }
    seeded = [base, *(runs[large] for runs in methods.values())]
    seeded += questions["growth"].values()
    runs = [run for each in (*methods.values(), *questions.values()) for run in each.values()]
    farm.train([*(replace(run, seed=seed) for run in seeded for seed in SEEDS), *runs])
    return {"methods": methods, "questions": questions, "tried": tried}


# ---- bytes on the wire -----------------------------------------------------------------------------------------------

COUNTED = """
import sys
from mpi4py import MPI
import hpcdl
from hpcdl.cli.main import main
status = main(["train", *sys.argv[1:]])
sent = sum(MPI.COMM_WORLD.allgather(hpcdl.sent_bytes()))
if MPI.COMM_WORLD.rank == 0:
    print("sent", sent)
sys.exit(status)
"""


def sent_bytes(precision: str, ranks: int) -> int:
    """What all ranks send in 4 updates by 1,000 of MNIST-5k's images, each rank on a node of its own, so to speak."""
    words = ["--data", "mnist5k", "--epochs", "1", "--batch-size", str(1000 // ranks), "--precision", precision]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(COUNTED)
        script.flush()
        done = subprocess.run(
            [Path(sys.executable).parent / "mpiexec", "-n", str(ranks), sys.executable, script.name, *words],
            env={**os.environ, "HPCDL_NODES": "+".join("1" * ranks)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"hpcdl train failed: {done.stderr}")
    return int(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("sent ")))


def main() -> None:
    """Train, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="fashion, mnist5k or a folder of IDX files (fashion if it is installed)")
    parser.add_argument("--report", action="store_true", help="write the report anew from large-batch.json")
    arguments = parser.parse_args()
    here = Path(__file__).parent
    numbers = here / "large-batch.json"
    if not arguments.report:
        source = arguments.data or ("fashion" if data.FASHION.is_dir() else "mnist5k")
        numbers.write_text(json.dumps(measured(source), indent=1) + "\n")
    from large_batch_report import write  # beside this file

    write(json.loads(numbers.read_text()), here)


def measured(source: str) -> dict[str, Any]:
    """All trainings, as what JSON can hold."""
    images = data.load(source)
    plan = plan_for(len(images.train.labels))
    began = time.perf_counter()
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wire = {f"{name} {ranks}": sent_bytes(name, ranks) for name in ("fp32", "bf16") for ranks in (2, 4)}
    farm = Farm(source, workers)
    found = study(farm, plan)
    index = {run: number for number, run in enumerate(farm.outcomes)}

    def numbered(value: Any) -> Any:
        """Runs by their numbers, with all seeds of a run."""
        if isinstance(value, Run):
            return [index[run] for seed in SEEDS if (run := replace(value, seed=seed)) in index]
        if isinstance(value, dict):
            return {str(name): numbered(each) for name, each in value.items()}
        return [numbered(each) for each in value] if isinstance(value, list) else value

    return {
        "machine": f"{workers} cores, Python {platform.python_version()}, torch {version('torch')}",
        "date": time.strftime("%Y-%m-%d"),
        "data": f"{images.name} ({images.counts})",
        "plan": asdict(plan),
        "milestones": ", ".join(map(str, MILESTONES)),
        "minutes": (time.perf_counter() - began) / 60,
        "runs": [{**asdict(run), **asdict(outcome)} for run, outcome in farm.outcomes.items()],
        "found": numbered(found),
        "wire": wire,
    }


if __name__ == "__main__":
    main()
