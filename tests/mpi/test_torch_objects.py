"""What all ranks should have alike: objects, parameters, optimiser state, metrics."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.errors import MismatchError

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from hpcdl.torch import objects  # noqa: E402
from hpcdl.torch.objects import (  # noqa: E402
    allgather_object,
    average_metrics,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_consistent,
)
from hpcdl.torch.sampler import ExactSampler  # noqa: E402


def same_on_all(comm: MPI.Intracomm, value: object) -> bool:
    return len(set(comm.allgather(str(value)))) == 1


# ---- objects -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_objects_travel_whole(comm: MPI.Intracomm) -> None:
    for root in range(comm.size):
        mine = {"rank": comm.rank, "array": np.full(7, comm.rank), "tensor": torch.full((2, 0, 3), comm.rank)}
        given = broadcast_object(mine if comm.rank == root else None, comm, root=root)
        assert given["rank"] == root and (given["array"] == root).all() and given["tensor"].shape == (2, 0, 3)
        given["array"] += 1  # a copy may be written to
        assert (given is mine) == (comm.rank == root)
    everybody = allgather_object(("x" * comm.rank, np.arange(comm.rank)), comm)
    assert [(text, array.tolist()) for text, array in everybody] == [
        ("x" * r, list(range(r))) for r in range(comm.size)
    ]


@pytest.mark.ranks(2)
def test_objects_longer_than_one_message_travel_whole(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py.util import pkl5

    monkeypatch.setattr(pkl5._BigMPI, "blocksize", 1 << 10)  # in place of 2 GiB
    data = np.arange(100_000, dtype=np.uint16)
    given = broadcast_object((data.tobytes(), data) if comm.rank == 1 else None, comm, root=1)
    assert given[0] == data.tobytes() and (given[1] == data).all()
    assert all((each == data + rank).all() for rank, each in enumerate(allgather_object(data + comm.rank, comm)))


@pytest.mark.ranks(2)
def test_objects_never_meet_the_users_messages(comm: MPI.Intracomm) -> None:
    peer = 1 - comm.rank
    received = comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    assert broadcast_object(comm.rank, comm) == 0
    assert allgather_object(comm.rank, comm) == [0, 1]
    request = comm.isend("the user's", peer)
    assert received.wait() == "the user's"
    request.wait()


class Secret:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("it is secret")


def fail() -> None:
    raise RuntimeError("not on this rank")


class OnlyOnRank0:
    """Cannot be rebuilt where `fail` fails."""

    def __reduce__(self) -> Any:
        return fail, ()


@pytest.mark.ranks(2, 3)
def test_an_object_that_one_rank_cannot_serve_is_refused_by_all(comm: MPI.Intracomm) -> None:
    last = comm.size - 1
    for call in (
        lambda: broadcast_object(Secret(), comm, root=last),
        lambda: allgather_object(Secret() if comm.rank == last else 1, comm),
    ):
        with pytest.raises(TypeError, match=rf"cannot be pickled: .* it is secret \(on rank {last} of") as raised:
            call()
        assert same_on_all(comm, raised.value)
    with pytest.raises(TypeError, match="cannot be rebuilt from its pickle: RuntimeError: not on this rank") as raised:
        broadcast_object(OnlyOnRank0() if comm.rank == 0 else None, comm)
    assert same_on_all(comm, raised.value)
    with pytest.raises(MismatchError, match="the same root: rank 1 has 1, rank 0 has 0"):
        broadcast_object(1, comm, root=min(comm.rank, 1))
    with pytest.raises(ValueError, match=f"root {comm.size} is no rank"):
        broadcast_object(1, comm, root=comm.size)
    assert broadcast_object(comm.rank, comm) == 0


# ---- parameters ----------------------------------------------------------------------------------------------------


class Mixture(nn.Module):  # type: ignore[misc]
    """Parameters of all sorts of types and layouts, with a BatchNorm's buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(3, 2)
        self.linear.weight = nn.Parameter(torch.randn(3, 2).t())
        self.norm = nn.BatchNorm2d(4)
        assert self.norm.num_batches_tracked is not None
        self.norm.num_batches_tracked += seed
        for place, kind in enumerate(
            (torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.complex64, torch.float64)
        ):
            self.register_parameter(f"p{place}", nn.Parameter(torch.randn(place, 3).to(kind)))
        self.register_buffer("flags", torch.randn(5) > 0)
        self.register_buffer("eighths", torch.randn(5).to(torch.float8_e5m2))
        self.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_get_the_roots_parameters_of_any_type_and_layout(comm: MPI.Intracomm) -> None:
    root = comm.size - 1
    expected = Mixture(root)
    forms: list[Any] = [
        lambda model: model,
        lambda model: model.state_dict(),
        lambda model: [*model.named_parameters(), *model.named_buffers()],
        lambda model: (tensor for tensor in [*model.parameters(), *model.buffers()]),
    ]
    for form in forms:
        model = Mixture(comm.rank)
        strides = [tensor.stride() for tensor in model.state_dict().values()]
        assert (check_consistent(model, comm) is None) == (comm.size == 1)
        broadcast_parameters(form(model), comm, root=root)
        assert check_consistent(model, comm) is check_consistent(model.state_dict(), comm) is None
        assert check_consistent([*model.parameters(), *expected.buffers()], comm) is None
        for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128)), name
        assert [tensor.stride() for tensor in model.state_dict().values()] == strides


@pytest.mark.ranks(2)
def test_parameters_of_any_length_travel_in_batches(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (1, 16, 1000):
        monkeypatch.setattr(objects, "BATCH_BYTES", limit)
        tensors = [
            torch.full((n,), float(n * (1 - comm.rank)), dtype=kind)
            for n in (1, 5, 0, 3, 2)
            for kind in (torch.float32, torch.int8)
        ]
        broadcast_parameters(tensors, comm)
        assert all((tensor == len(tensor)).all() for tensor in tensors)


@pytest.mark.ranks(2, 3)
def test_parameters_that_differ_between_ranks_are_refused_by_all(comm: MPI.Intracomm) -> None:
    a, b = torch.ones(2, 3), torch.ones(4)
    last = comm.size - 1
    where = rf"\(on rank {last} of {comm.size}\)"
    for wrong, message in [
        ({"b": b, "a": a}, "'b' stands where rank 0 has 'a': all ranks must have the same order"),
        ({"a": a}, "'b' is missing, which rank 0 has"),
        ({"a": a, "b": b, "c": b}, "'c' is one that rank 0 has not"),
        ({"a": a.t(), "b": b}, r"'a' is float32 \(3, 2\) on cpu, and on rank 0 float32 \(2, 3\) on cpu"),
        ({"a": a, "b": b.double()}, r"'b' is float64 \(4,\) on cpu, and on rank 0 float32 \(4,\) on cpu"),
    ]:
        given = wrong if comm.rank == last else {"a": a, "b": b}
        with pytest.raises(MismatchError, match=f"{message} {where}") as raised:
            broadcast_parameters(given, comm)
        assert same_on_all(comm, raised.value)
        assert check_consistent(given, comm) == str(raised.value)
    for what, message in [
        ({"a": None}, "'a' is of type NoneType, no tensor"),
        ([a, b.expand(3, 4)], "'tensor 1' is expanded"),
        ([a.to_sparse()], "'tensor 0' is no dense tensor"),
        (nn.LazyLinear(3), "'weight' is not initialised yet"),
        (3, "'int' object is not iterable"),
    ]:
        for call in (broadcast_parameters, check_consistent):
            with pytest.raises(TypeError, match=rf"{message}.*{where}"):
                call(what if comm.rank == last else [a, b], comm)  # type: ignore[arg-type, operator]


@pytest.mark.ranks(2, 3)
def test_the_first_parameter_that_is_not_bit_for_bit_the_same_is_named(comm: MPI.Intracomm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).requires_grad_()
    last = comm.rank == comm.size - 1
    assert check_consistent(model, comm) is None

    def answer_with(name: str, value: float, place: Any = 0) -> str | None:
        changed = copy.deepcopy(model)
        if last:
            changed.state_dict()[name].view(-1)[place] = value
        answer = check_consistent(changed, comm)
        assert same_on_all(comm, answer)
        return answer

    for name in ("0.weight", "2.bias", "1.running_var", "1.num_batches_tracked"):
        assert answer_with(name, 7) == f"'{name}' on rank {comm.size - 1} has not the bits that it has on rank 0"
    assert "1.running_mean" in str(answer_with("1.running_mean", -0.0))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert check_consistent(model, comm) is None
    assert "0.weight" in str(answer_with("0.weight", -math.nan))
    if last:
        model.to(memory_format=torch.preserve_format)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert check_consistent(model, comm) is None


@pytest.mark.ranks(2)
def test_models_of_different_seeds_are_told_apart(comm: MPI.Intracomm) -> None:
    torch.manual_seed(comm.rank)
    assert "'weight' on rank 1" in str(check_consistent(nn.Linear(3, 3), comm))


# ---- optimisers ----------------------------------------------------------------------------------------------------


def stepped(optimizer: Any, steps: int = 2) -> Any:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
    return optimizer


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(2, 2)).to(memory_format=torch.channels_last)


def described(value: Any) -> Any:
    """The value with every type in it, and of tensors the bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: described(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(entry) for entry in value]
    return type(value).__name__, value


OPTIMISERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(0.5, 0.25), foreach=None),
    "tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


@pytest.mark.ranks(2)  # torch.optim takes seconds to import
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("have_state", ["nobody", "the root", "the others", "all"])
def test_all_ranks_get_the_roots_state_with_all_types(comm: MPI.Intracomm, name: str, have_state: str) -> None:
    root = comm.size - 1
    model = network()
    optimizer = OPTIMISERS[name](model.parameters())
    if name == "lbfgs":  # which takes no other layout
        model.to(memory_format=torch.contiguous_format)
        step, optimizer.step = optimizer.step, lambda: step(lambda: (model[0].weight ** 2).sum())
    has_it = have_state == "all" or have_state == ("the root" if comm.rank == root else "the others")
    if has_it:
        stepped(optimizer, steps=comm.rank + 1)
    if comm.rank == root:  # options of a checkpoint that it alone has loaded
        optimizer.param_groups[0].update(lr=0.001, extra=("nested", (1, None, True, 2.5)), initial_lr=0.5)
    broadcast_optimizer_state(optimizer, comm, root=root)
    assert same_on_all(comm, described(optimizer.state_dict()))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["extra"]) == (0.001, ("nested", (1, None, True, 2.5)))
    broadcast_parameters(model, comm, root=root)
    stepped(optimizer)
    assert check_consistent(model, comm) is None


@pytest.mark.ranks(2)
def test_state_keeps_its_type_where_its_parameter_has_another(comm: MPI.Intracomm) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if comm.rank == 0:
        optimizer.state[parameter] = {"residual": torch.full((3,), 1 / 3), "count": 3, "name": None, "seen": True}
    broadcast_optimizer_state(optimizer, comm)
    state = optimizer.state[parameter]
    assert state["residual"].dtype == torch.float32 and state["residual"].tolist() == torch.full((3,), 1 / 3).tolist()
    assert (state["count"], state["name"], state["seen"]) == (3, None, True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("root", [0, 1])
def test_state_lies_in_memory_as_its_parameter_does(comm: MPI.Intracomm, root: int) -> None:
    model = network()
    if comm.rank == 1:
        model = model.to(memory_format=torch.contiguous_format)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    if comm.rank == root:
        stepped(optimizer)
    broadcast_optimizer_state(optimizer, comm, root=root)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()


@pytest.mark.ranks(2)
def test_a_checkpoint_that_rank_0_alone_loads_reaches_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    before = network()
    saved = stepped(torch.optim.Adam(before.parameters(), lr=1e-3), steps=3)
    model = network(seed=comm.rank + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if comm.rank == 0:
        torch.save([before.state_dict(), saved.state_dict()], tmp_path / "checkpoint")
        parameters, state = torch.load(tmp_path / "checkpoint", weights_only=True)
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
    broadcast_parameters(model.state_dict(), comm)
    broadcast_optimizer_state(optimizer, comm)
    stepped(saved)
    stepped(optimizer)
    assert check_consistent(model, comm) is None
    assert all(torch.equal(ours, its) for ours, its in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_optimisers_that_do_not_fit_are_refused_by_all(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    model = network()
    parameters = list(model.parameters())
    for wrong, message in [
        (torch.optim.Adam(parameters), "the same class of optimiser: rank . has Adam, rank 0 has SGD"),
        (torch.optim.SGD(parameters[:2]), "'group 0, parameter 2' is missing, which rank 0 has"),
        (torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}]), "'group 0, parameter 2' is miss"),
        (torch.optim.SGD(parameters[::-1]), r"'group 0, parameter 0' is float32 \(2,\) on cpu"),
    ]:
        optimizer = wrong if last else torch.optim.SGD(parameters)
        with pytest.raises(MismatchError, match=message) as raised:
            broadcast_optimizer_state(optimizer, comm)
        assert same_on_all(comm, raised.value)
    optimizer = torch.optim.SGD(parameters)
    optimizer.param_groups[0]["secret"] = Secret()
    with pytest.raises(TypeError, match=r"the optimiser's state cannot be pickled: .* it is secret"):
        broadcast_optimizer_state(optimizer, comm)


# ---- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_metrics_are_weighed_by_samples(comm: MPI.Intracomm) -> None:
    rank, ranks = comm.rank, range(comm.size)
    plain = average_metrics({"loss": 6.0 * rank, "hits": torch.tensor([12 * rank])}, comm)
    assert plain == {"loss": 3.0 * (comm.size - 1), "hits": 6.0 * (comm.size - 1)}
    samples = rank * 2  # none on rank 0, where the mean over them is nan
    mine = {"loss": 3.0 if samples else math.nan, "accuracy": np.float32(rank), "none": 1}
    if rank % 2:
        mine = dict(reversed(mine.items()))
    weights = {"loss": samples, "accuracy": rank + 1, "none": 0}
    means = average_metrics(mine, comm, weights=weights)
    total = sum(rank + 1 for rank in ranks)
    assert math.isnan(means["none"])
    assert means["accuracy"] == sum((rank + 1) * rank for rank in ranks) / total
    assert list(means) == list(mine)
    if comm.size > 1:
        assert means["loss"] == average_metrics({"loss": mine["loss"]}, comm, weights=samples)["loss"] == 3
    assert average_metrics({}, comm) == {}


@pytest.mark.ranks(2, 3)
def test_metrics_that_do_not_fit_are_refused_by_all(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    for mine, weights, error, message in [
        ({"loss": 1}, None, MismatchError, r"the same metrics: rank . has \['loss'\], rank 0 has \['acc', 'loss'\]"),
        ({"loss": "much", "acc": 1}, 1, ValueError, "could not convert string to float: 'much'"),
        ({"loss": 1, "acc": 1}, -1, ValueError, "'acc' has weight -1.0, which is no number of samples"),
        ({"loss": 1, "acc": 1}, {"acc": 1}, ValueError, "KeyError: 'loss'"),
        ({"loss": 1, 3: 1}, 1, TypeError, "a metric's name is a str: .*3 is none"),
    ]:
        with pytest.raises(error, match=message) as raised:
            average_metrics(mine if last else {"acc": 1, "loss": 1}, comm, weights=weights if last else 1)
        assert same_on_all(comm, raised.value)


@pytest.mark.ranks(1, 2, 3)
def test_an_evaluation_does_not_depend_on_the_number_of_ranks(comm: MPI.Intracomm) -> None:
    sampler = ExactSampler(10, comm)
    right = [sample % 3 == 0 for sample in sampler]  # 0, 3, 6, 9
    accuracy = sum(right) / len(right) if right else math.nan
    assert average_metrics({"accuracy": accuracy}, comm, weights=len(sampler))["accuracy"] == pytest.approx(0.4, 1e-15)
    assert sorted(sample for part in comm.allgather(list(sampler)) for sample in part) == list(range(10))
    empty = average_metrics({"accuracy": 1.0 if comm.rank == 0 else math.nan}, comm, weights=len(ExactSampler(0, comm)))
    assert math.isnan(empty["accuracy"])
