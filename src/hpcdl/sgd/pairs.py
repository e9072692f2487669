"""Who meets whom in a step of gossip."""

from __future__ import annotations

import numpy as np


def matching(size: int, step: int, seed: int = 0) -> list[int]:
    """Each rank's partner in this step, by rank; of an odd number of ranks one is its own, and sits out.

    All ranks find the same one, and every pairing is as likely as any other.
    """
    order = np.random.default_rng([seed, step]).permutation(size).tolist()
    partners = list(range(size))
    for one, other in zip(order[0::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return partners
