"""hpcdl: hand-written collectives for distributed deep-learning training, over mpi4py.

Importing this starts no MPI; the first collective does.
"""

from hpcdl import collectives
from hpcdl.api import (
    algorithms,
    allgather,
    allreduce,
    barrier,
    broadcast,
    choose,
    empty,
    explain,
    iallgather,
    iallreduce,
    ibarrier,
    ibroadcast,
    ireduce,
    ireduce_scatter,
    local_rank,
    local_size,
    plan_allgather,
    plan_allreduce,
    plan_barrier,
    plan_broadcast,
    plan_reduce,
    plan_reduce_scatter,
    rank,
    reduce,
    reduce_scatter,
    sent_bytes,
    share,
    size,
    zeros,
)
from hpcdl.ends import take_others_along
from hpcdl.errors import HpcdlError, MismatchError, RankEndedError, RankFailedError, UnsupportedArrayError
from hpcdl.preemption import preemption

__version__ = "0.1.0"

__all__ = [
    "HpcdlError",
    "MismatchError",
    "RankEndedError",
    "RankFailedError",
    "UnsupportedArrayError",
    "algorithms",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "choose",
    "collectives",
    "empty",
    "explain",
    "iallgather",
    "iallreduce",
    "ibarrier",
    "ibroadcast",
    "ireduce",
    "ireduce_scatter",
    "local_rank",
    "local_size",
    "plan_allgather",
    "plan_allreduce",
    "plan_barrier",
    "plan_broadcast",
    "plan_reduce",
    "plan_reduce_scatter",
    "preemption",
    "rank",
    "reduce",
    "reduce_scatter",
    "sent_bytes",
    "share",
    "size",
    "zeros",
]

take_others_along()
