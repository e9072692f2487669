"""PowerSGD: the same sum on all ranks, nothing lost over their mean, and near the best that so few columns can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import settings

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.compress.hook import Compression  # noqa: E402
from hpcdl.compress.method import Piece  # noqa: E402
from hpcdl.compress.powersgd import PowerSGD  # noqa: E402
from hpcdl.compress.wire import Wire  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.ranks(1, 3)

TOLERANCE = 1e-5
"""Of the norms: float32 has 7 digits, and a product of some dozen columns loses one or two."""


def random(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """That rank's, the same whoever asks."""
    drawn: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank))
    return drawn


def total(comm: MPI.Comm, make: Callable[[int], Tensor]) -> Tensor:
    """The exact sum over the ranks, to the digits of float32."""
    return torch.stack([make(rank).double() for rank in range(comm.size)]).sum(0).float()


def summed(comm: MPI.Comm, mine: Tensor) -> Tensor:
    return torch.from_numpy(comm.allreduce(mine.double().numpy()))


def reduce(method: PowerSGD, wire: Wire, **gradients: Tensor) -> dict[str, Tensor]:
    pieces = [Piece(key, each.clone(), each.ndim > 1) for key, each in gradients.items()]
    method.reduce(pieces, wire)
    return {piece.key: piece.values for piece in pieces}


def assert_alike(comm: MPI.Comm, *tensors: Tensor) -> None:
    mine = b"".join(each.contiguous().numpy().tobytes() for each in tensors)
    assert len(set(comm.allgather(mine))) == 1


def apart(x: Tensor, y: Tensor) -> float:
    """As a share of y."""
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_what_is_exchanged_and_what_is_kept_are_what_was_given(comm: MPI.Intracomm) -> None:
    method, wire = PowerSGD(rank=2), Wire(comm)
    shapes = {"a": (20, 30), "b": (12, 5, 3, 3), "c": (17, 17)}
    kept = {key: torch.zeros(shape) for key, shape in shapes.items()}
    for step in range(5):
        given = {key: random(comm.rank, *shape, seed=step) for key, shape in shapes.items()}
        exchanged = reduce(method, wire, **given)
        assert_alike(comm, *exchanged.values())
        for key, sent in exchanged.items():
            # Over all ranks, and on each: what it kept before and was given is what it keeps and its part of the sum.
            before = summed(comm, kept[key] + given[key])
            kept[key] = method.error.kept[key].clone()
            assert apart(sent + summed(comm, kept[key]), before) < TOLERANCE
            assert torch.linalg.matrix_rank(sent.flatten(1), rtol=1e-4) == 2  # so not all of it was sent


@pytest.mark.ranks(1, 3)
def test_the_error_on_a_fixed_matrix_nears_the_best_of_that_rank(comm: MPI.Intracomm) -> None:
    exact = total(comm, lambda rank: random(rank, 40, 60))
    u, s, v = torch.linalg.svd(exact, full_matrices=False)
    for rank in (1, 2, 4, 8):
        best = apart((u[:, :rank] * s[:rank]) @ v[:rank], exact)
        method, wire, errors = PowerSGD(rank=rank), Wire(comm), []
        for _ in range(20):
            errors.append(apart(reduce(method, wire, a=random(comm.rank, 40, 60))["a"], exact))
            method.error.kept.clear()  # else it would not be the same matrix
        # Noise has no gap between its singular values, which is the worst case: the first step is some 2 to 20 % off.
        assert best <= errors[-1] < 1.005 * best
        assert errors[-1] < errors[0] and errors[0] > 1.01 * best


def test_a_matrix_of_that_rank_is_sent_whole(comm: MPI.Intracomm) -> None:
    right = random(99, 3, 50)

    def matrix(rank: int) -> Tensor:
        return random(rank, 30, 3) @ right

    exact, method, wire = total(comm, matrix), PowerSGD(rank=3), Wire(comm)
    for _ in range(3):
        exchanged = reduce(method, wire, a=matrix(comm.rank))["a"]
        assert apart(exchanged, exact) < TOLERANCE
        # What the ranks keep of their own cancels out: only the sum is of that rank.
        assert float(summed(comm, method.error.kept["a"]).norm()) < 10 * TOLERANCE * float(exact.norm())


@pytest.mark.ranks(2)
def test_with_the_error_fed_back_a_constant_gradient_gets_through(comm: MPI.Intracomm) -> None:
    exact, method, wire = total(comm, lambda rank: random(rank, 16, 24)), PowerSGD(rank=1), Wire(comm)
    sent, steps = torch.zeros(16, 24), 200
    for _ in range(steps):
        sent += reduce(method, wire, a=random(comm.rank, 16, 24))["a"]
    # The error does not grow, so the mean of what was sent nears the gradient with the number of steps.
    assert apart(sent / steps, exact) < 0.1
    method = PowerSGD(rank=1)
    for _ in range(steps):
        sent = reduce(method, wire, a=random(comm.rank, 16, 24))["a"]
        method.error.kept.clear()
    assert apart(sent, exact) > 0.5


def test_vectors_and_what_would_not_be_shorter_go_as_they_are(comm: MPI.Intracomm) -> None:
    method, wire = PowerSGD(rank=3), Wire(comm)
    shapes = {"bias": (50,), "small": (6, 6), "empty": (0, 4), "thin": (2, 500), "one": (1, 1), "row": (1, 9)}
    numbers = {key: torch.arange(torch.Size(shape).numel()).float().view(shape) for key, shape in shapes.items()}
    exchanged = reduce(method, wire, **{key: each * (comm.rank + 1) for key, each in numbers.items()})
    for key, each in numbers.items():
        assert torch.equal(exchanged[key], each * (comm.size * (comm.size + 1) // 2))
    assert not method.error.kept  # 3 * (6 + 6) is not below 6 * 6
    reduce(method, wire, a=torch.ones(7, 6))  # and 3 * (7 + 6) is below 7 * 6
    assert list(method.error.kept) == ["a"]


@pytest.mark.ranks(2)
def test_no_more_travels_than_two_thin_matrices(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "NODES", "1+1")
    sent, rank, n, m = [], 2, 1000, 400
    comm = comm.Dup()
    for shape in [(n, m), (n * m,)]:
        wire, method, piece = Wire(comm), PowerSGD(rank), Piece("a", torch.ones(shape), len(shape) > 1)
        before = hpcdl.sent_bytes()
        method.reduce([piece], wire)
        sent.append(hpcdl.sent_bytes() - before)
    assert sent[1] == 4 * n * m  # 2 (p - 1) / p of it
    assert sent[0] == 4 * rank * (n + m)
    assert wire.seconds > 0
    comm.Free()


def test_zeros_give_zeros_and_are_no_trap(comm: MPI.Intracomm) -> None:
    method, wire = PowerSGD(rank=2), Wire(comm)
    for _ in range(3):
        assert torch.equal(reduce(method, wire, a=torch.zeros(20, 30))["a"], torch.zeros(20, 30))
    # The columns found are zeros now: to begin with those would send nothing for ever. Nor would it help to begin with
    # the first unit vectors, where a network's first inputs are always 0.
    gradient = torch.zeros(20, 30)
    gradient[5:15, 5:15] = 1
    assert apart(reduce(method, wire, a=gradient)["a"], gradient * comm.size) < TOLERANCE


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_tiny_and_huge_gradients_keep_their_digits(comm: MPI.Intracomm, factor: float) -> None:
    method, wire = PowerSGD(rank=2), Wire(comm)
    ordinary, scaled_method = [], PowerSGD(rank=2)
    for step in range(4):
        gradient = random(comm.rank, 20, 30, seed=step)
        ordinary = reduce(method, wire, a=gradient)["a"]
        scaled = reduce(scaled_method, wire, a=gradient * factor)["a"]
        assert apart(scaled.double() / factor, ordinary) < TOLERANCE


def test_the_gradient_may_lie_in_memory_in_any_order(comm: MPI.Intracomm) -> None:
    plain, other, wire = PowerSGD(rank=1), PowerSGD(rank=1), Wire(comm)
    for step in range(3):
        gradient = random(comm.rank, 8, 4, 3, 3, seed=step)
        expected = reduce(plain, wire, a=gradient)["a"]
        piece = Piece("a", gradient.clone(memory_format=torch.channels_last), True)
        other.reduce([piece], wire)
        assert torch.equal(piece.values, expected)


def test_float64_keeps_its_type_and_loses_nothing(comm: MPI.Intracomm) -> None:
    method, wire = PowerSGD(rank=2), Wire(comm)
    gradient = random(comm.rank, 20, 30).double()
    exchanged = reduce(method, wire, a=gradient)["a"]
    assert exchanged.dtype == method.error.kept["a"].dtype == torch.float64
    assert apart(exchanged + summed(comm, method.error.kept["a"]), summed(comm, gradient)) < TOLERANCE


def test_a_resumed_one_goes_on_to_the_bit(comm: MPI.Intracomm) -> None:
    whole, wire = PowerSGD(rank=2), Wire(comm)
    for step in range(6):
        if step == 3:
            resumed = PowerSGD(rank=2)
            resumed.load_state_dict({name: dict(kept) for name, kept in whole.state_dict().items()})
        gradient = {"a": random(comm.rank, 20, 30, seed=step), "b": random(comm.rank, 9, 25, seed=step + 50)}
        expected = reduce(whole, wire, **gradient)
        if step >= 3:
            # Other buckets than before, too: what is kept goes by the parameter.
            for key in ("b", "a"):
                got = reduce(resumed, wire, **{key: gradient[key]})[key]
                assert torch.equal(got, expected[key])
                assert torch.equal(resumed.error.kept[key], whole.error.kept[key])


def test_another_rank_goes_on_with_columns_drawn_anew(comm: MPI.Intracomm) -> None:
    method, other, wire = PowerSGD(rank=2), PowerSGD(rank=3), Wire(comm)
    reduce(method, wire, a=random(comm.rank, 20, 30))
    other.load_state_dict(method.state_dict())
    exchanged = reduce(other, wire, a=random(comm.rank, 20, 30))["a"]
    assert torch.linalg.matrix_rank(exchanged, rtol=1e-4) == 3


@pytest.mark.ranks(2)
def test_the_seed_is_what_a_training_begins_with(comm: MPI.Intracomm) -> None:
    first = [reduce(PowerSGD(1, seed=seed), Wire(comm), a=random(comm.rank, 9, 9))["a"] for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    # Parameters of one shape begin with other columns.
    both = reduce(PowerSGD(1), Wire(comm), a=random(comm.rank, 9, 9), b=random(comm.rank, 9, 9))
    assert not torch.equal(both["a"], both["b"])


@pytest.mark.ranks(4)
def test_the_bits_are_those_of_all_ranks_whatever_threads_and_addresses_they_have(comm: MPI.Intracomm) -> None:
    method, wire, before = PowerSGD(rank=4), Wire(comm), torch.get_num_threads()
    torch.set_num_threads(1 + comm.rank)
    try:
        for step in range(3):
            flat = torch.empty(700 * 300 + 16)
            view = flat[comm.rank : comm.rank + 700 * 300].view(700, 300).copy_(random(comm.rank, 700, 300, seed=step))
            method.reduce([Piece("a", view, True)], wire)
            assert_alike(comm, view, method.right.kept["a"])
    finally:
        torch.set_num_threads(before)


@pytest.mark.ranks(2)
def test_a_wrapped_module_is_trained_with_it(comm: MPI.Intracomm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
    ddp = DistributedDataParallel(model, comm)
    compression = Compression(ddp, PowerSGD(rank=2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses: list[Any] = []
    for step in range(60):
        x = random(comm.rank, 16, 20, seed=step)
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert compression.residual_norm() > 0
    assert_alike(comm, *(each.detach() for each in ddp.parameters()))


@pytest.mark.ranks(2)
def test_shares_of_matrices_are_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match="powersgd needs whole matrices"):
        Compression(DistributedDataParallel(nn.Linear(9, 9), comm), PowerSGD(), exchange="by_node")


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank is a whole number from 1 upwards, not 0"),
        ({"rank": 2.0}, "rank is a whole number from 1 upwards, not 2.0"),
        ({"seed": -1}, "seed is a whole number from 0 to 4294967295, not -1"),
        ({"seed": 2**32}, "seed is a whole number from 0 to 4294967295, not 4294967296"),
    ],
)
def test_what_makes_no_sense_is_refused(comm: MPI.Intracomm, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PowerSGD(**options)
