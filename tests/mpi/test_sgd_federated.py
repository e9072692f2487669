"""Federated averaging: the laws of the weighted mean, whatever the number of ranks that play the clients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.data import ImageSet, Part
from hpcdl.errors import MismatchError
from hpcdl.sgd import asked, deal, dropped

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.sgd import FederatedAveraging  # noqa: E402
from hpcdl.sgd.training import Federated  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402
from hpcdl.torch.tasks import build, image_task  # noqa: E402

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

Sgd = light(torch.optim.SGD)
SAMPLES = 60
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0)).double()
CLIENTS = deal(np.arange(SAMPLES) % 10, 7, skew="labels:0.4", seed=3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def loss(model: nn.Module, numbers: Any) -> Tensor:
    x = X[torch.as_tensor(numbers)]
    return (model(x) - x[:, :3]).square().mean()


def averaging(comm: MPI.Intracomm, model: nn.Module, clients: Any = CLIENTS, **options: Any) -> FederatedAveraging:
    options = {"optimizer": lambda module: Sgd(module.parameters(), lr=0.1), **options}
    return FederatedAveraging(model, clients, loss, comm, **options)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("batch_size", [None, SAMPLES])
def test_one_step_of_all_clients_is_a_step_of_synchronous_sgd(comm: MPI.Intracomm, batch_size: int | None) -> None:
    """Each on all its samples, so that batches are in proportion to their numbers."""
    assert len({len(mine) for mine in CLIENTS}) > 3
    model, alone = network(), network()
    federated = averaging(comm, model, fraction=1.0, batch_size=batch_size)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(4):
        expected = loss(alone, np.arange(SAMPLES))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        done = federated.round()
        assert torch.allclose(vector(model), vector(alone), rtol=1e-12, atol=1e-14)
        assert done.loss == pytest.approx(expected.item(), rel=1e-12)
        assert (done.samples, done.steps, done.dropped) == (SAMPLES, 1, ())
    assert (vector(alone) - vector(network())).norm() > 0.01
    assert len({each.numpy().tobytes() for each in comm.allgather(vector(model))}) == 1


def test_clients_count_by_their_samples(comm: MPI.Intracomm) -> None:
    """One has a sample, the other three; by whole numbers."""
    x = torch.tensor([8.0, 16.0, 32.0, 64.0]).double()
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 5)
    federated = FederatedAveraging(
        model,
        [np.array([0]), np.array([1, 2, 3])],
        lambda module, numbers: (module.weight * x[torch.as_tensor(numbers)]).sum(),
        comm,
        optimizer=lambda module: Sgd(module.parameters(), lr=1),
        fraction=1.0,
        batch_size=1,
        local_epochs=2,
    )
    done = federated.round()
    assert model.weight.item() == 5 - (1 * 16 + 3 * 224) / 4
    assert (done.samples, done.steps) == (4, 6)


def test_it_does_not_depend_on_the_number_of_ranks(comm: MPI.Intracomm) -> None:
    options = {"fraction": 0.6, "local_epochs": 2, "batch_size": 4, "drop_out": 0.3, "seed": 1}
    momentum = {"optimizer": lambda module: Sgd(module.parameters(), lr=0.05, momentum=0.9)}
    together, alone = network(), network()
    ours = averaging(comm, together, **options, **momentum)
    theirs = averaging(MPI.COMM_SELF, alone, **options, **momentum)
    for number, (mine, single) in enumerate(zip(ours, theirs, strict=False)):
        assert mine._replace(loss=0) == single._replace(loss=0)
        assert mine.asked == tuple(asked(7, 0.6, number, 1)) and len(mine.asked) == 4
        assert mine.dropped == tuple(dropped(mine.asked, 0.3, number, 1))
        assert mine.samples == sum(len(CLIENTS[client]) for client in mine.asked if client not in mine.dropped)
        assert mine.loss == pytest.approx(single.loss, rel=1e-10, nan_ok=True)
        assert torch.allclose(vector(together), vector(alone), rtol=1e-10, atol=1e-13)
        if number == 5:
            break
    assert len({each.numpy().tobytes() for each in comm.allgather(vector(together))}) == 1


def test_who_drops_out_does_not_count_and_if_all_do_nothing_changes(comm: MPI.Intracomm) -> None:
    model = network()
    federated = averaging(comm, model, fraction=0.3, drop_out=0.7)
    seen, before = set(), vector(model)
    for done in federated:
        still = done.samples == 0
        seen.add(still)
        if still:
            assert done.dropped == done.asked and (vector(model) == before).all() and math.isnan(done.loss)
        before = vector(model)
        if seen == {True, False}:
            break


def test_statistics_are_averaged_too(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.BatchNorm1d(5, momentum=1.0), nn.Linear(5, 3)).double()
    clients = [np.arange(20), np.arange(20, 60)]
    averaging(comm, model, clients, fraction=1.0, batch_size=None).round()
    means = [X[:20].mean(0), X[20:].mean(0)]
    assert torch.allclose(model[0].running_mean, (means[0] + 2 * means[1]) / 3, rtol=1e-12)
    assert model[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"fraction": 0}, "fraction 0 of the clients"),
        ({"local_epochs": 0}, "makes 0 passes"),
        ({"batch_size": 0}, "batches have 0 samples"),
        ({"drop_out": 1}, "with the probability 1"),
        ({"clients": []}, "there are no clients"),
    ],
)
def test_what_is_no_federation_is_refused_by_all(comm: MPI.Intracomm, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        averaging(comm, network(), **(options if comm.rank == comm.size - 1 else {}))
    if comm.size > 1:
        with pytest.raises(MismatchError, match="FederatedAveraging"):
            averaging(comm, network(), seed=comm.rank)


def test_an_epoch_is_over_when_as_many_samples_were_seen(comm: MPI.Intracomm) -> None:
    random = np.random.RandomState(1)
    parts = [Part(random.randint(0, 256, (n, 4, 4)).astype(np.uint8), random.randint(0, 10, n)) for n in (SAMPLES, 20)]
    task = image_task(ImageSet("noise", *parts), torch.float64)
    training = Federated(
        task,
        build("mlp", task, seed=0).double(),
        lambda module: Sgd(module.parameters(), lr=0.05),
        comm,
        clients=CLIENTS,
        batch_size=4,
        fraction=0.3,
        seed=2,
    )
    seen: list[int] = []
    epochs = list(training.train(6, lambda samples: seen.append(samples)))
    assert sum(seen) >= 6 * SAMPLES > sum(seen) - seen[-1]
    assert [epoch.number for epoch in epochs] == [1, 2, 3, 4, 5, 6]
    assert epochs[-1].loss < epochs[0].loss
    assert training.spread() == 0
    assert training.remark == f"{len(seen)} rounds; 0 times a client did not report back"
