"""Deep Gradient Compression: each rank's momentum travels in the end, whatever waits meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI
from pretended import on_nodes

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.compress.dgc import DGC, merge  # noqa: E402
from hpcdl.compress.hook import Compression  # noqa: E402
from hpcdl.compress.method import Piece  # noqa: E402
from hpcdl.compress.sparse import count  # noqa: E402
from hpcdl.compress.wire import Wire  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402
from hpcdl.torch.scaler import GradScaler  # noqa: E402

pytestmark = pytest.mark.ranks(1, 3)

SHAPES = [(9, 11), (5,), (), (0, 3), (1, 1), (4, 3, 2)]
SMALL = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4}  # MiB: several buckets


@pytest.fixture
def wire(comm: MPI.Intracomm) -> Iterator[Wire]:
    own = Wire(comm)
    yield own
    own.close()


def integers(shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    """They add up without rounding, and float16 holds their sums over some steps."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-20, 21, shape, generator=random).float() * 16


def normal(shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


Make = Callable[[tuple[int, ...], int, int], Tensor]


def given(step: int, rank: int, make: Make = integers) -> list[Piece]:
    tensors = [make(shape, step + 50 * number, rank) for number, shape in enumerate(SHAPES)]
    return [Piece(f"p{number}", values, values.ndim > 1) for number, values in enumerate(tensors)]


def dgc(density: float = 0.1, **options: Any) -> DGC:
    return DGC(density, **{"warmup_epochs": 0, "momentum": 0.5, **options})


def same(comm: MPI.Intracomm, tensors: list[Tensor]) -> bool:
    """Are they equal on all ranks, to the last bit?"""
    mine = [each.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
    return all(theirs == mine for theirs in comm.allgather(mine))


def waiting(method: DGC, piece: Piece) -> Tensor:
    kept: Tensor = method.unsent.kept.get(piece.key, torch.zeros_like(piece.values))
    return kept.clone()


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_without_momentum_what_was_sent_and_what_waits_are_all_gradients(
    comm: MPI.Intracomm, wire: Wire, value_dtype: Any
) -> None:
    method = dgc(momentum=0.0, value_dtype=value_dtype)
    came, whole = ([torch.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step in range(6):
        pieces = given(step, comm.rank)
        method.reduce(pieces, wire)
        assert same(comm, [piece.values for piece in pieces])
        for number, piece in enumerate(pieces):
            came[number] += piece.values
            whole[number] += sum(given(step, rank)[number].values for rank in range(comm.size))
            waits = sum(comm.allgather(waiting(method, piece)))
            assert torch.equal(came[number] + waits, whole[number])
            assert piece.is_matrix or not waits.any()


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_velocity_is_what_is_sent_and_masked_only_where_it_was(
    comm: MPI.Intracomm, wire: Wire, masking: bool, nesterov: bool
) -> None:
    """Algorithm 7 on paper, element by element; without masking, what was sent and V are the sum of all U."""
    method = dgc(masking=masking, nesterov=nesterov, value_dtype=torch.float32)
    u, v, came, moved = ([torch.zeros(shape) for shape in SHAPES] for _ in range(4))
    for step in range(5):
        gradients, pieces = given(step, comm.rank), given(step, comm.rank)
        method.reduce(pieces, wire)
        for number, (gradient, piece) in enumerate(zip(gradients, pieces, strict=True)):
            u[number] = u[number] * 0.5 + gradient.values
            grown = gradient.values + u[number] * 0.5 if nesterov else u[number]
            moved[number] += sum(comm.allgather(grown))
            v[number] = v[number] + grown
            left = waiting(method, piece)
            gone = left != v[number]
            assert not left[gone].any()  # whole elements go
            n = left.numel()
            assert int(gone.sum()) <= (count(0.1, n) if piece.is_matrix else n)
            assert torch.equal(sum(comm.allgather(v[number] - left)), piece.values)
            if masking and piece.is_matrix and n:
                # What is 0 may have been sent too.
                u[number][gone] = 0
                unlike = method.velocity.kept[piece.key] != u[number]
                assert (v[number][unlike] == 0).all()
                u[number] = method.velocity.kept[piece.key].clone()
            assert torch.equal(method.velocity.kept.get(piece.key, u[number]), u[number])
            v[number] = left
            came[number] += piece.values
            if not masking:
                assert torch.equal(came[number] + sum(comm.allgather(v[number])), moved[number])


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_density_1_it_is_momentum_of_the_sum(comm: MPI.Intracomm, wire: Wire, nesterov: bool, dtype: Any) -> None:
    method = dgc(1.0, momentum=0.5 if comm.size > 1 else 0.9, nesterov=nesterov)
    make: Make = integers if comm.size > 1 else normal
    start = [normal(shape, 0, 0).to(dtype) for shape in SHAPES]
    ours = [each.clone().requires_grad_() for each in start]
    theirs = [each.clone().requires_grad_() for each in start]
    mine = torch.optim.SGD(ours, lr=0.25)
    torchs = torch.optim.SGD(theirs, lr=0.25, momentum=method.momentum, nesterov=nesterov)
    for step in range(5):
        own = [piece._replace(values=piece.values.to(dtype)) for piece in given(step, comm.rank, make)]
        method.reduce(own, wire)
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = own[number].values
            b.grad = sum(given(step, rank, make)[number].values for rank in range(comm.size)).to(dtype)
        mine.step()
        torchs.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not method.unsent.kept


def test_momentum_and_what_waits_go_on_when_density_changes(comm: MPI.Intracomm, wire: Wire) -> None:
    method = dgc(masking=False)
    u, moved, came = (torch.zeros(SHAPES[0]) for _ in range(3))
    for step, density in enumerate((1.0, 0.1, 0.1, 1.0, 0.1, 1.0)):
        method.density = density
        piece = given(step, comm.rank)[0]
        u = u * 0.5 + piece.values
        moved += sum(comm.allgather(u))
        method.reduce([piece], wire)
        came += piece.values
        assert torch.equal(came, moved) == (density == 1)


def test_zero_gradients_have_momentum_run_out(comm: MPI.Intracomm, wire: Wire) -> None:
    method, sums = dgc(0.5), []
    for step in range(40):
        pieces = given(0, comm.rank) if step == 0 else given(0, comm.rank, lambda shape, *_: torch.zeros(shape))
        method.reduce(pieces, wire)
        assert all(piece.values.isfinite().all() for piece in pieces)
        sums.append(sum(float(piece.values.abs().sum()) for piece in pieces))
    assert sums[0] > 100 and sums[-1] < 1e-6


def test_equal_elements_are_sent_up_to_the_cap(comm: MPI.Intracomm, wire: Wire) -> None:
    method, came = dgc(0.1, momentum=0.0), torch.zeros(10, 10)
    for _ in range(3):
        piece = Piece("x", torch.ones(10, 10), True)
        method.reduce([piece], wire)
        assert 10 <= int(piece.values.count_nonzero()) <= 10 * comm.size
        came += piece.values
    assert torch.equal(came + sum(comm.allgather(method.unsent.kept["x"])), torch.full((10, 10), 3.0 * comm.size))


# ---- warm-up, state --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_density_falls_by_the_same_factor_each_epoch(comm: MPI.Intracomm) -> None:
    def schedule(method: DGC, epochs: int = 7) -> list[float]:
        densities = []
        for epoch in range(epochs):
            method.begin_epoch(epoch)
            densities.append(method.density)
        return densities

    assert DGC().density == schedule(DGC())[0]
    assert schedule(DGC()) == pytest.approx([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001, 0.001], rel=0.02)
    assert schedule(DGC(0.01, warmup_epochs=1), 3) == pytest.approx([0.1, 0.01, 0.01])
    assert schedule(DGC(0.01, warmup_epochs=0), 2) == [0.01, 0.01]
    assert schedule(DGC(1.0), 2) == [1.0, 1.0]


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_state_goes_on_in_the_middle_of_warm_up(comm: MPI.Intracomm, wire: Wire, nesterov: bool) -> None:
    method, again = (DGC(0.05, warmup_epochs=3, nesterov=nesterov) for _ in range(2))
    for epoch in range(5):
        method.begin_epoch(epoch)
        if epoch == 2:
            again.load_state_dict(method.state_dict())
        if epoch >= 2:
            again.begin_epoch(epoch)
            assert again.density == method.density
        for step in range(2):
            pieces = given(2 * epoch + step, comm.rank, normal)
            method.reduce(pieces, wire)
            if epoch >= 2:
                others = given(2 * epoch + step, comm.rank, normal)
                again.reduce(others, wire)
                assert all(torch.equal(a.values, b.values) for a, b in zip(pieces, others, strict=True))


def test_what_travels_is_the_density_of_the_epoch(comm: MPI.Intracomm, wire: Wire) -> None:
    method = DGC(0.01, warmup_epochs=1)
    for epoch, k in ((0, 100), (1, 10), (0, 100)):
        method.begin_epoch(epoch)
        piece = Piece("x", normal((40, 25), epoch, 0), True)
        method.reduce([piece], wire)
        assert k <= int(piece.values.count_nonzero()) <= k * comm.size


@pytest.mark.ranks(2, 4)
def test_fewer_ranks_take_over_what_the_lost_ones_remember(comm: MPI.Intracomm, wire: Wire) -> None:
    """With all sent in the end, as if nobody had been lost; gradients have 1/N inside, whatever N was."""
    method, alone = dgc(masking=False), dgc(1.0)
    came = torch.zeros(SHAPES[0])
    whole = came.clone()
    one = Wire(MPI.COMM_SELF)
    for step in range(3):
        piece = given(step, comm.rank)[0]
        total = Piece("p0", sum(comm.allgather(piece.values)), True)
        method.reduce([piece], wire)
        alone.reduce([total], one)
        came += piece.values
        whole += total.values
    states = comm.allgather(method.state_dict())
    kept = states[0]["unsent"]["p0"].clone()
    merged = merge(states)
    assert torch.equal(states[0]["unsent"]["p0"], kept)
    survivor = dgc(1.0)
    survivor.load_state_dict(merged)
    for step in range(3, 5):
        piece, total = (Piece("p0", integers(SHAPES[0], step, 0), True) for _ in range(2))
        survivor.reduce([piece], one)
        alone.reduce([total], one)
        came += piece.values
        whole += total.values
        assert torch.equal(piece.values, total.values) == (step > 3)
    assert torch.equal(came, whole)
    one.close()


@pytest.mark.ranks(1)
def test_what_one_rank_alone_remembers_is_merged_too(comm: MPI.Intracomm) -> None:
    a, b = ({"method": "dgc", "velocity": {key: torch.ones(2)}, "unsent": {}} for key in "ab")
    merged = merge([a, b, b])
    assert merged["method"] == "dgc" and merged["unsent"] == {}
    assert {key: value.tolist() for key, value in merged["velocity"].items()} == {"a": [1, 1], "b": [2, 2]}
    with pytest.raises(ValueError, match="same method, not"):
        merge([a, {**b, "method": "topk"}])
    with pytest.raises(ValueError, match="no states"):
        merge([])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"density": 0.0}, "above 0 and up to 1, not 0.0"),
        ({"momentum": 1.0}, "momentum is from 0 to below 1, not 1.0"),
        ({"momentum": -0.1}, "momentum is from 0 to below 1, not -0.1"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov needs a momentum above 0"),
        ({"clip_norm": 0.0}, "a length above 0, or None, not 0.0"),
        ({"clip_norm": float("nan")}, "a length above 0, or None, not nan"),
        ({"warmup_epochs": -1}, "a number of epochs, not -1"),
        ({"value_dtype": torch.bfloat16}, "torch.float32 or torch.float16, not torch.bfloat16"),
    ],
)
def test_arguments_that_cannot_work_are_refused(comm: MPI.Intracomm, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        DGC(**options)


# ---- through a wrapped module ----------------------------------------------------------------------------------------


class Layers(nn.Module):
    """What comes into each layer is the gradient of each row of its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 12), nn.Linear(40, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], 1).sum()


def inputs(step: int, rank: int) -> Tensor:
    return integers((1, 40), step, rank)


def whole(method: DGC, comm: MPI.Intracomm, key: str) -> Tensor:
    """What all ranks have not sent of a parameter: in parts, if each has its share."""
    total = torch.zeros(12 if "first" in key else 6, 40)
    for kept in comm.allgather({name: value for name, value in method.unsent.kept.items() if name.startswith(key)}):
        for name, value in kept.items():
            low, high = map(int, name.removeprefix(key).strip("[]").split(":")) if "[" in name else (0, total.numel())
            total.view(-1)[low:high] += value.view(-1)
    return total


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("exchange", ["flat", "by_node"])
def test_a_modules_gradients_come_in_the_end_whatever_the_nodes(
    comm: MPI.Intracomm, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nodes in {1: ["1"], 2: ["1+1", "2"], 4: ["2+2", "1+1+1+1", "4"]}[comm.size]:
        with on_nodes(comm, nodes, monkeypatch) as duplicate:
            model = Layers()
            ddp = DistributedDataParallel(model, duplicate, **SMALL)
            method = dgc(0.05, momentum=0.0)
            Compression(ddp, method, exchange=exchange)
            came, all_ = torch.zeros(40), torch.zeros(40)
            for step in range(4):
                ddp.zero_grad()
                ddp(inputs(step, comm.rank)).backward()
                came = came + model.first.weight.grad[0]
                all_ = all_ + sum(inputs(step, rank)[0] for rank in range(comm.size)) / comm.size
                assert same(comm, [each.grad for each in model.parameters()])
                assert (model.first.bias.grad == 1).all()
            left = whole(method, comm, "first.weight")
            assert left.any()
            assert torch.equal(came + left[0], all_)


@pytest.mark.ranks(1, 2, 4)
def test_new_buckets_keep_what_waits(comm: MPI.Intracomm) -> None:
    model = Layers()
    ddp = DistributedDataParallel(model, comm)
    method = dgc(0.05, momentum=0.0)
    Compression(ddp, method)
    came, all_ = torch.zeros(6, 40), torch.zeros(40)
    for step in range(5):
        model.first.weight.requires_grad_(step % 2 == 0)
        ddp.zero_grad()
        ddp(inputs(step, comm.rank)).backward()
        came += model.second.weight.grad
        all_ = all_ + sum(inputs(step, rank) for rank in range(comm.size)) / comm.size
    left = whole(method, comm, "second.weight")
    assert left.any()
    assert torch.equal(came + left, all_.expand(6, -1))


@pytest.mark.ranks(2)
def test_memory_is_in_true_size_whatever_the_scale(comm: MPI.Intracomm) -> None:
    memories = []
    for scale in (None, 1024.0):
        model = Layers()
        scaler = None if scale is None else GradScaler(comm, init_scale=scale)
        ddp = DistributedDataParallel(model, comm, scaler=scaler, average=False, **SMALL)
        method = dgc(0.05)
        Compression(ddp, method)
        optimiser = torch.optim.SGD(ddp.parameters(), lr=2**-10)
        for step in range(5):
            optimiser.zero_grad()
            loss = ddp(inputs(step, comm.rank))
            if scaler is None:
                loss.backward()
                optimiser.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimiser)
                scaler.update(scaler.get_scale() / 2)
        parameters = [each.detach().clone() for each in model.parameters()]
        memories.append([*method.velocity.kept.values(), *method.unsent.kept.values(), *parameters])
    assert len(memories[0]) == 4 + 2 + 4
    assert all(torch.equal(a, b) for a, b in zip(*memories, strict=True))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("scaled", [True, False])
def test_an_inf_is_seen_by_all_at_once_and_never_remembered(comm: MPI.Intracomm, scaled: bool) -> None:
    model = Layers()
    scaler = GradScaler(comm, init_scale=8.0) if scaled else None
    ddp = DistributedDataParallel(model, comm, scaler=scaler, **SMALL)
    method = dgc(0.05)
    Compression(ddp, method)
    for step in range(3):
        before = {name: dict(memory.kept) for name, memory in method.memories()}
        before = {name: {key: value.clone() for key, value in kept.items()} for name, kept in before.items()}
        ddp.zero_grad()
        loss = ddp(inputs(step, comm.rank)) * (torch.inf if step == 1 and comm.rank == comm.size - 1 else 1)
        (loss if scaler is None else scaler.scale(loss)).backward()
        finite = [bool(each.grad.isfinite().all()) for each in model.parameters()]
        assert finite == [step != 1] * 4
        after = method.state_dict()
        assert all(after[name].keys() == kept.keys() or step == 0 for name, kept in before.items())
        alike = [torch.equal(after[name][key], value) for name, kept in before.items() for key, value in kept.items()]
        assert step != 1 or all(alike)
        if scaler is not None:  # the verdict of this step is asked for before the next
            optimiser = torch.optim.SGD(ddp.parameters(), lr=1.0)
            scaler.step(optimiser)
            scaler.update()


@pytest.mark.ranks(3)
def test_where_dense_is_cheaper_it_is_dense_and_says_so_once(
    comm: MPI.Intracomm, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    method = dgc(0.5, value_dtype=torch.float32)
    with caplog.at_level(logging.INFO, logger="hpcdl"):
        for step in range(2):
            method.reduce(given(step, comm.rank), wire)
    (told,) = [each for each in caplog.messages if "everything is sent" in each] or [""]
    assert (told.startswith("dgc at density 0.5 ")) == (comm.rank == 0)
