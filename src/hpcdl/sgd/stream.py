"""A rank's batches without end, by the number of the step: epoch behind epoch of `hpcdl.data.shares`."""

from __future__ import annotations

from hpcdl.data import Share, shares


class Stream:
    """Share number `step` of a rank. Ranks of the same arguments have together the batches that `shares` would give.

    A rank may leave steps out, and go on for ever: each comes to the next epoch when it has the last one behind it.
    """

    def __init__(self, n: int, *, seed: int, batch: int, rank: int, size: int) -> None:
        self.n, self.seed, self.batch, self.rank, self.size = n, seed, batch, rank, size
        self.steps = -(-n // batch)
        """Of an epoch."""
        self._epoch, self._shares = -1, list[Share]()

    def __getitem__(self, step: int) -> Share:
        epoch, number = divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._shares = list(shares(self.n, epoch, seed=self.seed, batch=self.batch, rank=self.rank, size=self.size))
        return self._shares[number]
