"""The record of operations, and HPCDL_TRACE: one file of all ranks, valid whatever happens, bounded, on one clock."""

from __future__ import annotations

import json
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from harness.launch import run_ranks, side_by_side

from hpcdl import record, trace

PROGRAM = """
import os, sys, time, numpy as np, hpcdl
from mpi4py import MPI
rank, x = MPI.COMM_WORLD.rank, np.ones(1000, np.float32)
plan = hpcdl.plan_allreduce(x, algorithm="ring")
for step in range(5):
    hpcdl.allreduce(x, algorithm="folded")
    plan()
    hpcdl.iallreduce(x).wait()
hpcdl.barrier()
END
"""


def traced(
    file: Path, ranks: int, end: str = "", timeout_s: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    script = PROGRAM.replace("END", end)
    return run_ranks(ranks, "-c", script, timeout_s=timeout_s, env={"HPCDL_TRACE": str(file), **env})


def events(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in found if event["ph"] == "X")
    assert {event["ph"] for event in found} <= {"X", "M"}
    return found


def complete(found: list[dict[str, Any]], rank: int, name: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == "X" and event["pid"] == rank and event["name"] == name]


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_operations_are_in_one_file_with_what_they_were(ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = traced(file, ranks)
    assert (done.returncode, done.stderr) == (0, "")
    found = events(file)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    for rank in range(ranks):
        plain = [each["args"] for each in complete(found, rank, "allreduce")]
        assert [each["algorithm"] for each in plain] == ["folded", "ring"] * 5
        assert {each["bytes"] for each in plain} == {4000}
        assert {each["at"] for each in plain} == {"<string>:7", "<string>:8"}
        assert [each["run"] for each in plain if "run" in each] == [1, 2, 3, 4, 5]
        assert all("waited_us" in each for each in plain if "run" not in each)
        assert len(complete(found, rank, "iallreduce")) == 5
        assert len(complete(found, rank, "plan_allreduce")) == len(complete(found, rank, "barrier")) == 1
        (name,) = [event["args"]["name"] for event in found if event["ph"] == "M" and event["pid"] == rank]
        assert name.startswith(f"rank {rank} on ")
    # The barrier ends nowhere before it has begun everywhere: so the clocks are one.
    barriers = [complete(found, rank, "barrier")[0] for rank in range(ranks)]
    assert len({(each["args"]["comm"], each["args"]["number"]) for each in barriers}) == 1
    assert max(each["ts"] for each in barriers) <= min(each["ts"] + each["dur"] for each in barriers)


def test_gradients_are_known_by_their_bucket(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = """
import torch, hpcdl.torch
model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
model = hpcdl.torch.DistributedDataParallel(model, bucket_cap_mb=0.05, first_bucket_mb=0.05)
for step in range(3):
    model(torch.ones(2, 100)).sum().backward()
    model.zero_grad()
"""
    file = tmp_path / "trace.json"
    assert run_ranks(2, "-c", script, timeout_s=90, env={"HPCDL_TRACE": str(file)}).returncode == 0
    for rank in range(2):
        runs = [event["args"] for event in complete(events(file), rank, "allreduce") if "bucket" in event["args"]]
        assert [each["bucket"] for each in runs] == [0, 1] * 3
        assert all(40_000 <= each["bytes"] <= 41_000 for each in runs)


def test_the_file_is_whole_after_a_crash(tmp_path: Path) -> None:
    def crashed(end: str) -> subprocess.CompletedProcess[str]:
        return traced(tmp_path / end[:5], 3, f"time.sleep(2.5)\nif rank == 1:\n    {end}\nhpcdl.barrier()")

    ends = ("os.kill(os.getpid(), 9)", "raise ValueError", "sys.exit(3)", "os._exit(1)")
    for end, done in side_by_side(crashed, ends).items():
        assert done.returncode != 0, end
        found = events(tmp_path / end[:5])
        for rank in range(3):
            assert len(complete(found, rank, "allreduce")) == 10


def test_the_file_is_whole_before_the_first_operation_ends(tmp_path: Path) -> None:
    script = "import os, numpy as np\nfrom hpcdl import watch\nwatch.watch()\nos.kill(os.getpid(), 9)"
    file = tmp_path / "trace.json"
    assert run_ranks(1, "-c", script, timeout_s=30, env={"HPCDL_TRACE": str(file)}).returncode != 0
    assert events(file) == []


@pytest.mark.parametrize("place", ["", "no/such/folder/trace.json"])
def test_a_file_that_cannot_be_written_is_said_and_harms_nothing(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    done = traced(file, 2)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hpcdl: HPCDL_TRACE={file}: ")
    assert line.endswith("; no trace is written")


def test_the_file_grows_no_longer_than_its_bound_and_says_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "FILE_BYTES", 2000)
    monkeypatch.setattr(record, "_keep", record.operations.append)
    tracer = trace.Tracer(str(tmp_path / "trace.json"), 0, "here")
    lines = [json.dumps({"ph": "M", "name": str(number)}) for number in range(100)]
    for first in range(0, 100, 10):
        tracer.write(lines[first : first + 10], 0, 0, last=False)
    tracer.write([], 5, 0, last=True)
    found = json.loads((tmp_path / "trace.json").read_text())
    assert (tmp_path / "trace.json").stat().st_size < 2200
    assert found[-1]["name"] == "hpcdl_left_out"
    assert found[-1]["args"]["events"] == 105 - (len(found) - 1)
    assert [event["name"] for event in found[:-1]] == [str(number) for number in range(len(found) - 1)]


def test_clocks_of_two_machines_are_compared_and_the_quickest_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_keep", record.operations.append)
    clock = iter([0, 1000, 2000, 2010, 3000, 4000, 5000, 6000, 7000, 8000])
    tracer = trace.Tracer("", 1, "there")
    monkeypatch.setattr(trace, "now", lambda: next(clock))
    theirs = iter([100_500, 102_005, 100_000, 100_000, 100_000])
    tracer.align(lambda: {"time": next(theirs), "start": 99_000, "boot": "another machine"})
    operation = [record.About("barrier", "0.1"), 1, 0, (lambda: 0).__code__, 0, 7, 1_000, 0, 0, 3_000]
    line = json.loads(tracer._line(operation))
    assert (line["ts"], line["dur"]) == ((1_000 + 100_000 - 99_000) / 1e3, 2.0)


def test_the_last_thousand_operations_are_remembered_and_no_more() -> None:
    operations: deque[record.Operation] = deque(maxlen=record.LENGTH)
    assert record.operations.maxlen == operations.maxlen == 1000
    about = record.About("allreduce", "0.1", 8)
    for number in range(1500):
        record.begin(about, number, 0, 0)[record.ENDED] = record.now()
    numbers = [each[record.NUMBER] for each in record.snapshot() if each[record.ABOUT] is about]
    assert numbers == list(range(500, 1500))


def test_the_record_names_the_users_line() -> None:
    def outer(depth: int | None) -> str:
        return record.describe(record.begin(record.About("allreduce of 3", "0.1"), 7, 2, depth))

    line = outer.__code__.co_firstlineno
    assert outer(0) == f"operation 7, allreduce of 3, run 2 of the plan, called at {Path(__file__).name}:{line + 1}"
    assert outer(None).endswith(f":{line + 1}")
    assert outer(1).endswith(f":{line + 6}")
