"""Steps of a DistributedOptimizer are steps of one process on the whole batch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import hpcdl
from hpcdl.errors import MismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from hpcdl.torch.objects import broadcast_parameters  # noqa: E402
from hpcdl.torch.optimizer import DistributedOptimizer  # noqa: E402

BATCH = 12  # divides by 1, 2, 3 and 4 ranks


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, n, generator=random, dtype=torch.float64) for n in (5, 3))  # type: ignore[return-value]


def mine(comm: MPI.Intracomm, tensors: Any) -> Any:
    """This rank's rows."""
    return tuple(each.chunk(comm.size)[comm.rank] for each in tensors)


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(model: Any, **options: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def flat(model: Any) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def assert_follows(comm: MPI.Intracomm, ours: Any, one: Any) -> None:
    """The same parameters to 10 digits, and bits that are the same on all ranks."""
    assert float((flat(ours) - flat(one)).norm() / flat(one).norm()) < 1e-10
    assert float((flat(one) - flat(network())).norm()) > 1e-3  # it has learned something
    assert len(set(comm.allgather(flat(ours).numpy().tobytes()))) == 1


def pair(comm: MPI.Intracomm, make: Callable[[Any], Any] = sgd, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A network and its optimiser on this rank of all, and both again for a process alone."""
    ours, one = network(), network()
    distributed = DistributedOptimizer(make(ours), ours.named_parameters(), comm=comm, **options)
    return ours, distributed, one, make(one)


# ---- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [sgd, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)])
@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_the_mean_is_that_of_the_whole_batch(comm: MPI.Intracomm, make: Any, bucket_cap_mb: float) -> None:
    ours, distributed, one, alone = pair(comm, make, bucket_cap_mb=bucket_cap_mb)
    assert type(distributed) is type(alone)
    for step in range(5):
        distributed.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.step()
        alone.zero_grad()
        loss_of(one, *batch(step)).backward()
        alone.step()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(1, 3)
def test_the_sum_is_that_of_all_ranks_losses(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm, op="sum")
    for step in range(4):
        distributed.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.step()
        alone.zero_grad()
        (loss_of(one, *batch(step)) * comm.size).backward()
        alone.step()
    assert_follows(comm, ours, one)
    for use in (distributed.step, distributed.synchronize):
        with pytest.raises(RuntimeError, match="would be summed once more: call"):
            use()


@pytest.mark.ranks(2, 3)
def test_what_is_not_zeroed_adds_up_as_in_one_process(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm)
    for step in range(3):
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.step()
        loss_of(one, *batch(step)).backward()
        alone.step()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(1, 3)
def test_the_last_window_of_accumulated_passes_may_be_short(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm, backward_passes_per_step=8)
    for _ in range(2):
        for number in range(10):
            loss_of(ours, *mine(comm, batch(number))).backward()
            loss_of(one, *batch(number)).backward()
            if number in (7, 9):
                for each in (distributed, alone):
                    each.step()
                    each.zero_grad()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
def test_a_step_reduces_the_passes_that_there_are(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm, backward_passes_per_step=4)
    for step in range(4):
        loss_of(ours, *mine(comm, batch(step))).backward()
        loss_of(one, *batch(step)).backward()
        for each in (distributed, alone):
            each.step()
            each.zero_grad()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_pass_too_many_is_refused(comm: MPI.Intracomm, set_to_none: bool) -> None:
    ours, distributed, _, _ = pair(comm, backward_passes_per_step=2)
    distributed.step()

    def backward() -> None:
        loss_of(ours, *mine(comm, batch(0))).backward()

    for _ in range(2):
        backward()
        backward()
        distributed.zero_grad(set_to_none)  # which begins anew
    backward()
    backward()
    with pytest.raises(
        RuntimeError, match=r"\d.(weight|bias) has got gradients from more than backward_passes_per_step=2"
    ):
        backward()
    distributed.zero_grad(set_to_none)
    backward()
    distributed.step()
    ours.zero_grad()  # nor does this go past us
    backward()
    backward()
    ours.zero_grad()
    backward()


@pytest.mark.ranks(1, 3)
def test_a_pass_that_is_thrown_away_leaves_nothing(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm)
    for step in range(4):
        loss_of(ours, *mine(comm, batch(step + 100))).backward()
        distributed.zero_grad(set_to_none=step % 2 == 0)
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.step()
        distributed.zero_grad(set_to_none=step % 2 == 0)
        loss_of(one, *batch(step)).backward()
        alone.step()
        alone.zero_grad()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("without", [0, 1, -1])
def test_a_rank_without_samples_counts_with_zeros(comm: MPI.Intracomm, without: int) -> None:
    ours, distributed, one, alone = pair(comm)
    for step in range(3):
        inputs, targets = batch(step)
        parts = inputs.chunk(comm.size), targets.chunk(comm.size)
        for rank in range(comm.size):
            if step == 1 or rank != without % comm.size:  # in the first step too, when the buckets are made
                loss = loss_of(one, parts[0][rank], parts[1][rank]) / comm.size
                loss.backward()
                if rank == comm.rank:
                    loss_of(ours, parts[0][rank], parts[1][rank]).backward()
        for each in (distributed, alone):
            each.step()
            each.zero_grad()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
def test_a_parameter_used_on_no_rank_keeps_its_gradient(comm: MPI.Intracomm) -> None:
    ours = nn.ModuleList([network(), network()])
    before = flat(ours[1])
    distributed = DistributedOptimizer(torch.optim.AdamW(ours.parameters(), weight_decay=0.1), comm=comm)
    for step in range(3):
        distributed.zero_grad()
        loss_of(ours[0], *mine(comm, batch(step))).backward()
        distributed.step()
        assert all(each.grad is None for each in ours[1].parameters())
    assert torch.equal(flat(ours[1]), before)
    loss_of(ours[comm.rank], *mine(comm, batch(3))).backward()
    distributed.step()
    assert not torch.equal(flat(ours[1]), before)
    assert len(set(comm.allgather(flat(ours).numpy().tobytes()))) == 1


# ---- synchronize ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])  # a sum may not be reduced twice
def test_clipping_behind_synchronize_is_clipping_the_whole_batchs_gradient(comm: MPI.Intracomm, op: str) -> None:
    ours, distributed, one, alone = pair(comm, op=op)
    scale = comm.size if op == "sum" else 1
    for step in range(4):
        distributed.zero_grad()
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.synchronize()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        with distributed.skip_synchronize():
            distributed.step()
        alone.zero_grad()
        (loss_of(one, *batch(step)) * scale).backward()
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(one.parameters(), 0.1)), rel=1e-10)
        assert float(norm) > 0.1
        alone.step()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
def test_a_second_reduction_is_told_of_and_changes_nothing(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm)
    loss_of(ours, *mine(comm, batch(0))).backward()
    distributed.synchronize()
    with pytest.warns(RuntimeWarning, match="skip_synchronize"):
        distributed.step()
    loss_of(one, *batch(0)).backward()
    alone.step()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_an_inf_on_one_rank_makes_all_skip_alike(comm: MPI.Intracomm, fused: bool) -> None:
    def make(model: Any) -> Any:
        return sgd(model, fused=fused)

    ours, distributed, one, alone = pair(comm, make)
    scalers = torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        distributed.zero_grad()
        scalers[0].scale(loss_of(ours, *mine(comm, batch(step)))).backward()
        alone.zero_grad()
        scalers[1].scale(loss_of(one, *batch(step))).backward()
        if step == 1:
            one[0].weight.grad[0, 0] = torch.inf
            if comm.rank == comm.size - 1:
                ours[0].weight.grad[0, 0] = torch.inf
        distributed.synchronize()
        scalers[0].unscale_(distributed)
        with distributed.skip_synchronize():
            scalers[0].step(distributed)
        scalers[1].step(alone)
        for scaler in scalers:
            scaler.update()
        assert set(comm.allgather(scalers[0].get_scale())) == {scalers[1].get_scale()}
    assert scalers[0].get_scale() == 2.0**9
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_that_judges_one_ranks_gradients_is_refused_on_all(
    comm: MPI.Intracomm, fused: bool, unscale: bool
) -> None:
    ours, distributed, _, _ = pair(comm, lambda model: sgd(model, fused=fused))
    for _ in range(2):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(ours, *mine(comm, batch(0)))).backward()
        if comm.rank == 1:
            ours[0].weight.grad[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(distributed)
        with pytest.raises(RuntimeError, match=r"this rank alone: call optimizer.synchronize\(\) first"):
            scaler.step(distributed)
        distributed.zero_grad()
    loss_of(ours, *mine(comm, batch(0))).backward()
    distributed.step()
    assert bool(flat(ours).isfinite().all())


# ---- an optimiser like any other -----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", ["scheduler", "wrapper"])
def test_a_scheduler_made_before_or_behind_is_silent(comm: MPI.Intracomm, first: str) -> None:
    ours, one = network(), network()
    optimiser, alone = sgd(ours), sgd(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if first == "wrapper":
            optimiser = DistributedOptimizer(optimiser, comm=comm)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimiser, alone)]
        if first == "scheduler":
            optimiser = DistributedOptimizer(optimiser, comm=comm)
        for step in range(5):
            loss_of(ours, *mine(comm, batch(step))).backward()
            loss_of(one, *batch(step)).backward()
            for each in (optimiser, alone):
                each.step()
                each.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
    assert optimiser.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
def test_state_goes_out_and_in(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm)
    for step in range(4):
        distributed.zero_grad()
        loss_of(ours, *mine(comm, batch(step))).backward()
        distributed.step()
        alone.zero_grad()
        loss_of(one, *batch(step)).backward()
        alone.step()
        if step == 1:  # to a new pair, and back into the same
            state, parameters = pickle.loads(pickle.dumps(distributed.state_dict())), copy.deepcopy(ours.state_dict())
            ours = network(seed=5)
            ours.load_state_dict(parameters)
            distributed = DistributedOptimizer(sgd(ours), comm=comm)
            distributed.load_state_dict(state)
        if step == 2:
            distributed.load_state_dict(distributed.state_dict())
    assert_follows(comm, ours, one)
    plain = pickle.loads(pickle.dumps(distributed))
    assert type(plain) is torch.optim.SGD and not hasattr(plain, "synchronize")


@pytest.mark.ranks(1, 3)
def test_an_added_group_is_reduced_from_the_next_step_on(comm: MPI.Intracomm) -> None:
    ours, one = network(), network()

    def first_layers(model: Any) -> Any:
        return torch.optim.SGD(model[:3].parameters(), lr=0.1)

    distributed = DistributedOptimizer(first_layers(ours), ours.named_parameters(), comm=comm)
    alone = first_layers(one)
    for step in range(4):
        distributed.zero_grad()
        alone.zero_grad()
        loss_of(ours, *mine(comm, batch(step))).backward()
        loss_of(one, *batch(step)).backward()
        if step == 1:
            distributed.add_param_group({"params": ours[4].parameters(), "lr": 0.2})
            alone.add_param_group({"params": one[4].parameters(), "lr": 0.2})
        distributed.step()
        alone.step()
        if step == 0:  # nobody's gradients yet
            ours.zero_grad()
            one.zero_grad()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(2)
def test_a_parameter_may_be_unfrozen(comm: MPI.Intracomm) -> None:
    ours, distributed, one, alone = pair(comm)
    for model in (ours, one):
        model[0].weight.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for model in (ours, one):
                model[0].weight.requires_grad_(True)
        distributed.zero_grad()
        alone.zero_grad()
        loss_of(ours, *mine(comm, batch(step))).backward()
        loss_of(one, *batch(step)).backward()
        distributed.step()
        alone.step()
    assert_follows(comm, ours, one)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("make", [sgd, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=6)])
def test_a_closure_sees_the_whole_batch(comm: MPI.Intracomm, make: Any, op: str) -> None:
    ours, distributed, one, alone = pair(comm, make, op=op)
    scale = comm.size if op == "sum" else 1

    def step_of(optimiser: Any, model: Any, data: Any, scale: int) -> Any:
        def closure() -> Any:
            optimiser.zero_grad()
            loss = loss_of(model, *data) * scale
            loss.backward()
            return loss

        return optimiser.step(closure)

    for step in range(3):
        loss = step_of(distributed, ours, mine(comm, batch(step)), 1)
        assert float(loss) == pytest.approx(float(step_of(alone, one, batch(step), scale)), rel=1e-10)
    assert_follows(comm, ours, one)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_two_optimisers_on_two_models_do_not_meet(comm: MPI.Intracomm, op: str) -> None:
    """As a generator and a discriminator: the loss of one goes through the other, which throws its gradients away."""
    scale = comm.size if op == "sum" else 1

    def trained(wrap: Callable[[Any], Any], part: Callable[[Any], Any], scale: int) -> Any:
        maker, judge = (nn.Linear(5, 3), nn.Linear(3, 1))
        for seed, each in enumerate((maker, judge)):
            torch.manual_seed(seed)
            each.double().reset_parameters()
        makers, judges = (wrap(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (maker, judge))
        for step in range(4):
            inputs, real = part(batch(step))
            judges.zero_grad()
            (
                (judge(real) - 1).square().mean() * scale + judge(maker(inputs).detach()).square().mean() * scale
            ).backward()
            judges.step()
            makers.zero_grad()
            ((judge(maker(inputs)) - 1).square().mean() * scale).backward()
            makers.step()
        return nn.ModuleList([maker, judge])

    ours = trained(lambda each: DistributedOptimizer(each, comm=comm, op=op), lambda data: mine(comm, data), 1)
    one = trained(lambda each: each, lambda data: data, scale)
    assert float((flat(ours) - flat(one)).norm() / flat(one).norm()) < 1e-10
    assert len(set(comm.allgather(flat(ours).numpy().tobytes()))) == 1


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_are_the_dense_ones(comm: MPI.Intracomm, sparse_as_dense: bool, passes: int) -> None:
    words = [torch.arange(BATCH) % 5, torch.full((BATCH,), 3), torch.arange(BATCH) // 2]
    torch.manual_seed(0)
    one = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).double()
    ours = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)).double()
    ours.load_state_dict(one.state_dict())
    distributed = DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.5),
        comm=comm,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=passes,
    )
    alone = torch.optim.SGD(one.parameters(), lr=0.5)
    for step in range(4):
        distributed.zero_grad()
        alone.zero_grad()
        for number in range(passes):
            data = words[(step + number) % 3], batch(step)[1]
            loss_of(ours, *mine(comm, data)).backward()
            loss_of(one, *data).backward()
        distributed.step()
        alone.step()
        assert ours[0].weight.grad.is_sparse != sparse_as_dense
    assert float((flat(ours) - flat(one)).norm() / flat(one).norm()) < 1e-10
    assert len(set(comm.allgather(flat(ours).numpy().tobytes()))) == 1


@pytest.mark.ranks(2)
def test_a_gradient_that_becomes_sparse_later_is_refused(comm: MPI.Intracomm) -> None:
    ours = nn.Embedding(9, 4, sparse=True)
    distributed = DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.5), comm=comm)
    distributed.step()
    with pytest.raises(RuntimeError, match=r"group 0, parameter 0 has a sparse gradient now .* sparse_as_dense=True"):
        ours(torch.arange(3)).sum().backward()


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_bad_arguments_are_refused_by_all(comm: MPI.Intracomm) -> None:
    model = network()
    (_, parameter), *others = model.named_parameters()
    last = comm.rank == comm.size - 1  # the others hear of it

    def refused(match: str, named: Any = None, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            DistributedOptimizer(sgd(model), named if last else None, comm=comm, **(options if last else {}))

    twice = [("a", parameter), ("a", others[0][1]), *others[1:]]
    refused("several parameters have the same name: a", twice)
    refused(
        r"lacks parameters of the optimiser: group 0, parameter 0 \(7, 5\); .*, parameter 2 \(7, 7\)",
        others[:1] + others[2:],
    )
    refused("op is one of mean, sum, not 'max'", op="max")
    refused("1 or more, not 0", backward_passes_per_step=0)
    refused("bucket_cap_mb is above 0", bucket_cap_mb=0)
    with pytest.raises(ValueError, match="quick"):
        DistributedOptimizer(sgd(model), comm=comm, algorithm="quick")
    optimiser = DistributedOptimizer(sgd(model), [*model.named_parameters(), ("more", torch.zeros(1))], comm=comm)
    with pytest.raises(ValueError, match="a distributed one already"):
        DistributedOptimizer(optimiser, comm=comm)


@pytest.mark.ranks(2, 3)
def test_ranks_with_different_parameters_get_one_error(comm: MPI.Intracomm) -> None:
    model = network() if comm.rank != 1 else network()[:3]
    with pytest.raises(MismatchError, match=r"'4.weight' is missing, which rank 0 has \(on rank 1 of") as raised:
        DistributedOptimizer(sgd(model), model.named_parameters(), comm=comm)
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.ranks(2)
def test_the_names_are_the_optimisers_own_if_it_has_some(comm: MPI.Intracomm) -> None:
    model = network()
    optimiser = torch.optim.SGD(model.named_parameters(), lr=0.1)
    if "param_names" not in optimiser.param_groups[0]:
        pytest.skip("this torch does not keep names")
    distributed = DistributedOptimizer(optimiser, comm=comm)
    distributed.step()
    loss_of(model, *mine(comm, batch(0))).backward()
    with pytest.raises(RuntimeError, match=r"^4.(bias|weight) has got gradients from more than"):
        loss_of(model, *mine(comm, batch(0))).backward()


# ---- who is where --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_ranks_are_counted_in_the_communicator_and_on_the_node(comm: MPI.Intracomm) -> None:
    assert (hpcdl.rank(comm), hpcdl.size(comm)) == (comm.rank, comm.size)
    assert (hpcdl.local_rank(comm), hpcdl.local_size(comm)) == (comm.rank, comm.size)  # all are on one node
    assert (hpcdl.rank(), hpcdl.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    half = comm.Split(comm.rank % 2, -comm.rank)
    assert (hpcdl.local_rank(half), hpcdl.local_size(half)) == (half.rank, half.size)
    half.Free()


@pytest.mark.ranks(2)
def test_a_broadcast_ahead_makes_all_start_alike(comm: MPI.Intracomm) -> None:
    model = network(seed=comm.rank)
    distributed = DistributedOptimizer(sgd(model), comm=comm)
    broadcast_parameters(model, comm)
    loss_of(model, *mine(comm, batch(0))).backward()
    distributed.step()
    assert len(set(comm.allgather(flat(model).numpy().tobytes()))) == 1
