"""Batch normalisation over several ranks is that of one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from hpcdl.torch.norm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402

PLAIN: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SIZES = {1: [5], 2: [3, 5], 3: [3, 0, 5], 4: [2, 7, 0, 1]}


def close(ours: Any, theirs: Any, rtol: float = 1e-10) -> None:
    """To 10 of float64's 16 digits, of the largest where some are nearly 0 by cancellation."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()) if theirs.numel() else 0)


def mine(whole: Any, comm: MPI.Intracomm) -> Any:
    return whole.split(SIZES[comm.size])[comm.rank]


def images(comm: MPI.Intracomm, dimensions: int, seed: int = 0, shift: float = 5.0) -> Any:
    torch.manual_seed(seed)
    n = sum(SIZES[comm.size])
    return torch.randn([n, 3, 4, 2, 3][:dimensions], dtype=torch.float64) * torch.rand(()) + shift


def pair(plain: Any, comm: MPI.Intracomm) -> tuple[Any, Any]:
    """One process's module and ours, of the same weights, which are no ones."""
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.copy_(torch.arange(1.0, 1 + len(parameter)) * (number + 1))
    return plain, convert_sync_batchnorm(copy.deepcopy(plain), comm)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_the_batch_norm_of_the_whole_batch(comm: MPI.Intracomm, dimensions: int, momentum: float | None) -> None:
    plain, ours = pair(PLAIN[dimensions](3, momentum=momentum).double(), comm)
    for step in range(3):
        whole = images(comm, dimensions, seed=step).requires_grad_()
        x = mine(whole.detach(), comm).clone().requires_grad_()
        expected, output = plain(whole), ours(x)
        close(output, mine(expected, comm))
        slope = torch.cos(whole.detach() * 7)
        plain.zero_grad()
        ours.zero_grad()
        (expected * slope).sum().backward()
        (output * mine(slope, comm)).sum().backward()
        close(x.grad, mine(whole.grad, comm))
        for name, parameter in ours.named_parameters():  # the rank's own share
            close(comm.allreduce(parameter.grad), dict(plain.named_parameters())[name].grad)
        for name, buffer in ours.named_buffers():
            close(buffer, dict(plain.named_buffers())[name])
    close(ours.eval()(whole), plain.eval()(whole))


@pytest.mark.ranks(2)
def test_the_running_variance_counts_the_batch_of_all_ranks(comm: MPI.Intracomm) -> None:
    # 3 values on rank 0, 5 on rank 1: 0..7 have the variance 42 / 7 = 6, and 42 / 8 biased.
    ours = SyncBatchNorm(1, momentum=1.0, comm=comm, dtype=torch.float64)
    x = torch.arange(8, dtype=torch.float64)[:, None]
    ours(x[:3] if comm.rank == 0 else x[3:])
    assert ours.running_mean is not None and ours.running_var is not None
    assert ours.running_mean.tolist() == [3.5]
    close(ours.running_var, torch.tensor([6.0], dtype=torch.float64))


@pytest.mark.ranks(3)
def test_a_large_mean_does_not_cancel(comm: MPI.Intracomm) -> None:
    # Of squares of 1e8 float64 keeps no digit behind the point, and the variance is 1/12. The means themselves are
    # rounded to 1e-8.
    torch.manual_seed(0)
    noise = torch.rand(sum(SIZES[3]), 3, 500, dtype=torch.float64)
    ours = SyncBatchNorm(3, momentum=1.0, comm=comm, dtype=torch.float64)
    ours(mine(noise + 1e8, comm))
    expected = (noise + 1e8 - 1e8).transpose(0, 1).flatten(1).var(1)
    assert ours.running_var is not None
    close(ours.running_var, expected, rtol=1e-7)


@pytest.mark.ranks(2)
def test_without_weights_or_running_statistics(comm: MPI.Intracomm) -> None:
    for options in ({"affine": False}, {"track_running_stats": False}, {"affine": False, "track_running_stats": False}):
        plain, ours = pair(nn.BatchNorm2d(3, **options).double(), comm)
        whole = images(comm, 4).requires_grad_()
        x = mine(whole.detach(), comm).clone().requires_grad_()
        (plain(whole) ** 3).sum().backward()
        (ours(x) ** 3).sum().backward()
        close(x.grad, mine(whole.grad, comm))
        assert list(ours.state_dict()) == list(plain.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_16_bits_get_statistics_in_float32(comm: MPI.Intracomm, kind: Any) -> None:
    plain, ours = pair(nn.BatchNorm2d(3), comm)
    whole = images(comm, 4).to(kind).requires_grad_()
    x = mine(whole.detach(), comm).clone().requires_grad_()
    exact = whole.detach().float().requires_grad_()
    expected, output = plain(exact), ours(x)
    (expected**2).sum().backward()
    (output.float() ** 2).sum().backward()
    assert output.dtype == x.grad.dtype == kind
    close(output, mine(expected.to(kind), comm), rtol=1e-2)
    close(ours.running_mean, plain.running_mean, rtol=1e-6)
    close(ours.running_var, plain.running_var, rtol=1e-5)


@pytest.mark.ranks(2)
def test_ranks_with_images_of_other_sizes_and_layouts_count_by_value(comm: MPI.Intracomm) -> None:
    torch.manual_seed(0)
    both = [torch.randn(2, 3, 4, 4, dtype=torch.float64), 3 + torch.randn(3, 3, 2, 5, dtype=torch.float64)]
    ours = SyncBatchNorm(3, momentum=1.0, affine=False, comm=comm, dtype=torch.float64)
    output = ours(both[comm.rank].contiguous(memory_format=torch.channels_last))
    values = torch.cat([x.transpose(0, 1).flatten(1) for x in both], 1)
    close(ours.running_var, values.var(1))
    expected = (both[comm.rank] - values.mean(1).view(1, 3, 1, 1)) / (
        values.var(1, correction=0).view(1, 3, 1, 1) + ours.eps
    ).sqrt()
    close(output, expected)


@pytest.mark.ranks(2)
def test_eval_mode_talks_to_nobody(comm: MPI.Intracomm) -> None:
    ours = SyncBatchNorm(3, comm=comm)
    ours(torch.randn(4, 3))
    if comm.rank == 0:
        assert ours.eval()(torch.randn(1, 3)).shape == (1, 3)
        with pytest.raises(ValueError, match=r"\(N, 3, ...\)"):
            ours(torch.randn(1, 4))
    comm.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_one_value_a_channel_is_refused_by_all(comm: MPI.Intracomm) -> None:
    ours = SyncBatchNorm(3, comm=comm)
    last = comm.rank == comm.size - 1
    with pytest.raises(ValueError, match="more than 1 value a channel"):
        ours(torch.ones(1 if last else 0, 3))
    assert ours(torch.ones(2 if last else 0, 3)).shape == (2 if last else 0, 3)


@pytest.mark.ranks(2)
def test_a_batch_of_nothing_changes_no_statistics(comm: MPI.Intracomm) -> None:
    ours = SyncBatchNorm(3, comm=comm)
    x = torch.ones(0, 3, requires_grad=True)
    ours(x).sum().backward()
    assert ours.running_var is not None and ours.running_var.tolist() == [1, 1, 1]
    assert x.grad is not None and x.grad.shape == (0, 3)
    assert ours.weight.grad is not None and ours.weight.grad.tolist() == [0, 0, 0]


@pytest.mark.ranks(3)
def test_an_input_that_one_rank_must_refuse_all_refuse(comm: MPI.Intracomm) -> None:
    ours = SyncBatchNorm(3, comm=comm)
    good = torch.ones(2, 3)
    for wrong, error in ((torch.ones(2, 4), ValueError), (torch.ones(3), ValueError), (good.long(), TypeError)):
        with pytest.raises(error, match="the input must be of"):
            ours(wrong if comm.rank == 1 else good)
    ours(good)


@pytest.mark.ranks(3)
def test_a_rank_that_needs_no_gradient_of_its_input_takes_part(comm: MPI.Intracomm) -> None:
    plain, ours = pair(nn.BatchNorm2d(3).double(), comm)
    whole = images(comm, 4).requires_grad_()
    x = mine(whole.detach(), comm).clone().requires_grad_(comm.rank == 2)
    (plain(whole) ** 3).sum().backward()
    (ours(x) ** 3).sum().backward()
    if comm.rank == 2:
        close(x.grad, mine(whole.grad, comm))
    else:
        assert x.grad is None


@pytest.mark.ranks(2)
def test_a_second_derivative_is_refused(comm: MPI.Intracomm) -> None:
    ours = SyncBatchNorm(3, comm=comm)
    x = torch.randn(4, 3, requires_grad=True)
    (first,) = torch.autograd.grad((ours(x) ** 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.ranks(1, 2)
def test_conversion_keeps_all_but_the_kind(comm: MPI.Intracomm) -> None:
    shared = nn.BatchNorm2d(4, eps=0.5, momentum=None)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), shared, nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4)), shared
    )
    model[2].eval()
    state, names = model.state_dict(keep_vars=True), [name for name, _ in model.named_modules(remove_duplicate=False)]
    others = [model[0], model[2], model[2][1]]
    seen: list[int] = []
    shared.register_forward_hook(lambda *_: seen.append(1))

    ours = convert_sync_batchnorm(model, comm)
    assert ours is model
    after = ours.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert [name for name, _ in ours.named_modules(remove_duplicate=False)] == names
    assert [model[0], model[2], model[2][1]] == others and type(others[2]) is nn.GroupNorm
    assert type(model[1]) is type(model[2][0]) is SyncBatchNorm
    assert model[1] is model[3] and (model[1].eps, model[1].momentum) == (0.5, None)
    assert (model[1].training, model[2][0].training) == (True, False)
    ours(torch.randn(2, 3, 2, 2))
    assert seen == [1, 1]

    duplicate = copy.deepcopy(ours)
    assert duplicate[1].comm is comm and duplicate[1].weight is not model[1].weight
    alone = nn.BatchNorm1d(2)
    assert type(convert_sync_batchnorm(alone, comm)) is SyncBatchNorm and type(alone) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="'1' does not know its number of features"):
        convert_sync_batchnorm(nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()), comm)
