"""Processes that were started in another way than by MPI's."""

import os
import subprocess
import sys

import pytest
from harness.launch import run_ranks

from hpcdl.environment import RANKS

pytest.importorskip("torch", reason="torch is not installed")


def test_under_torchrun_without_mpi_nobody_trains_alone() -> None:
    script = "from torch import nn; from hpcdl.torch import DistributedDataParallel as D; D(nn.Linear(2, 2))"
    environ = {name: value for name, value in os.environ.items() if name not in RANKS}
    environ |= {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ)
    assert run.returncode != 0
    assert "HpcdlError: 4 processes (WORLD_SIZE), each MPI rank 0 of 1: torchrun starts no MPI" in run.stderr
    assert "mpiexec -n 4 python" in run.stderr


def test_importing_the_torch_layer_starts_no_mpi() -> None:
    script = "import sys, hpcdl.torch, hpcdl.torch.optimizer, hpcdl.torch.train; sys.exit('mpi4py.MPI' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


FORKED = """
import os, time
import torch
from torch import nn
from hpcdl.torch import DistributedDataParallel
ddp = DistributedDataParallel(nn.Linear(2, 1), overlap=True)
ddp(torch.ones(1, 2)).sum().backward()
if os.fork() == 0:
    time.sleep(3)
    os._exit(0)
ddp(torch.ones(1, 2)).sum().backward()
print("done")
"""


def test_a_forked_child_that_is_still_alive_does_not_keep_a_rank_from_ending() -> None:
    run = run_ranks(2, "-c", FORKED, timeout_s=30)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("done") == 2
