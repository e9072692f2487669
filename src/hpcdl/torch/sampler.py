"""A sampler for evaluation: every sample is looked at once, by one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

from torch.utils.data import Sampler

from hpcdl.data import part

if TYPE_CHECKING:
    from mpi4py import MPI


class ExactSampler(Sampler[int]):
    """Gives each sample to exactly one rank, in order: the ranks' parts differ by one sample at most, and may be empty.

    Takes a dataset or its length, the same on all ranks, and a communicator (MPI.COMM_WORLD if not given), or without
    MPI `rank=` and `size=`. A metric over the samples of all ranks (`average_metrics`, weighted by samples) then does
    not depend on the number of ranks. Not a collective call: a bad argument is a ValueError or TypeError on this rank.

    Training wants the same number of batches on all ranks instead. There torch's own sampler pads:
    `DistributedSampler(dataset, num_replicas=comm.size, rank=comm.rank)`, with `set_epoch(epoch)` before each epoch.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        comm: MPI.Comm | None = None,
        *,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        length = dataset_or_length if isinstance(dataset_or_length, int) else _length(dataset_or_length)
        if length < 0:
            raise ValueError(f"a dataset has no fewer than 0 samples, and this one {length}")
        if (rank is None) != (size is None) or (rank is not None and comm is not None):
            raise ValueError(
                f"give a communicator, or rank and size together, not comm={comm}, rank={rank}, size={size}"
            )
        if rank is None or size is None:
            if comm is None:
                # Importing it starts MPI, which a data loader's worker must not.
                from mpi4py import MPI

                comm = MPI.COMM_WORLD
            rank, size = comm.rank, comm.size
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is none of {size} ranks, which count from 0")
        mine = part(length, rank, size)
        # No communicator is kept, so the sampler can be pickled.
        self.indices = range(mine.start, mine.stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _length(dataset: Sized) -> int:
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"a {type(dataset).__name__} has no length, so it cannot be dealt out: let each rank's own dataset "
            "leave out the samples of the others"
        )
    return len(dataset)
