"""A training whose batches come from worker processes, made in each of the three ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.launch import run_ranks

pytest.importorskip("torch")

SCRIPT = """
import os
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import hpcdl
import hpcdl.torch

class Numbers(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((3,), float(index)), torch.tensor([1.0])

def main():
    from mpi4py import MPI
    torch.manual_seed(0)
    model = hpcdl.torch.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
    hpcdl.torch.check_consistent(model)
    os.write(1, f"rank {MPI.COMM_WORLD.rank}: {steps} steps\\n".encode())  # in one piece

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_fifty_steps_with_two_workers(method: str, tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT)
    done = run_ranks(2, str(script), method, timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 50 steps", "rank 1: 50 steps"]
