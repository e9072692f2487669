"""Ranks that train on their own and are averaged: the laws of elastic averaging, gossip and local SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.data import ImageSet, Part
from hpcdl.errors import MismatchError
from hpcdl.sgd import Pace, matching

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.sgd import ElasticAveraging, Gossip, LocalSGD  # noqa: E402
from hpcdl.sgd.training import Averaged  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402
from hpcdl.torch.tasks import build, image_task  # noqa: E402
from hpcdl.torch.train import Trainer, spread  # noqa: E402

pytestmark = pytest.mark.ranks(1, 2, 3, 4, 5)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().double() for each in model.parameters()])


def everybody(comm: MPI.Intracomm, model: nn.Module) -> Tensor:
    """The ranks' parameters, one rank a row."""
    return torch.stack(comm.allgather(vector(model)))


def scattered(comm: MPI.Intracomm, model: nn.Module, seed: int = 0) -> nn.Module:
    """Whole numbers, others on each rank: sums and halves of them are exact."""
    random = torch.Generator().manual_seed(100 * seed + comm.rank)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.randint(-1000, 1000, each.shape, generator=random))
    return model


def network(dtype: Any = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


# ---- gossip --------------------------------------------------------------------------------------------------------


def test_gossip_preserves_the_mean_and_partners_agree_to_the_last_bit(comm: MPI.Intracomm) -> None:
    model = network()
    gossip = Gossip(model, comm, seed=7)
    before = everybody(comm, scattered(comm, model))
    for step in range(1, 9):
        was = everybody(comm, model)
        gossip.step()
        rows, partners = everybody(comm, model), matching(comm.size, step, 7)
        assert (rows.sum(0) == before.sum(0)).all()
        for rank, partner in enumerate(partners):
            assert (rows[rank] == (was[rank] + was[partner]) / 2).all()

    def apart(rows: Tensor) -> float:
        return float((rows.max(0).values - rows.min(0).values).max())

    assert apart(everybody(comm, model)) <= apart(before) / 2  # and they come together


def test_gossip_knows_other_types_and_statistics(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2).half(), nn.BatchNorm1d(2))
    gossip = Gossip(model, comm)
    scattered(comm, model)
    with torch.no_grad():
        model[1].weight.fill_(60000)  # of two such the sum is no float16
        model[2].running_var.fill_(2 + comm.rank)
        model[2].num_batches_tracked.fill_(comm.rank)
    gossip.step()
    partner = matching(comm.size, 1)[comm.rank]
    assert (model[1].weight == 60000).all()
    assert (model[2].running_var == 2 + (comm.rank + partner) / 2).all()
    assert model[2].num_batches_tracked == comm.rank
    assert model[0].weight.dtype == torch.bfloat16


# ---- elastic averaging ---------------------------------------------------------------------------------------------


def test_ranks_and_centre_come_together_by_the_factor_that_alpha_says(comm: MPI.Intracomm) -> None:
    p = comm.size
    model = network()
    elastic = ElasticAveraging(model, comm, every=3, moving_rate=p / 8)  # alpha 1/8
    assert elastic.alpha == 0.125
    factor = 1 - (1 + p) / 8
    scattered(comm, model)
    (centre,) = elastic.centre
    centre.copy_(torch.randint(-1000, 1000, centre.shape, generator=torch.Generator().manual_seed(1)))
    for _ in range(3):
        rows, was = everybody(comm, model), centre.clone()
        assert [elastic.step() for _ in range(3)] == [False, False, True]
        now = everybody(comm, model)
        assert (now == rows - (rows - was) / 8).all()
        # p times the distance of the mean from the centre; in thirds it would not be exact.
        assert (now.sum(0) - p * centre == factor * (rows.sum(0) - p * was)).all()
        assert len({each.numpy().tobytes() for each in comm.allgather(centre)}) == 1


@pytest.mark.parametrize("beyond", [False, True])
def test_at_the_bound_of_alpha_they_come_together_and_beyond_it_is_refused(comm: MPI.Intracomm, beyond: bool) -> None:
    bound = 2 * comm.size / (1 + comm.size)
    if not beyond:
        elastic = ElasticAveraging(network(), comm, moving_rate=bound * 0.999)
        assert abs(1 - elastic.alpha * (1 + comm.size)) < 1
        return
    for rate in (bound, bound * 1.5, 0.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=rf"moving_rate \S+ on {comm.size} ranks is alpha = .* below {bound:.4g}"):
            ElasticAveraging(network(), comm, moving_rate=rate)


def test_the_centre_is_what_stands_for_all_and_goes_into_a_state(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(network(), nn.BatchNorm1d(3).double())
    elastic = ElasticAveraging(model, comm, every=1, moving_rate=0.5)
    scattered(comm, model)
    elastic.step()
    mine, centre = vector(model), elastic.centre[0].clone()
    model[1].running_var.fill_(1 + comm.rank)
    with elastic.consensus():
        assert (vector(model) == centre).all()
        assert (model[1].running_var == 1 + (comm.size - 1) / 2).all()
    assert (vector(model) == mine).all() and (model[1].running_var == 1 + comm.rank).all()
    other = ElasticAveraging(network_like(model), comm, every=1, moving_rate=0.5)
    other.load_state_dict(elastic.state_dict())
    assert (other.centre[0] == centre).all() and other.steps == 1


def network_like(model: nn.Module) -> nn.Module:
    other = nn.Sequential(network(), nn.BatchNorm1d(3).double())
    other.load_state_dict(model.state_dict())
    return other


# ---- local SGD -----------------------------------------------------------------------------------------------------


def test_a_mean_in_every_step_is_synchronous_sgd(comm: MPI.Intracomm) -> None:
    """In float64: of 16 digits a few are lost, as the numbers are added in another order."""
    local, together = network(), DistributedDataParallel(network(), comm)
    averaging = LocalSGD(local, comm, every=1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.01) for each in (local, together)]
    for step in range(6):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + comm.rank)).double()
        for model, optimizer in zip((local, together), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
        averaging.step()
    assert (vector(local) - vector(network())).norm() > 0.01
    assert torch.allclose(vector(local), vector(together), rtol=1e-12, atol=1e-14)
    assert spread(local, comm) == 0


def test_where_all_numbers_are_exact_it_is_so_to_the_last_bit(comm: MPI.Intracomm) -> None:
    if comm.size not in (1, 2, 4):  # a third is not exact
        return
    local = nn.Linear(4, 3, bias=False).double()
    scattered(MPI.COMM_SELF, local)
    together = DistributedDataParallel(nn.Linear(4, 3, bias=False).double(), comm)
    together.module.load_state_dict(local.state_dict())
    averaging = LocalSGD(local, comm, every=1)
    for step in range(5):
        x = torch.randint(-8, 8, (4, 4), generator=torch.Generator().manual_seed(step + 50 * comm.rank)).double()
        for model in (local, together):
            model.zero_grad()
            model(x).sum().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each.sub_(each.grad, alpha=0.125)
        averaging.step()
        assert (vector(local) == vector(together)).all()


def test_between_two_means_ranks_are_alone(comm: MPI.Intracomm) -> None:
    model = network()
    averaging = LocalSGD(model, comm, every=4)
    scattered(comm, model)
    before = everybody(comm, model)
    assert [averaging.step() for _ in range(3)] == [False] * 3
    assert (vector(model) == before[comm.rank]).all()
    with averaging.consensus():
        assert torch.allclose(vector(model), before.mean(0), rtol=1e-15)
    assert (vector(model) == before[comm.rank]).all()
    assert averaging.step()
    assert torch.allclose(vector(model), before.mean(0), rtol=1e-15)  # three whole numbers have no exact mean
    assert len({row.numpy().tobytes() for row in everybody(comm, model)}) == 1


def test_frozen_parameters_stay_and_two_types_are_averaged(comm: MPI.Intracomm) -> None:
    model = nn.ModuleList([nn.Linear(2, 2).double(), nn.Linear(2, 2), nn.Linear(2, 2)])
    model[2].requires_grad_(False)
    averaging = LocalSGD(model, comm, every=1)
    for layer in model:
        nn.init.constant_(layer.weight, comm.rank)
    averaging.step()
    mean = (comm.size - 1) / 2
    assert (model[0].weight == mean).all() and (model[1].weight == mean).all()
    assert (model[2].weight == comm.rank).all()
    model.double()
    with pytest.raises(RuntimeError, match=r"was torch.float32 .* is torch.float64 now"):
        averaging.average()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalSGD, Gossip, ElasticAveraging])
def test_bad_or_different_arguments_are_refused_by_all(comm: MPI.Intracomm, kind: Any) -> None:
    with pytest.raises(ValueError, match="every is a number of steps, 1 or more, not 0"):
        kind(network(), comm, every=0 if comm.rank == comm.size - 1 else 4)
    if comm.size > 1:
        with pytest.raises(MismatchError, match=kind.__name__):
            kind(network(), comm, every=4 + (comm.rank == 1))
        with pytest.raises(MismatchError):
            kind(nn.Linear(2, 2 + (comm.rank == 1)), comm)


# ---- a whole training ----------------------------------------------------------------------------------------------


def noise(n: int) -> Any:
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, 4, 4)).astype(np.uint8), random.randint(0, 10, count)) for count in (n, 20)
    ]
    return image_task(ImageSet("noise", *parts), torch.float64)


def test_local_training_with_a_mean_in_every_step_follows_the_synchronous_one(comm: MPI.Intracomm) -> None:
    """Also where the last batch is not dealt out evenly, or leaves ranks without a sample."""
    task = noise(6 * comm.size + 1)
    sgd = light(torch.optim.SGD)
    trainings = []
    for kind in ("sync", "local"):
        model = build("mlp", task, seed=0).double()
        optimizer = sgd(model.parameters(), lr=0.01)
        if kind == "sync":
            trainings.append(Trainer(task, model, optimizer, comm, batch_size=4))
        else:
            averaging = LocalSGD(model, comm, every=1)
            trainings.append(Averaged(task, model, optimizer, averaging, comm, batch_size=2, accumulate=2))
        list(trainings[-1].train(2))
    sync, local = trainings
    assert sync.steps == local.steps == 4
    assert torch.allclose(vector(local.model), vector(sync.model), rtol=1e-10, atol=1e-13)
    for ours, theirs in zip(local.epochs, sync.epochs, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-10)
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-10) and ours.accuracy == theirs.accuracy


@pytest.mark.parametrize("kind", [Gossip, ElasticAveraging])
def test_at_the_end_all_ranks_have_what_was_evaluated(comm: MPI.Intracomm, kind: Any) -> None:
    task = noise(40)
    model = build("mlp", task, seed=0).double()
    optimizer = light(torch.optim.SGD)(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    training = Averaged(task, model, optimizer, kind(model, comm, every=5), comm, batch_size=3)
    losses = [epoch.loss for epoch in training.train(4)]
    assert losses[-1] < losses[0]
    assert training.spread() == 0
    if comm.size > 1:
        assert not training.remark.endswith("by up to 0")


def test_the_slow_rank_holds_up_the_mean(comm: MPI.Intracomm) -> None:
    task = noise(8 * comm.size)
    model = build("mlp", task, seed=0).double()
    optimizer = light(torch.optim.SGD)(model.parameters(), lr=0.01)
    pace = Pace(0.01, slow_rank=0, slow_factor=5)
    training = Averaged(task, model, optimizer, LocalSGD(model, comm, every=1), comm, batch_size=4, pace=pace)
    (epoch,) = training.train(1)
    assert epoch.per_s <= 8 * comm.size / (2 * 0.05)
    if comm.size > 1:
        assert epoch.communication > 0.5 * (comm.size - 1) / comm.size  # the others wait
