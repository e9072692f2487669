"""python -m hpcdl.run between hosts: an unchanged PyTorch program finds rank 0's host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import TESTS
from harness.launch import environment, is_open_mpi

from cluster.hosts import Hosts, missing

MPIEXEC = Path(sys.executable).with_name("mpiexec")
EXAMPLE = TESTS.parent / "examples" / "unchanged_ddp.py"
pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec of MPICH or Open MPI beside this python"),
    pytest.mark.timeout(120),
]


def test_ranks_of_two_hosts_train_an_unchanged_program() -> None:
    with Hosts(2) as hosts:
        mpi = "openmpi" if is_open_mpi() else "mpich"
        words = [sys.executable, "-m", "hpcdl.run", str(EXAMPLE)]
        line = hosts.mpiexec(mpi, MPIEXEC.parent, 2, words, {"OMP_NUM_THREADS": "1"})
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=environment())
    assert done.returncode == 0, done.stderr
    losses = [text for text in done.stdout.splitlines() if text.startswith("epoch ")]
    assert len(losses) == 3 and all(text.endswith("over 4 ranks") for text in losses)
