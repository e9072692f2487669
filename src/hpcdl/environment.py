"""How this process was launched: the ranks that the launcher speaks of, the cores of the node.

Floor 1. Nothing here starts MPI but what is given a communicator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

# Set for every process of a job, by MPICH's mpiexec and SLURM's pmi2, by Open MPI, and by srun. SLURM_NTASKS
# stands in a batch script too, where a forgotten mpiexec or srun is as wrong.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")
YIELD = "OMPI_MCA_mpi_yield_when_idle"


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Is this process one of an MPI job, as far as one can tell without starting MPI?"""
    return any(name in environ for name in RANKS)


def wrong_size(size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if MPI knows of this process alone where the launcher has started several, else None."""
    name = next((name for name in SIZES if environ.get(name, "").isdecimal()), None)
    if size > 1 or name is None or int(environ[name]) <= 1:
        return None
    return (
        f"{name} says {environ[name]} processes, but MPI says this is rank 0 of 1: if they were started "
        "together, each now trains alone. Use the mpiexec of the MPI that mpi4py loads, or srun with the "
        "--mpi that it needs"
    )


def cores_per_rank(comm: MPI.Comm) -> int:
    """How many cores each rank of this node may use, whether the launcher binds the ranks to cores or not."""
    ranks, cores, mine = _node(comm)
    return max(1, min(mine, cores // ranks))


def notices(comm: MPI.Comm) -> list[str]:
    """What a person should know of how the job was launched, the same on all ranks."""
    wrong = wrong_size(comm.size)
    return [*([f"warning: {wrong}"] if wrong else []), *filter(None, [crowding(comm)])]


def crowding(comm: MPI.Comm) -> str | None:
    """A hint if the ranks of some node outnumber its cores, else None; the same on all ranks."""
    from mpi4py import MPI

    nodes = [(ranks, cores) for ranks, cores, _ in comm.allgather(_node(comm))]
    ranks, cores = max(nodes, key=lambda node: node[0] / node[1])
    if ranks <= cores:
        return None
    hint = f"note: {ranks} ranks share {cores} core{'s' if cores > 1 else ''} of a node, so they wait for each other"
    if MPI.get_vendor()[0] == "Open MPI" and os.environ.get(YIELD) != "1":
        hint += f"; {YIELD}=1 lets those that wait for messages step aside"
    return hint


def _node(comm: MPI.Comm) -> tuple[int, int, int]:
    """How many ranks this node has, how many cores they may use together, and how many this one."""
    from mpi4py import MPI

    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    every = set[int]().union(*node.allgather(mine))
    size = node.size
    node.Free()
    return size, len(every), len(mine)
