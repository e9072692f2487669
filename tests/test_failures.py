"""What docs/failures.md promises: each fault has a named culprit or a prompt end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Collection
from functools import partial

import pytest
from harness.launch import run_ranks, side_by_side

# A rank does something wrong in the place of FAULT, between two calls that go well and one that does not.
PROGRAM = """
import os, signal, sys, time
import numpy as np, hpcdl
from mpi4py import MPI
rank, x, grid = MPI.COMM_WORLD.rank, np.ones(1000), np.ones((2, 3))
plan = hpcdl.plan_allreduce(np.ones(10**5), algorithm="ring")
plan()
def train():
    hpcdl.allreduce(x)
def fault():
    print(f"the fault is at {time.time()}", flush=True)
    FAULT
train()
hpcdl.barrier()
if rank == 1:
    fault()
WAIT
print("went on", flush=True)
"""
# Through shared memory, which knows itself who has ended; through messages; and without any agreement ahead.
WAYS = {
    "shared memory": ("train()", {}),
    "messages": ("train()", {"HPCDL_SHARED": "0"}),
    "a plan": ("plan()", {}),
    "a work": ("hpcdl.iallreduce(x).wait()", {"HPCDL_SHARED": "0"}),
}
CLOSED = "a plan that the other has closed"


def run(fault: str, way: str, **env: str) -> subprocess.CompletedProcess[str]:
    wait, own = WAYS["a plan" if way == CLOSED else way]
    fault = f"global plan; plan.close(); del plan; {fault}" if way == CLOSED else fault
    script = PROGRAM.replace("FAULT", fault).replace("WAIT", wait)
    done = run_ranks(4, "-c", script, timeout_s=60, env={"OMP_NUM_THREADS": "1", **own, **env})
    done.ended_s = time.time() - float(re.search(r"fault is at ([\d.]+)", done.stdout)[1])  # type: ignore[attr-defined, index]
    return done


def reports(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the watch has said: a line and those below it that are indented."""
    return re.findall(r"^hpcdl: after .*(?:\n  .*)*", done.stderr, re.MULTILINE)


def each_way(fault: str, ways: Collection[str] = WAYS, **env: str) -> dict[str, subprocess.CompletedProcess[str]]:
    return side_by_side(partial(run, fault, **env), ways)


def test_a_rank_that_sleeps_is_named_once_with_its_last_operation_and_place_and_all_goes_on() -> None:
    for way, done in each_way("time.sleep(4)", HPCDL_STALL_SECONDS="1").items():
        assert done.returncode == 0, (way, done.stderr)
        assert done.stdout.count("went on") == 4
        (report,) = reports(done)
        assert "after 1 s of waiting in operation" in report
        assert "of 4 ranks; the ranks wait on:" in report
        assert re.search(
            r"\n  rank 1 \(\S+\) has not come; its last is operation \d+, barrier, called at <string>:\d+", report
        )
        assert "; it is in fault at <string>:" in report
        assert "\n  ranks 0, 2-3 wait in it" in report


def test_who_sleeps_for_ever_ends_the_job_if_that_is_wanted() -> None:
    for way, done in each_way("time.sleep(1000)", HPCDL_STALL_SECONDS="1", HPCDL_STALL_ABORT="1").items():
        assert done.returncode != 0, way
        (report,) = reports(done)
        assert "the job is ended (HPCDL_STALL_ABORT=1)" in report
        assert re.search(r"\n  rank 1 \(\S+\) has not come", report)


def test_rank_0_is_named_too_when_it_is_the_one_that_is_missing() -> None:
    script = PROGRAM.replace("FAULT", "time.sleep(3)").replace("WAIT", "train()").replace("rank == 1", "rank == 0")
    late = run_ranks(3, "-c", script, timeout_s=60, env={"HPCDL_STALL_SECONDS": "1"})
    assert late.returncode == 0
    (report,) = reports(late)
    assert re.search(r"\n  rank 0 \(\S+\) has not come", report)


def test_only_the_ranks_of_a_communicator_are_spoken_of() -> None:
    script = """
import time, numpy as np, hpcdl
from mpi4py import MPI
world = MPI.COMM_WORLD
odd = world.Split(world.rank % 2, -world.rank)
hpcdl.allreduce(np.ones(3), odd)
if world.rank == 2:
    time.sleep(3)
hpcdl.allreduce(np.ones(3), odd)
"""
    done = run_ranks(4, "-c", script, timeout_s=60, env={"HPCDL_STALL_SECONDS": "1"})
    (report,) = reports(done)
    assert "of 2 ranks" in report
    assert re.search(r"rank 0 \(\S+, of the job 2\) has not come", report)


def test_a_stopped_rank_is_named() -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    for way, done in each_way(stop, HPCDL_STALL_SECONDS="1", HPCDL_STALL_ABORT="1").items():
        assert done.returncode != 0, way
        (report,) = reports(done)
        assert re.search(r"\n  rank 1 \(\S+\) does not answer: it is stopped", report)


def test_a_rank_that_exits_ends_the_job_and_is_named() -> None:
    for way, done in each_way("sys.exit(3)", [*WAYS, CLOSED]).items():
        assert done.returncode != 0, way
        assert done.ended_s < 10  # type: ignore[attr-defined]
        assert re.search(r"rank 1( \(\S+\))? has ended its program, and will not come to", done.stderr)


def test_a_rank_that_raises_ends_the_job_with_its_own_traceback() -> None:
    for way, done in each_way("raise ValueError('rank 1 is fed up')").items():
        assert done.returncode != 0, way
        assert done.ended_s < 10  # type: ignore[attr-defined]
        assert re.findall(r"^\w+Error: .*", done.stderr, re.MULTILINE) == ["ValueError: rank 1 is fed up"]


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"])
def test_a_rank_that_is_gone_without_a_word_ends_the_job(how: str) -> None:
    for way, done in each_way(how).items():
        assert done.returncode != 0, way
        assert done.ended_s < 10  # type: ignore[attr-defined]
        assert "went on" not in done.stdout


def run_under(ranks: int, script: str, setting: str) -> subprocess.CompletedProcess[str]:
    name, _, value = setting.partition("=")
    return run_ranks(ranks, "-c", script, timeout_s=90, env={name: value})


def test_one_all_reduce_too_many_ends_the_job_and_names_who_has_ended() -> None:
    script = PROGRAM.replace("FAULT", "pass").replace("WAIT", "if rank == 1: hpcdl.allreduce(x)")
    settings = ("HPCDL_SHARED=1", "HPCDL_SHARED=0")
    for setting, done in side_by_side(partial(run_under, 4, script), settings).items():
        assert done.returncode != 0, setting
        assert re.search(r"rank [023]( \(\S+\))? has ended its program, and will not come to", done.stderr)


def test_a_rank_with_more_batches_than_the_others_ends_the_job_and_names_who_has_ended() -> None:
    pytest.importorskip("torch")
    script = """
import torch, hpcdl, hpcdl.torch
model = hpcdl.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
for step in range(3 + hpcdl.rank()):
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()
"""
    settings = ("HPCDL_SHARED=1", "HPCDL_SHARED=0", "HPCDL_CHECK=0")
    for setting, done in side_by_side(partial(run_under, 2, script), settings).items():
        assert done.returncode != 0, setting
        assert re.search(r"rank 0( \(\S+\))? has ended its program, and will not come to", done.stderr)


def test_another_shape_is_the_same_error_on_all_ranks() -> None:
    done = run("hpcdl.allreduce(grid)", "shared memory")
    assert done.returncode != 0
    assert "MismatchError: the ranks do not call the same collective:" in done.stderr
    assert "rank 1: allreduce sum of float64 2x3" in done.stderr


def test_who_never_makes_a_first_call_is_waited_for_aloud() -> None:
    script = """
import time, numpy as np, hpcdl
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    time.sleep(3)
hpcdl.allreduce(np.ones(3))
"""
    done = run_ranks(2, "-c", script, timeout_s=60, env={"HPCDL_STALL_SECONDS": "1"})
    assert done.returncode == 0
    assert re.search(r"hpcdl: rank 0 \(\S+\) has waited 1 s for the other ranks to come to", done.stderr)
    assert "the first collective on a communicator of 2 ranks, called at <string>:6" in done.stderr


def test_a_stall_watch_that_is_turned_off_says_nothing() -> None:
    done = run("time.sleep(2)", "shared memory", HPCDL_STALL_SECONDS="0")
    assert (done.returncode, done.stdout.count("went on"), done.stderr) == (0, 4, "")


def test_a_works_whose_end_nobody_waits_for_is_no_stall() -> None:
    script = """
import time, numpy as np, hpcdl
work = hpcdl.iallreduce(np.ones(3))
time.sleep(2)
work.wait()
"""
    done = run_ranks(2, "-c", script, timeout_s=60, env={"HPCDL_STALL_SECONDS": "0.5"})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_takes_no_leave_for_its_rank() -> None:
    script = """
import atexit, os, time, numpy as np, hpcdl
hpcdl.allreduce(np.ones(3))
if os.fork() == 0:
    atexit._run_exitfuncs()  # which are the rank's
    os._exit(0)
os.wait()
for _ in range(3):
    time.sleep(0.5)
    hpcdl.allreduce(np.ones(3))
"""
    done = run_ranks(2, "-c", script, timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")
