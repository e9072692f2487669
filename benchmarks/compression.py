"""What each method of compression does to accuracy, to the bytes on the wire and to a step's time: make compression

Four ranks, as if each were on a node of its own, train an MLP 784-128-10 on Fashion-MNIST and a transformer on the
characters of the King James Bible, from the same parameters, on the same batches, by SGD with momentum; each method
with a rate of its own, chosen on data that is held out of the training's. Then a network of 10 million parameters takes
steps on four hosts with slow links, and on one node. Writes compression.md and the numbers behind it.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from cluster.hosts import Hosts, missing  # noqa: E402

from hpcdl import data, text  # noqa: E402

RANKS = 4
MOMENTUM = 0.9
HIDDEN, HELD_OUT = 128, 1 / 6
BLOCK_SIZE, CHARACTERS = 64, 120_000
"""Of the transformer's windows, and of the part of the Bible that is read: so much is learnt in a minute."""
CLIP_NORM = 0.5
"""Of a text's gradient."""
DGC = "dgc"


@dataclass(frozen=True)
class Course:
    """What all methods are trained alike in."""

    batch: int  # of a rank
    epochs: int


COURSES = {"images": Course(64, 8), "text": Course(1, 8)}


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    method: str  # or "dense"
    lr: float
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    search: bool = False


# Of each method the rate that was the best one of those searched with --search.
IMAGES = (
    Run("images", "dense", 0.1),
    Run("images", DGC, 0.1),
    Run("images", "topk", 0.05, (("density", 0.02),)),
    Run("images", "onebit", 0.05),
    Run("images", "qsgd", 0.1),
    Run("images", "terngrad", 0.1),
    Run("images", "powersgd", 0.1),
    Run("images", "bf16", 0.1),
    Run("images", "randomk", 0.00625),
    Run("images", "signsgd", 0.0001),
)
TEXT = (
    Run("text", "dense", 1.0),
    Run("text", DGC, 1.0, (("clip_norm", CLIP_NORM),)),
)
SPEEDS = {"100mbit": 30, "1gbit": 12, "one node": 6}
"""Seconds for each network."""


@dataclass(frozen=True)
class Outcome:
    """What came of it, after each epoch, and in the last one."""

    accuracies: list[float]  # in %
    losses: list[float]  # of what is held out
    seconds: float
    ratio: float = math.nan
    error: float = math.nan
    residual: float = math.nan
    compressing: float = math.nan


# ---- one training, on all ranks --------------------------------------------------------------------------------------


def task_of(run: Run) -> Any:
    """What is to be learnt; another part is held out where a rate is searched."""
    from hpcdl.torch.tasks import image_task, text_task

    if run.task == "images":
        images = data.load(source())
        if run.search:
            images = data.ImageSet(images.name, *data.hold_out(images.train, HELD_OUT))
        return image_task(images)
    bible, tenth = text.load("bible", block_size=BLOCK_SIZE), CHARACTERS // 10
    test = bible.train[CHARACTERS : CHARACTERS + tenth] if run.search else bible.test[:tenth]
    return text_task(bible._replace(train=bible.train[:CHARACTERS], test=test), BLOCK_SIZE)


def source() -> str:
    """The images that are installed."""
    return "fashion" if data.FASHION.is_dir() else "mnist5k"


def trained(run: Run, task: Any) -> Outcome:
    """Train once (a collective call)."""
    import torch
    from mpi4py import MPI

    from hpcdl.compress import Compression, make
    from hpcdl.torch import DistributedDataParallel
    from hpcdl.torch.models import mlp, transformer
    from hpcdl.torch.recipe import Schedule, optimizer, scheduler
    from hpcdl.torch.train import Trainer

    def compression(model: DistributedDataParallel) -> Compression:
        return Compression(model, make(run.method, **dict(run.options)))

    torch.manual_seed(run.seed)
    model = mlp(*task.shape, hidden=HIDDEN) if run.task == "images" else transformer(*task.shape)
    course = COURSES[run.task]
    # DGC has the momentum itself.
    chosen = optimizer("sgd", model, lr=run.lr, momentum=0 if run.method == DGC else MOMENTUM)
    trainer = Trainer(
        task,
        model,
        chosen,
        MPI.COMM_WORLD,
        batch_size=course.batch,
        seed=run.seed,
        clip_norm=CLIP_NORM if run.task == "text" and run.method != DGC else None,  # which sees to it itself
        overlap=False,
        compression=None if run.method == "dense" else compression,
    )
    trainer.scheduler = scheduler(
        Schedule("polynomial", warmup_epochs=1.0),
        chosen,
        epochs=course.epochs,
        updates=trainer.updates,
        growth=trainer.growth,
    )
    began, epochs = time.perf_counter(), []
    for epoch in trainer.train(course.epochs):
        epochs.append(epoch)
        if not math.isfinite(epoch.loss + epoch.test_loss):
            break
    seconds, told = time.perf_counter() - began, epochs[-1].compressed
    return Outcome(
        [round(100 * each.accuracy, 2) for each in epochs],
        [round(each.test_loss, 4) for each in epochs],
        seconds,
        *((told.ratio, told.error, told.residual, told.compressing) if told else ()),
    )


def matrix_ratio(value_dtype: Any) -> float:
    """How many times fewer bytes DGC sends of a matrix alone, at its usual density (a collective call)."""
    import torch
    from mpi4py import MPI

    from hpcdl.compress import Compression, make
    from hpcdl.torch import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(1000, 1000, bias=False), MPI.COMM_WORLD)
    compression = Compression(model, make(DGC, warmup_epochs=0, value_dtype=value_dtype))
    model(torch.ones(1, 1000)).sum().backward()
    told = compression.told()
    return told.dense_bytes / told.sent_bytes


def work(runs: Sequence[Run], results: Path) -> None:
    """What each rank does: all the runs; rank 0 writes a line after each."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    first, tasks = MPI.COMM_WORLD.rank == 0, dict[tuple[str, bool], Any]()

    def put(line: dict[str, Any]) -> None:
        if first:
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    put({"matrix": {name: matrix_ratio(getattr(torch, name)) for name in ("float16", "float32")}})
    for run in runs:
        key = run.task, run.search
        if key not in tasks:
            tasks[key] = task_of(run)
        outcome = trained(run, tasks[key])
        put({**asdict(run), **asdict(outcome)})
        if first:
            loss, accuracy = outcome.losses[-1], outcome.accuracies[-1]
            print(f"{outcome.seconds:6.1f} s  {accuracy:5.2f} %  loss {loss:.4f}  {show(run)}", flush=True)


def show(run: Run) -> str:
    """In one line."""
    options = "".join(f" {name}={value}" for name, value in run.options)
    return f"{run.task} {run.method}{options} lr {run.lr:g} seed {run.seed}{' (search)' if run.search else ''}"


# ---- starting the ranks ----------------------------------------------------------------------------------------------


def trainings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What came of these, one behind the other in the same four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        asked, results = Path(folder) / "runs.json", Path(folder) / "results.jsonl"
        asked.write_text(json.dumps([asdict(run) for run in runs]))
        words = [*mpiexec(), sys.executable, __file__, "--work", str(asked), str(results)]
        # Each rank as if on a node of its own, so that all of it is sent by messages, and counted.
        subprocess.run(words, env={**os.environ, "HPCDL_NODES": "+".join("1" * RANKS)}, check=True, timeout=3600)
        return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def mpiexec() -> list[str]:
    """What starts the ranks here."""
    return [str(Path(sys.executable).parent / "mpiexec"), "-n", str(RANKS)]


def speed(network: str, seconds: int) -> dict[str, Any]:
    """Steps of a large network on four hosts, whose links carry so much, or on one node."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "speed.json"
        script = [str(HERE / "compression_speed.py"), "--seconds", str(seconds), "--output", str(output)]
        settings = {"OMP_NUM_THREADS": "1", "HPCDL_TUNING": "0"}
        print(f"{network}:", flush=True)
        if network == "one node":
            line = [*mpiexec(), sys.executable, *script]
            subprocess.run(line, env={**os.environ, **settings}, check=True, timeout=600)
        else:
            with Hosts(RANKS, network) as hosts:
                line = hosts.mpiexec("mpich", Path(sys.executable).parent, 1, [sys.executable, *script], settings)
                subprocess.run(line, check=True, timeout=600)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def selection() -> float:
    """The time it takes to find the largest 0.1 % of 10 million elements, as a share of what abs and topk take."""
    import torch
    from selection import measure, normal  # beside this file

    torch.set_num_threads(1)
    times = measure(normal(10_000_000), 10_000, 8)
    return median(times["sample"]) / median(times["topk"])


def searched(task: str, methods: Sequence[str]) -> list[Run]:
    """The rates around those that were chosen, half and twice."""
    chosen = [run for run in (*IMAGES, *TEXT) if run.task == task and (not methods or run.method in methods)]
    return [replace(run, lr=run.lr * factor, search=True) for run in chosen for factor in (0.5, 1, 2)]


def main() -> None:
    """Train, measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="write the report anew from compression.json")
    parser.add_argument("--only", choices=("accuracy", "speed"), help="measure this anew, and keep the other")
    known = [run.method for run in IMAGES]
    parser.add_argument("--methods", nargs="+", choices=known, help="train with these anew, and keep the others")
    parser.add_argument(
        "--search", nargs="+", choices=known, help="try half and twice the rates of images (text: --task) instead"
    )
    parser.add_argument("--task", choices=tuple(COURSES), default="images", help="of --search (%(default)s)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        asked = json.loads(Path(arguments.work[0]).read_text())
        runs = [Run(**{**each, "options": tuple(map(tuple, each["options"]))}) for each in asked]
        work(runs, Path(arguments.work[1]))
        return
    if arguments.search:
        trainings(searched(arguments.task, arguments.search))
        return
    file = HERE / "compression.json"
    numbers = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not numbers and (arguments.report or arguments.methods or arguments.only == "speed"):
        parser.error(f"there are no numbers yet in {file}: measure all of them first, without options")
    if not arguments.report:
        spent, began = numbers.setdefault("seconds", {}), time.perf_counter()
        numbers["images"] = source()
        if arguments.methods:
            anew = accuracy(arguments.methods)
            kept = {(run["task"], run["method"]): run for run in (*numbers["runs"], *anew["runs"])}
            numbers |= anew | {"runs": list(kept.values())}
        elif arguments.only != "speed":
            numbers |= accuracy()
            spent["accuracy"] = time.perf_counter() - began
        if arguments.only != "accuracy" and not arguments.methods:
            began = time.perf_counter()
            problem = missing()
            if problem:
                print(f"steps on hosts keep their figures: {problem}")
            networks = {name: seconds for name, seconds in SPEEDS.items() if name == "one node" or not problem}
            found = {name: speed(name, seconds) for name, seconds in networks.items()}
            numbers["speed"] = numbers.get("speed", {}) | found
            numbers["selection"] = selection()
            spent["speed"] = time.perf_counter() - began
        file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    from compression_report import write  # beside this file

    write(numbers, HERE)


def accuracy(methods: Sequence[str] = ()) -> dict[str, Any]:
    """The trainings, all or those by some methods, as what JSON can hold."""
    chosen = list(IMAGES)
    try:
        text.load("bible", block_size=BLOCK_SIZE)
    except data.DataError as error:
        print(f"no text is trained on: {error}")
    else:
        chosen += TEXT
    first, *rest = trainings([run for run in chosen if not methods or run.method in methods])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        **first,
        "runs": rest,
        "courses": {name: asdict(course) for name, course in COURSES.items()},
        "machine": f"{cores} cores, Python {platform.python_version()}, torch {version('torch')}",
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
