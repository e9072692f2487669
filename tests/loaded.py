"""A data set for data loaders. Their workers import this file, and with it hpcdl, which must not start MPI there."""

import sys

import torch
from torch import Tensor

import hpcdl
import hpcdl.torch


class Numbers(torch.utils.data.Dataset[Tensor]):
    """24 rows of numbers."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> Tensor:
        if torch.utils.data.get_worker_info() is None:
            raise RuntimeError("this is no worker")
        if "spawn" in (torch.multiprocessing.get_start_method(allow_none=True) or "") and "mpi4py.MPI" in sys.modules:
            raise RuntimeError(f"hpcdl {hpcdl.__version__} has started MPI in a worker")
        return torch.full((self.width,), float(number), dtype=torch.float64)
