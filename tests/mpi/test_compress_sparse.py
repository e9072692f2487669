"""TopK and RandomK: few elements travel, the others wait, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from mpi4py import MPI
from pretended import on_nodes

import hpcdl

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.compress.dense import dense  # noqa: E402
from hpcdl.compress.hook import Compression  # noqa: E402
from hpcdl.compress.method import Method, Piece  # noqa: E402
from hpcdl.compress.sparse import FEW, RandomK, TopK, count, draw, payload_bytes, select  # noqa: E402
from hpcdl.compress.wire import Wire  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.ranks(1, 2, 3)

TYPES = pytest.mark.parametrize("value_dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
SHAPES = [(7, 9), (5,), (), (0, 3), (1, 1), (4, 3, 2)]


@pytest.fixture
def wire(comm: MPI.Intracomm) -> Iterator[Wire]:
    own = Wire(comm)
    yield own
    own.close()


def integers(shape: tuple[int, ...], step: int, rank: int, top: int = 99) -> Tensor:
    """They add up without rounding, and float16 holds them."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(-top, top + 1, shape, generator=random).float()


def normal(shape: tuple[int, ...], step: int, rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def given(step: int, rank: int, make: Any = integers) -> list[Piece]:
    return [
        Piece(f"p{number}", make(shape, step + 50 * number, rank), len(shape) > 1)
        for number, shape in enumerate(SHAPES)
    ]


def same(comm: MPI.Intracomm, pieces: list[Piece]) -> bool:
    """Are they equal on all ranks, to the last bit?"""
    mine = [piece.values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for piece in pieces]
    return all(theirs == mine for theirs in comm.allgather(mine))


def kept(method: Any, piece: Piece) -> Tensor:
    waiting: Tensor = method.unsent.kept.get(piece.key, torch.zeros_like(piece.values))
    return waiting.clone()


def methods(value_dtype: Any = torch.float32) -> list[Method]:
    return [TopK(0.1, value_dtype), RandomK(0.1)]


# ---- dense -----------------------------------------------------------------------------------------------------------


def test_dense_adds_up_whatever_the_pieces_look_like(comm: MPI.Intracomm, wire: Wire) -> None:
    shapes = [(3,), (0,), (), (2, 3, 4, 5)]
    own, sums = [], []
    for number, shape in enumerate(shapes):
        theirs = [integers(shape, number, rank) for rank in range(comm.size)]
        values = theirs[comm.rank].clone(
            memory_format=torch.channels_last if len(shape) == 4 else torch.preserve_format
        )
        own.append(Piece(str(number), values, False))
        sums.append(torch.stack(theirs).sum(0))
    assert not own[-1].values.is_contiguous()
    dense(own, wire)
    assert all(torch.equal(piece.values, expected) for piece, expected in zip(own, sums, strict=True))
    dense([], wire)
    dense(own[1:2], wire)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize("n", [1, 2, 100, 16383, 16384, 300_000])
@pytest.mark.parametrize("density", [1e-4, 0.01, 0.25, 1.0])
@pytest.mark.parametrize("power", [1, 5])
def test_what_is_chosen_is_the_largest_and_about_as_much_as_asked(
    comm: MPI.Intracomm, n: int, density: float, power: int
) -> None:
    x, k = torch.randn(n, generator=torch.Generator().manual_seed(n)).pow(power), count(density, n)
    chosen = select(x, k)
    assert 0.8 * k <= len(chosen) <= k
    assert set(chosen.tolist()) == set(x.abs().topk(len(chosen)).indices.tolist())


@pytest.mark.ranks(1)
@pytest.mark.parametrize("n", [100, 20_000, 200_000])
def test_ties_and_zeros_neither_fill_the_wire_nor_stop_it(comm: MPI.Intracomm, n: int) -> None:
    k = n // 100
    assert len(select(torch.zeros(n), k)) <= k
    for equal in torch.ones(n), -torch.ones(n), torch.full((n,), 1e-42):
        assert len(set(select(equal, k).tolist())) == k
    few = torch.zeros(n)
    few[n // 3 : n // 3 + k // 2] = torch.arange(1.0, k // 2 + 1) * -1
    chosen = set(select(few, k).tolist())
    assert chosen >= set(range(n // 3, n // 3 + k // 2)) and len(chosen) <= k
    assert n < FEW or len(chosen) == k // 2  # what is 0 is not sent where nobody has to sort
    two = torch.ones(n)
    two[::7] = 2
    chosen = select(two, k)
    assert 0.8 * k <= len(chosen) <= k and (two[chosen] == 2).all()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("width", [100, 101, 128, 1000])
def test_a_matrix_with_few_large_columns_is_sampled_fairly(comm: MPI.Intracomm, width: int) -> None:
    x = torch.randn(3000, width, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 1000
    k = x.numel() // 1000
    chosen = select(x.view(-1), k)
    assert 0.8 * k <= len(chosen) <= k and (chosen % width == 0).all()


@pytest.mark.ranks(1)
def test_the_number_is_rounded_up_and_at_least_one_of_some(comm: MPI.Intracomm) -> None:
    assert [count(0.1, n) for n in (0, 1, 9, 10, 11, 30, 70)] == [0, 1, 1, 1, 2, 3, 7]
    assert [count(0.001, n) for n in (1, 999, 1000, 1001, 10_000_000)] == [1, 1, 1, 2, 10_000]
    assert [count(0.07, n) for n in (99, 100, 101)] == [7, 7, 8]
    assert [count(1, n) for n in (0, 1, 7)] == [0, 1, 7]


# ---- laws ------------------------------------------------------------------------------------------------------------


@TYPES
def test_nothing_is_lost_and_all_ranks_get_the_same(comm: MPI.Intracomm, wire: Wire, value_dtype: Any) -> None:
    for method in methods(value_dtype):
        for step in range(5):
            pieces = given(step, comm.rank)
            known = [piece.values + kept(method, piece) for piece in pieces]
            method.reduce(pieces, wire)
            sent = [each - kept(method, piece) for each, piece in zip(known, pieces, strict=True)]
            assert all(
                torch.equal(piece.values, torch.stack(parts).sum(0))
                for piece, *parts in zip(pieces, *comm.allgather(sent), strict=True)
            )
            assert same(comm, pieces)
            for piece, mine in zip(pieces, sent, strict=True):
                n = piece.values.numel()
                assert int((mine != 0).sum()) <= (count(0.1, n) if piece.is_matrix else n)


@TYPES
def test_the_largest_travel(comm: MPI.Intracomm, wire: Wire, value_dtype: Any) -> None:
    method = TopK(0.1, value_dtype)
    for step in range(3):
        (piece, *_) = pieces = given(step, comm.rank, normal)
        known = piece.values + kept(method, piece)
        method.reduce(pieces, wire)
        largest = known.view(-1).abs().topk(count(0.1, known.numel())).indices
        left = kept(method, piece).view(-1)
        rounding = torch.finfo(value_dtype).eps / 2 if value_dtype is torch.float16 else 0.0
        assert (left[largest].abs() <= known.view(-1)[largest].abs() * rounding).all()
        others = torch.ones(left.shape, dtype=torch.bool).index_fill_(0, largest, False)
        assert torch.equal(left[others], known.view(-1)[others])


@pytest.mark.ranks(2, 3, 5)
@TYPES
def test_all_ranks_have_the_same_bits_also_where_sums_round(comm: MPI.Intracomm, wire: Wire, value_dtype: Any) -> None:
    for method in methods(value_dtype):
        for step in range(3):
            pieces = given(step, comm.rank, normal)
            method.reduce(pieces, wire)
            assert same(comm, pieces)


@pytest.mark.ranks(1)
@TYPES
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e9, 3e38])
def test_what_rounding_loses_is_kept_at_any_size(
    comm: MPI.Intracomm, wire: Wire, value_dtype: Any, size: float
) -> None:
    method, x = TopK(0.1, value_dtype), torch.linspace(0.1, 1, 100).view(10, 10) * size
    piece = Piece("x", x.clone(), True)
    method.reduce([piece], wire)
    assert torch.equal(piece.values + kept(method, piece), x)
    assert int(piece.values.count_nonzero()) == 10
    assert torch.allclose(piece.values[-1], x[-1], rtol=torch.finfo(value_dtype).eps / 2, atol=0)


def test_an_index_on_several_ranks_counts_as_often(comm: MPI.Intracomm, wire: Wire) -> None:
    values = torch.full((4, 5), 0.5)
    values[2, 3], values[0, 0] = 7.0, 3.0
    piece = Piece("x", values, True)
    TopK(0.1).reduce([piece], wire)
    expected = torch.zeros(4, 5)
    expected[2, 3], expected[0, 0] = 7.0 * comm.size, 3.0 * comm.size
    assert torch.equal(piece.values, expected)


def test_zero_gradients_stay_zero(comm: MPI.Intracomm, wire: Wire) -> None:
    for method in methods():
        pieces = given(0, comm.rank, lambda shape, *_: torch.zeros(shape))
        method.reduce(pieces, wire)
        assert not any(piece.values.any() for piece in pieces)


@pytest.mark.ranks(2, 3)
def test_a_rank_with_nothing_to_send_is_no_hindrance(comm: MPI.Intracomm, wire: Wire) -> None:
    x = torch.zeros(200, 200)
    if comm.rank:
        x[3, 4] = 5.0
    piece = Piece("x", x, True)
    TopK(0.001).reduce([piece], wire)
    assert piece.values[3, 4] == 5 * (comm.size - 1) and piece.values.count_nonzero() == 1


def test_strides_make_no_difference(comm: MPI.Intracomm, wire: Wire) -> None:
    for plain, other in zip(methods(), methods(), strict=True):
        for step in range(3):
            x = integers((2, 3, 4, 5), step, comm.rank)
            mine = Piece("x", x.clone(), True)
            theirs = Piece("x", x.clone(memory_format=torch.channels_last), True)
            plain.reduce([mine], wire)
            other.reduce([theirs], wire)
            assert torch.equal(mine.values, theirs.values)


def test_double_precision_keeps_what_float32_cannot_hold(comm: MPI.Intracomm, wire: Wire) -> None:
    x = normal((10, 10), 0, comm.rank).double() / 3
    piece, method = Piece("x", x.clone(), True), TopK(0.1)
    method.reduce([piece], wire)
    left = kept(method, piece)
    assert left.dtype is torch.float64
    # A float32 value and its double remainder: their sum has at most 53 bits, so nothing rounds.
    assert torch.equal(sum(comm.allgather(x - left)), piece.values)


# ---- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("value_dtype", "least"), [(torch.float32, 240), (torch.float16, 320)])
def test_the_bytes_sent_are_the_cap_and_a_small_part_of_a_rings(
    comm: MPI.Intracomm, value_dtype: Any, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 400_000
    with on_nodes(comm, "+".join("1" * comm.size), monkeypatch) as duplicate:
        wire, method = Wire(duplicate), TopK(0.001, value_dtype)
        for values in normal((n // 100, 100), 0, comm.rank), torch.zeros(n // 100, 100):
            before = hpcdl.sent_bytes()
            method.reduce([Piece("x", values, True)], wire)
            sent = hpcdl.sent_bytes() - before
            assert sent == payload_bytes([n // 1000], value_dtype) * (comm.size - 1)
            assert comm.size != 4 or 2 * 3 / 4 * 4 * n / sent >= least
        wire.close()


@pytest.mark.ranks(2, 4)
def test_a_payload_that_is_longer_than_a_ring_is_not_sent(
    comm: MPI.Intracomm, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    method = TopK(1 / comm.size + 0.1)
    with caplog.at_level(logging.INFO, logger="hpcdl"):
        for step in range(2):
            pieces = given(step, comm.rank)
            method.reduce(pieces, wire)
            for number, piece in enumerate(pieces):
                theirs = [given(step, rank)[number].values for rank in range(comm.size)]
                assert torch.equal(piece.values, torch.stack(theirs).sum(0))
    told = [each for each in caplog.messages if "everything is sent" in each]
    assert len(told) == (comm.rank == 0)
    assert not method.unsent.kept


def test_what_waits_goes_along_when_all_is_sent(comm: MPI.Intracomm, wire: Wire) -> None:
    method, total = TopK(0.1), [torch.zeros(shape) for shape in SHAPES]
    for step, density in enumerate((0.1, 0.1, 1.0, 0.1, 1.0)):
        method.density = density
        pieces = given(step, comm.rank)
        method.reduce(pieces, wire)
        for sum_, piece, *theirs in zip(total, pieces, *(given(step, rank) for rank in range(comm.size)), strict=True):
            sum_ += sum(each.values for each in theirs) - piece.values  # what all ranks have kept
        assert density < 1 or not any(sum_.any() for sum_ in total)
        assert density == 1 or total[0].any()


# ---- RandomK ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("n", "k"), [(0, 0), (1, 1), (7, 3), (100, 1), (100, 99), (100, 100), (1000, 37)])
def test_drawn_indices_are_distinct_and_each_as_likely(comm: MPI.Intracomm, n: int, k: int) -> None:
    random, often, draws = torch.Generator().manual_seed(0), torch.zeros(n), 2000
    for _ in range(draws):
        indices = draw(n, k, random)
        assert len(set(indices.tolist())) == k
        often[indices] += 1
    # The parts differ by one element in length; beside that, five standard deviations of a binomial distribution.
    if n:
        least, most = 1 / -(-n // k), 1 / (n // k)
        spread = 5 * (draws * most * (1 - least)) ** 0.5
        assert often.min() >= draws * least - spread and often.max() <= draws * most + spread


def test_each_step_draws_anew_and_no_element_waits_for_ever(comm: MPI.Intracomm, wire: Wire) -> None:
    method, seen = RandomK(0.1, seed=3), []
    for _ in range(60):
        piece = Piece("x", torch.ones(10, 10), True)
        method.reduce([piece], wire)
        assert int(piece.values.count_nonzero()) == 10
        seen.append(piece.values != 0)
    assert not any(torch.equal(*pair) for pair in pairwise(seen))
    assert torch.stack(seen).any(0).all()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("differs", ["seed", "state"])
def test_ranks_that_would_draw_differently_are_told_so(comm: MPI.Intracomm, wire: Wire, differs: str) -> None:
    odd = comm.rank == comm.size - 1
    method = RandomK(0.1, seed=4 + (differs == "seed" and odd))
    if differs == "state" and odd:
        method.load_state_dict({"unsent": {}, "calls": 7})
    with pytest.raises(ValueError, match=r"seeds are 4 to 5.*0 to 0" if differs == "seed" else r"4 to 4.*0 to 7"):
        method.reduce(given(0, comm.rank), wire)


# ---- state, arguments ------------------------------------------------------------------------------------------------


@TYPES
def test_a_state_goes_on_as_if_nothing_had_happened(comm: MPI.Intracomm, wire: Wire, value_dtype: Any) -> None:
    for method, again in zip(methods(value_dtype), methods(value_dtype), strict=True):
        for step in range(6):
            if step == 3:
                again.load_state_dict(method.state_dict())
            pieces = given(step, comm.rank, normal)
            method.reduce(pieces, wire)
            if step >= 3:
                others = given(step, comm.rank, normal)
                again.reduce(others, wire)
                assert all(torch.equal(a.values, b.values) for a, b in zip(pieces, others, strict=True))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("density", [0, -0.1, 1.1, float("nan")])
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_a_density_is_a_part(comm: MPI.Intracomm, kind: Any, density: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and up to 1, not {density}"):
        kind(density)


@pytest.mark.ranks(1)
def test_other_arguments_that_cannot_work_are_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match=r"torch.float32 or torch.float16, not torch.bfloat16"):
        TopK(0.1, torch.bfloat16)
    with pytest.raises(ValueError, match=r"2\*\*32 - 1, not -1"):
        RandomK(0.1, seed=-1)


# ---- through a wrapped module ----------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_gradients_of_a_module_come_through_in_the_end(comm: MPI.Intracomm, kind: Any, average: bool) -> None:
    layer = nn.Linear(16, 8)
    ddp = DistributedDataParallel(layer, comm, average=average, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
    method = kind(0.05)
    Compression(ddp, method)
    came, whole = torch.zeros(8, 16), torch.zeros(8, 16)
    for step in range(4):
        ddp.zero_grad()
        # As many powers of two as ranks divide without rounding.
        ddp(integers((1, 16), step, comm.rank) * 4).sum().backward()
        came += layer.weight.grad
        for rank in range(comm.size):
            whole += integers((1, 16), step, rank) * 4 / (comm.size if average else 1)
        assert (layer.bias.grad == (1 if average else comm.size)).all()
    waiting = sum(comm.allgather(method.unsent.kept["weight"]))
    assert waiting.any()
    assert torch.equal(came + waiting, whole)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_a_module_may_be_converted_in_between(comm: MPI.Intracomm, wire: Wire, kind: Any) -> None:
    method, came, whole = kind(0.1), torch.zeros(10, 10), torch.zeros(10, 10)
    for step, dtype in enumerate((torch.float32, torch.float64, torch.float64, torch.float32)):
        piece = Piece("x", integers((10, 10), step, comm.rank).to(dtype), True)
        whole += sum(comm.allgather(piece.values.float()))
        method.reduce([piece], wire)
        assert piece.values.dtype is dtype
        came += piece.values.float()
    assert torch.equal(came + sum(comm.allgather(method.unsent.kept["x"].float())), whole)
