"""Preemption in programs of their own: signals from outside and in numbers, and ranks that end in the block."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.launch import Job, run_ranks


def test_its_import_starts_no_mpi() -> None:
    code = "import sys, hpcdl.preemption, hpcdl.logs; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_storm_of_signals_in_the_middle_of_collectives_disturbs_none() -> None:
    script = """
import os, signal, threading, time
import hpcdl
import numpy as np
from hpcdl.preemption import preemption
from mpi4py import MPI

comm = MPI.COMM_WORLD
ended = threading.Event()

def storm():
    while not ended.wait(0.0005):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)

thread = threading.Thread(target=storm)
x = np.empty(10**5)
with preemption(comm) as stop:
    thread.start()
    for step in range(100):
        x[:] = step
        comm.Barrier()
        assert (hpcdl.allreduce(x, comm) == step * comm.size).all()
        stop()
    ended.set()
    thread.join()
assert stop.reason and stop.reason.startswith("SIG") and " at rank 0 " in stop.reason, stop.reason
"""
    done = run_ranks(3, "-c", script, timeout_s=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_from_outside_to_one_rank_reaches_all(tmp_path: Path, rank: int) -> None:
    script = f"""
import os, time
from pathlib import Path
import hpcdl
from hpcdl.preemption import preemption
from mpi4py import MPI

comm, folder = MPI.COMM_WORLD, Path({str(tmp_path)!r})
with preemption(comm) as stop:
    (folder / f"pid-{{comm.rank}}").write_text(str(os.getpid()))
    step = 0
    while not stop():
        step += 1
        time.sleep(0.001 * comm.rank)
(folder / f"stop-{{comm.rank}}").write_text(f"{{step}} {{stop.reason}}")
"""
    with Job(3, "-c", script) as job:
        end = time.monotonic() + 60
        while not all((tmp_path / f"pid-{each}").exists() for each in range(3)):
            assert time.monotonic() < end and job.process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGTERM)
        assert job.process.wait(30) == 0
    (said,) = {(tmp_path / f"stop-{each}").read_text() for each in range(3)}
    assert f"SIGTERM at rank {rank} (" in said


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise RuntimeError('planted')", "os._exit(4)"])
def test_a_rank_that_ends_in_the_block_ends_the_job(end: str) -> None:
    script = f"""
import os, sys
import hpcdl
from hpcdl.preemption import preemption
from mpi4py import MPI

with preemption(MPI.COMM_WORLD) as stop:
    for step in range(10**9):
        if step == 5 and MPI.COMM_WORLD.rank == 1:
            {end}
        stop()
"""
    began = time.monotonic()
    done = run_ranks(3, "-c", script, timeout_s=60)
    assert done.returncode != 0
    assert time.monotonic() - began < 15  # a start takes some of it
    if end.startswith("raise"):
        assert "RuntimeError: planted" in done.stderr
    if end.startswith("sys"):
        assert "rank 1 has ended its program" in done.stderr
