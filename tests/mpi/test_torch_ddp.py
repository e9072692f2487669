"""DistributedDataParallel: training on several ranks is training on one with all their data."""

from __future__ import annotations

import copy
import os
import pickle
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from pretended import on_nodes

import hpcdl
from hpcdl import settings

torch = pytest.importorskip("torch", reason="torch is not installed")

from loaded import Numbers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hpcdl.shared import find  # noqa: E402
from hpcdl.torch import DistributedDataParallel, SyncBatchNorm  # noqa: E402
from hpcdl.torch.hooks import GradBucket, allreduce_hook  # noqa: E402

pytestmark = pytest.mark.ranks(2, 3)

BATCH, WIDTH = 6, 5
SMALL = {"bucket_cap_mb": 2e-4, "first_bucket_mb": 1e-4}  # MiB: several buckets for a few dozen numbers


@pytest.fixture(autouse=True)
def _check(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the agreement ahead of every collective, and on 2 and 4 ranks without it, unless HPCDL_CHECK says which."""
    if "HPCDL_CHECK" not in os.environ:
        monkeypatch.setattr(settings, "CHECK", comm.size % 2 == 1)


@pytest.fixture(params=[False, True], ids=["at the end", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 1))
    return layers.double()


def data(step: int, rank: int, n: int = BATCH) -> Tensor:
    return torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


def everything(step: int, size: int, n: int = BATCH) -> Tensor:
    return torch.cat([data(step, rank, n) for rank in range(size)])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss


def assert_equal_on_all_ranks(model: nn.Module, comm: MPI.Intracomm) -> None:
    mine = b"".join(
        each.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for each in model.state_dict().values()
        if each.numel() and each.dim()
    )
    assert len(set(comm.allgather(mine))) == 1


def assert_close(ours: nn.Module, alone: nn.Module) -> None:
    """To 10 digits: float64 has 16, and some steps lose a few."""
    for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12), name


Optimiser = Callable[[Any], torch.optim.Optimizer]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def follow(
    comm: MPI.Intracomm,
    ddp: DistributedDataParallel,
    alone: nn.Module,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    optimiser: Optimiser = SGD,
    steps: int = 4,
    between: Callable[[nn.Module], object] = lambda model: None,
    set_to_none: bool = True,
) -> None:
    """Train both, one on all data; they stay together."""
    mine, theirs = optimiser(ddp.parameters()), optimiser(alone.parameters())
    for step in range(steps):
        for model, steps_of, x in ((ddp, mine, data(step, comm.rank)), (alone, theirs, everything(step, comm.size))):
            steps_of.zero_grad(set_to_none=set_to_none)
            loss(model, x).backward()
            between(model)
            steps_of.step()
    assert_close(ddp.module, alone)
    assert_equal_on_all_ranks(ddp.module, comm)


# ---- the law itself --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("optimiser", "set_to_none"),
    [(SGD, True), (partial(torch.optim.AdamW, lr=0.01), False)],
    ids=["SGD", "AdamW, zeros"],
)
def test_ranks_follow_one_process_with_all_their_data(
    comm: MPI.Intracomm, overlap: bool, optimiser: Optimiser, set_to_none: bool
) -> None:
    # The ranks start from different parameters: rank 0's count.
    ddp = DistributedDataParallel(network(comm.rank), comm, overlap=overlap, **SMALL)
    assert len(ddp.reducer.buckets) > 2
    follow(comm, ddp, network(0), optimiser=optimiser, set_to_none=set_to_none)


@pytest.mark.ranks(1, 2, 3)
def test_gradients_lie_in_memory_of_the_node_in_buckets_filled_from_the_end(comm: MPI.Intracomm) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm, **SMALL)
    loss_of(ddp, data(0, comm.rank)).backward()
    names = [name for bucket in ddp.reducer.buckets for name in (slot.name for slot in bucket.slots)]
    assert names == [name for name, _ in model.named_parameters()][::-1]
    for bucket in ddp.reducer.buckets:
        assert bucket.flat.data_ptr() % 64 == 0
        assert comm.size == 1 or find(bucket.flat.data_ptr(), bucket.flat.nbytes) is not None
        for slot in bucket.slots:
            assert slot.parameter.grad is slot.view
            assert slot.view.data_ptr() % 64 == 0
            assert slot.view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


@pytest.mark.ranks(1, 3)
def test_there_is_one_set_of_buckets_and_nothing_beside_it(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    ddp = DistributedDataParallel(model, comm, bucket_cap_mb=0.5)
    optimiser = SGD(ddp.parameters())
    for _ in range(2):
        optimiser.zero_grad()
        ddp(torch.ones(2, 300)).sum().backward()
        optimiser.step()
    parameters = list(model.parameters())
    lengths = [bucket.flat.nbytes for bucket in ddp.reducer.buckets]
    assert sum(lengths) < sum(each.nbytes for each in parameters) + 64 * len(parameters)
    storages = {each.grad.untyped_storage().data_ptr() for each in parameters}
    assert storages == {bucket.flat.untyped_storage().data_ptr() for bucket in ddp.reducer.buckets}
    assert [bucket.plan.scratch_bytes for bucket in ddp.reducer.buckets] == [0] * len(lengths)


def test_the_sum_is_the_sum(comm: MPI.Intracomm, overlap: bool) -> None:
    layer = nn.Linear(3, 2, bias=False)
    ddp = DistributedDataParallel(layer, comm, average=False, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        assert (layer.weight.grad == sum(range(1, comm.size + 1))).all()


@pytest.mark.ranks(1, 3)
def test_types_never_share_a_bucket(comm: MPI.Intracomm, overlap: bool) -> None:
    types = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float32, torch.float16)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(number + 1, dtype=dtype) for number, dtype in enumerate(types)])

        def forward(self, factor: float) -> Tensor:
            return torch.stack(
                [(part * factor * (number + 1)).sum().real.double() for number, part in enumerate(self.parts)]
            ).sum()

    model = Mixed()
    ddp = DistributedDataParallel(model, comm, overlap=overlap)
    for _ in range(3):
        ddp.zero_grad()
        ddp(2.0 * comm.rank).backward()
        for number, (part, dtype) in enumerate(zip(model.parts, types, strict=True)):
            assert part.grad.dtype == dtype
            assert (part.grad == (comm.size - 1) * (number + 1)).all()  # the mean of 0, 2, ..., exact in 16 bits
    for bucket in ddp.reducer.buckets:
        assert {slot.parameter.dtype for slot in bucket.slots} == {bucket.flat.dtype}


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_parameters_stay_equal_and_runs_repeat_whatever_the_timing(comm: MPI.Intracomm) -> None:
    ends = []
    for seed in (1, 2):
        random, model = np.random.default_rng(10 * seed + comm.rank), network()
        ddp = DistributedDataParallel(model, comm, overlap=True, **SMALL)
        optimiser = SGD(ddp.parameters())
        for step in range(100):
            optimiser.zero_grad()
            loss = loss_of(ddp, data(step, comm.rank))
            time.sleep(random.choice([0, 0, 0, 1e-3]))
            loss.backward()
            optimiser.step()
        assert_equal_on_all_ranks(model, comm)
        ends.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*ends)


# ---- which parameters take part --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Some parameters are used only if they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, 1).double() for _ in range(3))

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if sometimes else y


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(
    ("optimiser", "set_to_none"),
    [(SGD, False), (partial(torch.optim.AdamW, lr=0.1), True)],
    ids=["momentum, zeros", "AdamW"],
)
def test_what_no_rank_uses_stays_as_it_is(
    comm: MPI.Intracomm, overlap: bool, optimiser: Optimiser, set_to_none: bool
) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, comm, overlap=overlap, **SMALL)
    follow(
        comm,
        ddp,
        Branches(),
        loss=lambda model, x: model(x, sometimes=ddp.reducer.comm is None).square().mean(),
        optimiser=optimiser,
        set_to_none=set_to_none,
    )
    assert model.never.weight.grad is None
    assert set(ddp.unused_parameters) == {
        f"{part}.{name}" for part in ("sometimes", "never") for name in ("weight", "bias")
    }


def test_a_gradient_that_no_rank_has_added_to_keeps_its_bits(comm: MPI.Intracomm, overlap: bool) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, comm, overlap=overlap)
    ddp(data(0, comm.rank), sometimes=True).square().mean().backward()
    before = model.sometimes.weight.grad.clone()
    for _ in range(3):  # the mean of three equal numbers need not be that number
        model.always.zero_grad()
        ddp(data(1, comm.rank)).square().mean().backward()
        assert torch.equal(model.sometimes.weight.grad, before)


def test_what_one_rank_uses_has_the_same_gradient_on_all(comm: MPI.Intracomm, overlap: bool) -> None:
    model, last = Branches(), comm.size - 1
    ddp = DistributedDataParallel(model, comm, overlap=overlap)
    for step in range(4):
        ddp.zero_grad()
        used = step != 1 and comm.rank == last
        ddp(torch.ones(1, WIDTH, dtype=torch.float64), sometimes=used).sum().backward()
        gradient = model.sometimes.weight.grad
        assert gradient is None if step == 1 else (gradient == 1 / comm.size).all()
        assert (model.always.weight.grad == 1).all()
        assert ("sometimes.weight" in ddp.unused_parameters) == (step == 1)


@pytest.mark.ranks(2)
def test_parameters_that_no_rank_uses_are_told_once_by_rank_0(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(Branches(), comm, find_unused_parameters=True)
    for step in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp(data(0, comm.rank), sometimes=True).sum().backward()
        told = [str(each.message) for each in caught]
        assert told == (
            ["no rank used these parameters in this step: never.weight, never.bias"] if comm.rank == step == 0 else []
        )


def test_a_rank_without_samples_puts_in_zeros(comm: MPI.Intracomm, overlap: bool) -> None:
    layer = nn.Linear(WIDTH, 1)
    ddp = DistributedDataParallel(layer, comm, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1 if comm.rank == 0 else 0, WIDTH)).sum().backward()
        assert (layer.weight.grad == torch.tensor(1 / comm.size)).all()


@pytest.mark.ranks(1, 3)
def test_a_module_without_trainable_parameters_works(comm: MPI.Intracomm) -> None:
    model = network().requires_grad_(False)
    ddp = DistributedDataParallel(model, comm)
    x = data(0, comm.rank).requires_grad_()
    ddp(x).sum().backward()
    assert x.grad is not None and all(each.grad is None for each in model.parameters())
    nothing = DistributedDataParallel(nn.ReLU(), comm)
    nothing(x).sum().backward()


def test_parameters_can_be_frozen_and_unfrozen(comm: MPI.Intracomm, overlap: bool) -> None:
    def turn(model: nn.Module) -> None:
        inner = getattr(model, "module", model)
        inner.steps = getattr(inner, "steps", 0) + 1
        for name, each in inner.named_parameters():
            each.requires_grad_(inner.steps >= 2 or name.startswith("0"))
            if not each.requires_grad:
                each.grad = None

    model, alone = network(), network()
    for each in (model, alone):
        each.steps = -1  # type: ignore[assignment]
        turn(each)
    ddp = DistributedDataParallel(model, comm, overlap=overlap, **SMALL)
    follow(comm, ddp, alone, steps=6, between=turn)
    assert all(each.grad is not None for each in model.parameters())


def test_what_is_converted_after_it_was_wrapped_has_new_buckets(comm: MPI.Intracomm, overlap: bool) -> None:
    ddp = DistributedDataParallel(network().float(), comm, overlap=overlap)
    loss_of(ddp, data(0, comm.rank).float()).backward()
    ddp.double()
    follow(comm, ddp, copy.deepcopy(ddp.module))


def test_what_is_ignored_stays_each_ranks_own(comm: MPI.Intracomm) -> None:
    model = Branches()
    model._ddp_params_and_buffers_to_ignore = ["never.weight"]  # type: ignore[assignment]
    nn.init.constant_(model.sometimes.weight, comm.rank)
    nn.init.constant_(model.never.weight, comm.rank)
    ddp = DistributedDataParallel(model, comm, ignore=["sometimes.weight", "sometimes.bias"])
    ddp(torch.full((1, WIDTH), float(comm.rank), dtype=torch.float64), sometimes=True).sum().backward()
    assert (model.sometimes.weight == comm.rank).all() and (model.never.weight == comm.rank).all()
    assert (model.sometimes.weight.grad == comm.rank).all()
    assert (model.always.weight.grad == (comm.size - 1) / 2).all()


# ---- what a backward pass can look like ------------------------------------------------------------------------------


class Tied(nn.Module):
    """Weights shared by two layers, and a block used twice under activation checkpointing, or without."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.reentrant = reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = self.last(x)
        return x.sum(1, keepdim=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_shared_weights_and_checkpoints_are_reduced_once(comm: MPI.Intracomm, overlap: bool, reentrant: bool) -> None:
    calls: list[int] = []
    ddp = DistributedDataParallel(Tied(reentrant), comm, overlap=overlap, **SMALL)
    reduce = ddp.reducer.reduce
    ddp.reducer.reduce = lambda **options: (calls.append(1), reduce(**options))[1]  # type: ignore[method-assign]
    follow(comm, ddp, Tied(None))
    assert len(calls) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_module_may_be_checkpointed(comm: MPI.Intracomm, overlap: bool, reentrant: bool) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if model is not ddp:
            return loss_of(model, x)
        y: Tensor = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        return (y - x.sum(1, keepdim=True)).square().mean()

    follow(comm, ddp, network(), loss=loss)


def test_several_forward_passes_before_one_backward(comm: MPI.Intracomm, overlap: bool) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)
    follow(comm, ddp, network(), loss=lambda model, x: loss_of(model, x) + 2 * loss_of(model, x + 1))


def test_a_graph_can_be_used_twice(comm: MPI.Intracomm, overlap: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        result = loss_of(model, x)
        result.backward(retain_graph=True)
        return result * 2

    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)
    follow(comm, ddp, network(), loss=loss)


@pytest.mark.ranks(1, 3)
def test_outputs_of_any_form(comm: MPI.Intracomm, overlap: bool) -> None:
    import dataclasses

    @dataclasses.dataclass
    class Output:
        y: Tensor
        note: str

    class Odd(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.inner, self.form = network(), form

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            return {"dict": {"a": [y]}, "tuple": (y, None), "dataclass": Output(y, "?"), "unknown": lambda: y}[
                self.form
            ]

    get = {
        "dict": lambda out: out["a"][0],
        "tuple": lambda out: out[0],
        "dataclass": lambda out: out.y,
        "unknown": lambda out: out(),
    }
    for form, take in get.items():
        ddp = DistributedDataParallel(Odd(form), comm, overlap=overlap, **SMALL)
        follow(comm, ddp, Odd(form), loss=lambda model, x, take=take: take(model(x)).square().mean(), steps=2)


def test_the_inner_module_called_on_its_own_is_reduced_too(comm: MPI.Intracomm, overlap: bool) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)
    follow(comm, ddp, network(), loss=lambda model, x: loss_of(model.module if model is ddp else model, x))


def test_the_inner_modules_sum_is_no_second_reduction(comm: MPI.Intracomm, overlap: bool) -> None:
    layer = nn.Linear(3, 2)
    ddp = DistributedDataParallel(layer, comm, average=False, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad(set_to_none=False)
        layer(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        assert (layer.weight.grad == sum(range(1, comm.size + 1))).all()
    with pytest.raises(RuntimeError, match="was reduced in an earlier backward pass"):
        layer(torch.ones(1, 3)).sum().backward()


def test_a_sparse_gradient_that_nobody_expected_has_a_place_in_a_bucket(comm: MPI.Intracomm) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 2))

        def forward(self, row: int) -> Tensor:
            return nn.functional.embedding(torch.tensor([row, row]), self.table, sparse=True)

    model = Rows()
    ddp = DistributedDataParallel(model, comm, average=False)
    ddp(comm.rank).sum().backward()
    assert (model.table.grad == torch.tensor([2.0 * (row < comm.size) for row in range(4)])[:, None]).all()


@pytest.mark.parametrize("windows", [(1, 3, 2)])
def test_under_no_sync_gradients_add_up_on_each_rank(
    comm: MPI.Intracomm, overlap: bool, windows: tuple[int, ...]
) -> None:
    model, alone = network(), network()
    ddp, step = DistributedDataParallel(model, comm, overlap=overlap, **SMALL), 0
    mine, theirs = SGD(ddp.parameters()), SGD(alone.parameters())
    for window in windows:
        for last in [False] * (window - 1) + [True]:
            with nullcontext() if last else ddp.no_sync():
                loss_of(ddp, data(step, comm.rank)).backward()
            loss_of(alone, everything(step, comm.size)).backward()
            step += 1
        for optimiser in (mine, theirs):
            optimiser.step()
            optimiser.zero_grad()
    assert_close(model, alone)
    assert_equal_on_all_ranks(model, comm)


@pytest.mark.ranks(1, 2)
def test_under_no_sync_nothing_is_reduced(comm: MPI.Intracomm, overlap: bool) -> None:
    layer = nn.Linear(3, 2)
    ddp = DistributedDataParallel(layer, comm, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        assert (layer.weight.grad == comm.rank + 1).all()
        ddp(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        assert (layer.weight.grad == comm.size + 1).all()


def test_clipping_acts_on_the_averaged_gradients(comm: MPI.Intracomm, overlap: bool) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)
    follow(comm, ddp, network(), between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("meddle", ["detach_", "None", "new", "twice"])
def test_users_may_do_what_they_like_with_a_gradient(comm: MPI.Intracomm, overlap: bool, meddle: str) -> None:
    def between(model: nn.Module) -> None:
        for each in list(model.parameters())[::2]:
            if meddle == "detach_":
                each.grad = each.grad.detach_()
            elif meddle == "None":
                each.grad = None
            elif meddle == "new":
                each.grad = each.grad * 3
            else:
                each.grad.mul_(3)

    ddp = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL)
    follow(comm, ddp, network(), between=between, set_to_none=False)


def test_a_step_may_be_left_out(comm: MPI.Intracomm, overlap: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        loss_of(model, x + 1).backward()
        model.zero_grad()
        return loss_of(model, x)

    follow(comm, DistributedDataParallel(network(), comm, overlap=overlap, **SMALL), network(), loss=loss)


@pytest.mark.ranks(1, 3)
def test_the_step_after_a_backward_that_raised_is_right(comm: MPI.Intracomm, overlap: bool) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise ArithmeticError("on all ranks")

    ddp, ours = DistributedDataParallel(network(), comm, overlap=overlap, **SMALL), []
    loss_of(ddp, data(9, comm.rank)).backward()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if model is ddp:
            inner = ddp.module[0].register_forward_hook(lambda module, args, out: Raises.apply(out))
            with pytest.raises(ArithmeticError):
                loss_of(model, x).backward()
            inner.remove()
            ddp.zero_grad()
            ours.append(1)
        return loss_of(model, x)

    if not overlap:  # a bucket that is on its way stays so until the others come
        follow(comm, ddp, network(), loss=loss)
        assert len(ours) == 4


def test_second_derivatives_are_refused_with_the_parameters_name(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm)
    with pytest.raises(RuntimeError, match=r"create_graph=True\) gave 4.bias a gradient"):
        loss_of(ddp, data(0, comm.rank)).backward(create_graph=True)


def test_what_was_summed_is_not_summed_again(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm, average=False)
    loss_of(ddp, data(0, comm.rank)).backward()
    with pytest.raises(RuntimeError, match="was reduced in an earlier backward pass"):
        loss_of(ddp, data(0, comm.rank)).backward()
    ddp.zero_grad(set_to_none=False)
    loss_of(ddp, data(0, comm.rank)).backward()
    with ddp.no_sync(), pytest.raises(RuntimeError, match="zero_grad"):
        loss_of(ddp, data(0, comm.rank)).backward()


def test_a_mean_may_be_added_to(comm: MPI.Intracomm, overlap: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        loss_of(model, x + 1).backward()
        return loss_of(model, x)

    follow(comm, DistributedDataParallel(network(), comm, overlap=overlap, **SMALL), network(), loss=loss)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_gradients_follow_dense_ones(comm: MPI.Intracomm, overlap: bool, sparse: bool) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(50, 3, sparse=sparse)
            self.out = nn.Linear(3, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            rows = (x.abs() * 10).long().clamp(max=20)
            y: Tensor = self.out(self.words(torch.cat([rows, rows], 1)).mean(1))
            return y

    ddp = DistributedDataParallel(Words(sparse), comm, overlap=overlap)
    follow(comm, ddp, Words(False), optimiser=partial(torch.optim.SGD, lr=0.1))
    assert ddp.module.words.weight.grad.is_sparse == sparse
    follow(comm, ddp, copy.deepcopy(ddp.module), optimiser=partial(torch.optim.SGD, lr=0.1), set_to_none=False)
    ddp.zero_grad()
    with torch.no_grad():
        ddp.module.out.weight.zero_()
    ddp.module.out(torch.ones(1, 3, dtype=torch.float64)).sum().backward()  # nobody looks up a word
    assert ddp.module.words.weight.grad is None


@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_channels_last_follows_contiguous(comm: MPI.Intracomm, kind: str) -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 2, 2)).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        pixels = x.repeat(1, 20)[:, :100].reshape(-1, 4, 5, 5)
        return model(pixels).square().mean()  # type: ignore[no-any-return]

    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[kind]
    model = convolutions().to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, comm)
    follow(comm, ddp, convolutions(), loss=loss, optimiser=partial(torch.optim.SGD, lr=0.1, momentum=0.9, **options))
    assert model[0].weight.grad.stride() == model[0].weight.stride() != model[0].weight.contiguous().stride()


@pytest.mark.ranks(2)
def test_two_networks_with_two_optimisers(comm: MPI.Intracomm, overlap: bool) -> None:
    def trained(wrap: Callable[[nn.Module], nn.Module], batches: Callable[[int], Tensor]) -> list[nn.Module]:
        torch.manual_seed(0)
        makes = wrap(nn.Linear(WIDTH, WIDTH).double())
        judges = wrap(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).double())
        optimisers = SGD(makes.parameters()), SGD(judges.parameters())
        for step in range(3):
            x = batches(step)
            optimisers[1].zero_grad()
            (judges(makes(x).detach()).mean() - judges(x).mean()).backward()
            optimisers[1].step()
            optimisers[0].zero_grad()
            (-judges(makes(x)).mean()).backward()
            optimisers[0].step()
        return [makes, judges]

    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, comm, overlap=overlap, **SMALL)

    ours = trained(wrap, lambda step: data(step, comm.rank))
    alone = trained(lambda module: module, lambda step: everything(step, comm.size))
    for mine, theirs in zip(ours, alone, strict=True):
        assert_close(mine.module, theirs)  # type: ignore[arg-type]
        assert_equal_on_all_ranks(mine.module, comm)  # type: ignore[arg-type]


# ---- buffers, evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
def test_buffers_are_rank_0s_after_each_step_and_evaluation_talks_to_nobody(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3)).double()
    ddp = DistributedDataParallel(model, comm)
    for step in range(3):
        ddp(data(step, comm.rank)).square().mean().backward()
        assert_equal_on_all_ranks(model, comm)
        assert int(model[1].num_batches_tracked) == step + 1
        if comm.rank == 0:  # alone
            ddp.eval()
            with torch.no_grad():
                ddp(data(step, 0))
            ddp(data(step, 0))
            ddp.train()
    own = DistributedDataParallel(copy.deepcopy(model), comm, broadcast_buffers=False)
    own(data(9, comm.rank)).square().mean().backward()
    means = comm.allgather(own.module[1].running_mean.tolist())
    assert len({tuple(mean) for mean in means}) == comm.size


# ---- ranks with fewer batches ----------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("among_all", [True, False])
def test_ranks_with_fewer_batches_help_the_others_to_the_end(
    comm: MPI.Intracomm, overlap: bool, among_all: bool
) -> None:
    batches = [2 + (rank * 3) % 5 for rank in range(comm.size)]
    model, alone = network(), network()
    ddp = DistributedDataParallel(model, comm, overlap=overlap, **SMALL)
    mine, theirs = torch.optim.SGD(ddp.parameters(), lr=0.05), torch.optim.SGD(alone.parameters(), lr=0.05)
    with ddp.join(divide_by_initial_world_size=among_all):
        for step in range(batches[comm.rank]):
            mine.zero_grad()
            loss_of(ddp, data(step, comm.rank)).backward()
            mine.step()
    for step in range(max(batches)):
        theirs.zero_grad()
        present = [rank for rank in range(comm.size) if step < batches[rank]]
        for rank in present:
            (loss_of(alone, data(step, rank)) / (comm.size if among_all else len(present))).backward()
        theirs.step()
    assert_equal_on_all_ranks(model, comm)
    assert_close(model, alone)
    follow(comm, ddp, copy.deepcopy(model))  # and afterwards as before


def test_join_refuses_what_would_wait_in_forward(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(nn.Sequential(SyncBatchNorm(WIDTH, comm=comm)), comm)
    with pytest.raises(ValueError, match=r"join\(\) cannot help a module with SyncBatchNorm"), ddp.join():
        pass


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_out_a_synchronised_forward_is_told_of_by_all(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 2), SyncBatchNorm(2, comm=comm))
    ddp = DistributedDataParallel(model, comm)
    loss = ddp(torch.ones(4, WIDTH)).sum()
    loss.backward()
    ddp.train(comm.rank != 0)
    with pytest.raises(hpcdl.MismatchError, match=r"(?s)rank 0: the reduction of 4 gradients.*ranks 1-2: allgather"):
        ddp(torch.ones(4, WIDTH)).sum().backward()
    ddp.train()
    ddp.zero_grad()
    ddp(torch.ones(4, WIDTH)).sum().backward()


@pytest.mark.ranks(1, 2)
def test_an_inf_on_one_rank_has_all_ranks_leave_out_the_step(comm: MPI.Intracomm, overlap: bool) -> None:
    layer = nn.Linear(2, 1)
    ddp = DistributedDataParallel(layer, comm, overlap=overlap)
    optimiser, scaler = torch.optim.SGD(ddp.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        before = layer.weight.clone()
        optimiser.zero_grad()
        factor = torch.inf if step == 1 and comm.rank == comm.size - 1 else 1.0
        scaler.scale(ddp(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimiser)
        scaler.update()
        assert torch.equal(layer.weight, before) == (step == 1)
        assert scaler.get_scale() == (8.0 if step < 1 else 4.0)
    assert_equal_on_all_ranks(layer, comm)


@pytest.mark.ranks(2)
def test_what_is_ignored_stays_each_ranks_own_behind_join(comm: MPI.Intracomm) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, comm, ignore=["never.weight"])
    nn.init.constant_(model.never.weight, comm.rank)
    with ddp.join():
        for step in range(1 + comm.rank):
            ddp(data(step, comm.rank)).sum().backward()
    assert (model.never.weight == comm.rank).all()


@pytest.mark.ranks(2)
def test_a_parameter_without_elements_is_reduced_beside_others(comm: MPI.Intracomm, overlap: bool) -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(n) for n in (1, 2, 0, 3, 5)])

        def forward(self, factor: float) -> Tensor:
            return torch.cat([part * factor for part in self.parts]).sum()

    model = Lengths()
    ddp = DistributedDataParallel(model, comm, average=False, overlap=overlap)
    for _ in range(2):
        ddp.zero_grad()
        ddp(comm.rank + 1.0).backward()
        assert all((part.grad == 3).all() and part.grad.shape == part.shape for part in model.parts)


@pytest.mark.ranks(2)
def test_an_error_inside_join_is_not_hidden(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm)
    with pytest.raises(ArithmeticError), ddp.join():
        raise ArithmeticError


# ---- hooks and the wire ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
def test_a_hook_gets_the_buckets_in_order_and_its_result_counts(comm: MPI.Intracomm) -> None:
    seen: list[int] = []

    def hook(state: str, bucket: GradBucket) -> Any:
        assert state == "state"
        assert bucket.is_last() == (bucket.index() == len(ddp.reducer.buckets) - 1)
        assert [each.shape for each in bucket.gradients()] == [each.shape for each in bucket.parameters()]
        seen.append(bucket.index())
        future: torch.futures.Future[Any] = torch.futures.Future()
        mean = allreduce_hook(comm, bucket).clone()
        bucket.set_buffer(torch.zeros_like(mean))
        future.set_result([mean] if bucket.index() % 2 else mean)
        return future

    ddp = DistributedDataParallel(network(), comm, **SMALL)
    ddp.register_comm_hook("state", hook)
    follow(comm, ddp, network())
    assert seen == list(range(len(ddp.reducer.buckets))) * 4
    with pytest.raises(RuntimeError, match="hook"):
        ddp.register_comm_hook(None, hook)
    ddp.zero_grad()
    loss_of(ddp, data(0, comm.rank)).backward()
    with pytest.raises(RuntimeError, match="was reduced in an earlier"):
        loss_of(ddp, data(0, comm.rank)).backward()


def test_on_one_node_the_wire_type_changes_nothing(comm: MPI.Intracomm) -> None:
    model = network().float()
    gradients = []
    for dtype in (None, torch.bfloat16):
        ddp = DistributedDataParallel(copy.deepcopy(model), comm, wire_dtype=dtype)
        loss_of(ddp, data(0, comm.rank).float()).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in ddp.parameters()]))
    assert torch.equal(*gradients)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("average", [True, False])
def test_between_nodes_gradients_travel_as_16_bits(
    comm: MPI.Intracomm, average: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nodes in {2: ["1+1"], 3: ["1+1+1", "2+1"], 4: ["2+2", "3+1"]}[comm.size]:
        with on_nodes(comm, nodes, monkeypatch) as duplicate:
            for dtype in (torch.bfloat16, torch.float16):
                layer = nn.Linear(100, 3, bias=False)
                ddp = DistributedDataParallel(layer, duplicate, wire_dtype=dtype, average=average)
                ddp(torch.linspace(1, 2, 100)[None] * (comm.rank + 1)).sum().backward()
                exact = torch.linspace(1, 2, 100).expand(3, -1) * (comm.size + 1) / 2 * (1 if average else comm.size)
                gradient = layer.weight.grad
                # Rounded twice: once on the way, once as the result.
                assert torch.allclose(gradient, exact, rtol=2 * torch.finfo(dtype).eps)
                assert not torch.equal(gradient, exact)
                scaled = gradient if average else gradient / comm.size
                assert average is False or torch.equal(scaled.to(dtype).float(), scaled)
                assert len(set(comm.allgather(gradient.numpy().tobytes()))) == 1


@pytest.mark.ranks(2)
def test_16_bits_do_not_overflow_before_the_mean(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_nodes(comm, "1+1", monkeypatch) as duplicate:
        layer = nn.Linear(8, 1, bias=False)
        ddp = DistributedDataParallel(layer, duplicate, wire_dtype=torch.float16)
        ddp(torch.full((1, 8), 60000.0)).sum().backward()
        assert (layer.weight.grad == 60000 - 60000 % 32).all()


@pytest.mark.ranks(2)
def test_the_users_own_messages_may_be_under_way_beside_a_thread_of_ours(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=True, **SMALL)
    x, total = np.ones(1000), np.empty(1000)

    def meanwhile(*_: object) -> None:
        comm.Allreduce(x, total)
        assert (hpcdl.allreduce(x.copy(), comm) == comm.size).all()

    for layer in ddp.module:
        layer.register_full_backward_hook(meanwhile)  # type: ignore[operator]
    follow(comm, ddp, network(), steps=10)
    assert (total == comm.size).all()


# ---- a module like any other -----------------------------------------------------------------------------------------


def test_keys_are_plain_and_torchs_own_can_be_loaded(comm: MPI.Intracomm) -> None:
    model = network(comm.rank)
    ddp = DistributedDataParallel(model, comm)
    assert list(ddp.state_dict()) == list(network().state_dict())
    other = {f"module.{name}": value for name, value in network(7).state_dict().items()}
    ddp.load_state_dict(other)
    assert torch.equal(model[0].weight, network(7)[0].weight)  # type: ignore[union-attr, arg-type, index]
    ddp.load_state_dict(network(8).state_dict())
    assert torch.equal(model[0].weight, network(8)[0].weight)  # type: ignore[union-attr, arg-type, index]


def test_copies_and_pickles_train_on(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm, **SMALL)
    loss_of(ddp, data(0, comm.rank)).backward()
    ddp.eval()
    copied = copy.deepcopy(ddp)
    assert not copied.training and copied.module is not ddp.module
    follow(comm, copied, network())
    if comm.size == MPI.COMM_WORLD.size:
        again = pickle.loads(pickle.dumps(ddp))
        assert not again.training
        follow(comm, again, network())


def test_a_module_can_be_wrapped_anew(comm: MPI.Intracomm) -> None:
    model = network()
    for _ in range(3):
        ddp = DistributedDataParallel(model, comm)
        loss_of(ddp, data(0, comm.rank)).backward()
        ddp.zero_grad()
        del ddp
    follow(comm, DistributedDataParallel(model, comm, **SMALL), network())


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"process_group": object()}, ValueError, "pass an mpi4py communicator as comm"),
    ({"mixed_precision": object()}, ValueError, "means nothing here"),
    ({"buckets": 3}, TypeError, "no argument buckets"),
    (
        {"wire_dtype": torch.int8},
        ValueError,
        "wire_dtype is one of torch.bfloat16, torch.float16, or None, not torch.int8",
    ),
    ({"overlap": "maybe"}, ValueError, "overlap is True, False or 'auto', not 'maybe'"),
    ({"bucket_cap_mb": 0}, ValueError, "are above 0, not 0 and 1"),
    ({"device_ids": [0]}, ValueError, "the module's own device, cpu, not cuda:0"),
    ({"output_device": "cuda:1"}, ValueError, "not cuda:1"),
    ({"algorithm": "rign"}, ValueError, "rign"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_cannot_work_is_refused_at_once(comm: MPI.Intracomm, case: int) -> None:
    options, kind, line = WRONG[case]
    with pytest.raises(kind, match=line.replace("(", r"\(")):
        DistributedDataParallel(network(), comm, **options)


@pytest.mark.ranks(2)
def test_modules_that_cannot_be_wrapped_are_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match="wrapped already"):
        DistributedDataParallel(DistributedDataParallel(network(), comm), comm)
    with pytest.raises(ValueError, match="a lazy module has no shapes yet"):
        DistributedDataParallel(nn.LazyLinear(3), comm)
    DistributedDataParallel(
        network(), comm, device_ids=["cpu"], output_device="cpu", gradient_as_bucket_view=False, static_graph=True
    )


@pytest.mark.ranks(2, 3)
def test_modules_that_differ_are_refused_with_the_parameters_name_and_the_rank(comm: MPI.Intracomm) -> None:
    last = comm.size - 1

    class Order(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("b", "a") if comm.rank == last else ("a", "b"):
                setattr(self, name, nn.Linear(2, 2))

    with pytest.raises(hpcdl.HpcdlError, match=rf"(?s)a\.weight.*rank {last}|rank {last}.*b\.weight"):
        DistributedDataParallel(Order(), comm)
    with pytest.raises(hpcdl.HpcdlError, match=f"(?s)weight.*rank {last}|rank {last}.*weight"):
        DistributedDataParallel(nn.Linear(2 + (comm.rank == last), 2), comm)


@pytest.mark.ranks(2)
def test_mpi_knows_best_how_many_ranks_there_are(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "6")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(network(), comm)
    told = [str(each.message) for each in caught if "WORLD_SIZE" in str(each.message)]
    assert told == (
        ["WORLD_SIZE=7 contradicts MPI, which knows of 2 processes: MPI's ranks count here"] if comm.rank == 0 else []
    )
    follow(comm, ddp, network(), steps=1)


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_data_loaders_workers_do_no_harm(comm: MPI.Intracomm) -> None:
    ddp = DistributedDataParallel(network(), comm, overlap=True)
    loader = torch.utils.data.DataLoader(Numbers(WIDTH), 2, num_workers=2, multiprocessing_context="fork")
    optimiser = SGD(ddp.parameters())
    for _ in range(2):
        for x in loader:
            optimiser.zero_grad()
            loss_of(ddp, x).backward()
            optimiser.step()
    assert_equal_on_all_ranks(ddp.module, comm)
