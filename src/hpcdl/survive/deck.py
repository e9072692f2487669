"""Which sample is dealt to whom in an epoch, while ranks are lost and join: none is lost, and none is seen twice.

Floor 5. Pure: every member keeps the same deck, and what is done to it follows from what all of them know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpcdl.data import part

Numbers: TypeAlias = NDArray[np.int64]


class Deck:
    """The numbers of an epoch's samples that are still to be dealt, in the order in which they will be."""

    def __init__(self, left: Numbers) -> None:
        self.left = left

    @classmethod
    def shuffled(cls, n: int, epoch: int, seed: int) -> Deck:
        """All n samples, in the order in which `hpcdl.data.shares` has them."""
        return cls(np.random.default_rng([seed, epoch]).permutation(n))

    def deal(self, members: Sequence[int], each: int) -> dict[int, Numbers]:
        """The next samples, up to `each` a member, to every member its part; they are off the deck."""
        count = each * len(members)
        dealt, self.left = self.left[:count], self.left[count:]
        return {rank: dealt[part(len(dealt), place, len(members))] for place, rank in enumerate(members)}

    def settle(self, dealt: Mapping[int, Numbers], counted: Collection[int]) -> int:
        """Take back, to be dealt next, what was dealt to others than those that counted; how many samples counted."""
        back = [numbers for rank, numbers in dealt.items() if rank not in counted]
        if back:
            self.left = np.concatenate([*back, self.left])
        return sum(len(numbers) for rank, numbers in dealt.items() if rank in counted)
