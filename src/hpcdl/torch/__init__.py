"""The PyTorch layer. Importing it starts no MPI, and makes the backend "hpcdl" known to torch.distributed."""

from hpcdl.torch import backend
from hpcdl.torch.backend import monitored_barrier
from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from hpcdl.torch.decay import decay_groups
from hpcdl.torch.functional import all_reduce
from hpcdl.torch.grouped import grouped_allreduce, grouped_iallreduce, poll
from hpcdl.torch.growth import BatchGrowth
from hpcdl.torch.lars import LARS
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
from hpcdl.torch.scaler import Culprit, GradScaler
from hpcdl.torch.schedules import GradualWarmup, linear_scaled_lr

__all__ = [
    "LARS",
    "BatchGrowth",
    "Checkpoint",
    "CheckpointError",
    "Culprit",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ExactSampler",
    "GradScaler",
    "GradualWarmup",
    "SyncBatchNorm",
    "all_reduce",
    "allgather_object",
    "average_metrics",
    "backend",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_consistent",
    "convert_sync_batchnorm",
    "decay_groups",
    "empty",
    "grouped_allreduce",
    "grouped_iallreduce",
    "linear_scaled_lr",
    "load_checkpoint",
    "monitored_barrier",
    "poll",
    "save_checkpoint",
    "zeros",
]

backend.register()
