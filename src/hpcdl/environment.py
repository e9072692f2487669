"""How this process was launched: the ranks that the launcher speaks of, the cores of the node.

Floor 1. Nothing here starts MPI but what is given a communicator. HPCDL_DETECT=0 has the environment left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

# Set for every process of a job, by MPICH's mpiexec and SLURM's pmi2, by Open MPI, and by srun. SLURM_NTASKS
# stands in a batch script too, where a forgotten mpiexec or srun is as wrong. Under an mpiexec inside SLURM it counts
# the nodes: there it comes last.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")
YIELD = "OMPI_MCA_mpi_yield_when_idle"

HYDRA, INTEL, OPEN_MPI, SRUN = "MPICH's mpiexec", "Intel MPI's mpiexec", "Open MPI's mpiexec", "srun"
LAUNCHERS = (HYDRA, INTEL, OPEN_MPI, SRUN)
TORCHRUN, BATCH, SHELL, NOBODY = "torchrun", "a SLURM batch script", "a shell in a SLURM allocation", "nobody"
UNKNOWN = "HPCDL_DETECT=0"

NO_STEPS = range(0xFFFFFFF0, 1 << 32)
"""Numbers that SLURM gives to what is no srun of a user's: the batch script, the shell of salloc."""
MOST_NODES = 1 << 20


class Launch(NamedTuple):
    """Who has started this process, as far as the environment tells."""

    by: str
    size: int | None = None
    """How many processes; in a batch script or a shell, how many srun would start."""
    rank: int | None = None
    pmi: str = ""
    """What the processes find each other by: pmi1, pmi2, pmix; or nothing."""


def classify(environ: Mapping[str, str] = os.environ) -> Launch:
    """Who has started this process. The name of a SLURM job says nothing: people call theirs bash or interactive."""
    if not _detect(environ):
        return Launch(UNKNOWN)

    def number(*names: str) -> int | None:
        return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)

    if "TORCHELASTIC_RUN_ID" in environ:  # first: what is around it, srun or mpiexec, has started torchrun itself
        return Launch(TORCHRUN, number("WORLD_SIZE"), number("RANK"))
    if "OMPI_COMM_WORLD_RANK" in environ:
        return Launch(OPEN_MPI, number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK"), "pmix")
    if "PMI_RANK" in environ:
        size, rank = number("PMI_SIZE"), number("PMI_RANK")
        if "PMI_JOBID" in environ and "MPI_LOCALNRANKS" not in environ:
            return Launch(SRUN, size, rank, "pmi2")
        intel = any(name.startswith(("I_MPI_HYDRA_", "HYDRA_BSTRAP_")) for name in environ)
        return Launch(INTEL if intel else HYDRA, size, rank, "pmi1")
    step, size = number("SLURM_STEP_ID"), number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if step is not None and step not in NO_STEPS:
        return Launch(SRUN, size, number("SLURM_PROCID"), "pmix" if "PMIX_RANK" in environ else "")
    if "PMIX_RANK" in environ:  # PRRTE, which Open MPI's mpiexec is made of
        return Launch(OPEN_MPI, None, number("PMIX_RANK"), "pmix")
    if "SLURM_JOB_ID" in environ:
        batch = "SLURM_TASK_PID" in environ and step not in NO_STEPS
        return Launch(BATCH if batch else SHELL, number("SLURM_NTASKS"))
    return Launch(NOBODY)


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Is this process one of an MPI job, as far as one can tell without starting MPI?"""
    return classify(environ).by in LAUNCHERS


def wrong_size(size: int, environ: Mapping[str, str] = os.environ, vendor: str = "") -> str | None:
    """A warning if MPI knows of this process alone where the launcher has started several, else None."""
    name = next((name for name in SIZES if environ.get(name, "").isdecimal()), None)
    if not _detect(environ) or size > 1 or name is None or int(environ[name]) <= 1:
        return None
    says = f"{name} says {environ[name]} processes, but MPI says this is rank 0 of 1"
    by = classify(environ).by
    if by in (BATCH, SHELL):
        return f"{says}: {by} is one process. {right_launcher(vendor)}"
    return f"{says}: if they were started together, each now trains alone. {right_launcher(vendor)}"


def right_launcher(vendor: str = "") -> str:
    """What starts the ranks of an MPI library, named as in MPI.get_vendor()."""
    if vendor == "Open MPI":
        return (
            "Start the ranks by Open MPI's own mpiexec, or by srun --mpi=pmix where srun --mpi=list names it; "
            "srun --mpi=pmi2 leaves each alone"
        )
    if vendor:
        return f"Start the ranks by {vendor}'s own mpiexec, or by srun --mpi=pmi2"
    return "Use the mpiexec of the MPI that mpi4py loads, or srun with the --mpi that it needs"


def contradiction(rank: int, size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if RANK and WORLD_SIZE, which torch goes by, say other than MPI does, else None."""
    true = {"RANK": rank, "WORLD_SIZE": size}
    wrong = [
        f"{name}={environ[name]}" for name, value in true.items() if name in environ and environ[name] != str(value)
    ]
    if not _detect(environ) or not wrong:
        return None
    return f"{' and '.join(wrong)} contradict MPI, for which this is rank {rank} of {size}: MPI's ranks count here"


def slurm_contradiction(size: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """A warning if SLURM's numbers of tasks do not go together, else None."""
    # Under mpiexec SLURM has started one process a node, not the ranks.
    if classify(environ).by not in (SRUN, BATCH, SHELL):
        return None
    tasks, per_node, nodes = (
        environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NUM_NODES")
    )
    nodes = nodes or environ.get("SLURM_NNODES", "")
    counts = f"MPI's number of ranks, {size}, is what counts"
    if tasks.isdecimal() and per_node.isdecimal() and nodes.isdecimal() and int(tasks) != int(per_node) * int(nodes):
        many, all_nodes = f"{nodes} node{'s' if nodes != '1' else ''}", int(per_node) * int(nodes)
        return f"SLURM_NTASKS={tasks}, but SLURM_NTASKS_PER_NODE={per_node} on {many} would be {all_nodes}: {counts}"
    spread = environ.get("SLURM_TASKS_PER_NODE", "")
    try:
        together = sum(slurm_tasks(spread)) if spread else None
    except ValueError as error:
        return f"SLURM_TASKS_PER_NODE: {error}; {counts}"
    if tasks.isdecimal() and together not in (None, int(tasks)):
        return f"SLURM_NTASKS={tasks}, but SLURM_TASKS_PER_NODE={spread} is {together}: {counts}"
    return None


def slurm_tasks(text: str) -> list[int]:
    """SLURM's numbers of tasks, node by node: "2(x3),1" is 2, 2, 2, 1."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x([1-9]\d*)\))?\s*", part)
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise ValueError(f"{text!r} are no numbers of tasks such as 2(x3),1")
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def slurm_nodes(text: str) -> list[str]:
    """The names in SLURM's list of nodes: "n[01-03,7]" is n01, n02, n03, n7; "a[1-2]b[3-4]" are four."""
    names = []
    for entry in re.findall(r"(?:\[[^\]]*\]|[^,\[])+|[,\[]", text):
        if entry == ",":
            continue
        if not re.fullmatch(r"([^\s\[\],]|\[[\d,-]+\])+", entry):
            raise ValueError(f"{text!r} is no list of nodes such as n[01-03,7]: {entry!r}")
        parts = [
            _numbers(part[1:-1], text) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[\]]+", entry)
        ]
        if prod(map(len, parts)) > MOST_NODES:
            raise ValueError(f"{text!r} is no list of nodes: {entry!r} are more than {MOST_NODES}")
        names += ["".join(words) for words in product(*parts)]
    if not names or re.search(r"^,|,,|,$", re.sub(r"\[[^\]]*\]", "", text)):
        raise ValueError(f"{text!r} is no list of nodes such as n[01-03,7]: a name is empty")
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    """The numbers of "01-03,7", each as wide as its range is written."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not 0 <= high - low < MOST_NODES:
            raise ValueError(f"{text!r} is no list of nodes such as n[01-03,7]: {part!r} is no range")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def cores_per_rank(comm: MPI.Comm) -> int:
    """How many cores each rank of this node may use, whether the launcher binds the ranks to cores or not."""
    ranks, cores, mine = _node(comm)
    return max(1, min(mine, cores // ranks))


def notices(comm: MPI.Comm) -> list[str]:
    """What a person should know of how the job was launched, the same on all ranks."""
    from mpi4py import MPI

    wrong = wrong_size(comm.size, vendor=MPI.get_vendor()[0])
    return [*([f"warning: {wrong}"] if wrong else []), *filter(None, [crowding(comm)])]


def crowding(comm: MPI.Comm) -> str | None:
    """A hint if the ranks of some node outnumber its cores, else None; the same on all ranks."""
    from mpi4py import MPI

    nodes = [(ranks, cores) for ranks, cores, _ in comm.allgather(_node(comm))]
    ranks, cores = max(nodes, key=lambda node: node[0] / node[1])
    hint = crowded(ranks, cores, MPI.get_vendor()[0])
    return f"note: {hint}" if hint else None


def crowded(ranks: int, cores: int, vendor: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """A hint if so many ranks outnumber the cores that they may use, else None."""
    if ranks <= cores:
        return None
    hint = f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''} of a node, so they wait for each other"
    if vendor == "Open MPI" and environ.get(YIELD) != "1":
        hint += f"; {YIELD}=1 lets those that wait for messages step aside"
    return hint


def _detect(environ: Mapping[str, str]) -> bool:
    return environ.get("HPCDL_DETECT", "1") != "0"


def _node(comm: MPI.Comm) -> tuple[int, int, int]:
    """How many ranks this node has, how many cores they may use together, and how many this one."""
    from mpi4py import MPI

    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    every = set[int]().union(*node.allgather(mine))
    size = node.size
    node.Free()
    return size, len(every), len(mine)
