"""Backup workers: a step is made of the first gradients, late ones are dropped, and the slow delay nobody."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.sgd.backup import backup_workers  # noqa: E402
from hpcdl.sgd.pace import Pace  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402

SGD = light(torch.optim.SGD)


def line() -> nn.Module:
    """A model that is one number."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def one(part: nn.Module) -> torch.optim.Optimizer:
    return SGD(part.parameters(), lr=1.0)


@pytest.mark.ranks(2, 3, 5)
def test_without_backups_it_is_synchronous_sgd(comm: MPI.Intracomm) -> None:
    """Exactly: all numbers are dyadic. Four workers have uneven shares, and the mean is that of all samples."""
    sizes, steps, lr = {2: [2], 3: [2, 2], 5: [1, 1, 2, 4]}[comm.size], 3, 2.0**-4
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    model.weight.data.copy_(torch.tensor([[5.0, -3.0, 2.0]]))
    alone = model.weight.detach().clone().requires_grad_()

    def batch(step: int, worker: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + worker)
        return torch.randint(-8, 8, (sizes[worker], 3), generator=generator).to(torch.float64)

    def error(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight.T - x.sum(1, keepdim=True)).square().mean() / 2

    def loss(step: int) -> tuple[Tensor, int]:
        x = batch(step, comm.rank - 1)
        return error(model.weight, x), len(x)

    rule = SGD([alone], lr=lr)
    for step in range(steps):
        rule.zero_grad()
        error(alone, torch.cat([batch(step, worker) for worker in range(len(sizes))])).backward()
        rule.step()
    report = backup_workers(
        model, loss, lambda part: SGD(part.parameters(), lr=lr), comm, samples=steps * sum(sizes), backups=0
    )
    if comm.rank == 0:
        assert torch.equal(model.weight, alone)
        assert report.updates == steps and sum(report.late.values()) == 0


@pytest.mark.ranks(3, 5)
def test_an_update_divides_by_n_and_not_by_all(comm: MPI.Intracomm) -> None:
    """The last worker is too late for each of 8 steps; without it the gradients of 1 are 1 in the mean."""
    model, steps, late = line(), 8, comm.size - 1
    report = backup_workers(
        model,
        lambda step: ((model.weight * (100 if comm.rank == late else 1)).sum(), 1),
        one,
        comm,
        samples=steps * (comm.size - 2),
        backups=1,
        pace=Pace(step_s=0.01, slow_rank=late, slow_factor=5),
    )
    if comm.rank == 0:
        assert model.weight.item() == -steps
        assert report.updates == steps
        assert set(report.late) <= {late}
        # Five times as slow, it comes at every fifth step, and could not count once.
        assert report.seconds < 0.7 * 5 * 0.01 * steps
    if comm.rank == late:
        assert 0 < report.updates < steps


@pytest.mark.ranks(4)
def test_all_workers_of_a_step_work_on_its_batch_and_the_late_leave_steps_out(comm: MPI.Intracomm) -> None:
    model = line()
    steps: list[int] = []

    def loss(step: int) -> tuple[Tensor, int]:
        assert model.weight.item() == -step  # it has the parameters of the step that it is told
        steps.append(step)
        return (model.weight * 1).sum(), 1

    pace = Pace(step_s=0.005, slow_rank=2, slow_factor=6)
    report = backup_workers(model, loss, one, comm, samples=40, backups=1, pace=pace)
    everything = comm.gather(steps)
    if everything is not None:
        assert everything[1] == everything[3] == list(range(20))
        assert everything[2] == sorted(set(everything[2])) and len(everything[2]) <= 6
        assert report.late[2] in (len(everything[2]), len(everything[2]) - 1)  # the last one comes behind the end


@pytest.mark.ranks(4)
def test_an_empty_share_counts_as_a_gradient_of_no_sample(comm: MPI.Intracomm) -> None:
    model = line()
    report = backup_workers(
        model,
        lambda step: ((model.weight * 4 * comm.rank).sum(), 0 if comm.rank == 3 and step else 1),
        one,
        comm,
        samples=5,
        backups=0,
    )
    if comm.rank == 0:
        assert report.updates == 2
        assert model.weight.item() == -(4 + 8 + 12) / 3 - (4 + 8) / 2


@pytest.mark.ranks(3)
def test_steps_go_on_with_those_who_are_left(comm: MPI.Intracomm) -> None:
    model = line()

    def loss(step: int) -> tuple[Tensor, int] | None:
        return ((model.weight * comm.rank).sum(), 1) if comm.rank == 1 or step < 2 else None

    report = backup_workers(model, loss, one, comm, samples=8, backups=0)
    if comm.rank == 0:
        assert report.left == {2: "finished early"}
        assert report.updates == 2 + 4
        assert model.weight.item() == -2 * 1.5 - 4


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("backups", "words"), [(2, "0 to 1 can be backups, not 2"), (-1, "not -1")])
def test_all_refuse_too_many_backups(comm: MPI.Intracomm, backups: int, words: str) -> None:
    model = line()
    train: Any = backup_workers
    with pytest.raises(ValueError, match=words):
        train(model, lambda step: None, one, comm, samples=3, backups=backups)
