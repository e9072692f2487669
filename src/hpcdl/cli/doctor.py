"""hpcdl doctor: what is wrong with the launch, the nodes and the settings, and how to mend it."""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdl import verdict
from hpcdl.cli import doctor_child, doctor_launch, doctor_node, doctor_probe, doctor_start
from hpcdl.cli.doctor_facts import Facts, about_node, about_process, about_rank, attempt, mpiexec_on_path
from hpcdl.cli.doctor_report import ERROR, NOTE, OK, WARNING, Finding, as_json, as_text, merged, status
from hpcdl.cli.doctor_watch import STARTED, Child, End, watched
from hpcdl.environment import classify
from hpcdl.topology import group_by, parse_nodes

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.collectives import Nodes

EPILOG = """\
Alone it does what one process can; under the launcher (mpiexec -n 4 hpcdl doctor) it looks at all ranks and nodes.
Exit status: 0 if nothing is an error; 1 if something is; 2 if it could not begin.
--json prints one object: "format" is "hpcdl doctor 1"; "status" the exit status; "ranks" and "hosts" how many and
which; "seconds" how long it took; "links" what pairs of ranks measured (a, b, latency_s, usual_s, bytes_per_s,
offset_s, within a node); "compute_s" of each rank the median and the 90th percentile of a fixed computation;
"findings" a list of objects with "level" (ok, note, warning, error), "topic", "seen", "do", "command" and "host", each
a text, empty where there is none.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl doctor can be told."""
    parser.description = "Say what is wrong here, and how to mend it. Run it alone, or as: mpiexec -n 4 hpcdl doctor"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = parser.add_argument
    option("--json", action="store_true", help="one JSON object instead of the report")
    option("--quick", action="store_true", help="without torch, CuPy and GPUs, and without messages between ranks")


def run(arguments: argparse.Namespace) -> int:
    """Examine in a child process; if MPI ends that, or keeps it, this one says so."""
    own = watched()
    if isinstance(own, End):
        return doctor_start.report(own, arguments.json)
    return examine(arguments, own)


def examine(arguments: argparse.Namespace, own: Child) -> int:
    """Gather what all ranks find, print it on rank 0; the exit status is the same on all of them."""
    began = time.monotonic()
    problems = list(settings_problems(os.environ))
    own.tell("starting MPI")
    try:
        said = doctor_start.start_mpi(own)
    except Exception as error:
        own.tell("starting MPI", unusable=f"{type(error).__name__}: {error}")
        return 1
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    own.tell("agreeing on the arguments", **{STARTED: True})
    # A rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse.
    if refusal := verdict.agree(comm, None):
        if comm.rank == 0:
            print(f"hpcdl: {refusal}", file=sys.stderr, flush=True)
        return 2
    quick, as_object = comm.bcast((arguments.quick, arguments.json))
    launch = classify()
    isolated = doctor_launch.alone(launch, comm.size, MPI.get_vendor()[0])
    if said and not isolated:
        problems.append(Finding(NOTE, "MPI", f"while it started, it said: {doctor_start.briefly(said)}"))

    own.tell("gathering what each rank sees")
    mine = attempt(problems, "rank", lambda: {**about_process(), **about_rank(comm)})
    ranks: list[Facts | None] = comm.allgather(mine)
    nodes = group_by([facts["node"] if facts else f"rank {rank}" for rank, facts in enumerate(ranks)])
    node = next(each for each in nodes if comm.rank in each)
    leads = comm.rank == node[0]
    spare = len(node) < (os.cpu_count() or 1)

    # Where there is a core for it, it looks at torch while the ranks measure; else it would be measured.
    child = doctor_child.start() if leads and not quick and spare else None
    own.tell("computing")
    doctor_probe.rest(comm)
    speed = attempt(problems, "speed", lambda: doctor_probe.spread(doctor_probe.compute())) or (0.0, 0.0)
    speeds: list[tuple[float, float]] = comm.allgather(speed)
    own.tell("sharing memory")
    memory = shares_memory(comm, nodes, problems)
    links = [] if quick else doctor_probe.probe(comm, nodes, own.tell)
    about = None
    if leads:
        own.tell("looking at the node")
        about = attempt(problems, "node", about_node)
        if not quick:
            own.tell("waiting for torch and CuPy")
            child = child or doctor_child.start()
            about = about and about | {"devices": doctor_child.finish(child, time.monotonic() + doctor_child.LIMIT_S)}
        problems += attempt(problems, "tuning", lambda: list(tuning_problems())) or [] if comm.rank == 0 else []
    own.tell("gathering what was found")
    doctor_probe.rest(comm)
    gathered: list[tuple[list[Finding], Facts | None]] = comm.gather((problems, about)) or []
    outcome = 0
    if comm.rank == 0:
        known = [facts for facts in ranks if facts]
        findings = list(chain.from_iterable(found for found, _ in gathered))
        if known:
            findings += conclude(known, nodes, speeds, links, memory, [about for _, about in gathered if about])
        hosts = list(dict.fromkeys(facts["host"] for facts in known))
        findings = merged(findings, len(hosts))
        outcome = status(findings)
        seconds = time.monotonic() - began
        if isolated and launch.rank:
            outcome = 0  # all find the same: the one that the launcher calls rank 0 says it, and fails for all
        elif as_object:
            measured = {"links": [link._asdict() for link in links], "compute_s": speeds}
            print(as_json(findings, {"ranks": comm.size, "hosts": hosts, "seconds": seconds, **measured}))
        else:
            where = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
            many = f"{comm.size} rank{'s' if comm.size > 1 else ''}"
            print(as_text(findings, f"hpcdl doctor: {many} on {where}, {seconds:.1f} s"))
        sys.stdout.flush()
    own.tell("ending")
    return int(comm.bcast(outcome))


def conclude(
    ranks: Sequence[Facts],
    nodes: Nodes,
    speeds: Sequence[tuple[float, float]],
    links: Sequence[doctor_probe.Link],
    memory: tuple[str, str] | None,
    abouts: Sequence[Facts],
) -> Iterator[Finding]:
    """What rank 0 makes of all that was gathered."""
    by_rank = {facts["rank"]: facts for facts in ranks}
    hosts = [by_rank[rank]["host"] if rank in by_rank else "?" for rank in range(len(speeds))]
    crowded = any(len(node) > len(set().union(*(by_rank[r]["cores"] for r in node if r in by_rank))) for node in nodes)
    yield from doctor_launch.about_mpi(ranks)
    yield from doctor_launch.about_launcher(ranks, mpiexec_on_path() if len(speeds) == 1 else ("", ""))
    yield from doctor_launch.about_slurm(ranks)
    yield from doctor_launch.about_variables_of_torch(ranks)
    yield from doctor_launch.about_threads_of_mpi(ranks)
    yield from variables(ranks)
    for node in nodes:
        present = [by_rank[rank] for rank in node if rank in by_rank]
        if present:
            yield from doctor_launch.about_cores(present)
    if all(middle > 0 for middle, _ in speeds):
        yield from doctor_probe.about_speed(speeds, hosts, crowded)
    yield from doctor_probe.about_links(links, hosts, crowded)
    if memory is not None and len(speeds) > 1:
        yield from doctor_node.about_memory(*memory)
    on_host = {facts["host"]: sum(each["host"] == facts["host"] for each in ranks) for facts in abouts}
    for facts in abouts:
        number = on_host[facts["host"]]
        yield from doctor_node.about_shm(facts)
        yield from doctor_node.about_fork(facts)
        if "devices" in facts:
            yield from doctor_node.about_devices(facts, number, facts["devices"])


def settings_problems(environ: Mapping[str, str]) -> Iterator[Finding]:
    """HPCDL_ variables that are no use; a value that hpcdl refuses is taken away, so that the doctor can go on."""
    try:
        from hpcdl import settings
    except ValueError as error:
        name = str(error).partition("=")[0]
        yield Finding(ERROR, "settings", str(error), "hpcdl refuses to begin with it", f"unset {name}")
        os.environ.pop(name, None)
        from hpcdl import settings
    for name, value in sorted(environ.items()):
        if not name.startswith("HPCDL_"):
            continue
        if name not in settings.VARIABLES:
            near = difflib.get_close_matches(name, settings.VARIABLES, 1)
            do = f"Is {near[0]} meant?" if near else f"There are {', '.join(settings.VARIABLES)}"
            yield Finding(WARNING, "settings", f"hpcdl knows no {name}", do)
        elif name in SWITCHES and value not in ("0", "1"):
            counts = "on" if SWITCHES[name] else "off"
            yield Finding(WARNING, "settings", f"{name}={value} counts as {counts}", "0 is off, 1 is on")
    trace = environ.get("HPCDL_TRACE", "")
    if trace and not os.access(Path(trace).absolute().parent, os.W_OK):
        seen = f"HPCDL_TRACE={trace}: nothing can be written in {Path(trace).absolute().parent}"
        yield Finding(ERROR, "settings", seen, host=platform.node())


SWITCHES = {"HPCDL_CHECK": True, "HPCDL_DETECT": True, "HPCDL_SHARED": True, "HPCDL_STALL_ABORT": False}
"""The variables that are 0 or 1, and whether they are on unless told."""


def variables(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """The HPCDL_ variables that are set, and whether all ranks have the same."""
    from hpcdl.settings import VARIABLES

    first = ranks[0]["environ"]
    for name, does in VARIABLES.items():
        if name in first:
            yield Finding(NOTE, "settings", f"{name}={first[name]} is set. {does[0].upper()}{does[1:]}")
        for other in ranks:
            if other["environ"].get(name) != first.get(name):
                values = [each["environ"].get(name, "unset") for each in (ranks[0], other)]
                seen = f"{name} is {values[0]} on rank 0, but {values[1]} on rank {other['rank']}"
                yield Finding(ERROR, "settings", seen, "Ranks that go by other settings hang: mpiexec can pass it on")
                break


def tuning_problems() -> Iterator[Finding]:
    """Which table `auto` goes by."""
    from hpcdl import tuning

    table, problem = tuning.known()
    if problem:
        yield Finding(WARNING, "tuning", problem, "Measure anew: mpiexec -n 4 hpcdl tune")
    elif table:
        yield Finding(OK, "tuning", str(table))
    else:
        yield Finding(OK, "tuning", "no table: auto goes by built-in costs; mpiexec -n 4 hpcdl tune measures")


def shares_memory(comm: MPI.Intracomm, nodes: Nodes, problems: list[Finding]) -> tuple[str, str] | None:
    """Why a node's ranks share no memory, and which ranks of a host cannot; None if it cannot be tried."""
    from hpcdl import settings
    from hpcdl.channel import channel

    wrong = None
    try:
        if settings.NODES:
            parse_nodes(settings.NODES, comm.size)
    except ValueError as error:
        wrong = Finding(ERROR, "settings", " ".join(str(error).split()), command="unset HPCDL_NODES")
        problems.append(wrong)
    if any(comm.allgather(wrong is not None)):
        return None
    own = next(number for number, ranks in enumerate(nodes) if comm.rank in ranks)
    everywhere: list[str] = comm.allgather(platform.node())
    apart = {host for host in everywhere if sum(any(everywhere[r] == host for r in node) for node in nodes) > 1}
    detached = f"ranks on {', '.join(sorted(apart))} do not see each other's memory" if apart else ""
    node = comm.Split(own, comm.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = channel(node).no_memory
    node.Free()
    return next(filter(None, comm.allgather(reason)), ""), detached
