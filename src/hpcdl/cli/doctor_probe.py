"""What the doctor measures: how fast the ranks compute, how fast they reach each other, how far their clocks are apart.

Each probe ends at a deadline of its own. Ranks that have no part in one sleep, so as not to take its core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcdl.cli.doctor_report import NOTE, OK, WARNING, Finding
from hpcdl.units import show_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.collectives import Nodes

BLOCK, STEPS, REPEATS = 4096, 150, 30
"""A computation in the fastest cache that takes about a millisecond, so that most repeats meet no interruption."""
SLOW = 1.5
"""So many times the median of all ranks is slow: more than what a turbo clock makes between cores."""
JITTER = 2.0

TRIED_COMMUNICATORS = 64
"""Enough for any program; to try up to the end would take from those that MPI itself has yet to make."""

LARGE = 1 << 20
ROUNDS, LARGE_ROUNDS = 200, 10
PAIR_S = 0.05
MOST_PAIRS = 32
WEAK = 2.0
SKEW_S = 0.1
"""Logs of hosts whose clocks are farther apart are in a wrong order; hpcdl's own trace aligns clocks itself."""
SLEEPY_S = 1e-3

PING, STOP = 1, 2


class Link(NamedTuple):
    """What two ranks measured."""

    a: int
    b: int
    latency_s: float
    """One way, the half of the fastest round trip."""
    usual_s: float
    """One way, the half of the median round trip."""
    bytes_per_s: float
    """Of the largest messages, one way."""
    offset_s: float
    """How far the clock of b is ahead of that of a."""
    within: bool
    """Are they on one node?"""


def compute(clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The seconds of each repeat of a fixed computation."""
    x, seconds = np.linspace(0, 1, BLOCK), []
    for _ in range(REPEATS + 1):
        begin = clock()
        for _ in range(STEPS):
            np.multiply(x, 0.999, out=x)
            np.add(x, 0.001, out=x)
        seconds.append(clock() - begin)
    return seconds[1:]  # the first one warms up


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and what nine of ten stay below."""
    return median(seconds), quantiles(seconds, n=10)[-1]


def about_speed(spreads: Sequence[tuple[float, float]], hosts: Sequence[str], crowded: bool) -> Iterator[Finding]:
    """Which ranks are slower than the others, or unsteady."""
    medians = [middle for middle, _ in spreads]
    usual = median(medians)
    slow = [rank for rank, middle in enumerate(medians) if middle > SLOW * usual]
    for rank in slow[:MOST_PAIRS]:
        seen = (
            f"rank {rank} on {hosts[rank]} takes {show_seconds(medians[rank])} for what the median rank does in "
            f"{show_seconds(usual)}: all others wait for it in every collective"
        )
        do = "Look for another program on its core (top), a hot or power-capped processor, and how ranks are bound"
        yield Finding(WARNING, "slow rank", seen, do)
    unsteady = [rank for rank, (middle, late) in enumerate(spreads) if late > JITTER * middle and rank not in slow]
    if unsteady and not crowded:  # ranks that share cores interrupt each other
        worst = max(unsteady, key=lambda rank: spreads[rank][1] / spreads[rank][0])
        middle, late = spreads[worst]
        more = f", and {len(unsteady) - 1} more" if len(unsteady) > 1 else ""
        seen = (
            f"rank {worst} on {hosts[worst]}{more}: the same computation takes {show_seconds(middle)}, but one time in "
            f"ten over {show_seconds(late)}"
        )
        yield Finding(NOTE, "jitter", seen, "Something else runs on these cores now and then")
    if not slow and not (unsteady and not crowded):
        ranks = f"all {len(medians)} ranks compute" if len(medians) > 1 else "this rank computes"
        fastest, slowest = min(medians), max(medians)
        times = f"in {show_seconds(fastest)}" + (f" to {show_seconds(slowest)}" if len(medians) > 1 else "")
        yield Finding(OK, "speed", f"{ranks} the same {times}")


def communicators() -> int:
    """How many communicators of this process alone can live at once, of as many as are tried; no one else is asked."""
    from mpi4py import MPI

    made: list[MPI.Comm] = []
    try:
        while len(made) < TRIED_COMMUNICATORS:
            made.append(MPI.COMM_SELF.Dup())
    except MPI.Exception:
        pass
    for comm in made:
        comm.Free()
    return len(made)


def pairs(nodes: Nodes) -> list[tuple[int, int]]:
    """Whom to have measure: two ranks of each node, the first node with every other, and each node with the next."""
    first = [ranks[0] for ranks in nodes]
    inside = [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]
    star = [(first[0], other) for other in first[1:]]
    ring = [(one, next) for one, next in pairwise(first) if one != first[0]]
    return [pair for kind in (inside, star, ring) for pair in kind[:MOST_PAIRS]]


def probe(comm: MPI.Intracomm, nodes: Nodes, tell: Callable[[str], object]) -> list[Link]:
    """All pairs, one after the other; the links are on rank 0 (a collective call)."""
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    mine = []
    for a, b in pairs(nodes):
        tell(f"messages between rank {a} and rank {b}")
        if comm.rank == a:
            mine.append(Link(a, b, *_ask(comm, b), node_of[a] == node_of[b]))
        elif comm.rank == b:
            _answer(comm, a)
        rest(comm)
    tell("gathering the measurements")
    found: list[list[Link]] = comm.gather(mine) or []
    return [link for links in found for link in links]


def rest(comm: MPI.Intracomm) -> None:
    """A barrier that leaves the core to those who are not there yet."""
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(SLEEPY_S)


def _ask(comm: MPI.Intracomm, peer: int) -> tuple[float, float, float, float]:
    clock, large = np.zeros(1), np.zeros(LARGE, np.uint8)

    def trip(buffer: Any) -> float:
        begin = time.perf_counter()
        comm.Send(buffer, peer, PING)
        comm.Recv(buffer, peer, PING)
        return time.perf_counter() - begin

    trip(large)
    small: list[float] = []
    offsets = []
    end = time.perf_counter() + PAIR_S
    while len(small) < ROUNDS and (len(small) < 3 or time.perf_counter() < end):
        before = time.time()
        small.append(trip(clock))
        # The fastest exchange tells best when the other clock was read: half-way.
        offsets.append((small[-1], float(clock[0]) - before - small[-1] / 2))
    times: list[float] = []
    end = time.perf_counter() + PAIR_S
    while len(times) < LARGE_ROUNDS and (not times or time.perf_counter() < end):
        times.append(trip(large))
    comm.Send(clock, peer, STOP)
    return min(small) / 2, median(small) / 2, 2 * LARGE / min(times), min(offsets)[1]


def _answer(comm: MPI.Intracomm, peer: int) -> None:
    from mpi4py import MPI

    clock, large, status = np.zeros(1), np.zeros(LARGE, np.uint8), MPI.Status()
    while True:
        comm.Probe(peer, MPI.ANY_TAG, status)
        buffer: Any = clock if status.Get_count(MPI.BYTE) == clock.nbytes else large
        comm.Recv(buffer, peer, status.tag)
        if status.tag == STOP:
            return
        clock[0] = time.time()
        comm.Send(buffer, peer, PING)


def about_links(links: Sequence[Link], hosts: Sequence[str], crowded: bool) -> Iterator[Finding]:
    """Which links are weak, how fast the others are, and whether the clocks agree."""
    for within, where in ((True, "in a node"), (False, "between nodes")):
        kind = [link for link in links if link.within == within]
        if not kind:
            continue
        weak = list(_weak(kind))
        for link, why in weak:
            seen = f"rank {link.a} on {hosts[link.a]} and rank {link.b} on {hosts[link.b]}: {why}"
            do = "Look at the network between them: cable, switch port, which interface MPI takes"
            yield Finding(WARNING, "messages", seen, "" if within else do)
        worst = max(kind, key=lambda link: link.usual_s)
        if within and worst.usual_s > SLEEPY_S and not crowded:
            seen = f"a small message in a node takes {show_seconds(worst.usual_s)}, where a microsecond or two is usual"
            yield Finding(WARNING, "messages", seen, "Do the ranks share cores, or lack shared memory?")
        elif not weak:
            yield Finding(OK, "messages", f"{where} {_range(kind)}")
    yield from about_clocks(links, hosts)


def _weak(links: Sequence[Link]) -> Iterator[tuple[Link, str]]:
    """Those that are far from the others of their kind; two cannot tell which of them is."""
    if len(links) < 3:
        return
    latency, rate = median(link.usual_s for link in links), median(link.bytes_per_s for link in links)
    for link in links:
        if link.bytes_per_s * WEAK < rate:
            yield link, f"{link.bytes_per_s / 1e9:.3g} GB/s, where {rate / 1e9:.3g} are usual"
        elif link.usual_s > 2 * WEAK * latency:
            yield link, f"{show_seconds(link.usual_s)} a small message, where {show_seconds(latency)} are usual"


def _range(links: Sequence[Link]) -> str:
    low, high = min(link.usual_s for link in links), max(link.usual_s for link in links)
    slow, fast = min(link.bytes_per_s for link in links) / 1e9, max(link.bytes_per_s for link in links) / 1e9
    if len(links) == 1:
        return f"{show_seconds(low)} one way, {fast:.3g} GB/s"
    return f"{show_seconds(low)} to {show_seconds(high)} one way, {slow:.3g} to {fast:.3g} GB/s ({len(links)} pairs)"


def about_clocks(links: Sequence[Link], hosts: Sequence[str]) -> Iterator[Finding]:
    """How far the hosts' clocks are apart from the first one's."""
    offsets: Mapping[str, float] = {
        hosts[link.b]: link.offset_s for link in links if not link.within and hosts[link.a] == hosts[0]
    }
    if not offsets:
        return
    host, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    where = f"{show_seconds(abs(worst))} {'ahead of' if worst > 0 else 'behind'} {hosts[0]}'s"
    if abs(worst) > SKEW_S:
        do = "Run chrony or ntpd on all hosts: logs, file times and requeue limits depend on it"
        yield Finding(WARNING, "clocks", f"the clock of {host} is {where}", do)
    else:
        yield Finding(OK, "clocks", f"no clock is more than {show_seconds(abs(worst))} off {hosts[0]}'s")
