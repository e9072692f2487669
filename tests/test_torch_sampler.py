"""The evaluation sampler gives every sample to one rank, without MPI too."""

import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from hpcdl.torch.sampler import ExactSampler  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("n", [0, 1, 3, 10, 64])
def test_every_sample_is_given_once(n: int, size: int) -> None:
    samplers = [ExactSampler(n, rank=rank, size=size) for rank in range(size)]
    assert [sample for sampler in samplers for sample in sampler] == list(range(n))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]
    assert max(map(len, samplers)) - min(map(len, samplers)) <= 1


def test_a_data_loader_takes_it() -> None:
    data = TensorDataset(torch.arange(10))
    seen: list[int] = []
    for rank in range(3):
        sampler = pickle.loads(pickle.dumps(ExactSampler(data, rank=rank, size=3)))
        for (batch,) in DataLoader(data, batch_size=2, sampler=sampler):
            seen += batch.tolist()
    assert seen == list(range(10))


class Stream(IterableDataset):  # type: ignore[misc, type-arg]
    def __iter__(self) -> Any:
        return iter([1, 2])


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(TypeError, match="a Stream has no length"):
        ExactSampler(Stream(), rank=0, size=1)  # type: ignore[arg-type]
    for arguments in ({"rank": 0}, {"size": 2}, {"rank": 2, "size": 2}, {"rank": -1, "size": 2}):
        with pytest.raises(ValueError, match="rank"):
            ExactSampler(3, **arguments)
    with pytest.raises(ValueError, match="fewer than 0"):
        ExactSampler(-1, rank=0, size=1)
