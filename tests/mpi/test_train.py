"""Training on several ranks is training on one with the same global batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idx import write_images
from mpi4py import MPI

import hpcdl
from hpcdl.data import DataError, ImageSet, Part, load_together
from hpcdl.environment import cores_per_rank, crowding

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.train import Epoch, Replica, Scale, build, count_correct, train  # noqa: E402


def images(n: int, tests: int = 30, side: int = 8) -> ImageSet:
    """Noise with labels: nothing to learn, so every gradient is large."""
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, side, side)).astype(np.uint8), random.randint(0, 10, count))
        for count in (n, tests)
    ]
    return ImageSet("noise", *parts)


def trained(
    data: ImageSet,
    comm: MPI.Comm,
    *,
    batch_size: int,
    epochs: int,
    model: str = "mlp",
    algorithm: str = "auto",
) -> tuple[Replica, list[Epoch]]:
    """A replica in float64 after some epochs, and what they came to."""
    replica = Replica(build(model, data, seed=0).double(), comm, lr=0.05, momentum=0.9, algorithm=algorithm)
    return replica, list(train(replica, data, epochs=epochs, batch_size=batch_size, seed=0))


def assert_follows(one: tuple[Replica, list[Epoch]], several: tuple[Replica, list[Epoch]]) -> None:
    """The same parameters to 10 digits (float64 has 16, and 20 steps lose few), and the same results."""
    (mine, epochs), (ours, our_epochs) = one, several
    assert float(mine.velocity.norm()) > 0
    assert float((ours.parameters - mine.parameters).norm() / mine.parameters.norm()) < 1e-10
    assert [epoch.loss for epoch in our_epochs] == pytest.approx([epoch.loss for epoch in epochs], rel=1e-10)
    assert [epoch.accuracy for epoch in our_epochs] == [epoch.accuracy for epoch in epochs]
    assert ours.spread() == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", hpcdl.algorithms())
def test_4_ranks_of_32_follow_1_rank_of_128(comm: MPI.Intracomm, algorithm: str) -> None:
    data = images(500)  # 20 steps: 3 full batches and one of 116, 5 times
    one = trained(data, MPI.COMM_SELF, batch_size=128, epochs=5)
    assert_follows(one, trained(data, comm, batch_size=32, epochs=5, algorithm=algorithm))


@pytest.mark.ranks(3)
def test_a_convolutional_network_follows_too(comm: MPI.Intracomm) -> None:
    data = images(100)
    one = trained(data, MPI.COMM_SELF, batch_size=48, epochs=2, model="cnn")
    assert_follows(one, trained(data, comm, batch_size=16, epochs=2, model="cnn"))


@pytest.mark.ranks(2)  # torch.optim takes seconds to import
def test_a_step_is_that_of_torchs_sgd(comm: MPI.Intracomm) -> None:
    data = images(24)
    replica, _ = trained(data, comm, batch_size=24 // comm.size, epochs=5)
    model, scale = build("mlp", data, seed=0).double(), Scale(data.train.images, torch.float64)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        optimiser.zero_grad()
        scores = model(scale(data.train.images))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(data.train.labels)).backward()
        optimiser.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert float((replica.parameters - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("last", "model"), [(1, "mlp"), (2, "mlp"), (3, "mlp"), (1, "cnn")])
def test_ranks_with_no_sample_of_the_last_batch_take_part(comm: MPI.Intracomm, last: int, model: str) -> None:
    data = images(16 + last)
    one = trained(data, MPI.COMM_SELF, batch_size=16, epochs=2, model=model)
    assert_follows(one, trained(data, comm, batch_size=4, epochs=2, model=model))


@pytest.mark.ranks(3)
def test_each_test_image_is_counted_once(comm: MPI.Intracomm) -> None:
    n, wrong = 10, 3
    labels = np.arange(n)
    pixels = labels.astype(np.uint8)[:, None, None]
    seen: list[int] = []

    class Reader(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Reads the label off the only pixel, but for the first few."""

        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, pixels: Any) -> Any:
            named = pixels.flatten().round().long()
            seen.extend(named.tolist())
            return torch.nn.functional.one_hot(torch.where(named < wrong, 9 - named, named), 10)

    scale = Scale(pixels)
    scale.mean, scale.deviation = 0.0, 1.0
    replica = Replica(Reader(), comm, lr=0.1)
    assert count_correct(replica, scale, Part(pixels, labels), batch_size=2) == n - wrong
    assert sorted(comm.allreduce(seen)) == list(range(n))


@pytest.mark.ranks(1, 3)
def test_all_ranks_start_from_the_parameters_of_rank_0(comm: MPI.Intracomm) -> None:
    replica = Replica(build("mlp", images(10), seed=comm.rank), comm, lr=0.1)
    first = torch.nn.utils.parameters_to_vector(build("mlp", images(10), seed=0).parameters())
    assert torch.equal(replica.parameters, first.detach())
    assert torch.equal(torch.nn.utils.parameters_to_vector(replica.model.parameters()).detach(), first.detach())


@pytest.mark.ranks(3)
def test_a_parameter_that_drifts_on_one_rank_is_seen_by_all(comm: MPI.Intracomm) -> None:
    replica = Replica(build("mlp", images(10), seed=0), comm, lr=0.1)
    assert replica.spread() == 0
    if comm.rank == 1:
        replica.parameters[7] = 0.5
    else:
        replica.parameters[7] = 0.25
    assert replica.spread() == 0.25
    for lost in [{0}, {1}, {2}, {0, 1, 2}]:  # each, since MPI's max may keep the first or the last it is given
        replica.parameters[7] = np.nan if comm.rank in lost else 0.25
        assert not np.isfinite(replica.spread())


@pytest.mark.ranks(3)
def test_data_that_one_rank_cannot_read_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    write_images(tmp_path)  # each rank has a folder of its own
    assert len(load_together(str(tmp_path), comm).train.labels) == 400

    if comm.rank == 1:
        (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as raised:
        load_together(str(tmp_path), comm)
    assert "holds neither train-labels-idx1-ubyte.gz nor" in str(raised.value)
    assert "(on rank 1 of 3)" in str(raised.value)
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.ranks(3)
def test_data_that_differs_between_ranks_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    write_images(tmp_path, seed=int(comm.rank == 2))
    with pytest.raises(DataError, match="all ranks must have the same data: rank 2 has"):
        load_together(str(tmp_path), comm)


@pytest.mark.ranks(1, 2)
def test_the_ranks_of_a_node_share_its_cores(comm: MPI.Intracomm) -> None:
    import os

    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no process to cores")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores_per_rank(comm) == 1
        hint = crowding(comm)
        assert hint is None if comm.size == 1 else hint and "note: 2 ranks share 1 core of a node" in hint
        os.sched_setaffinity(0, before)
        assert cores_per_rank(comm) == max(1, len(before) // comm.size)
        mine = sorted(before)[comm.rank :: comm.size]
        os.sched_setaffinity(0, mine)
        assert cores_per_rank(comm) in {len(mine), len(before) // comm.size}
    finally:
        os.sched_setaffinity(0, before)
