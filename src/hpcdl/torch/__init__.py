"""The PyTorch layer. Importing it starts no MPI."""

from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from hpcdl.torch.functional import all_reduce
from hpcdl.torch.grouped import grouped_allreduce, grouped_iallreduce, poll
from hpcdl.torch.memory import empty, zeros
from hpcdl.torch.norm import SyncBatchNorm, convert_sync_batchnorm
from hpcdl.torch.objects import (
    allgather_object,
    average_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_consistent,
)
from hpcdl.torch.optimizer import DistributedOptimizer
from hpcdl.torch.parallel import DistributedDataParallel
from hpcdl.torch.sampler import ExactSampler

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ExactSampler",
    "SyncBatchNorm",
    "all_reduce",
    "allgather_object",
    "average_metrics",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_consistent",
    "convert_sync_batchnorm",
    "empty",
    "grouped_allreduce",
    "grouped_iallreduce",
    "load_checkpoint",
    "poll",
    "save_checkpoint",
    "zeros",
]
