"""What is left of node-shared memory when a job ends, however it ends; and jobs whose /dev/shm is too small for it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.launch import environment, is_open_mpi, mpiexec, run_ranks

SHM = Path("/dev/shm")

OF_MPI = re.compile(r"(mpich|ucx)_shm_|(sm|vader)_segment\.|osc_rdma\.")

ENDS = {
    "well": "",
    "with an exception": "if rank == 1: raise RuntimeError('rank 1 has had enough')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed inside an all-reduce": """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
import hpcdl.shared
hpcdl.shared.Meeting.Wait = die
hpcdl.allreduce(y)""",
}


def files() -> set[str]:
    return {file.name for file in SHM.iterdir() if not OF_MPI.match(file.name)}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_in_dev_shm(end: str, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        f"""
import os, signal, numpy as np, hpcdl
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
y = hpcdl.empty(1 << 20)
for x in (y, np.ones(1 << 20), np.ones(3)):
    plan = hpcdl.plan_allreduce(x)
    plan()
    hpcdl.allreduce(x)
if "/dev/shm/#" in open("/proc/self/maps").read():
    os.write(1, b"mapped\\n")
{ENDS[end]}
"""
    )
    before = files()
    run = run_ranks(2, str(script), timeout_s=60)
    assert "mapped" in run.stdout, run.stderr
    assert (run.returncode == 0) == (end == "well")
    assert files() <= before


# ---- a small /dev/shm ----------------------------------------------------------------------------------------------

SMALL = """
import os, warnings, numpy as np, hpcdl
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, p = comm.rank, comm.size
told = []
warnings.showwarning = lambda message, *_: told.append(str(message))

def check(*arrays):
    for x in arrays:
        for algorithm in "auto", "shared", "ring":
            for collective in hpcdl.allreduce, lambda *a, **k: hpcdl.iallreduce(*a, **k).result():
                x[...] = rank + 1
                assert (collective(x, algorithm=algorithm) == p * (p + 1) // 2).all(), algorithm
            x[...] = rank + 1
            with hpcdl.plan_allreduce(x, algorithm=algorithm) as plan:
                assert (plan() == p * (p + 1) // 2).all(), algorithm

def fill(left):
    if rank == 0:
        free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
        with open("/dev/shm/filler", "w") as file:
            os.posix_fallocate(file.fileno(), 0, free - left)
    comm.Barrier()

CASE
assert len(told) == (rank == 0), told
assert all("/dev/shm: [Errno 28] No space left on device" in line for line in told), told
os.write(1, b"right\\n")
"""

CASES = {
    "for a large array": """
small = hpcdl.empty(100)
large = hpcdl.empty(4 << 20)
assert not large.any()
check(large, small, np.empty(100_000, np.float32))""",
    "for a staging area": """
fill(64 << 10)
small = hpcdl.empty(100)
hpcdl.allreduce(np.ones(10))
check(small, np.empty(100_000, np.float32))""",
    "for anything": """
fill(4096)
small = hpcdl.empty(100)
check(small, np.empty(100_000, np.float32))""",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a /dev/shm of its own")
@pytest.mark.skipif(is_open_mpi(), reason="Open MPI itself needs more")
@pytest.mark.parametrize("too_small", CASES)
def test_where_dev_shm_is_too_small_all_goes_through_messages(
    too_small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "small.py"
    script.write_text(SMALL.replace("CASE", CASES[too_small]))
    mount = "mount -t tmpfs -o size=4m tmpfs /dev/shm"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "sh", "-c", mount], check=False).returncode:
        pytest.skip("no mount of its own to be had here, as in most containers")
    launcher = shlex.join(["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *mpiexec()])
    variables = environment()
    monkeypatch.setenv("MPIEXEC", launcher)
    run = run_ranks(2, str(script), timeout_s=60, env=variables)
    assert run.stdout.splitlines() == ["right"] * 2, run.stderr
    assert run.returncode == 0
