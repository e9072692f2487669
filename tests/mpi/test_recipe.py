"""Whatever the optimiser, the schedule of rates and the precision, several ranks train as one does."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.data import ImageSet, Part

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.growth import BatchGrowth  # noqa: E402
from hpcdl.torch.recipe import Schedule, optimizer, scheduler  # noqa: E402
from hpcdl.torch.tasks import Task, build, image_task  # noqa: E402
from hpcdl.torch.train import Trainer, spread  # noqa: E402

LRS = {"sgd": 0.05, "adam": 0.01, "rmsprop": 0.01, "lars": 5.0}


def noise(n: int, dtype: Any = torch.float64) -> Task:
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, 8, 8)).astype(np.uint8), random.randint(0, 10, count)) for count in (n, 20)
    ]
    return image_task(ImageSet("noise", *parts), dtype)


def trainer(
    task: Task,
    comm: MPI.Comm,
    *,
    batch: int = 12,
    kind: str = "sgd",
    schedule: Schedule | None = None,
    epochs: int = 3,
    lr: float | None = None,
    **options: Any,
) -> Trainer:
    """Not yet trained; in the task's own type."""
    network = build("mlp", task, seed=0).to(task.train(np.arange(1))[0].dtype)
    chosen = optimizer(kind, network, lr=lr or LRS[kind], momentum=0.9, weight_decay=0.01)
    ready = Trainer(task, network, chosen, comm, batch_size=batch // comm.size, **options)
    if schedule:
        ready.scheduler = scheduler(schedule, chosen, epochs=epochs, updates=ready.updates, growth=ready.growth)
    return ready


def parameters(of: Trainer) -> Any:
    return torch.nn.utils.parameters_to_vector(of.model.parameters()).detach()


def assert_follows(one: Trainer, several: Trainer) -> None:
    assert one.steps == several.steps > 0
    assert float((parameters(several) - parameters(one)).norm() / parameters(one).norm()) < 1e-9
    assert spread(several.model, several.comm) == 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", LRS)
def test_several_ranks_are_one_rank_with_every_optimiser(comm: MPI.Intracomm, kind: str) -> None:
    task, ends = noise(40), []
    for each in (MPI.COMM_SELF, comm):
        ends.append(trainer(task, each, kind=kind, clip_norm=1.0))
        before = parameters(ends[-1])
        list(ends[-1].train(3))
        assert float((parameters(ends[-1]) - before).norm() / before.norm()) > 0.01
    assert_follows(*ends)


@pytest.mark.ranks(2)
def test_momentum_and_decay_reach_the_optimiser(comm: MPI.Intracomm) -> None:
    for kind in LRS:
        decayed, plain = trainer(noise(8), comm, kind=kind).optimizer.param_groups
        assert {each.ndim for each in decayed["params"]} == {2} and decayed["weight_decay"] == 0.01
        assert {each.ndim for each in plain["params"]} == {1} and plain["weight_decay"] == 0
        assert (decayed["betas"][0] if kind == "adam" else decayed["momentum"]) == 0.9


SCHEDULES = {
    "constant": Schedule(),
    "step": Schedule("step", milestones=(1, 2)),
    "cosine": Schedule("cosine"),
    "polynomial": Schedule("polynomial"),
    "cyclic": Schedule("cyclic", cycle_epochs=1.5),
    "onecycle": Schedule("onecycle"),
    "warm": Schedule("cosine", warmup_epochs=1.5, start_factor=0.25),
}


# Each optimiser once behind a warm-up; two of the schedules move the momentum too, which is elsewhere in Adam.
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "sgd") for name in SCHEDULES),
        *(("warm", kind) for kind in LRS if kind != "sgd"),
        ("onecycle", "adam"),
        ("cyclic", "lars"),
    ],
)
def test_a_schedule_goes_its_way_and_resumes_to_the_bit(
    comm: MPI.Intracomm, tmp_path: Path, name: str, kind: str
) -> None:
    task, folder = noise(40), comm.bcast(tmp_path)
    whole, killed, resumed = (trainer(task, comm, kind=kind, schedule=SCHEDULES[name]) for _ in range(3))
    rates = []
    list(whole.train(3, lambda _: rates.append([group["lr"] for group in whole.optimizer.param_groups]) or False))
    assert len(rates) == whole.steps == 12
    # All groups' rates go alike: what is left out by LARS has a rate of its own, in proportion.
    ratio = 0.01 if kind == "lars" else 1
    assert [low for _, low in rates] == pytest.approx([high * ratio for high, _ in rates])

    list(killed.train(3, lambda _: killed.steps == 5))
    killed.save(folder)
    checkpoint = resumed.resume(folder)
    assert checkpoint is not None and resumed.steps == 5
    list(resumed.train(3))
    assert torch.equal(parameters(resumed), parameters(whole))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == rates[-1]


@pytest.mark.ranks(1)
def test_the_rates_are_those_that_were_asked_for(comm: MPI.Intracomm) -> None:
    def run(schedule: Schedule, kind: str = "sgd", **options: Any) -> tuple[list[float], list[float]]:
        ready, rates, momenta = trainer(noise(120), comm, schedule=schedule, kind=kind, **options), [], []
        step = ready.optimizer.step

        def stepped(*arguments: Any) -> None:
            group = ready.optimizer.param_groups[0]
            rates.append(group["lr"] / LRS[kind])
            momenta.append(group["betas"][0] if "betas" in group else group["momentum"])
            step(*arguments)

        ready.optimizer.step = stepped
        list(ready.train(3))
        assert len(rates) == 30
        return rates, momenta

    rates, momenta = run(Schedule("step", milestones=(1, 2), gamma=0.5))
    assert rates == [1] * 10 + [0.5] * 10 + [0.25] * 10 and set(momenta) == {0.9}
    rates, _ = run(Schedule("step", milestones=(1,), warmup_epochs=2, start_factor=0.2))
    assert rates == pytest.approx([(0.2 + 0.8 * t / 20) * (1 if t < 10 else 0.1) for t in range(20)] + [0.1] * 10)
    rates, _ = run(Schedule("polynomial"))
    assert rates == pytest.approx([(1 - t / 30) ** 2 for t in range(30)])
    rates, _ = run(Schedule("cosine"))
    assert rates == pytest.approx([(1 + math.cos(math.pi * t / 30)) / 2 for t in range(30)])
    for kind in ("sgd", "adam", "lars"):
        rates, momenta = run(Schedule("cyclic", cycle_epochs=2, lowest=0.2), kind)
        there = [abs(abs(t % 20) - 10) / 10 for t in range(30)]  # 1 where the rate is lowest
        assert rates == pytest.approx([1 - 0.8 * each for each in there])
        assert momenta == pytest.approx([0.85 + 0.05 * each for each in there])
        rates, momenta = run(Schedule("onecycle"), kind)
        top = rates.index(max(rates))
        assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1, abs=0.05) and 10 <= top <= 14
        assert rates[-1] == pytest.approx(0.001, rel=0.01)
        assert momenta[0] == momenta[-1] == 0.9 and momenta[top] == pytest.approx(0.85, abs=0.01)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("most", [None, 4, 7])
def test_a_batch_grows_where_the_rate_would_fall(comm: MPI.Intracomm, most: int | None) -> None:
    task, growth = noise(100), BatchGrowth(12, (1, 2), factor=3, limit=50)
    schedule = Schedule("step", milestones=(1, 2), gamma=1 / 3)
    one, several = (trainer(task, each, schedule=schedule, growth=growth, most=most) for each in (MPI.COMM_SELF, comm))
    passes, sizes = [], []
    forward = several.model.module.forward

    def counted(inputs: Any) -> Any:
        if torch.is_grad_enabled():
            sizes.append(len(inputs))
        return forward(inputs)

    several.model.module.forward = counted
    epochs = list(several.train(3, lambda _: passes.append(several.passes) or False))
    list(one.train(3))
    assert several.steps == growth.updates(100, 3) == 9 + 3 + 2 < 27
    assert [epoch.batch for epoch in epochs] == [12, 36, 50]
    assert [epoch.lr for epoch in epochs] == pytest.approx([0.05, 0.05, 0.05 * 50 / 108])
    assert max(sizes) <= (most or 50) and len(sizes) == sum(passes)
    assert comm.allreduce(sum(sizes)) == 300
    assert most is None or max(passes) > 1
    assert_follows(one, several)


@pytest.mark.ranks(2)
def test_a_grown_batch_resumes_to_the_bit(comm: MPI.Intracomm, tmp_path: Path) -> None:
    task, growth, folder = noise(100), BatchGrowth(12, (1, 2), factor=3, limit=50), comm.bcast(tmp_path)
    schedule = Schedule("step", milestones=(1, 2), gamma=1 / 3)
    whole, killed, resumed = (trainer(task, comm, schedule=schedule, growth=growth, most=5) for _ in range(3))
    list(whole.train(3))
    list(killed.train(3, lambda _: killed.steps == 11))
    killed.save(folder)
    assert resumed.resume(folder) is not None
    list(resumed.train(3))
    assert torch.equal(parameters(resumed), parameters(whole)) and resumed.steps == whole.steps


@pytest.mark.ranks(2, 3)
def test_clipping_is_of_the_gradient_that_all_ranks_have(comm: MPI.Intracomm) -> None:
    ready, norms = trainer(noise(36), comm, clip_norm=0.125, batch=36), []
    reductions, reduce = [], ready.model.reducer.reduce
    ready.model.reducer.reduce = lambda **options: (reductions.append(1), reduce(**options))
    step = ready.optimizer.step

    def stepped(*arguments: Any) -> None:
        norms.append(float(torch.cat([each.grad.flatten() for each in ready.model.parameters()]).norm()))
        step(*arguments)

    ready.optimizer.step = stepped
    list(ready.train(3))
    assert norms == pytest.approx([0.125] * 3, rel=1e-3) and len(reductions) == 3
    assert spread(ready.model, comm) == 0


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_stay_in_step_and_close_to_32(comm: MPI.Intracomm, precision: str) -> None:
    task = noise(48, torch.float32)
    exact, short = (trainer(task, comm, precision=each, accumulate=2, batch=8) for each in ("fp32", precision))
    losses = [[epoch.loss for epoch in each.train(4)] for each in (exact, short)]
    assert {each.dtype for each in short.model.parameters()} == {torch.float32}
    assert {state["momentum_buffer"].dtype for state in short.optimizer.state.values()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]
    assert spread(short.model, comm) == 0
    assert losses[1][-1] < losses[1][0]


@contextmanager
def inf_at(ready: Trainer, steps: dict[int, int]) -> Iterator[None]:
    """In these steps this rank's loss is infinite, and so are all its gradients."""
    forward = ready.model.module.forward

    def overflowing(inputs: Any) -> Any:
        bad = steps.get(ready.steps) == ready.comm.rank and torch.is_grad_enabled()
        return forward(inputs) * (math.inf if bad else 1)

    ready.model.module.forward = overflowing
    yield
    ready.model.module.forward = forward


@pytest.mark.ranks(2, 3)
def test_a_step_that_one_rank_cannot_take_is_taken_by_none(comm: MPI.Intracomm) -> None:
    task, states = noise(72, torch.float32), []
    ready = trainer(task, comm, precision="fp16", schedule=Schedule("polynomial"), clip_norm=1.0)
    assert ready.scaler is not None and ready.scheduler is not None
    with inf_at(ready, {1: 1, 4: 0}):
        for epoch in ready.train(1, lambda _: states.append((parameters(ready), ready.lr)) or False):
            assert epoch.skipped == 2 and math.isfinite(epoch.loss)
    same = [torch.equal(before[0], after[0]) for before, after in pairwise(states)]
    assert same == [True, False, False, True, False]
    rates = [rate for _, rate in states]
    assert rates[1] == rates[0] > rates[2] > rates[3] == rates[4] > rates[5]
    assert ready.scaler.get_scale() == 65536 / 4
    assert spread(ready.model, comm) == 0
    assert ready.first_not_finite() is None


@pytest.mark.ranks(2)
def test_where_a_training_first_went_wrong_is_told(comm: MPI.Intracomm) -> None:
    ready = trainer(noise(72), comm)
    with inf_at(ready, {2: 1}):
        list(ready.train(1))
    assert ready.first_not_finite() == (3, 1, "1.weight")


@pytest.mark.ranks(2)
def test_the_scale_comes_back_with_a_checkpoint(comm: MPI.Intracomm, tmp_path: Path) -> None:
    task, folder = noise(72, torch.float32), comm.bcast(tmp_path)
    whole, killed, resumed = (trainer(task, comm, precision="fp16") for _ in range(3))
    for each in (whole, killed):
        with inf_at(each, {1: 1}):
            list(each.train(2, lambda _, each=each: each is killed and each.steps == 4))
    killed.save(folder)
    assert resumed.resume(folder) is not None
    list(resumed.train(2))
    assert resumed.scaler is not None and resumed.scaler.get_scale() == 32768
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.ranks(2)
def test_lars_sees_the_gradient_in_its_true_size(comm: MPI.Intracomm) -> None:
    from hpcdl.torch import LARS, DistributedDataParallel, GradScaler

    ends = []
    for scaler in (None, GradScaler(comm, init_scale=2.0**16)):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(8, 4), comm, scaler=scaler)
        # With decay the ratio would be another for a gradient of another size.
        lars = LARS(model.parameters(), lr=1.0, weight_decay=0.5)
        for step in range(3):
            lars.zero_grad()
            loss = model(torch.full((2, 8), comm.rank + step + 1.0)).square().sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(lars)
                scaler.update()
            else:
                lars.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*ends) and bool(ends[0].isfinite().all())
