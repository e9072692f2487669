"""What the doctor makes of the launch: MPI, launcher, SLURM, cores and threads. Pure functions on gathered facts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcdl.cli.doctor_facts import Facts
from hpcdl.cli.doctor_probe import TRIED_COMMUNICATORS
from hpcdl.cli.doctor_report import ERROR, NOTE, OK, WARNING, Finding
from hpcdl.environment import (
    HYDRA,
    INTEL,
    LAUNCHERS,
    NOBODY,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    UNKNOWN,
    Launch,
    crowded,
    right_launcher,
    slurm_nodes,
)

OLDEST_MPI4PY = (4, 1)
ALIKE = {"mpi": ERROR, "hpcdl": ERROR, "mpi4py": WARNING, "python": WARNING, "numpy": WARNING}
"""What is to be the same on all ranks, and how bad it is if not."""
NAMES = {"mpi": "", "hpcdl": "hpcdl ", "mpi4py": "mpi4py ", "python": "Python ", "numpy": "NumPy "}

# Measured by making duplicates: MPICH 5.0 fails at 2,048; Open MPI 5.0 and Intel MPI 2021 had not at 5,000.
COMMUNICATORS = {
    "MPICH": "MPICH has room for about 2,000 live communicators, each with its windows",
    "Open MPI": "Open MPI has room for more than 5,000 live communicators",
    "Intel MPI": "Intel MPI has room for more than 5,000 live communicators",
}


def about_mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """The MPI library, mpi4py, and whether all ranks have the same."""
    first = ranks[0]
    libraries = first["libraries"]
    yield Finding(OK, "MPI", f"{first['mpi']} (MPI {first['standard']}) from {', '.join(libraries) or 'somewhere'}")
    versions = ", ".join(f"{NAMES[name]}{first[name]}" for name in ("mpi4py", "python", "numpy", "hpcdl"))
    yield Finding(OK, "versions", f"{versions}, in {first['prefix']}")
    yield from old_mpi4py(first["mpi4py"])
    for each in ranks:
        if len({os.path.realpath(library) for library in each["libraries"]}) > 1:
            both = " and ".join(each["libraries"])
            do = "Only one may be there: look for another package that was built with MPI, and for LD_PRELOAD"
            yield Finding(ERROR, "MPI", f"two MPI libraries are loaded: {both}", do, host=each["host"])
        for name, level in ALIKE.items():
            if each[name] != first[name]:
                seen = f"rank {each['rank']} has {NAMES[name]}{each[name]}, rank 0 on {first['host']} has {first[name]}"
                yield Finding(level, "versions", seen, "Use one environment on all nodes", host=each["host"])


def old_mpi4py(version: str) -> Iterator[Finding]:
    """hpcdl relies on what mpi4py has from a version on."""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < OLDEST_MPI4PY:
        oldest = ".".join(map(str, OLDEST_MPI4PY))
        yield Finding(
            ERROR, "MPI", f"mpi4py {version}: hpcdl needs {oldest} or newer", command=f"pip install 'mpi4py>={oldest}'"
        )


def about_threads_of_mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """The thread level, and what room there is for communicators."""
    level, vendor = ranks[0]["thread_level"], ranks[0]["vendor"]
    if level == "multiple":
        # bench --threads measures it: MPICH's barrier of two ranks is 0.4 us at single, 2.4 us at multiple.
        seen = (
            "multiple, so gradients are reduced while the backward pass goes on; the locks cost small messages a little"
        )
        yield Finding(OK, "thread level", seen)
    else:
        seen = f"{level}: the thread that drives iallreduce and the overlap of DDP needs multiple"
        do = "Leave mpi4py.rc.thread_level alone; if that is not the cause, this MPI was built without threads"
        yield Finding(NOTE, "thread level", seen, do)
    made, takes = ranks[0]["communicators"], "hpcdl takes one or two for each that it is used on, until comm.Free()"
    if made < TRIED_COMMUNICATORS:
        seen = f"MPI has room for {made} more communicators only; {takes}"
        yield Finding(WARNING, "communicators", seen, "Free those that are no longer used")
    elif vendor in COMMUNICATORS:
        yield Finding(OK, "communicators", f"{COMMUNICATORS[vendor]}; {takes}")


def about_launcher(ranks: Sequence[Facts], mpiexec: tuple[str, str] = ("", "")) -> Iterator[Finding]:
    """Who has started the ranks, and whether MPI knows of all of them; mpiexec is the path's, and whose it is."""
    first = ranks[0]
    launch, size, vendor = Launch(**first["launch"]), first["size"], first["vendor"]
    if launch.by == UNKNOWN:
        yield Finding(NOTE, "launcher", "HPCDL_DETECT=0: what launchers and SLURM have set is not looked at")
        return
    started = f"{size} rank{'s' if size > 1 else ''}, started by {launch.by}"
    started += f" with {launch.pmi}" if launch.pmi else ""
    if wrong := alone(launch, size, vendor):
        yield wrong._replace(do=f"{wrong.do}. {own_mpiexec(first['prefix'])}")
    elif first["wrong_size"]:  # variables without those that tell whose they are
        yield Finding(WARNING, "launcher", first["wrong_size"])
    elif launch.by in LAUNCHERS and launch.size not in (None, size):
        do = "A launcher's variables may have been passed on: start from a fresh shell"
        yield Finding(WARNING, "launcher", f"{started}, but that says {launch.size}: MPI's ranks count", do)
    else:
        yield Finding(OK, "launcher", started)
    path, whose = mpiexec
    if launch.by not in LAUNCHERS and whose and not same_family(whose, vendor):
        do = f"{right_launcher(vendor)}. {own_mpiexec(first['prefix'])}"
        yield Finding(WARNING, "launcher", f"{path} is {whose}'s, but mpi4py loads {vendor}", do)
    elif launch.by == NOBODY and not path:
        yield Finding(NOTE, "launcher", "there is no mpiexec on the PATH", own_mpiexec(first["prefix"]))


def alone(launch: Launch, size: int, vendor: str) -> Finding | None:
    """Does MPI know of one process where there are several?"""
    several = launch.size is not None and launch.size > 1
    if size > 1 or not several:
        return None
    if launch.by == TORCHRUN:
        seen = f"torchrun has started {launch.size} processes, but MPI says this is rank 0 of 1: torchrun starts no MPI"
        return Finding(ERROR, "launcher", seen, right_launcher(vendor))
    if launch.by not in LAUNCHERS:  # nothing went wrong yet: nothing has been started
        seen = f"this is one process of {launch.by} that asks for {launch.size}"
        return Finding(WARNING, "launcher", seen, right_launcher(vendor))
    how = f" with {launch.pmi}" if launch.pmi else " without any PMI" if launch.by == SRUN else ""
    seen = (
        f"{launch.by} has started {launch.size} processes{how}, but {vendor} says this is rank 0 of 1: "
        "each would train alone"
    )
    return Finding(ERROR, "launcher", seen, right_launcher(vendor))


def same_family(one: str, other: str) -> bool:
    """Can the mpiexec of one start the ranks of the other? MPICH and what is made of it understand each other."""
    return (one == "Open MPI") == (other == "Open MPI")


def own_mpiexec(prefix: str) -> str:
    """The mpiexec that a wheel has put beside python."""
    beside = Path(prefix) / "bin" / "mpiexec"
    return f"This environment has its own: {beside}" if beside.exists() else "Load the module of that MPI"


def about_slurm(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Do SLURM's numbers go together, and has every node of the job got a rank?"""
    first = ranks[0]
    launch, environ, size = Launch(**first["launch"]), first["environ"], first["size"]
    if launch.by == UNKNOWN or "SLURM_JOB_ID" not in environ:
        return
    if first["slurm"]:
        yield Finding(
            WARNING, "SLURM", first["slurm"], "Ask for --nodes and --ntasks-per-node alone, and give srun no -n"
        )
    nodelist = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))
    try:
        given = slurm_nodes(nodelist) if nodelist else []
    except ValueError as error:
        yield Finding(WARNING, "SLURM", f"SLURM_JOB_NODELIST: {error}")
        return
    used = {each["host"].partition(".")[0] for each in ranks}
    idle = [name for name in given if name.partition(".")[0] not in used]
    if idle and size > 1 and launch.by in LAUNCHERS:
        few = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        yield Finding(WARNING, "SLURM", f"{len(idle)} of the job's {len(given)} nodes have no rank: {few}")
    elif given:
        yield Finding(OK, "SLURM", f"job {environ['SLURM_JOB_ID']} on {nodelist}")


def about_variables_of_torch(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """RANK and WORLD_SIZE, where they say other than MPI."""
    wrong = [each for each in ranks if each["contradiction"]]
    if wrong and Launch(**ranks[0]["launch"]).by != TORCHRUN:
        more = f" ({len(wrong)} of {len(ranks)} ranks)" if len(wrong) > 1 else ""
        do = "Harmless for hpcdl; torch.distributed would wait for ranks that never come"
        yield Finding(WARNING, "RANK", f"{wrong[0]['contradiction']}{more}", do, "unset RANK WORLD_SIZE")


def about_cores(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks against cores, and threads against the cores that a rank may use; ranks are those of one node."""
    first, host = ranks[0], ranks[0]["host"]
    launch, vendor, number = Launch(**first["launch"]), first["vendor"], len(ranks)
    cores = set[int]().union(*(each["cores"] for each in ranks)) or set(range(first["cpus"]))
    room = f"{number} rank{'s' if number > 1 else ''} on {len(cores)} of {first['cpus']} cores"
    mine = {each["rank"]: each["cores"] or sorted(cores) for each in ranks}
    kinds = {len(own) for own in mine.values()}
    bound = f"each bound to {min(kinds)}" if max(kinds) < len(cores) else "not bound"
    if hint := crowded(number, len(cores), vendor, first["environ"]):
        do = "Start fewer ranks a node"
        if first["cpus"] >= number:
            do = f"The node has {first['cpus']} cores: {widen(launch, 1)}"
        yield Finding(WARNING, "cores", hint, do, host=host)
    else:
        yield Finding(OK, "cores", f"{room}, {bound}", host=host)

    wanted = {each["rank"]: threads(each) for each in ranks}
    short = [rank for rank, want in wanted.items() if want and want > len(mine[rank])]
    if short:
        rank = short[0]
        want, have = wanted[rank] or 0, len(mine[rank])
        seen = f"rank {rank} may use {have} core{'s' if have > 1 else ''}, but OMP_NUM_THREADS asks for {want} threads"
        others = len(short) - 1
        seen += f" (and {others} more rank{'s' if others > 1 else ''} alike)" if others else ""
        do = widen(launch, want) if want * number <= first["cpus"] else "Ask for fewer threads"
        yield Finding(WARNING, "threads", seen, do, f"export OMP_NUM_THREADS={have}", host)
    elif number > 1 and not any(wanted.values()) and sum(map(len, mine.values())) > len(cores):
        each_core = max(1, len(cores) // number)
        seen = (
            f"OMP_NUM_THREADS is not set and the ranks share their cores: NumPy and torch of each start "
            f"{max(kinds)} threads, {sum(map(len, mine.values()))} on {len(cores)} cores"
        )
        do = "hpcdl train shares the cores out by itself; in a script of your own set it"
        yield Finding(NOTE, "threads", seen, do, f"export OMP_NUM_THREADS={each_core}", host)


def threads(rank: Facts) -> int | None:
    """How many threads a rank is told to use; "4,2" are those of nested regions."""
    first = str(rank["environ"].get("OMP_NUM_THREADS", "")).partition(",")[0]
    return int(first) if first.isdecimal() else None


def widen(launch: Launch, cores: int) -> str:
    """How the launcher is told to give each rank so many cores. The flags are the launcher's, whatever the library."""
    ways = {
        SRUN: f"srun --cpus-per-task={cores}, which does not take it over from sbatch, or srun --cpu-bind=none",
        HYDRA: f"mpiexec -bind-to core:{cores}, or -bind-to none",
        INTEL: f"I_MPI_PIN_DOMAIN={cores}, or I_MPI_PIN=0",
        OPEN_MPI: f"mpiexec --map-by slot:PE={cores} --bind-to core, or --bind-to none",
    }
    return ways.get(launch.by, "the process was bound by whoever started it (taskset, a container, a batch system)")
