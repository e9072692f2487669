"""The watch between hosts: nothing is shared there, and sockets find their way."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import environment, is_open_mpi

from cluster.hosts import NAMES, Hosts, missing

MPIEXEC = Path(sys.executable).with_name("mpiexec")
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec of MPICH or Open MPI beside this python"),
    pytest.mark.timeout(120),
]

PROGRAM = """
import os, signal, sys, time
import numpy as np, hpcdl
from mpi4py import MPI
rank, x = MPI.COMM_WORLD.rank, np.ones(1000)
hpcdl.allreduce(x)
plan = hpcdl.plan_allreduce(x, algorithm="ring")
plan()
if rank == 3:
    FAULT
CALL
"""
CALLS = {"a call": "hpcdl.allreduce(x)", "a plan": "plan()"}


def run(fault: str, call: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = PROGRAM.replace("FAULT", fault).replace("CALL", CALLS[call])
    with Hosts(2) as hosts:
        mpi = "openmpi" if is_open_mpi() else "mpich"
        line = hosts.mpiexec(mpi, MPIEXEC.parent, 2, [sys.executable, "-c", script], {"OMP_NUM_THREADS": "1", **env})
        return subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment())


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_of_another_host_that_sleeps_is_named_with_its_host(call: str) -> None:
    done = run("time.sleep(4)", call, HPCDL_STALL_SECONDS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("of 4 ranks; the ranks wait on:") == 1
    assert re.search(
        rf"\n  rank 3 \({NAMES}2\) has not come; its last is operation \d+, .*at <string>:\d+", done.stderr
    )
    assert "\n  ranks 0-2 wait in it" in done.stderr


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_of_another_host_that_exits_ends_the_job(call: str) -> None:
    done = run("sys.exit(3)", call)
    assert done.returncode != 0
    assert f"hpcdl: rank 3 ({NAMES}2) has ended its program, and will not come to operation" in done.stderr


def test_a_stopped_rank_of_another_host_is_named() -> None:
    done = run("os.kill(os.getpid(), signal.SIGSTOP)", "a call", HPCDL_STALL_SECONDS="1", HPCDL_STALL_ABORT="1")
    assert done.returncode != 0
    assert f"\n  rank 3 ({NAMES}2) does not answer: it is stopped, its host is down" in done.stderr


def test_a_trace_of_two_hosts_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    assert run("pass", "a call", HPCDL_TRACE=str(file)).returncode == 0
    found = json.loads(file.read_text())
    names = {event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {f"rank {rank} on {NAMES}{1 + rank // 2}" for rank in range(4)}
    assert len([event for event in found if event["name"] == "allreduce"]) == 4 * 3
