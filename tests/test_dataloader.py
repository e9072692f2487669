"""A training whose batches come from other processes that import all anew; for forked ones see test_torch_ddp."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.launch import run_ranks

pytest.importorskip("torch")

SCRIPT = """
import os
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
    steps = 0
    for method in ("forkserver", "spawn"):
        for inputs, targets in DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
    hpcdl.torch.check_consistent(model)
    os.write(1, f"rank {MPI.COMM_WORLD.rank}: {steps} steps\\n".encode())  # in one piece

if __name__ == "__main__":
    main()
"""


def test_fifty_steps_with_a_worker_made_in_each_way(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT)
    done = run_ranks(2, str(script), timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 100 steps", "rank 1: 100 steps"]
