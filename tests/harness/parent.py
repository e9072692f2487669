"""The pytest that a person starts: it shows every test once per number of ranks, and lets mpiexec run them."""

import json
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness import all_stacks, needs_ranks, rank_counts, register_markers, spread, time_limit_s
from harness.launch import Job

START_LIMIT_S = 180  # longer than the child's own, so that its stacks are seen
TAIL = 6000  # characters of a broken start's output to show


class Parent:
    """The pytest plugin of a run that is not itself under mpiexec."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start: Start | None = None
        register_markers(config)
        # The test files import MPI. Were it started here, no mpiexec could be started from this process.
        with suppress(ImportError):
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if needs_ranks(metafunc.definition):
            spread(metafunc, rank_counts(metafunc.definition))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What needs no MPI goes first; then one number of ranks after the other, so that each is started once."""
        for item in items:
            if needs_ranks(item):
                item.stash[LIMIT_S] = time_limit_s(item)
                item.add_marker(pytest.mark.timeout(0), append=False)  # the ranks keep the time
        items.sort(key=ranks_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not needs_ranks(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if self.start is None or not self.start.covers(item):
            self.end_start()
            items = item.session.items
            rest = [other for other in items[items.index(item) :] if ranks_of(other) == ranks_of(item)]
            self.start = Start(self.config, rest)
        for report in self.start.reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def end_start(self) -> None:
        if self.start:
            self.start.end()
        self.start = None

    def pytest_sessionfinish(self) -> None:
        self.end_start()


class Start:
    """One mpiexec that runs the given items in order, and what it has told so far."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.began = time.monotonic()
        self.items = items
        self.waiting = [item.nodeid for item in items]
        self.started: set[str] = set()
        self.verdicts: dict[str, dict[str, Any]] = {}
        self.read = 0
        self.over = False  # the cases still waiting need another start

        # In pytest's cache folder, since ranks on other hosts see the repository but not this host's /tmp.
        shelf = config.cache.mkdir("ranks") if hasattr(config, "cache") else None
        self.folder = Path(tempfile.mkdtemp(dir=shelf, prefix="start-"))
        (self.folder / "cases").write_text(json.dumps(self.waiting))
        self.output = open(self.folder / "output", "wb")
        aloud = config.option.capture == "no"
        self.job = Job(
            ranks_of(items[0]),
            *("-m", "pytest", "-q", f"--rootdir={config.rootpath}", "-p", "no:cacheprovider"),
            # Its plugin imports all of hypothesis at the end, used or not: a second of each rank.
            *("-p", "no:hypothesispytest"),
            *(("-c", str(config.inipath)) if config.inipath else ()),
            *(("--capture=no",) if aloud else ()),
            *(f"--tb={config.option.tbstyle}", "--color=no"),
            *dict.fromkeys(str(item.path) for item in items),
            env={"HPCDL_TEST_FOLDER": str(self.folder)},
            cwd=config.rootpath,
            stdout=None if aloud else self.output,
            stderr=None if aloud else self.output,
        )

    def covers(self, item: pytest.Item) -> bool:
        return not self.over and item.nodeid in self.waiting

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Wait for the ranks' verdict on an item, and put it into pytest's words."""
        start_s = 0.0
        if not self.started:
            self.wait(lambda: self.started, START_LIMIT_S)
            start_s = time.monotonic() - self.began
        self.wait(lambda: item.nodeid in self.verdicts, item.stash[LIMIT_S] + START_LIMIT_S)
        self.waiting.remove(item.nodeid)
        verdict = self.verdicts.get(item.nodeid) or self.broken(item)
        if not self.waiting and not self.over and verdict["outcome"] != "failed":
            verdict = self.last(verdict)

        now = time.time()
        reports = []
        for when, duration in (("setup", start_s), ("call", verdict.get("duration", 0.0)), ("teardown", 0.0)):
            told = when == "call"
            longrepr = verdict.get("longrepr") or None
            report = pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords=dict.fromkeys(item.keywords, 1),
                outcome=verdict["outcome"] if told else "passed",
                longrepr=(tuple(longrepr) if isinstance(longrepr, list) else longrepr) if told else None,
                when=when,
                duration=duration,
                start=now - duration,
                stop=now,
            )
            if told and verdict.get("wasxfail") is not None:
                report.wasxfail = verdict["wasxfail"]
            reports.append(report)
        return reports

    def wait(self, happened, limit_s: float) -> None:
        """Take in what the ranks tell until it has happened or the job has ended."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.job.process.poll() is not None  # asked first: what it told last must still be read
            self.take_in()
            if happened() or ended:
                return
            if time.monotonic() > deadline:
                self.job.end()
            time.sleep(0.01)

    def take_in(self) -> None:
        """Read the new whole lines of the events; opened anew each time, for file systems over a network."""
        with suppress(FileNotFoundError), open(self.folder / "events", "rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                event = json.loads(line)
                if "case" in event:
                    self.started.add(event["case"])
                else:
                    self.verdicts[event["verdict"]] = event

    def broken(self, item: pytest.Item) -> dict[str, Any]:
        """The job ended without a verdict on an item: say how, and let the next items have a new start."""
        status = self.job.process.wait()
        began = "while this test ran" if item.nodeid in self.started else "before this test began"
        text = f"The {ranks_of(item)} ranks ended {began}, with status {status}.\n\n{self.remains()}"
        # Where no test began the next start would fare no better: then all of this start's tests fail so.
        self.over = bool(self.started)
        return {"outcome": "failed", "longrepr": text}

    def last(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """After the last test the ranks must end, and end well."""
        try:
            status = self.job.process.wait(START_LIMIT_S)
        except subprocess.TimeoutExpired:
            status = "none, and had to be killed"
        if status == 0 or any(other["outcome"] == "failed" for other in self.verdicts.values()):
            return verdict
        text = f"All tests had their verdict, but the ranks ended with status {status}.\n\n{self.remains()}"
        return {"outcome": "failed", "longrepr": text}

    def remains(self) -> str:
        """What the ranks have left behind: failures not agreed on, stacks, output."""
        failures = "".join(file.read_text() for file in sorted(self.folder.glob("failed-*")))
        output = (self.folder / "output").read_text(errors="replace")[-TAIL:]
        return f"{failures}{all_stacks(self.folder)}Output of the ranks:\n{output}"

    def end(self) -> None:
        self.job.end()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


LIMIT_S = pytest.StashKey[float]()


def ranks_of(item: pytest.Item) -> int:
    """How many ranks run an item; 0 for what this process runs itself."""
    return item.callspec.params["ranks"] if needs_ranks(item) else 0
