"""hpcdl selftest: is every collective right on these ranks, whatever the algorithm, the type and the layout?"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcdl import settings, verdict
from hpcdl.cli.agreed import Refused, agree, begin, complain
from hpcdl.cli.arguments import rate
from hpcdl.cli.bench import names, progress, surroundings
from hpcdl.logs import logger

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.cli.selftest_cases import Case, Finding, Here

# A test that fails so often has told what it can.
MOST_FAILURES, MOST_SHOWN = 100, 10

EPILOG = """\
A case is one call: of a collective in one of its forms (called, started, planned), by an algorithm, of a type, with an
operation, on arrays that lie in memory in some way. All ranks' results are compared with the exact one, element by
element, and what the library refuses by design must be refused on all of them. Exit status: 0 if all is well; 1 if a
case failed or took too long; 2 if it could not begin.
"""


class Failure(NamedTuple):
    """A case that failed; the same on all ranks."""

    case: str
    rank: int
    """The first on which it did."""
    host: str
    ranks: int
    """On how many."""
    problem: str
    place: int | None
    """Of the first wrong element."""
    got: str
    expected: str
    repeat: str
    """The command that runs this case alone."""


@dataclass
class Outcome:
    """What came of the cases."""

    passed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By row of the table and type."""
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    left_out: int = 0
    layouts: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """How many cases were run."""
        return self.passed.total() + self.refused.total() + len(self.failures)


class Part(NamedTuple):
    """What is still to be run, and what it depends on."""

    here: Here
    cases: deque[Case]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl selftest can be told."""
    parser.description = (
        "Check that every collective is right here: run it as your program will be run, mpiexec -n 4 hpcdl selftest"
    )
    parser.epilog = EPILOG
    option = parser.add_argument
    option("--seconds", type=rate, default=50.0, metavar="S", help="how long it may take (%(default)g)")
    option(
        "--only",
        type=names,
        default=[],
        metavar="WORDS",
        help="the cases with all of these: algorithms, types, operations, layouts, forms or a length, such as "
        "ring,float16,strided",
    )
    option(
        "--limit",
        type=rate,
        default=20.0,
        metavar="S",
        help="a case that takes longer ends the job, with its name (%(default)g)",
    )
    option("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check on all ranks, print on rank 0; the exit status is the same on all of them."""
    began = time.monotonic()
    from mpi4py import MPI

    comm, words, seconds = MPI.COMM_WORLD, arguments.only, arguments.seconds
    begin(comm)
    # Who is missing is said before a case that hangs ends the job.
    if settings.STALL_S > 0:
        settings.STALL_S = min(settings.STALL_S, arguments.limit / 2)
    try:
        prepare(comm, arguments)
        first, second = part(comm, words, torch=False), None
        if not first.cases:
            second = part(comm, words, torch=True)
            if not second.cases:
                there = ", ".join((*first.here.layouts, *second.here.layouts))
                raise Refused(f"--only {','.join(words)}: there is no case with all of these here (arrays: {there})")
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2
    head = surroundings(comm) | {"nodes": first.here.nodes}
    if comm.rank == 0 and not arguments.json:
        print(header(head), flush=True)
    with Runner(comm, began, arguments.limit) as runner:
        # To import torch takes seconds, from a file system that hundreds of ranks read minutes: half the time is safe.
        runner.follow(first, seconds / 2)
        second = second or part(comm, words, torch=True)
        runner.follow(second, seconds)
        runner.follow(first, seconds)
    outcome = runner.outcome
    outcome.layouts = [*first.here.layouts, *second.here.layouts]
    outcome.left_out = len(first.cases) + len(second.cases)
    outcome.seconds = time.monotonic() - began
    if comm.rank == 0:
        print(as_json(head, outcome) if arguments.json else table(first.here, outcome), flush=True)
    return 1 if outcome.failures else 0


def prepare(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    """Refuse what can be wrong before it begins."""
    # The first agreement: a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    agree(comm, None)
    for name, value in vars(arguments).items():
        if name != "run" and (differs := verdict.difference(comm, f"--{name}", value)):
            raise Refused(differs)
    from hpcdl.cli.selftest_cases import Here, known_words

    known = known_words(Here(comm.size, 2, [], [], []))
    for word in arguments.only:
        if not word.isdecimal() and not any(word in words for words in known.values()):
            there = "; ".join(f"{kind} {', '.join(words)}" for kind, words in known.items())
            raise Refused(f"--only {word}: nothing is called that; there are {there}, and lengths")


def part(comm: MPI.Intracomm, words: Sequence[str], *, torch: bool) -> Part:
    """The cases on torch's arrays, or on all others."""
    from hpcdl.buffers import TYPES
    from hpcdl.call import channel
    from hpcdl.cli import selftest_cases

    every = comm.allgather(selftest_cases.able(words, torch=torch))
    layouts, torch_dtypes = (
        [each for each in every[0][field] if all(each in other[field] for other in every)] for field in (0, 1)
    )
    if missing := sorted({layout for mine, _ in every for layout in mine} - set(layouts)):
        logger.info(f"not all ranks can make arrays of {', '.join(missing)}, so these are left out")
    own = channel(comm)
    selftest_cases.use_device(layouts, own.node.index(own.rank))
    here = selftest_cases.Here(comm.size, len(own.nodes), layouts, TYPES, torch_dtypes)
    barriers = [] if torch else selftest_cases.barriers(words)
    return Part(here, deque([*barriers, *selftest_cases.cases(here, words)]))


class Runner:
    """Runs cases, and keeps what came of them; all ranks go by rank 0's clock."""

    def __init__(self, comm: MPI.Intracomm, began: float, limit_s: float) -> None:
        from hpcdl.cli.selftest_cases import Shelf

        self.comm, self.began, self.outcome = comm, began, Outcome()
        self._limit = Limit(comm, limit_s)
        self._shelf = Shelf(comm.Dup(), comm.size)

    def __enter__(self) -> Runner:
        self._limit.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.over.set()

    def follow(self, part: Part, until_s: float) -> None:
        """Run what is left of it until the time is up, but one case at least in all."""
        clock_s, cases = self.comm.bcast(self._clock_s()), part.cases
        with progress(len(cases), on=self.comm.rank == 0) as advance:
            while cases and len(self.outcome.failures) < MOST_FAILURES and (clock_s < until_s or not self.outcome.done):
                case = cases.popleft()
                advance(str(case))
                clock_s = self._check(case, part.here)
        self._limit.begin(None)

    def _clock_s(self) -> float:
        return time.monotonic() - self.began

    def _check(self, case: Case, here: Here) -> float:
        """Run one, and agree on what came of it; the time by then."""
        from hpcdl.cli.selftest_cases import Shelf, check

        self._limit.begin(case)
        finding = check(case, here, self._shelf)
        self._limit.problem = finding.problem
        alike, clock_s = exchange(self.comm, finding, self._clock_s())
        if not alike:
            every = self.comm.allgather((finding, platform.node()))
            self.outcome.failures.append(failure(case, every))
            self.outcome.failed[row(case), case.dtype] += 1
            if any(each.broken for each, _ in every):
                # The old one may hold messages that nobody has taken.
                self._shelf = Shelf(self.comm.Dup(), self.comm.size)
        elif finding.refused:
            self.outcome.refused[row(case)] += 1
        else:
            self.outcome.passed[row(case), case.dtype] += 1
        return clock_s


def row(case: Case) -> str:
    """Where a case stands in the table."""
    return case.algorithm if case.collective == "allreduce" else case.collective


# ---- one verdict -----------------------------------------------------------------------------------------------------

PASSED, REFUSED, FAILED = range(3)


def exchange(comm: MPI.Intracomm, finding: Finding, clock_s: float) -> tuple[bool, float]:
    """Have all ranks found the same, and no problem? And what is the time on rank 0?"""
    status = FAILED if finding.problem else REFUSED if finding.refused else PASSED
    mine, every = np.array([status, finding.bits, int(clock_s * 1e6)], np.int64), np.empty((comm.size, 3), np.int64)
    request = comm.Iallgather(mine, every)
    while not request.Test():
        time.sleep(0)  # the rank waited for may need this core
    alike = bool((every[:, :2] == every[0, :2]).all()) and int(every[0, 0]) != FAILED
    return alike, int(every[0, 2]) / 1e6


def failure(case: Case, every: Sequence[tuple[Finding, str]]) -> Failure:
    """What is wrong, from what all ranks have found and their hosts."""
    findings = [finding for finding, _ in every]
    wrong = [rank for rank, finding in enumerate(findings) if finding.problem]
    problem = findings[wrong[0]].problem if wrong else ""
    if not wrong and len({finding.refused for finding in findings}) > 1:
        wrong = [rank for rank, finding in enumerate(findings) if finding.refused]
        problem = "was refused here, and not on all ranks"
    elif not wrong:
        wrong = [rank for rank, finding in enumerate(findings) if finding.bits != findings[0].bits]
        problem = "has other bits in its result than rank 0"
    first = findings[wrong[0]]
    return Failure(
        str(case),
        wrong[0],
        every[wrong[0]][1],
        len(wrong),
        problem,
        first.place,
        first.got,
        first.expected,
        f"hpcdl selftest --only {case.words()}",
    )


class Limit(threading.Thread):
    """Ends the job if a case takes too long, and says which one."""

    problem = ""
    """What this rank has found in the case; it waits for the others, which may never know."""

    def __init__(self, comm: MPI.Intracomm, limit_s: float) -> None:
        super().__init__(name="hpcdl selftest", daemon=True)
        self.rank, self.size, self.limit_s = comm.rank, comm.size, limit_s
        # Rank 0 speaks for all if it can.
        self.patience_s = limit_s + (min(limit_s, 3.0) if comm.rank else 0)
        self._case: tuple[Case, float] | None = None
        self.over = threading.Event()

    def begin(self, case: Case | None) -> None:
        """The time of a case begins; with None that of the last is over."""
        self._case, self.problem = case and (case, time.monotonic()), ""

    def run(self) -> None:
        """Look at the clock."""
        told = None
        while not self.over.wait(min(0.5, self.limit_s / 4)):
            if (now := self._case) is None:
                continue
            case, began = now
            waited_s = time.monotonic() - began
            # Whoever has found something is not the one that is stuck, and must say it before the job ends.
            if self.problem and told != case and waited_s > self.limit_s * 0.8:
                told = case
                self._say(f"{case}: {self.problem}")
            if waited_s > self.patience_s:
                where = "waits for the other ranks' verdict on it" if self.problem else "is still in it"
                self._say(
                    f"{case}: took longer than {self.limit_s:g} s, and this rank {where}; the job is ended. "
                    f"To repeat it: hpcdl selftest --only {case.words()}"
                )
                from hpcdl.watch import end_job

                end_job()
                return

    def _say(self, text: str) -> None:
        sys.stderr.write(f"hpcdl: rank {self.rank} of {self.size} on {platform.node()}: {text}\n")
        sys.stderr.flush()


# ---- printing --------------------------------------------------------------------------------------------------------


def header(head: dict[str, Any]) -> str:
    """Where this is."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    ranks, nodes = head["ranks"], head["nodes"]
    return (
        f"hpcdl selftest: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}, {head['mpi']}, {versions}"
    )


def short(dtype: str) -> str:
    """A type's name for a narrow column: f32, bf16, i64, c128."""
    for long, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if dtype.startswith(long):
            return letter + dtype.removeprefix(long)
    return dtype


def table(here: Here, outcome: Outcome) -> str:
    """Passes by algorithm and type, failures, and what all of it comes to."""
    from hpcdl.cli.selftest_cases import OTHERS

    passed, failed, refused = outcome.passed, outcome.failed, outcome.refused
    lines = ["", "passes by algorithm (of the all-reduces; the other collectives are below) and type; ! has failures"]
    dtypes = [name for name in here.dtypes if any(dtype == name for _, dtype in (*passed, *failed))]
    lines.append(f"{'':<22}" + "".join(f"{short(name):>6}" for name in dtypes) + f"{'refused':>9}")
    for name in (*here.algorithms, *OTHERS):
        counts = [(passed[name, dtype], failed[name, dtype]) for dtype in dtypes]
        if any(map(any, counts)) or refused[name]:
            cells = (f"{good or '-' if not bad else good}{'!' * bool(bad)}" for good, bad in counts)
            lines.append(f"{name:<22}" + "".join(f"{cell:>6}" for cell in cells) + f"{refused[name] or '-':>9}")
    if barriers := passed["barrier", ""] + failed["barrier", ""]:
        lines.append(f"{'barrier':<22}{passed['barrier', '']:>6}{'!' * (passed['barrier', ''] < barriers)}")
    lines += [f"arrays: {', '.join(outcome.layouts)}", ""]
    for each in outcome.failures[:MOST_SHOWN]:
        more = f" and {each.ranks - 1} more" if each.ranks > 1 else ""
        lines.append(f"FAILED {each.case}: rank {each.rank} on {each.host}{more}: {each.problem}")
        lines.append(f"  to repeat it on as many ranks: {each.repeat}")
    if len(outcome.failures) > MOST_SHOWN:
        lines.append(f"... and {len(outcome.failures) - MOST_SHOWN} more failures: see --json")
    return "\n".join([*lines, total(outcome)])


def total(outcome: Outcome) -> str:
    """In a sentence."""
    passed, refused = outcome.passed.total(), outcome.refused.total()
    text = (
        f"{passed} cases passed, {refused} were refused as they must be, {len(outcome.failures)} failed; "
        f"{outcome.seconds:.1f} s"
    )
    if not outcome.left_out:
        return text
    if len(outcome.failures) == MOST_FAILURES:
        return f"{text}; {outcome.left_out} left out, as so many failures are enough"
    needed = outcome.seconds * (1 + outcome.left_out / outcome.done)
    return f"{text}; {outcome.left_out} left out for want of time: all would take about --seconds {needed:.0f}"


def as_json(head: dict[str, Any], outcome: Outcome) -> str:
    """All of it."""
    rows = sorted({*outcome.passed, *outcome.failed, *((name, "") for name in outcome.refused)})
    results: dict[str, dict[str, Any]] = {}
    for name, dtype in rows:
        entry = results.setdefault(name, {"passed": {}, "failed": {}, "refused": outcome.refused[name]})
        for kind, counts in (("passed", outcome.passed), ("failed", outcome.failed)):
            if counts[name, dtype]:
                entry[kind][dtype] = counts[name, dtype]
    return json.dumps(
        {
            "header": head,
            "passed": outcome.passed.total(),
            "refused": outcome.refused.total(),
            "failed": len(outcome.failures),
            "left_out": outcome.left_out,
            "layouts": outcome.layouts,
            "seconds": round(outcome.seconds, 3),
            "results": results,
            "failures": [each._asdict() for each in outcome.failures],
        }
    )
