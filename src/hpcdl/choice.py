"""Which algorithm? What a tuning table has measured as the fastest, else what costs least in the usual model.

`auto` never takes MPI's own all-reduce: MPI promises no equal bits on all ranks, and its non-blocking form could not be
posted before all ranks have agreed.

Floor 3. The module is not called choose, since importing it would then hide the function `hpcdl.choose`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from hpcdl.collectives import Cost, Link, Nodes, find, names, packed, predicted, seconds
from hpcdl.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from hpcdl.tuning import Rule, Table

KINDS = ("private", "shared", "device")
"""Where the arrays lie: in each rank's own memory, in memory of `hpcdl.empty`, on GPUs. "mixed" where ranks differ."""

HOST = ("private", "shared")


class Shape(NamedTuple):
    """What a choice must know of a communicator: how many ranks are on each node, and whether these share memory."""

    sizes: tuple[int, ...]
    memory: bool

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.sizes)

    @property
    def nodes(self) -> Nodes:
        """As many ranks on each node, numbered node by node."""
        return packed(self.sizes, range(self.size))

    def __str__(self) -> str:
        ranks, count = f"{self.size} ranks" if self.size > 1 else "1 rank", len(self.sizes)
        if count == 1:
            return f"{ranks} on one node"
        if len(set(self.sizes)) == 1:
            return f"{ranks} on {count} nodes of {self.sizes[0]}"
        return f"{ranks} on nodes of {'+'.join(map(str, self.sizes))}"


class Links(NamedTuple):
    """What a message costs inside a node and between nodes; in shared memory a flag seen, a byte moved and added."""

    inside: Link
    between: Link
    memory: Link


# Medians on a 2-core machine, MPICH 5: a round between 2 ranks of one node takes 6 us from Python; memory moves at
# about 5 GB/s from rank to rank and is added at about 8 GB/s. Between hosts at 1 Gbit/s: 40 us, 0.12 GB/s. In shared
# memory 2 ranks take 2.4 us to meet, and each moves about 22 GB/s, added on the way.
BUILT_IN = Links(
    inside=Link(alpha=6e-6, beta=1 / 5e9, gamma=1 / 8e9),
    between=Link(alpha=40e-6, beta=1 / 0.12e9, gamma=1 / 8e9),
    memory=Link(alpha=1.2e-6, beta=1 / 22e9, gamma=0),
)

# As hpcdl.inside has them, which cannot be imported without MPI.
WHOLE_BYTES, CHUNK_BYTES = 16 << 10, 2 << 20

# Longer private arrays have left the cache when they are copied back: `shared` was measured to take about twice as long
# for each byte.
CACHED_BYTES = 8 << 20

# Where the costs say the same within so much, the first is taken: in a ring each rank has one source and one target,
# and it was measured to be quicker than halving's exchanges of the same bytes, on one node as between nodes.
CLOSE = 1.03
PREFERENCE = (
    "shared",
    "by_node:ring",
    "ring",
    "by_node:halving",
    "halving",
    "by_node:binary_blocks",
    "binary_blocks",
    "by_node:doubling",
    "doubling",
    "by_node:folded",
    "folded",
    "by_node:tree",
    "tree",
)


def candidates(collective: str, shape: Shape, kind: str) -> list[str]:
    """The algorithms that serve, the preferred first. by_master is left out: it is there to be compared with."""
    able = ["shared"] if serves("shared", collective, shape, kind) else []
    for name in names(shape.size, collective, shape.nodes):
        family = name.partition(":")[0]
        # With one node, or one rank on each, by_node is another name for what it runs.
        if family != "by_master" and (family != "by_node" or 1 < len(shape.sizes) < shape.size):
            able.append(find(name, shape.size, collective, shape.nodes).name)
    return sorted(able, key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))


def serves(name: str, collective: str, shape: Shape, kind: str) -> bool:
    """Can the algorithm of that name do it?"""
    if name == "shared":
        return collective == "allreduce" and kind in HOST and shape.memory and len(shape.sizes) == 1 < shape.size
    try:
        find(name, shape.size, collective, shape.nodes)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def choose_for(
    collective: str,
    nbytes: int,
    shape: Shape,
    dtype: str = "float32",
    kind: str = "private",
    table: Table | None = None,
) -> str:
    """The name of the algorithm that `auto` takes."""
    tuned = table and table.rule(collective, shape.sizes, dtype, kind)
    name = tuned.algorithm(nbytes) if tuned else None
    if name and serves(name, collective, shape, kind):
        return name
    links = table.links if table else BUILT_IN
    # Not direct: the model knows nothing of the crowd when all ranks talk to all at once.
    able = [name for name in candidates(collective, shape, kind) if not name.endswith("direct")]
    times = {name: predict(name, collective, nbytes, shape, kind, links) for name in able}
    return next(name for name, time in times.items() if time <= CLOSE * min(times.values()))


def predict(name: str, collective: str, nbytes: int, shape: Shape, kind: str, links: Links) -> float:
    """Seconds, by the model."""
    if name == "shared":
        return seconds(shared_cost(shape.size, nbytes, kind), links.memory)
    inside = links.inside
    if name.startswith("by_node") and shape.memory and kind in HOST:
        inside = links.memory._replace(gamma=inside.gamma)
    allreduce = predicted(name, nbytes, shape.sizes, inside, links.between)
    if collective == "allreduce":
        return allreduce
    # One half of it; and another round where the pieces still have to be dealt to the ranks that want them.
    in_order = find(name, shape.size, collective, shape.nodes).in_order
    dealt = name != "tree" if collective in ("reduce", "broadcast") else not in_order
    link = links.inside if len(shape.sizes) == 1 else links.between
    deal = link.alpha * (shape.size - 1) ** 0.5 + link.beta * nbytes / shape.size
    return allreduce / 2 + (deal if dealt else 0)


def shared_cost(size: int, n: int, kind: str) -> Cost:
    """What `shared` costs each rank: the flags it waits for where the ranks meet, the bytes it moves and adds.

    It reads its slice of all buffers and writes the sum into all of them. Private arrays are copied in and out besides,
    chunk by chunk with a meeting each, and short ones at once.
    """
    if kind == "shared" and n > WHOLE_BYTES:
        return Cost(messages=2 * size, sent=2 * n, added=n * (size - 1) / size)
    chunks = -(-n // CHUNK_BYTES)
    meetings = 1 if n <= WHOLE_BYTES else 2 if chunks == 1 else chunks + 2
    moved = 5 * n if n <= CACHED_BYTES else 10 * n
    return Cost(messages=meetings * size, sent=moved, added=n * (size - 1) / size)


class Candidate(NamedTuple):
    """An algorithm with its seconds, predicted and measured."""

    name: str
    predicted: float | None
    measured: float | None


class Explanation(NamedTuple):
    """What `auto` takes, and why."""

    question: str
    chosen: str
    why: str
    rows: list[Candidate]

    def __str__(self) -> str:
        def shown(seconds: float | None) -> str:
            return "-" if seconds is None else show_seconds(seconds)

        lines = [f"{self.question}: {self.chosen}", f"{self.why}.", ""]
        width = max(len("algorithm"), *(len(row.name) for row in self.rows))
        lines.append(f"  {'algorithm':{width}}  {'predicted':>9}  {'measured':>9}")
        for row in self.rows:
            mark = "*" if row.name == self.chosen else " "
            lines.append(f"{mark} {row.name:{width}}  {shown(row.predicted):>9}  {shown(row.measured):>9}")
        return "\n".join(lines)


def explained(
    collective: str,
    nbytes: int,
    shape: Shape,
    dtype: str = "float32",
    kind: str = "private",
    table: Table | None = None,
) -> Explanation:
    """What `choose_for` answers, with its reason and every candidate's time; MPI's own stands beside if measured."""
    chosen = choose_for(collective, nbytes, shape, dtype, kind, table)
    links = table.links if table else BUILT_IN
    tuned = table.rule(collective, shape.sizes, dtype, kind) if table else None
    able = candidates(collective, shape, kind)
    able += [] if chosen in able else [chosen]
    rows = [
        Candidate(
            name, predict(name, collective, nbytes, shape, kind, links), tuned.time(name, nbytes) if tuned else None
        )
        for name in able
    ]
    rows.sort(key=lambda row: (row.measured is None, row.measured or row.predicted))
    if tuned and "native" in tuned.measured:
        rows.append(Candidate("native", None, tuned.time("native", nbytes)))
    question = f"{collective} of {show_bytes(nbytes)} of {dtype} in {kind} arrays, {shape}"
    return Explanation(question, chosen, _reason(chosen, nbytes, table, tuned), rows)


def _reason(chosen: str, nbytes: int, table: Table | None, tuned: Rule | None) -> str:
    if table is None:
        return "There is no tuning table; by the built-in costs it takes the least time"
    ruled = tuned.algorithm(nbytes) if tuned else None
    if tuned is None or ruled is None:
        return f"{table} has no rule for this; by the costs of its links it takes the least time"
    if ruled != chosen:
        return f"{table} says {ruled}, which cannot serve here; by the costs of its links this takes the least time"
    start, end = tuned.reach(nbytes)
    reach = f"from {show_bytes(start)}" + (f" to {show_bytes(int(end))}" if end < math.inf else "")
    return f"{table} says so for {tuned.dtype}, {reach}"
