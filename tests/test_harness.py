"""The harness itself, on planted tests: what fails on one rank, hangs or crashes is reported, and nothing else is."""

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from harness import TESTS
from harness.launch import left_over, run_ranks

PLANTED = TESTS / "planted"


def outcomes(file: str, folder: Path, *arguments: str) -> dict[str, tuple[str, str]]:
    """Run planted tests under a pytest of their own; each test's outcome and text."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", str(PLANTED / file), f"--junitxml={report}", *arguments]
    run = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    told = {}
    for case in ET.parse(report).iter("testcase"):
        results = [child for child in case if child.tag in ("failure", "error", "skipped")]
        assert len(results) <= 1
        name = case.get("name", "").removesuffix("[np3]")
        told[name] = (results[0].tag, results[0].text or "") if results else ("passed", "")
    return told


def under_mpiexec(file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run planted tests as a user does by hand."""
    return run_ranks(3, "-m", "pytest", "--color=no", str(PLANTED / file), *arguments, timeout_s=60, cwd=TESTS.parent)


def test_a_failure_on_one_rank_fails_the_test_with_its_output(tmp_path: Path) -> None:
    told = outcomes("one_rank.py", tmp_path)
    kinds = {name: kind for name, (kind, _) in told.items()}
    assert kinds == {
        "test_before": "passed",
        "test_fails_on_rank_1": "failure",
        "test_fails_in_teardown_on_rank_1": "failure",
        "test_is_skipped_on_rank_1": "failure",
        "test_is_skipped_everywhere": "skipped",
        "test_is_expected_to_fail": "skipped",
        "test_after": "passed",
    }
    text = told["test_fails_on_rank_1"][1]
    assert "Rank 1 of 3 failed" in text
    assert "assert 1 != 1" in text
    assert "rank 1 was here" in text
    assert "rank 0 was here" not in text
    assert "rank 1 skipped" in told["test_is_skipped_on_rank_1"][1]
    assert "together" in told["test_is_skipped_everywhere"][1]


def test_a_hang_ends_at_its_limit_with_all_stacks_and_the_next_tests_run(tmp_path: Path) -> None:
    told = outcomes("hang.py", tmp_path)
    assert [kind for kind, _ in told.values()] == ["passed", "failure", "passed", "failure", "passed"]
    stuck = told["test_all_wait_for_a_message_that_nobody_sends"][1]
    one_failed = told["test_rank_1_fails_while_the_others_wait_for_it"][1]
    for rank in range(3):
        assert f"Rank {rank} stood here" in stuck
    assert stuck.count("in test_all_wait_for_a_message_that_nobody_sends") == 3
    assert "rank 1 has a reason" in one_failed
    assert one_failed.count("in test_rank_1_fails_while_the_others_wait_for_it") >= 2


def test_a_crash_fails_its_test_alone(tmp_path: Path) -> None:
    told = outcomes("crash.py", tmp_path)
    assert [kind for kind, _ in told.values()] == ["passed", "failure", "passed", "failure", "passed"]
    assert "ended while this test ran, with status" in told["test_rank_2_is_killed"][1]


def test_selection_reaches_the_ranks(tmp_path: Path) -> None:
    told = outcomes("one_rank.py", tmp_path, "-k", "before or after")
    assert told == {"test_before": ("passed", ""), "test_after": ("passed", "")}


def test_by_hand_a_failure_on_one_rank_is_shown_by_rank_0() -> None:
    run = under_mpiexec("one_rank.py")
    assert run.returncode != 0
    assert "3 failed, 2 passed, 1 skipped, 1 xfailed" in run.stdout
    failures = run.stdout.partition("short test summary")[0]  # with CI set, pytest repeats the messages behind it
    assert failures.count("assert 1 != 1") == 1
    assert "rank 1 was here" in run.stdout


def test_by_hand_a_hang_ends_at_its_limit_with_all_stacks() -> None:
    began = time.monotonic()
    run = under_mpiexec("hang.py")
    assert run.returncode != 0
    for rank in range(3):
        assert f"Rank {rank} of 3 is still at" in run.stderr
    assert run.stderr.count("in test_all_wait_for_a_message_that_nobody_sends") == 3
    assert time.monotonic() - began < 3 + 15  # the limit, and a start on a busy machine


def test_by_hand_a_rank_that_fails_does_not_wait_for_the_others() -> None:
    began = time.monotonic()
    run = under_mpiexec("hang.py", "-k", "rank_1_fails")
    assert run.returncode != 0
    assert "rank 1 has a reason" in run.stderr
    assert run.stderr.count("in test_rank_1_fails_while_the_others_wait_for_it") >= 2
    assert time.monotonic() - began < 5 + 15


def test_run_ranks_gives_status_and_output() -> None:
    # One write each: print may write the line and its end apart, and the launcher mixes what the ranks write.
    run = run_ranks(2, "-c", r"import os; os.write(1, b'out\n'); os.write(2, b'err\n')")
    assert run.returncode == 0
    assert run.stdout.split() == ["out", "out"]
    assert run.stderr.split() == ["err", "err"]


def test_run_ranks_leaves_nothing_behind_after_its_limit() -> None:
    code = "from mpi4py import MPI; import os, time; print(f'pid={os.getpid()}', flush=True); time.sleep(60)"
    began = time.time()
    with pytest.raises(TimeoutError, match="still running after 5 s") as caught:
        run_ranks(2, "-c", code, timeout_s=5)
    pids = re.findall(r"pid=(\d+)", str(caught.value))
    assert len(pids) == 2
    for pid in pids:
        commands = Path(f"/proc/{pid}/cmdline")
        assert not commands.exists() or commands.read_text() == ""  # gone, or not yet collected by its parent
    assert left_over(began) == []
