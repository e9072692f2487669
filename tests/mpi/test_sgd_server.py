"""Parameter servers: with one worker plain SGD, with several nobody waits, and what each remedy promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.sgd.downpour import parameter_server  # noqa: E402
from hpcdl.sgd.pace import Pace  # noqa: E402
from hpcdl.sgd.remedies import DelayCompensation, staleness_aware  # noqa: E402
from hpcdl.sgd.server import Report  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402

pytestmark = pytest.mark.ranks(2, 3, 4)

WIDTH, BATCH = 6, 4
SGD, ADAGRAD, ADAM = light(torch.optim.SGD), light(torch.optim.Adagrad), light(torch.optim.AdamW)
RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda part: SGD(part.parameters(), lr=0.1),
    "momentum": lambda part: SGD(part.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda part: ADAGRAD(part.parameters(), lr=0.1),
    "adam": lambda part: ADAM(part.parameters(), lr=0.01),
}


def network(dtype: Any = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.Linear(3, 1)).to(dtype)


def samples(step: int, rank: int, dtype: Any = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, dtype=dtype, generator=generator)


def error(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def line(place: float = 0.0) -> nn.Module:
    """A model that is one number."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, place)
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


# ---- one worker ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_one_worker_is_plain_sgd_bit_for_bit(comm: MPI.Intracomm, rule: str, dtype: Any) -> None:
    """However many servers have a part of the parameters each; remedies find nothing stale."""
    model, steps = network(dtype), 7
    report = parameter_server(
        model,
        lambda step: (error(model, samples(step, 0, dtype)), BATCH),
        RULES[rule],
        comm,
        samples=steps * BATCH,
        servers=comm.size - 1,
        rate=staleness_aware,
        compensate=DelayCompensation(),
        bound=0,
    )
    if comm.rank == 0:
        alone = network(dtype)
        optimizer = RULES[rule](alone)
        for step in range(steps):
            optimizer.zero_grad()
            error(alone, samples(step, 0, dtype)).backward()
            optimizer.step()
        assert torch.equal(flat(model), flat(alone))
        assert report.staleness == {0: steps} and report.left == {}
    assert report.updates == steps


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 3), (3, 1), (2, 3), (4, 2)])
def test_downpour_fetches_and_pushes_when_it_was_told_to(comm: MPI.Intracomm, n_fetch: int, n_push: int) -> None:
    """By hand, from the pseudo-code: pushes are sums, and a worker changes its own parameters meanwhile."""
    model, steps, lr = line(1.0), 12, 0.25
    report = parameter_server(
        model,
        lambda step: ((model.weight * (step % 4 - 1)).sum(), 1) if step < steps else None,
        lambda part: SGD(part.parameters(), lr=lr),
        comm,
        samples=10**6,
        n_fetch=n_fetch,
        n_push=n_push,
    )
    # The gradient does not depend on the parameters, so the server has the sum of all of them.
    if comm.rank == 0:
        assert model.weight.item() == 1.0 - lr * sum(step % 4 - 1 for step in range(steps))
        assert report.updates == steps // n_push
        assert report.samples == steps
        assert report.left == {1: "finished early"}
    here, server, accrued = 1.0, 1.0, 0.0
    for step in range(steps):
        if step % n_fetch == 0:
            here = server
        gradient = step % 4 - 1
        accrued += gradient
        here -= lr * gradient
        if (step + 1) % n_push == 0:
            server, accrued = server - lr * accrued, 0.0
    if comm.rank == 1:
        assert model.weight.item() == (server if steps % n_fetch == 0 else here)


@pytest.mark.ranks(2)
def test_a_gradient_by_several_steps_of_local_parameters_is_computed_there(comm: MPI.Intracomm) -> None:
    """Here it does depend on them: w * w / 2 has the gradient w."""
    model, lr = line(8.0), 0.5
    seen: list[float] = []

    def loss(step: int) -> tuple[Tensor, int] | None:
        seen.append(model.weight.item())
        return ((model.weight * model.weight / 2).sum(), 1) if step < 4 else None

    rule = lambda part: SGD(part.parameters(), lr=lr / 4)  # noqa: E731
    parameter_server(model, loss, rule, comm, samples=100, n_fetch=2, n_push=2)
    if comm.rank == 1:
        # 8, then 8 - 8 / 8 = 7; the server takes 15 / 8 at once: 6.125, and so on.
        assert seen == [8.0, 7.0, 6.125, 6.125 * 7 / 8, 6.125 - 6.125 * 15 / 8 / 8]


# ---- several workers -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_linear_regression_with_a_slow_worker_and_one_that_ends_early(comm: MPI.Intracomm) -> None:
    """It converges, the fast go on, and the staleness is told."""
    model = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def loss(step: int) -> tuple[Tensor, int] | None:
        if comm.rank == 3 and step == 5:
            return None
        return error(model, samples(step, comm.rank)), BATCH

    report = parameter_server(
        model,
        loss,
        lambda part: SGD(part.parameters(), lr=0.05),
        comm,
        samples=300 * BATCH,
        pace=Pace(step_s=0.001, slow_rank=2, slow_factor=40),
    )
    if comm.rank == 0:
        assert error(model, samples(0, 99)).item() < 1e-3
        assert report.left == {3: "finished early"} and report.lost == ()
        assert report.samples == 300 * BATCH and sum(report.staleness.values()) == 300
        assert max(report.staleness) >= 5
    steps = comm.gather(report.updates)
    if steps is not None:
        assert steps[3] == 5
        assert steps[1] > 4 * steps[2]


@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("bound", [0, 2])
def test_the_staleness_bound_is_never_exceeded_on_any_server(comm: MPI.Intracomm, bound: int) -> None:
    """On another server than the first one a gradient of each may still be on its way when the first has taken it."""
    model, servers = network(), comm.size // 2
    workers = comm.size - servers
    report = parameter_server(
        model,
        lambda step: (error(model, samples(step, comm.rank)), BATCH),
        RULES["sgd"],
        comm,
        samples=60 * BATCH,
        servers=servers,
        bound=bound,
        pace=Pace(step_s=0.0005, slow_rank=comm.size - 1, slow_factor=20),
    )
    if comm.rank < servers:
        assert 0 < max(report.staleness) <= (workers - 1) * (2 * bound + 1 + (comm.rank > 0))
    steps = comm.allgather(report.updates)[servers:]
    assert max(steps) - min(steps) <= bound + 2  # the last one may be on its way


@pytest.mark.ranks(4)
def test_what_stale_gradients_do_to_the_rate(comm: MPI.Intracomm) -> None:
    """All three fetch the first parameters, and push one after the other."""
    model = line()

    def loss(step: int) -> tuple[Tensor, int] | None:
        if step:
            return None
        time.sleep(0.15 * comm.rank)
        return (model.weight * 8).sum(), 1

    report = parameter_server(
        model, loss, lambda part: SGD(part.parameters(), lr=1.0), comm, samples=100, rate=staleness_aware
    )
    if comm.rank == 0:
        assert report.staleness == {0: 1, 1: 1, 2: 1}
        assert model.weight.item() == -8 - 8 - 4


@pytest.mark.ranks(4)
def test_softsync_takes_the_mean_of_all_and_weighs_the_samples(comm: MPI.Intracomm) -> None:
    model = line()
    report = parameter_server(
        model,
        lambda step: ((model.weight * [0, 4, 8, 24][comm.rank]).sum(), [0, 1, 1, 2][comm.rank]) if not step else None,
        lambda part: SGD(part.parameters(), lr=1.0),
        comm,
        samples=100,
        softsync=1,
    )
    if comm.rank == 0:
        assert report.updates == 1
        assert model.weight.item() == -(4 + 8 + 2 * 24) / 4


@pytest.mark.ranks(3)
def test_one_worker_may_bring_all_gradients_of_an_update(comm: MPI.Intracomm) -> None:
    """They come one behind the other into the same memory."""
    model = line()

    def loss(step: int) -> tuple[Tensor, int] | None:
        return ((model.weight * [4, 8, 1, 3][step]).sum(), 1) if comm.rank == 1 and step < 4 else None

    rule = lambda part: SGD(part.parameters(), lr=1.0)  # noqa: E731
    report = parameter_server(model, loss, rule, comm, samples=100, softsync=1)
    if comm.rank == 0:
        assert report.updates == 2
        assert model.weight.item() == -(4 + 8) / 2 - (1 + 3) / 2


@pytest.mark.ranks(3)
def test_delay_compensation_adds_what_the_parameters_have_moved(comm: MPI.Intracomm) -> None:
    """Both fetch 0; the first pushes 2, so the server is at -2; the second 4: 4 + 0.5 * 16 * -2 = -12."""
    model = line()

    def loss(step: int) -> tuple[Tensor, int] | None:
        if step:
            return None
        time.sleep(0.15 * comm.rank)
        return (model.weight * 2 * comm.rank).sum(), 1

    rule = lambda part: SGD(part.parameters(), lr=1.0)  # noqa: E731
    parameter_server(model, loss, rule, comm, samples=100, compensate=DelayCompensation(0.5))
    if comm.rank == 0:
        assert model.weight.item() == -2 + 12


@pytest.mark.ranks(2)
def test_the_adaptive_compensation_is_that_of_the_paper(comm: MPI.Intracomm) -> None:
    gradients, now, then = np.array([[3.0, -1.0], [2.0, 5.0]]), np.array([1.0, 2.0]), np.array([0.5, -1.0])
    compensate, mean_square = DelayCompensation(2.0, decay=0.95), np.zeros(2)
    for each in gradients:
        mean_square = 0.95 * mean_square + 0.05 * each**2
        strength = 2.0 / np.sqrt(mean_square + 1e-7)
        found = compensate(*map(torch.from_numpy, (each, now, then)))
        np.testing.assert_allclose(found.numpy(), each + strength * each**2 * (now - then), rtol=1e-14)


@pytest.mark.ranks(4)
def test_a_warm_start_is_one_workers(comm: MPI.Intracomm) -> None:
    model = line()
    firsts: list[float] = []

    def loss(step: int) -> tuple[Tensor, int] | None:
        firsts.append(model.weight.item())
        return ((model.weight * 1).sum(), 1) if step < 10 else None

    rule = lambda part: SGD(part.parameters(), lr=1.0)  # noqa: E731
    parameter_server(model, loss, rule, comm, samples=1000, warm=6)
    if comm.rank == 1:
        assert firsts[:6] == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    if comm.rank > 1:
        assert firsts[0] <= -6


# ---- who is late, silent or wrong ------------------------------------------------------------------------------------


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("steps", [500, 100], ids=["wakes in the midst", "wakes behind the end"])
def test_a_silent_worker_is_given_up_named_and_received_to_the_end(comm: MPI.Intracomm, steps: int) -> None:
    """What it brings when it wakes does not count."""
    model, told, servers = network(), list[tuple[int, str]](), comm.size - 2

    def loss(step: int) -> tuple[Tensor, int] | None:
        if comm.rank == comm.size - 1 and step == 3:
            time.sleep(1.8)
        return (error(model, samples(step, comm.rank)), BATCH) if step < steps else None

    report = parameter_server(
        model,
        loss,
        RULES["sgd"],
        comm,
        samples=10**6,
        servers=servers,
        timeout_s=1.0,
        pace=Pace(step_s=0.005),
        on_leave=lambda *what: told.append(what),
    )
    if comm.rank == 0:
        why = "was silent for 1 s"
        assert told == [(comm.size - 1, why)] and report.left[comm.size - 1] == why
        assert report.lost == (comm.size - 1,)
        assert report.samples == (steps + 3) * BATCH and report.absent == ()
        assert report.late == ({comm.size - 1: 1} if steps == 500 else {})
    elif comm.rank == comm.size - 1:
        assert report.updates == 4


@pytest.mark.ranks(4)
def test_the_server_sleeps_while_workers_compute(comm: MPI.Intracomm) -> None:
    model = network()
    report = parameter_server(
        model,
        lambda step: (error(model, samples(step, comm.rank)), BATCH),
        RULES["sgd"],
        comm,
        samples=60 * BATCH,
        pace=Pace(step_s=0.05),
    )
    if comm.rank == 0:
        assert report.seconds > 0.9
        # Some 60 updates of 0.2 ms, and 1000 looks a second of 20 us.
        assert report.cpu_s < 0.2 * report.seconds


@pytest.mark.ranks(3)
def test_an_epoch_is_told_with_its_sums_and_its_parameters(comm: MPI.Intracomm) -> None:
    model, passes = line(), list[tuple[Any, float]]()

    def on_pass(passed: Any) -> bool:
        passes.append((passed, model.weight.item()))
        for _ in range(5):
            time.sleep(0.002)
            passed.serve()
        assert model.weight.item() == passes[-1][1]  # whatever has come meanwhile
        return passed.number == 3

    report = parameter_server(
        model,
        lambda step: ((model.weight * 1).sum(), 2),
        lambda part: SGD(part.parameters(), lr=1.0),
        comm,
        samples=10**6,
        every=10,
        on_pass=on_pass,
        judge=lambda report: 5,
    )
    assert report.status == 5
    if comm.rank == 0:
        told = [(passed.number, passed.samples, place) for passed, place in passes]
        assert told == [(1, 10, -5.0), (2, 10, -10.0), (3, 10, -15.0)]
        assert passes[0][0].loss < 0 <= passes[0][0].waited <= 1
        assert all(passed.seconds > 0 for passed, _ in passes)
        assert report.samples < 10**5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": 9}, "can be servers, so that a worker is left, not 9"),
        ({"samples": 0}, "samples is a whole number from 1 upwards, not 0"),
        ({"n_fetch": 0}, "n_fetch is a whole number from 1"),
        ({"timeout_s": 0.0}, "more than 0 seconds of silence, not 0"),
        ({"softsync": 9}, "softsync is a number from 1 to"),
        ({"bound": -2}, "0 clocks ahead of the slowest"),
        ({"clip_norm": -1.0}, "a length above 0, not -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_all_refuse_what_cannot_be(comm: MPI.Intracomm, arguments: dict[str, Any], words: str) -> None:
    model = line()

    def train(**more: Any) -> Report:
        given = {"samples": 3, "loss": lambda step: ((model.weight * 1).sum(), 1), "optimizer": RULES["sgd"]}
        return parameter_server(model, comm=comm, **(given | more))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=words):
        train(**arguments)
    assert train().updates >= 0


def test_all_refuse_a_model_that_cannot_travel(comm: MPI.Intracomm) -> None:
    frozen = line().requires_grad_(False)
    both = nn.Sequential(line(), nn.Linear(1, 1))
    normed = nn.Sequential(line(), nn.BatchNorm1d(1, dtype=torch.float64))
    uneven = nn.Linear(1 + (comm.rank == 1), 1)
    for model, words in (
        (frozen, "nothing to train"),
        (both, "one type, on the CPU"),
        (normed, "1 keeps running statistics"),
        (uneven, "all ranks must have the same model: rank 1 has 3 parameters"),
    ):
        with pytest.raises(ValueError, match=words):
            parameter_server(model, lambda step: None, RULES["sgd"], comm, samples=1)
