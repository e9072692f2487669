"""Layers on several ranks learn what the whole learns on one, by torch's parts over the backend hpcdl."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.data import ImageSet, Part

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import hpcdl.torch  # noqa: E402
from hpcdl.sgd import Pace, Pipeline, cut, layers, mesh_of, split  # noqa: E402
from hpcdl.sgd.pipelined import Pipelined  # noqa: E402
from hpcdl.text import Text  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402
from hpcdl.torch.tasks import Task, build, image_task, text_task  # noqa: E402
from hpcdl.torch.train import Trainer  # noqa: E402

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.filterwarnings("ignore")]

Sgd = light(torch.optim.SGD)
assert hpcdl.torch


@pytest.fixture
def group(comm: MPI.Intracomm, tmp_path: Path) -> Iterator[MPI.Intracomm]:
    """The default process group."""
    store = dist.FileStore(f"{comm.bcast(str(tmp_path))}/store", comm.size)
    dist.init_process_group("hpcdl", store=store, rank=comm.rank, world_size=comm.size, timeout=timedelta(seconds=30))
    yield comm
    dist.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(6, 12),
        nn.Tanh(),
        nn.Linear(12, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    ).double()


def loss(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().sum()


def batch(replica: int, n: int = 12) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(replica)
    return torch.randn(n, 6, generator=random).double(), torch.randn(n, 4, generator=random).double()


def shapes(size: int) -> list[tuple[int, int, int]]:
    """Replicas, stages and parts of so many ranks."""
    found = []
    for stages in (1, 2, 3, 4):
        for parts in (1, 2, 4):
            if size % (stages * parts) == 0:
                found.append((size // (stages * parts), stages, parts))
    return found


def whole(each: Tensor) -> Tensor:
    return each.full_tensor() if isinstance(each, DTensor) else each


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_those_of_one_process(group: MPI.Intracomm, schedule: str) -> None:
    """In float64: of 16 digits a few are lost, as the numbers are added in another order."""
    for replicas, stages, parts in shapes(group.size):
        if schedule == "1f1b" and stages < min(2, group.size):  # which is gpipe
            continue
        mesh = mesh_of(stages, parts)
        assert mesh.shape == (replicas, stages, parts)
        pipeline = Pipeline(network(), mesh, loss=loss, micro_batches=4, schedule=schedule)
        alone = network()
        inputs, labels = (torch.cat(each) for each in zip(*map(batch, range(replicas)), strict=True))
        expected = loss(alone(inputs), labels)
        expected.backward()
        own = cut(layers(alone), stages)[mesh.stage]
        for _ in range(2):
            pipeline.stage.zero_grad()
            losses = pipeline.step(*batch(mesh.replica))
            assert len(losses) == (4 if pipeline.last else 0)
            for (name, mine), theirs in zip(pipeline.stage.named_parameters(), own.parameters(), strict=True):
                assert torch.allclose(whole(mine.grad), theirs.grad, rtol=1e-12, atol=1e-13), name
        result = pipeline.look(*batch(mesh.replica))
        if pipeline.last:
            assert torch.allclose(result, alone(batch(mesh.replica)[0]), rtol=1e-12)
        else:
            assert result is None


def test_a_split_layer_is_on_all_ranks_in_parts(group: MPI.Intracomm) -> None:
    mesh = mesh_of(1, group.size)
    model, alone = network(), network()
    split(model, mesh.mesh["part"])
    for name, rows, columns in (("1", 12 // group.size, 6), ("3", 8, 12 // group.size), ("5", 8 // group.size, 8)):
        assert tuple(model.get_submodule(name).weight.to_local().shape) == (rows, columns)
    inputs, labels = batch(0)
    inputs.requires_grad_()
    copy = inputs.detach().clone().requires_grad_()
    loss(model(inputs), labels).backward()
    loss(alone(copy), labels).backward()
    assert torch.allclose(inputs.grad, copy.grad, rtol=1e-12)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(whole(mine.grad), theirs.grad, rtol=1e-12, atol=1e-13)


# ---- whole trainings -----------------------------------------------------------------------------------------------


def noise(n: int) -> Task:
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, 4, 4)).astype(np.uint8), random.randint(0, 10, count)) for count in (n, 21)
    ]
    return image_task(ImageSet("noise", *parts), torch.float64)


def prattle() -> Task:
    random = np.random.RandomState(2)
    return text_task(Text("prattle", "abcde", random.randint(0, 5, 6 * 30 + 1), random.randint(0, 5, 6 * 9 + 1)), 6)


def followed(comm: MPI.Intracomm, task: Task, model: str, stages: int, parts: int, **options: Any) -> None:
    """A pipeline comes to what one rank comes to, also with a last batch that is short."""
    batch_size, epochs = 4, 2
    alone = build(model, task, seed=0).double()
    one = Trainer(
        task,
        alone,
        Sgd(alone.parameters(), lr=0.02, momentum=0.9),
        MPI.COMM_SELF,
        batch_size=batch_size * comm.size,
    )
    list(one.train(epochs))
    training = Pipelined(
        task,
        build(model, task, seed=0).double(),
        lambda module: Sgd(module.parameters(), lr=0.02, momentum=0.9),
        comm,
        mesh=mesh_of(stages, parts),
        batch_size=batch_size,
        micro_batches=3 * stages,
        **options,
    )
    seen: list[int] = []
    results = list(training.train(epochs, lambda samples: seen.append(samples)))
    assert training.steps == one.steps and sum(seen) == epochs * task.train_count
    for ours, theirs in zip(results, one.epochs, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-9)
        assert ours.accuracy == theirs.accuracy
    own = cut(layers(alone), stages)[training.mesh.stage]
    for mine, theirs in zip(training.model.parameters(), own.parameters(), strict=True):
        assert torch.allclose(whole(mine), theirs, rtol=1e-9, atol=1e-12)
    assert training.spread() == 0
    assert training.parameters == sum(each.numel() for each in alone.parameters())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_training_in_stages_follows_that_of_one_rank(group: MPI.Intracomm, schedule: str) -> None:
    followed(group, noise(25 + group.size), "mlp", 2, 1, schedule=schedule)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("model", ["cnn", "transformer"])
def test_other_networks_follow_too(group: MPI.Intracomm, model: str) -> None:
    stages = group.size
    followed(group, noise(30) if model == "cnn" else prattle(), model, stages, 1)


def test_a_training_with_split_layers_follows_too(group: MPI.Intracomm) -> None:
    followed(group, *((prattle(), "transformer", 1, 2) if group.size == 2 else (noise(30), "mlp", 2, 2)))


@pytest.mark.ranks(2)
def test_a_slow_stage_holds_up_the_others(group: MPI.Intracomm) -> None:
    task = noise(16)
    training = Pipelined(
        task,
        build("mlp", task, seed=0).double(),
        lambda module: Sgd(module.parameters(), lr=0.02),
        group,
        mesh=mesh_of(2),
        batch_size=4,
        micro_batches=4,
        pace=Pace(0.01, slow_rank=1, slow_factor=5),
    )
    (epoch,) = training.train(1)
    assert epoch.per_s <= 16 / (2 * 0.05)
    assert epoch.communication > 0.3  # rank 0 waits four fifths of its time


# ---- how a model is cut --------------------------------------------------------------------------------------------


def test_stages_are_cut_as_evenly_as_can_be(comm: MPI.Intracomm) -> None:
    def sizes(stages: int) -> list[int]:
        return [sum(p.numel() for p in stage.parameters()) for stage in cut(layers(network()), stages)]

    assert sizes(1) == [84 + 104 + 16 + 72 + 36]
    assert sizes(2) == [84 + 104, 16 + 72 + 36]  # the next cut would be 204 and 108
    assert sizes(3) == [84, 104 + 16, 72 + 36]
    assert sizes(5) == [84, 104, 16, 72, 36]
    alone, x = network(), batch(0)[0]
    for stages in range(1, 6):
        result = x
        for stage in cut(layers(alone), stages):
            result = stage(result)
        assert torch.equal(result, alone(x))


@pytest.mark.parametrize(
    ("attempt", "line"),
    [
        (lambda: cut(layers(network()), 6), "5 layers with parameters make 1 to 5 stages, not 6"),
        (lambda: layers(nn.Linear(2, 2)), "a Linear is no sequence of layers"),
        (lambda: mesh_of(5), r"ranks are no multiple of 5 stages x 1 parts"),
        (lambda: Pipeline(network(), mesh_of(1), loss=loss, micro_batches=0), "needs 1 micro-batches or more, not 0"),
        (lambda: Pipeline(network(), mesh_of(1), loss=loss, micro_batches=1, schedule="x"), "schedule is one of gpipe"),
    ],
)
def test_what_cannot_be_is_refused(group: MPI.Intracomm, attempt: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        attempt()


@pytest.mark.ranks(3)
def test_layers_that_cannot_be_split_evenly_are_refused_by_all(group: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match="layer 5, from 8 to 8 numbers, cannot be split evenly among 3 ranks"):
        Pipeline(network(), mesh_of(1, 3), loss=loss, micro_batches=1)
