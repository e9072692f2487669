"""One rank of a test run: all ranks agree on every verdict, and no test runs for ever."""

import faulthandler
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol
from mpi4py import MPI

from harness import all_stacks, needs_ranks, own_frames, rank_counts, register_markers, spread, time_limit_s
from hpcdl.ends import wait_until_read

START_LIMIT_S = 120  # to import MPI, torch and the tests
END_LIMIT_S = 20  # to finalise
GRACE_S = 5  # a rank that failed waits so long for the others
PASSED, SKIPPED, FAILED = range(3)


class Child:
    """The pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.size = self.world.rank, self.world.size
        self.verdicts = self.world.Dup()  # no message of a test can meet ours
        register_markers(config)

        capture = config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled():
            self.terminal = os.dup(2)

        # Where a parent started us it reads this folder and prints; under a user's own mpiexec we print.
        folder = os.environ.get("HPCDL_TEST_FOLDER")
        self.parent_reads = folder is not None
        if folder is None and self.rank == 0:
            folder = tempfile.mkdtemp(prefix="hpcdl-tests-")
        self.folder = Path(self.world.bcast(folder))
        self.folder.mkdir(exist_ok=True)  # on the other hosts
        self.stacks = open(self.folder / f"stacks-{self.rank}", "w+")
        self.events = open(self.folder / "events", "a", buffering=1) if self.rank == 0 else None

        # Both work while the main thread is inside a call into MPI: the handler of faulthandler is C, and the
        # kernel itself ends a process at SIGALRM. Python's own signal handlers would wait for the call to return.
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.timer: threading.Timer | None = None
        self.watch(START_LIMIT_S, "the start of the tests")

        node = self.world.Split_type(MPI.COMM_TYPE_SHARED)
        self.neighbours = dict(zip(node.allgather(self.rank), node.allgather(os.getpid()), strict=True))
        node.Free()

    def pytest_configure(self, config: pytest.Config) -> None:
        plugins = config.pluginmanager
        # pytest-timeout cannot interrupt a call into MPI, and its other method ends this rank alone.
        plugins.unregister(name="timeout")
        if self.rank > 0:
            reporter = plugins.get_plugin("terminalreporter")
            plugins.unregister(reporter)
            plugins.register(type(reporter)(config, open(os.devnull, "w")), "terminalreporter")

    # What runs

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if needs_ranks(metafunc.definition):
            spread(metafunc, (self.size,))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = {item.nodeid: item for item in items if needs_ranks(item)}
        if self.parent_reads:
            cases = json.loads((self.folder / "cases").read_text())
            chosen = {case: chosen[case] for case in cases if case in chosen}
        for item in chosen.values():
            if self.size not in rank_counts(item):
                counts = ", ".join(map(str, rank_counts(item)))
                item.add_marker(pytest.mark.skip(reason=f"written for {counts} ranks, these are {self.size}"))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = chosen.values()

    @pytest.fixture
    def comm(self, request: pytest.FixtureRequest) -> MPI.Intracomm:
        """A communicator of all ranks that no other test uses; freed once all ranks agree that the test is good."""
        comm = request.node.stash[COMM] = self.world.Dup()
        return comm

    # One test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        began = time.perf_counter()
        self.event(case=item.nodeid)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self.watch(time_limit_s(item), item.nodeid)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        outcome = self.agree(item, reports)
        comm = item.stash.get(COMM, None)
        if comm and outcome != FAILED:
            comm.Free()
        self.watch(START_LIMIT_S, f"what follows {item.nodeid}")

        told = max(reports, key=severity)
        self.event(
            verdict=item.nodeid,
            outcome=told.outcome,
            longrepr=told.longrepr if isinstance(told.longrepr, tuple) else told.longreprtext,
            wasxfail=getattr(told, "wasxfail", None),
            duration=time.perf_counter() - began,
        )
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def agree(self, item: pytest.Item, reports: list[pytest.TestReport]) -> int:
        """Make my reports say what all ranks say together; the verdict is the same on all ranks."""
        mine = severity(max(reports, key=severity))
        story = "".join(self.story(report) for report in reports if report.failed)
        if mine == FAILED:
            (self.folder / f"failed-{self.rank}").write_text(story)
        case = zlib.crc32(item.nodeid.encode())
        worst = array("q", [mine, -mine, case, -case])
        self.wait_for_all(self.verdicts.Iallreduce(MPI.IN_PLACE, worst, MPI.MAX), mine, item.nodeid)
        if worst[0] == -worst[1] < FAILED and worst[2] == -worst[3]:
            return mine

        # Every rank is here, so a plain collective is safe.
        everybody = self.verdicts.allgather((mine, item.nodeid, story))
        (self.folder / f"failed-{self.rank}").unlink(missing_ok=True)
        text = "".join(story for _, _, story in everybody)
        if len({nodeid for _, nodeid, _ in everybody}) > 1:
            text += "The ranks ran different tests:\n"
            text += "".join(f"  rank {rank}: {nodeid}\n" for rank, (_, nodeid, _) in enumerate(everybody))
        elif not text:
            words = ("passed", "skipped")
            text = "A test must be skipped on all ranks or on none:\n"
            text += "".join(f"  rank {rank} {words[outcome]}\n" for rank, (outcome, _, _) in enumerate(everybody))
        for report in reports:
            report.outcome, report.longrepr, report.sections = "passed", None, []
            vars(report).pop("wasxfail", None)
        blamed = reports[1] if len(reports) == 3 else reports[0]  # without a call only set-up and tear-down
        blamed.outcome, blamed.longrepr = "failed", text
        return FAILED

    def story(self, report: pytest.TestReport) -> str:
        """What a person needs to know of a failure on this rank."""
        sections = "".join(f"\n-- {title} --\n{text}" for title, text in report.sections)
        return f"Rank {self.rank} of {self.size} failed ({report.when}):\n{report.longreprtext}{sections}\n\n"

    # When the ranks do not come together

    def wait_for_all(self, request: MPI.Request, mine: int, nodeid: str) -> None:
        """Wait for the others without taking their cores; a rank that failed waits only a little."""
        deadline = time.monotonic() + GRACE_S
        pause_s = 0.00005
        while not request.Test():
            if mine == FAILED and time.monotonic() > deadline:
                self.give_up(nodeid)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.002)

    def give_up(self, nodeid: str) -> NoReturn:
        """I failed and others wait for what I shall never send: show where they are, and end the job."""
        with suppress(FileExistsError):
            (self.folder / f"given-up-by-{min(self.neighbours)}").touch(exist_ok=False)  # one rank a host does this
            for rank, pid in self.neighbours.items():
                with suppress(ProcessLookupError):
                    if rank != self.rank:
                        os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            text = f"\n{nodeid}: not all ranks came to its end\n"
            for file in sorted(self.folder.glob("failed-*")):
                text += file.read_text()
            self.say(text + all_stacks(self.folder))
            self.tidy()
            wait_until_read(self.terminal)
            self.world.Abort(1)
        time.sleep(3)
        self.world.Abort(1)

    def watch(self, seconds: float, what: str) -> None:
        """From now on: after so many seconds my threads' stacks are written, and then this process ends."""
        faulthandler.dump_traceback_later(seconds, file=self.stacks)
        # Every rank has its stacks written before the first one ends, since mpiexec then kills the others.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1.5)
        if self.timer:
            self.timer.cancel()
        if not self.parent_reads:
            self.timer = threading.Timer(seconds + 0.5, self.tell_hang, (seconds, what))
            self.timer.daemon = True
            self.timer.start()

    def tell_hang(self, seconds: float, what: str) -> None:
        stacks = own_frames(os.pread(self.stacks.fileno(), 1 << 20, 0).decode())
        self.say(f"\nRank {self.rank} of {self.size} is still at {what} after {seconds:g} s:\n{stacks}")
        self.tidy()

    def say(self, text: str) -> None:
        """Print past pytest's capture, in one piece; under a parent the files say it."""
        if not self.parent_reads:
            os.write(self.terminal, text.encode())

    def tidy(self) -> None:
        """Remove our folder; what the ranks of this host hold open they can still write."""
        if not self.parent_reads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def event(self, **fields: Any) -> None:
        """Tell the parent."""
        if self.events and self.parent_reads:
            self.events.write(json.dumps(fields) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self.tidy()
        self.watch(END_LIMIT_S, "the end of MPI")


COMM = pytest.StashKey[MPI.Intracomm]()


def severity(report: pytest.TestReport) -> int:
    return (PASSED, SKIPPED, FAILED)[("passed", "skipped", "failed").index(report.outcome)]
