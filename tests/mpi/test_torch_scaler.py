"""GradScaler: all ranks skip a step or none does, and one can read where the inf began."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import settings
from hpcdl.errors import MismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.torch import DistributedDataParallel, DistributedOptimizer, load_checkpoint, save_checkpoint  # noqa: E402
from hpcdl.torch.hooks import GradBucket, allreduce_hook  # noqa: E402
from hpcdl.torch.reducer import Reducer  # noqa: E402
from hpcdl.torch.scaler import Culprit, GradScaler  # noqa: E402

pytestmark = pytest.mark.ranks(1, 3)

SMALL = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4}  # MiB: several buckets
WIDTH = 5
INF, NAN = float("inf"), float("nan")


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def data(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def flat(model: Any) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def same(comm: MPI.Intracomm, *values: Any) -> bool:
    """Are they equal on all ranks, to the last bit?"""
    plain = [each.numpy().tobytes() if isinstance(each, Tensor) else each for each in values]
    return all(each == plain for each in comm.allgather(plain))


def poison(parameter: Any, value: float = INF) -> None:
    """Have a gradient become not finite in the next backward pass, as the loss of that rank alone would."""
    handle = parameter.register_hook(lambda gradient: (handle.remove(), torch.full_like(gradient, value))[1])


Way = Callable[[Any, Any, Any], tuple[Any, Any]]


def layer(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model, comm, overlap=False, scaler=scaler, **SMALL)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def overlapping(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model, comm, overlap=True, scaler=scaler, **SMALL)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.1, fused=True)


def hooked(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model, comm, scaler=scaler, **SMALL)
    ddp.register_comm_hook(comm, allreduce_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def optimiser(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, DistributedOptimizer(own, model.named_parameters(), comm=comm, bucket_cap_mb=1e-4)


def fused_optimiser(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, DistributedOptimizer(own, model.named_parameters(), comm=comm)


WAYS = pytest.mark.parametrize("way", [layer, overlapping, hooked, optimiser, fused_optimiser])


def training(
    comm: MPI.Intracomm, way: Way, steps: range | list[int], scaler: Any = None, at: dict[int, int] | None = None
) -> Any:
    """The parameters behind some steps; in step `at` the rank given there has an inf in its gradient of 2.weight."""
    model = network()
    wrapped, stepping = way(comm, model, scaler)
    for step in steps:
        wrapped.zero_grad()
        if at is not None and at.get(step) == comm.rank:
            poison(model[2].weight)
        loss = loss_of(wrapped, data(step, comm.rank))
        if scaler is None:
            loss.backward()
            stepping.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(stepping)
            scaler.update()
    return flat(model)


# ---- one decision ----------------------------------------------------------------------------------------------------


@WAYS
def test_scaled_steps_are_the_plain_ones_to_the_last_bit(comm: MPI.Intracomm, way: Way) -> None:
    scaler = GradScaler(comm, init_scale=2.0**16, growth_interval=2)
    scaled = training(comm, way, range(5), scaler)
    assert scaler.get_scale() == 2.0**18 and not scaler.skipped and scaler.culprit is None
    assert torch.equal(scaled, training(comm, way, range(5)))
    assert same(comm, scaled)


@pytest.mark.ranks(1, 2, 4)
@WAYS
def test_an_inf_on_one_rank_has_all_skip_and_scale_alike_and_is_named(comm: MPI.Intracomm, way: Way) -> None:
    bad = comm.size - 1
    scaler = GradScaler(comm, init_scale=1024.0)
    skipping = training(comm, way, range(5), scaler, at={2: bad})
    assert scaler.get_scale() == 512.0
    assert scaler.culprit == Culprit(2, bad, "2.weight")
    assert torch.equal(skipping, training(comm, way, [0, 1, 3, 4]))
    assert same(comm, skipping)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_scheduler_that_is_stepped_unless_skipped_follows_the_optimiser(comm: MPI.Intracomm, value: float) -> None:
    scaler = GradScaler(comm)
    ddp, stepping = layer(comm, network(), scaler)
    scheduler = torch.optim.lr_scheduler.StepLR(stepping, 1, 0.5)
    skips = []
    for step in range(4):
        if step in (0, 2) and comm.rank == 0:
            poison(ddp.module[0].bias, value)
        stepping.zero_grad()
        scaler.scale(loss_of(ddp, data(step, comm.rank))).backward()
        scaler.step(stepping)
        scaler.update()
        skips.append(scaler.skipped)
        if not scaler.skipped:
            scheduler.step()
    assert skips == [True, False, True, False]
    assert scheduler.get_last_lr() == [0.1 / 4]
    assert scaler.culprit == Culprit(2, 0, "0.bias")


@pytest.mark.parametrize("given", [False, True])
def test_a_gradient_that_is_not_reduced_counts_too(comm: MPI.Intracomm, given: bool) -> None:
    scaler, model = GradScaler(comm), network()
    ddp = DistributedDataParallel(model, comm, ignore=["0.bias"], scaler=scaler if given else None)
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = flat(model)
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    if comm.rank == comm.size - 1:
        model[0].bias.grad[0] = NAN
    scaler.step(stepping)
    scaler.update()
    assert scaler.skipped and torch.equal(flat(model), before)
    assert scaler.get_scale() == 2.0**15
    assert scaler.culprit == Culprit(0, comm.size - 1, "group 0, parameter 1")


def test_several_optimisers_skip_each_for_itself_and_the_scale_falls_once(comm: MPI.Intracomm) -> None:
    scaler, model = GradScaler(comm), network()
    ddp = DistributedDataParallel(model, comm, scaler=scaler)
    both = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 4)]
    before = model[0].weight.clone(), model[4].weight.clone()
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    if comm.rank == 0:
        model[0].weight.grad[0, 0] = INF  # behind the reduction, on one rank
    skipped = []
    for each in both:
        scaler.step(each)
        skipped.append(scaler.skipped)
    scaler.update()
    assert skipped == [True, False] and scaler.get_scale() == 2.0**15
    assert torch.equal(model[0].weight, before[0]) and not torch.equal(model[4].weight, before[1])
    assert same(comm, flat(model))


@pytest.mark.ranks(2, 4)
def test_scales_that_differ_are_an_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm, init_scale=64.0 if comm.rank < 2 else 32.0)
    ddp, stepping = layer(comm, network(), scaler)
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    if comm.size < 3:
        scaler.step(stepping)
        return
    with pytest.raises(MismatchError, match="it is 32 on rank") as caught:
        scaler.step(stepping)
    assert caught.value.table == [["32 on rank 2", "32 on ranks 2, 3"][comm.size - 3], "64 on ranks 0, 1"]


@pytest.mark.ranks(2, 3)
def test_a_rank_that_does_something_else_meanwhile_is_told(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "CHECK", True)
    scaler, model = GradScaler(comm), network()
    scaler.scale(loss_of(model, data(0, comm.rank))).backward()
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    act = partial(hpcdl.allreduce, torch.ones(7), comm) if comm.rank == 0 else partial(scaler.step, stepping)
    with pytest.raises(MismatchError, match=r"(?s)rank 0: .*7.*: .*3"):
        act()


# ---- what has no gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [layer, optimiser])
def test_parameters_without_gradients_are_fine(comm: MPI.Intracomm, way: Way) -> None:
    scaler, model = GradScaler(comm), network()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    wrapped, stepping = way(comm, model, scaler)
    before = flat(model)
    scaler.scale(loss_of(wrapped, data(0, comm.rank))).backward()
    scaler.step(stepping)
    scaler.update()
    assert not scaler.skipped and model.unused.grad is None
    assert not torch.equal(flat(model), before) and same(comm, flat(model))


def test_a_rank_may_have_no_gradient_at_all(comm: MPI.Intracomm) -> None:
    scaler, own = GradScaler(comm), nn.Linear(2, 1)
    stepping = torch.optim.SGD(own.parameters(), lr=0.1)
    for value, skipped in ((1.0, False), (INF, True)):
        own.zero_grad()
        if comm.rank == 0:
            scaler.scale(own(torch.ones(1, 2)).sum() * value).backward()
        scaler.step(stepping)
        assert scaler.skipped == skipped
        scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.culprit == Culprit(1, 0, "group 0, parameter 0")


def test_a_rank_without_samples_counts_with_zeros(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm)
    model, stepping = optimiser(comm, network(), scaler)
    before = flat(model)
    if comm.rank == comm.size - 1:
        scaler.scale(loss_of(model, data(0, 0))).backward()
    scaler.step(stepping)
    scaler.update()
    assert not scaler.skipped and same(comm, flat(model)) and not torch.equal(flat(model), before)


def test_a_loss_that_nobody_has_scaled_is_refused_on_all(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm)
    ddp, stepping = layer(comm, network(), scaler)
    loss_of(ddp, data(0, comm.rank)).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"no rank has scaled a loss: call scaler.scale\(loss\)"):
            scaler.step(stepping)
        scaler = GradScaler(comm)


# ---- the floor -------------------------------------------------------------------------------------------------------


def levels(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "hpcdl" and each.levelno == level]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [layer, optimiser])
def test_sixty_steps_of_inf_end_at_the_floor_with_one_message(
    comm: MPI.Intracomm, way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpcdl")
    bad = comm.size - 1
    scaler, model = GradScaler(comm, init_scale=2.0**10, growth_interval=2, min_scale=4.0), network()
    wrapped, stepping = way(comm, model, scaler)

    def go(steps: range, is_bad: Callable[[int], bool]) -> list[float]:
        scales = []
        for step in steps:
            wrapped.zero_grad()
            if is_bad(step) and comm.rank == bad:
                poison(model[4].bias)
            scaler.scale(loss_of(wrapped, data(step, comm.rank))).backward()
            scaler.step(stepping)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert go(range(3), lambda step: False)[-1] == 2.0**11
    before = flat(model)
    scales = go(range(3, 63), lambda step: True)
    assert scales[:9] == [2.0**power for power in range(10, 1, -1)] and set(scales[9:]) == {4.0}
    assert torch.equal(flat(model), before)
    notes, warned = levels(caplog, logging.INFO), levels(caplog, logging.WARNING)
    if comm.rank != 0:
        assert not notes and not warned
    else:
        assert len(notes) == 60 and len(warned) == 1
        assert notes[0] == (
            f"step 3 was skipped: rank {bad} had a non-finite gradient of 4.bias; the loss scale was 2048 and is 1024"
        )
        assert "its floor, min_scale=4, and steps are skipped still, 10 in a row" in warned[0]
        assert f"In the first of them, step 3, rank {bad} had a non-finite gradient of 4.bias." in warned[0]
    # A finite step between two at the floor does not make the same stay another one.
    assert set(go(range(63, 67), lambda step: step % 2 == 0)) == {4.0}
    assert len(levels(caplog, logging.WARNING)) == (comm.rank == 0)
    assert go(range(67, 71), lambda step: False) == [4.0, 8.0, 8.0, 16.0]
    go(range(71, 75), lambda step: True)
    warned = levels(caplog, logging.WARNING)
    assert len(warned) == 2 * (comm.rank == 0)
    assert not warned or ("3 in a row" in warned[1] and "step 71" in warned[1])


def test_a_large_backoff_stops_at_the_floor(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm, init_scale=100.0, backoff_factor=0.001, min_scale=0.1)
    for _ in range(2):
        training(comm, layer, range(1), scaler, at={0: 0})
        assert scaler.get_scale() == scaler.min_scale == pytest.approx(0.1)


# ---- who has begun ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_parameter_of_the_first_rank_is_named(comm: MPI.Intracomm, overlap: bool) -> None:
    scaler, model = GradScaler(comm), network()
    ddp = DistributedDataParallel(model, comm, overlap=overlap, scaler=scaler, **SMALL)
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):  # overlap begins once a step has shown what comes
        if comm.rank >= comm.size // 2:
            for parameter in (model[4].bias, model[2].bias, model[2].weight):
                poison(parameter, NAN)
        ddp.zero_grad()
        scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
        scaler.step(stepping)
        scaler.update()
    assert scaler.culprit == Culprit(2, comm.size // 2, "2.weight")


def test_reductions_added_up_blame_the_rank_of_the_first(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm)
    ddp, stepping = layer(comm, network(), scaler)
    for step in range(3):
        if step == 1 and comm.rank == comm.size - 1:
            poison(ddp.module[2].weight)
        scaler.scale(loss_of(ddp, data(step, comm.rank))).backward()
    scaler.step(stepping)
    assert scaler.skipped and scaler.culprit == Culprit(0, comm.size - 1, "2.weight")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_overflow_of_the_sum_is_blamed_on_no_rank(
    comm: MPI.Intracomm, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpcdl")
    scaler, model = GradScaler(comm), network()
    ddp = DistributedDataParallel(model, comm, average=False, overlap=overlap, scaler=scaler, **SMALL)
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.1)
    poison(model[2].weight, 3e38)
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    scaler.step(stepping)
    scaler.update()
    assert scaler.skipped and scaler.culprit == Culprit(0, None, "2.weight")
    told = levels(caplog, logging.INFO)
    assert len(told) == (comm.rank == 0)
    assert not told or "2.weight is not finite, which came from the sum over the ranks" in told[0]


def test_large_finite_gradients_are_no_false_alarm(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm)
    ddp, stepping = hooked(comm, network(), scaler)
    poison(ddp.module[2].weight, 3e38)  # 42 of them, whose sum overflows
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    bucket = next(each for each in ddp.reducer.buckets if each.slots[0].name == "2.weight")
    assert not bool(bucket.flat.sum().isfinite())
    if comm.size == 1:  # else the sum of the ranks overflows, too
        scaler.step(stepping)
        assert not scaler.skipped and scaler.culprit is None


def test_without_the_layers_help_only_the_parameter_is_known(
    comm: MPI.Intracomm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpcdl")
    scaler = GradScaler(comm)
    ddp, stepping = layer(comm, network(), None)
    if comm.rank == 0:
        poison(ddp.module[2].weight)
    scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
    scaler.step(stepping)
    scaler.update()
    assert scaler.culprit == Culprit(0, 0 if comm.size == 1 else None, "group 0, parameter 2")
    told = "".join(levels(caplog, logging.INFO))
    assert ("scaler=scaler) tells" in told) == (comm.size > 1 and comm.rank == 0)


# ---- communication hooks ---------------------------------------------------------------------------------------------


class Feedback:
    """Sends halves of what it has, and keeps the rest for the next time: exact, and spoilt for ever by one nan."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.kept, self.calls = comm, {}, 0

    def __call__(self, state: object, bucket: GradBucket) -> Tensor:
        self.calls += 1
        buffer = bucket.buffer()
        buffer += self.kept.get(bucket.index(), torch.zeros_like(buffer))
        self.kept[bucket.index()] = buffer / 2
        buffer /= 2
        return allreduce_hook(self.comm, bucket)


def feedback(comm: Any, model: Any, scaler: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model, comm, scaler=scaler, **SMALL)
    ddp.feedback = Feedback(comm)
    ddp.register_comm_hook(None, ddp.feedback)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_nothing_that_is_not_finite_gets_into_a_hooks_state(comm: MPI.Intracomm, set_to_none: bool) -> None:
    results = []
    for scaler, steps in ((GradScaler(comm, init_scale=8.0, backoff_factor=0.999), range(5)), (None, [0, 1, 3, 4])):
        model = network()
        ddp, stepping = feedback(comm, model, scaler)
        for step in steps:
            ddp.zero_grad(set_to_none=set_to_none)
            loss = loss_of(ddp, data(step, comm.rank))
            if step == 2 and comm.rank == comm.size - 1:
                poison(model[0].bias, NAN)  # in the last bucket of all
            # The scale is not halved, so that what is kept has one scale.
            (loss * 8.0 if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                for each in ddp.parameters():
                    each.grad /= 8.0
                stepping.step()
                continue
            if step == 2:
                assert all(bool(each.grad.isnan().all()) for each in ddp.parameters())
            scaler.step(stepping)
            scaler.update(8.0)
            assert scaler.skipped == (step == 2)
        assert ddp.feedback.calls == 4 * len(ddp.reducer.buckets)
        assert all(bool(each.isfinite().all()) for each in ddp.feedback.kept.values())
        results.append(flat(model))
    assert torch.equal(*results) and same(comm, results[0])


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("value", [1.0, INF])
def test_sparse_gradients_are_looked_at_too(comm: MPI.Intracomm, hook: bool, value: float) -> None:
    scaler = GradScaler(comm)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model, comm, scaler=scaler)
    own = Feedback(comm)
    if hook:
        ddp.register_comm_hook(None, own)
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler.scale(ddp(torch.tensor([comm.rank, 2, 2])).sum()).backward(retain_graph=True)
    own.calls = 0
    ddp.zero_grad()
    output = ddp(torch.tensor([comm.rank, 2, 2]))
    if comm.rank == comm.size - 1:
        handle = model[0].weight.register_hook(lambda gradient: (handle.remove(), gradient * value)[1])
    before = model[0].weight.clone()
    scaler.scale(output.sum()).backward()
    scaler.step(stepping)
    scaler.update()
    assert scaler.skipped == (value == INF) == torch.equal(before, model[0].weight)
    assert scaler.culprit == (Culprit(0, comm.size - 1, "0.weight") if value == INF else None)
    assert own.calls == (hook and value != INF)


@pytest.mark.ranks(4)
def test_what_overflows_on_a_wire_of_16_bits_is_blamed_on_no_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "NODES", "2+2")
    duplicate = comm.Dup()
    scaler, model = GradScaler(duplicate, init_scale=1.0), network()  # or all would overflow
    ddp = DistributedDataParallel(model, duplicate, wire_dtype=torch.float16, scaler=scaler)
    assert ddp.reducer.hook is not None
    stepping = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for value, culprit in ((1e6, Culprit(0, None, "2.bias")), (NAN, Culprit(1, 0, "2.bias"))):
        ddp.zero_grad()
        if comm.rank == 0:
            poison(model[2].bias, value)
        scaler.scale(loss_of(ddp, data(0, comm.rank))).backward()
        scaler.step(stepping)
        scaler.update()
        assert scaler.skipped and scaler.culprit == culprit
    duplicate.Free()


# ---- the loop around it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [layer, optimiser])
@pytest.mark.parametrize("explicit", [False, True])
def test_clipping_acts_on_what_is_averaged_and_unscaled_with_one_reduction(
    comm: MPI.Intracomm, way: Way, explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reductions = []
    reduce = Reducer.reduce
    monkeypatch.setattr(Reducer, "reduce", lambda self, **options: (reductions.append(self), reduce(self, **options)))
    results = []
    for scaler in (GradScaler(comm), None):
        model = network()
        wrapped, stepping = way(comm, model, scaler)
        reductions.clear()
        for step in range(3):
            model.zero_grad()  # not the optimiser's: it must see for itself that gradients are new
            loss = loss_of(wrapped, data(step, comm.rank))
            (loss if scaler is None else scaler.scale(loss)).backward()
            if way is optimiser and (explicit or scaler is None):
                stepping.synchronize()
            if scaler is not None:
                scaler.unscale_(stepping)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert same(comm, norm.detach()) and float(norm) > 0.5
            if scaler is not None:
                scaler.step(stepping)
                scaler.update()
            elif way is optimiser:
                with stepping.skip_synchronize():
                    stepping.step()
            else:
                stepping.step()
        assert len(reductions) == 3
        results.append(flat(model))
    assert torch.equal(*results) and same(comm, results[0])


def test_behind_a_skipped_step_the_next_is_reduced_whoever_zeroes_the_gradients(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm)
    model, stepping = optimiser(comm, network(), scaler)
    for step in range(3):
        if step == 1 and comm.rank == 0:
            poison(model[0].weight)
        model.zero_grad()
        scaler.scale(loss_of(model, data(step, comm.rank))).backward()
        scaler.step(stepping)
        scaler.update()
        assert scaler.skipped == (step == 1) and same(comm, flat(model))


@pytest.mark.parametrize("way", ["layer", "optimiser"])
def test_gradients_added_up_over_a_window_are_scaled_alike_also_if_it_is_short(comm: MPI.Intracomm, way: str) -> None:
    results = []
    for scaler in (GradScaler(comm), None):
        model = network()
        if way == "layer":
            wrapped, stepping = layer(comm, model, scaler)
        else:
            wrapped = model
            stepping = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), comm=comm, op="sum", backward_passes_per_step=4
            )
        for number in range(2 * 10):
            last = number % 10 % 4 == 3 or number % 10 == 9  # of 10 batches the last window has two
            loss = loss_of(wrapped, data(number, comm.rank)) / 4
            scaled = loss if scaler is None else scaler.scale(loss)
            if way == "layer" and not last:
                with wrapped.no_sync():
                    wrapped(data(number, comm.rank))
                    loss = loss_of(wrapped, data(number, comm.rank)) / 4
                    (loss if scaler is None else scaler.scale(loss)).backward()
            else:
                scaled.backward()
            if last:
                if scaler is None:
                    stepping.step()
                else:
                    scaler.step(stepping)
                    scaler.update()
                stepping.zero_grad()
        results.append(flat(model))
    assert torch.equal(*results) and same(comm, results[0])


@pytest.mark.ranks(1, 4)
def test_ranks_with_fewer_batches_keep_the_same_scale_and_parameters(comm: MPI.Intracomm) -> None:
    for hook in (False, True):
        scaler = GradScaler(comm, init_scale=2.0**10, growth_interval=3)
        ddp, stepping = (hooked if hook else layer)(comm, network(), scaler)
        steps = 2 + 2 * comm.rank
        bad = {1: 0, 2 * comm.size - 1: comm.size - 1}
        with ddp.join():
            for step in range(steps):
                ddp.zero_grad()
                if bad.get(step) == comm.rank:
                    poison(ddp.module[4].weight)
                scaler.scale(loss_of(ddp, data(step, comm.rank))).backward()
                scaler.step(stepping)
                scaler.update()
                assert scaler.skipped == (step in bad)
        assert same(comm, flat(ddp.module), scaler.state_dict(), scaler.culprit)
        assert scaler.state_dict()["step"] == 2 * comm.size
        assert scaler.culprit == Culprit(2 * comm.size - 1, comm.size - 1, "4.weight")
        ddp.zero_grad()  # and all go on
        poison(ddp.module[0].bias)
        scaler.scale(loss_of(ddp, data(9, comm.rank))).backward()
        scaler.step(stepping)
        scaler.update()
        assert scaler.culprit == Culprit(2 * comm.size, 0, "0.bias")


def test_a_scaler_that_is_not_enabled_does_nothing(comm: MPI.Intracomm) -> None:
    for way in (layer, optimiser):
        scaler = GradScaler(comm, enabled=False)
        assert torch.equal(training(comm, way, range(3), scaler), training(comm, way, range(3)))
        assert not scaler.skipped and scaler.get_scale() == 1.0 and scaler.state_dict() == {}


# ---- state and copies ------------------------------------------------------------------------------------------------


def test_state_goes_into_torchs_scaler_and_back(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm, init_scale=64.0)
    training(comm, layer, range(4), scaler, at={1: 0})
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    assert plain.get_scale() == 32.0 and scaler.state_dict() == {**plain.state_dict(), "step": 4}
    other = GradScaler(comm)
    other.load_state_dict(plain.state_dict())
    assert other.state_dict() == {**plain.state_dict(), "step": 0}
    other.load_state_dict(scaler.state_dict())
    training(comm, layer, range(1), other, at={0: 0})
    assert other.culprit == Culprit(4, 0, "2.weight") and other.get_scale() == 16.0
    with pytest.raises(ValueError, match="the state's scale, 32, is not between min_scale=33"):
        GradScaler(comm, min_scale=33.0).load_state_dict(scaler.state_dict())


@pytest.mark.ranks(2)
def test_a_checkpoint_restores_the_scale_on_all_ranks(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder = comm.bcast(tmp_path)
    model, scaler = network(), GradScaler(comm, init_scale=64.0)
    training(comm, layer, range(2), scaler, at={1: comm.size - 1})
    save_checkpoint(folder, model=model, scaler=scaler, comm=comm)
    other = GradScaler(comm, init_scale=2.0 ** (20 + comm.rank))  # of which each rank has another
    other.scale(torch.ones(1))
    load_checkpoint(folder, model=model, scaler=other, comm=comm)
    assert other.state_dict() == scaler.state_dict() and other.get_scale() == 32.0
    assert torch.equal(training(comm, layer, range(3), other), training(comm, layer, range(3)))


def test_copies_of_a_wrapper_have_a_scaler_of_their_own(comm: MPI.Intracomm) -> None:
    scaler = GradScaler(comm, init_scale=64.0)
    ddp, _ = layer(comm, network(), scaler)
    twin, its_scaler = copy.deepcopy((ddp, scaler))
    again, unpickled = pickle.loads(pickle.dumps((ddp, scaler)))
    for wrapper, own in ((ddp, scaler), (twin, its_scaler), (again, unpickled)):
        assert wrapper.scaler is wrapper.reducer.scaler is own
        stepping = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        if comm.rank == comm.size - 1:
            poison(wrapper.module[0].weight)
        own.scale(loss_of(wrapper, data(0, comm.rank))).backward()
        own.step(stepping)
        own.update()
        assert own.get_scale() == 32.0
        assert own.culprit == Culprit(0, comm.size - 1, "0.weight")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_scale": 0.5}, "init_scale is from min_scale=1.0 to 3.4.*, not 0.5"),
        ({"init_scale": INF}, "init_scale is from .* not inf"),
        ({"init_scale": NAN}, "init_scale is from .* not nan"),
        ({"min_scale": 0.0}, "min_scale is from 1.17.* not 0.0"),
        ({"growth_factor": 1.0}, "growth_factor is above 1, not 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor is between 0 and 1, not 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor is between 0 and 1, not 0.0"),
        ({"growth_interval": 0}, "growth_interval is a number of steps, 1 or more, not 0"),
        ({"growth_interval": 2.5}, "growth_interval is a number of steps, 1 or more, not 2.5"),
        ({"device": "abacus"}, "device is the type of a device, 'cpu' or 'cuda', not 'abacus'"),
    ],
)
@pytest.mark.ranks(1)
def test_arguments_that_are_wrong_are_named(comm: MPI.Intracomm, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradScaler(comm, **arguments)


@pytest.mark.ranks(1)
def test_wrong_uses_say_what_is_right(comm: MPI.Intracomm) -> None:
    with pytest.raises(TypeError, match="not 'cuda': pass all else by name, as device='cuda'"):
        GradScaler("cuda")  # type: ignore[arg-type]
    scaler = GradScaler(comm, init_scale=8.0)
    ddp, stepping = layer(comm, network(), scaler)
    scaler.scale(loss_of(ddp, data(0, 0))).backward()
    for arguments, others in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(RuntimeError, match="a closure cannot be given"):
            scaler.step(stepping, *arguments, **others)
    scaler.step(stepping)
    with pytest.raises(RuntimeError, match="call update"):
        scaler.step(stepping)
    for new in (0.5, INF, NAN, torch.tensor(0.0)):
        with pytest.raises(ValueError, match="new_scale is from min_scale=1 to"):
            scaler.update(new)
    scaler.update(16)
    assert scaler.get_scale() == 16.0


def test_the_layer_takes_only_this_scaler_and_on_all_ranks(comm: MPI.Intracomm) -> None:
    with pytest.raises(TypeError, match=r"not torch.amp.grad_scaler.GradScaler: make it by hpcdl.torch.GradScaler"):
        DistributedDataParallel(network(), comm, scaler=torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    if comm.size > 1:
        with pytest.raises(MismatchError, match="the same scaler: rank 1 has none, rank 0 has an enabled one"):
            DistributedDataParallel(network(), comm, scaler=GradScaler(comm) if comm.rank == 0 else None)
