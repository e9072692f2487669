"""Which algorithm? The one that costs least in the usual model: alpha a message, beta a byte, gamma a byte added.

Floor 3. The module is not called choose, since importing it would then hide the function `hpcdl.choose`.
"""

from __future__ import annotations

from functools import lru_cache

from hpcdl.collectives import Link, find, names, seconds

# A round between two ranks of one node costs 4.5 us from Python; memory moves at about 5 GB/s from rank to rank and is
# added at about 8 GB/s (medians on a 2-core machine, MPICH 5).
NODE = Link(alpha=4.5e-6, beta=1 / 5e9, gamma=1 / 8e9)

# A tie goes to the first. Not direct: the model knows nothing of the crowd when all ranks talk to all at once.
CANDIDATES = ("halving", "binary_blocks", "ring", "doubling", "folded", "tree")


@lru_cache(maxsize=4096)
def choose_for(collective: str, nbytes: int, size: int) -> str:
    """The name of the algorithm that `auto` takes."""
    able = [name for name in CANDIDATES if name in names(size, collective)]
    return min(able, key=lambda name: _predicted(name, collective, nbytes, size))


def _predicted(name: str, collective: str, nbytes: int, size: int) -> float:
    algorithm = find(name)
    allreduce = seconds(algorithm.cost(size, nbytes), NODE)
    if collective == "allreduce":
        return allreduce
    # One half of it; and another round where the pieces still have to be dealt to the ranks that want them.
    dealt = name != "tree" if collective in ("reduce", "broadcast") else not algorithm.in_order
    return allreduce / 2 + (NODE.alpha * (size - 1) ** 0.5 + NODE.beta * nbytes / size if dealt else 0)
