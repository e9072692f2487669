"""Quantised gradients: the same bits on all ranks, nothing lost or nothing biased, and as few bytes as they claim."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from cases import pretended
from mpi4py import MPI

import hpcdl

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.compress.codecs import Levels, Noise  # noqa: E402
from hpcdl.compress.hook import Compression  # noqa: E402
from hpcdl.compress.method import Method, Piece  # noqa: E402
from hpcdl.compress.quantise import QSGD, OneBit, SignSGD, TernGrad  # noqa: E402
from hpcdl.compress.wire import Wire  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.ranks(3)

Make = Callable[[], Method]


def small_blocks_onebit() -> Method:
    return OneBit(column=16)


def qsgd4() -> Method:
    return QSGD(bits=4, bucket=24)


def qsgd2() -> Method:
    return QSGD(bits=2, bucket=7)


def unclipped() -> Method:
    return TernGrad(clip=None)


def fed_signs() -> Method:
    return SignSGD(feedback=True, block=16)


ALL = [OneBit, small_blocks_onebit, QSGD, qsgd4, qsgd2, TernGrad, unclipped, SignSGD, fed_signs]
PLAIN = [OneBit, QSGD, TernGrad, SignSGD, fed_signs]
FED = [OneBit, small_blocks_onebit, fed_signs]
every_method = pytest.mark.parametrize("make", ALL)
every_plain_method = pytest.mark.parametrize("make", PLAIN)
every_fed = pytest.mark.parametrize("make", FED)

SHAPES = {"a": (33, 31), "b.bias": (5,), "c": (7, 5), "d": (0, 3), "e": (1, 1), "f": (2, 1), "g": (3, 5, 2, 2)}
"""Odd, empty, of fewer elements than ranks; and one that is added up as it is."""


def numbers(key: str, rank: int, step: int = 0) -> Tensor:
    """What a rank has for a parameter: normal numbers, of another size for each parameter."""
    seed = crc32(f"{key} {rank} {step}".encode())
    drawn = torch.randn(SHAPES[key], generator=torch.Generator().manual_seed(seed))
    return drawn * 10.0 ** (-(ord(key[0]) % 3))


def pieces_of(keys: Iterable[str], rank: int, step: int = 0) -> list[Piece]:
    return [Piece(key, numbers(key, rank, step), "bias" not in key) for key in keys]


def total_of(key: str, ranks: int, step: int = 0) -> Tensor:
    return sum(numbers(key, rank, step).double() for rank in range(ranks))  # type: ignore[return-value]


def reduced(method: Method, wire: Wire, keys: Iterable[str] = SHAPES, step: int = 0) -> dict[str, Tensor]:
    pieces = pieces_of(keys, wire.rank, step)
    method.reduce(pieces, wire)
    return {piece.key: piece.values for piece in pieces}


def one(method: Method, wire: Wire, values: Tensor, key: str = "w") -> Tensor:
    """A single matrix, reduced."""
    method.reduce([Piece(key, values, True)], wire)
    return values


def same(comm: MPI.Intracomm, tensors: Iterable[Tensor]) -> bool:
    """Are they equal on all ranks, to the last bit?"""
    plain = [each.contiguous().numpy().tobytes() for each in tensors]
    return all(each == plain for each in comm.allgather(plain))


def kept_by_all(method: Method, comm: MPI.Intracomm, key: str) -> Tensor:
    """What all ranks together have not sent yet of a parameter."""
    mine = torch.zeros(SHAPES[key], dtype=torch.float64)
    for _, memory in method.memories():
        if key in memory.kept:
            mine += memory.kept[key]
    return hpcdl.allreduce(mine, comm)  # type: ignore[no-any-return]


# ---- for all of them -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3, 5)
@every_method
def test_all_ranks_get_the_same_bits(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    for step in range(3):
        results = reduced(method, wire, step=step)
        assert same(comm, results.values())
        assert all(each.isfinite().all() for each in results.values())
    wire.close()


@pytest.mark.ranks(1, 3)
@every_method
def test_biases_are_added_up_as_they_are(comm: MPI.Intracomm, make: Make) -> None:
    whole = torch.tensor([0.0, 1, -2, 3, -4])
    pieces = [Piece("b.bias", whole * (comm.rank + 1), False), Piece("w", torch.ones(3, 3), True)]
    make().reduce(pieces, Wire(comm))
    exact = whole * sum(range(1, comm.size + 1))
    if make is SignSGD:
        exact = torch.tensor([1.0, 1, -1, 1, -1])
    assert torch.equal(pieces[0].values, exact)


@every_plain_method
def test_zeros_stay_zeros(comm: MPI.Intracomm, make: Make) -> None:
    result = one(make(), Wire(comm), torch.zeros(9, 5))
    assert (result == (1 if make is SignSGD else 0)).all()


@every_plain_method
def test_nothing_to_reduce_is_fine(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    method.reduce([], wire)
    assert one(method, wire, torch.zeros(0, 4)).shape == (0, 4)
    method.reduce([Piece("bias", torch.zeros(0), False)], wire)


@every_method
def test_where_the_numbers_lie_does_not_matter(comm: MPI.Intracomm, make: Make) -> None:
    wire, other = Wire(comm), Wire(comm)
    values = numbers("g", comm.rank)
    turned = values.clone().contiguous(memory_format=torch.channels_last)
    cut = torch.zeros(3, 5, 2, 4)[..., ::2].copy_(values)
    plain = one(make(), wire, values.clone())
    assert not turned.is_contiguous() and not cut.is_contiguous()
    assert torch.equal(one(make(), other, turned), plain)
    assert torch.equal(one(make(), other, cut), plain)
    if make is not TernGrad:  # of which the clip is computed in another precision
        assert torch.equal(one(make(), other, values.double()), plain.double())


@pytest.mark.ranks(1, 3)
@every_method
def test_a_resumed_run_has_the_same_bits(comm: MPI.Intracomm, make: Make) -> None:
    wire, straight, resumed = Wire(comm), make(), make()
    for step in range(3):
        reduced(straight, wire, step=step)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    for step in range(3, 6):
        expected = reduced(straight, wire, step=step)
        for key, each in reduced(resumed, Wire(comm), step=step).items():
            assert torch.equal(each, expected[key])


@every_plain_method
def test_a_state_from_before_the_first_step_is_one_too(comm: MPI.Intracomm, make: Make) -> None:
    begun, fresh = make(), make()
    begun.load_state_dict(copy.deepcopy(make().state_dict()))
    expected = reduced(fresh, Wire(comm))
    assert all(torch.equal(each, expected[key]) for key, each in reduced(begun, Wire(comm)).items())


@pytest.mark.parametrize("make", [OneBit, small_blocks_onebit, SignSGD, fed_signs])
def test_what_travels_together_does_not_matter(comm: MPI.Intracomm, make: Make) -> None:
    together = reduced(make(), Wire(comm))
    method, wire = make(), Wire(comm)
    apart = {key: value for key in SHAPES for key, value in reduced(method, wire, [key]).items()}
    assert all(torch.equal(together[key], apart[key]) for key in SHAPES)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (OneBit, {"column": 0}, "column is a whole number from 1 upwards, not 0"),
        (QSGD, {"bits": 3}, "bits is 2, 4 or 8, not 3"),
        (QSGD, {"bucket": -1}, "bucket is a whole number from 1 upwards, not -1"),
        (QSGD, {"seed": -1}, "seed is a whole number from 0 to 4294967295, not -1"),
        (TernGrad, {"clip": 0.0}, "clip is a number of standard deviations above 0, or None, not 0.0"),
        (TernGrad, {"clip": math.nan}, "clip is a number of standard deviations above 0, or None, not nan"),
        (SignSGD, {"block": 2.5}, "block is a whole number from 1 upwards, not 2.5"),
    ],
)
@pytest.mark.ranks(1)
def test_what_makes_no_sense_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


# ---- nothing is lost -------------------------------------------------------------------------------------------------


def near(one: Tensor, other: Tensor, size: float) -> bool:
    """Do they differ by the rounding of float32 alone? Each step rounds numbers of the residual's size some times."""
    return bool((one - other).abs().max() <= 100 * 2.0**-24 * size) if one.numel() else True


@pytest.mark.ranks(1, 2, 3, 5)
@every_fed
def test_what_was_sent_and_what_is_kept_is_what_was_given(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    sent = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    given = copy.deepcopy(sent)
    for step in range(10):
        for key, result in reduced(method, wire, step=step).items():
            sent[key] += result
            given[key] += total_of(key, comm.size, step)
    for key in SHAPES:
        kept = kept_by_all(method, comm, key)
        size = float(given[key].abs().amax() + kept.abs().amax()) if kept.numel() else 0
        assert near(sent[key] + kept, given[key], size * comm.size)
        assert torch.count_nonzero(sent[key]) == sent[key].numel()


@every_fed
def test_a_gradient_that_stays_gets_through(comm: MPI.Intracomm, make: Make) -> None:
    # What is kept of it is bounded, so the mean of what is sent comes to the gradient in the end.
    method, wire = make(), Wire(comm)
    exact, sent, errors = total_of("a", comm.size), torch.zeros(SHAPES["a"]), []
    for step in range(1, 51):
        sent += reduced(method, wire, ["a"])["a"]
        if step in (1, 12, 50):
            errors.append(float((sent / step - exact).norm() / exact.norm()))
    assert errors[0] < 1  # nearer than zeros
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 1.7


def owners(method: Method, comm: MPI.Intracomm, key: str) -> Tensor:
    """How many ranks keep something of each element's sum. Of more than one, somebody's would never be sent."""
    summed = dict(method.memories())["summed"].kept[key]
    return hpcdl.allreduce((summed != 0).to(torch.int32), comm)  # type: ignore[no-any-return]


# One rank's two values a column are encoded again as they are, and nothing need be lost.
@pytest.mark.ranks(3)
@every_fed
def test_no_rank_keeps_what_is_lost_of_another_ones_part(comm: MPI.Intracomm, make: Make) -> None:
    method = make()
    reduced(method, Wire(comm), ["a"])
    assert owners(method, comm, "a").max() == 1


@pytest.mark.ranks(3)
@every_fed
def test_what_another_rank_has_kept_is_sent_on(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    sent = sum(reduced(method, wire, ["a"], step)["a"].double() for step in range(3))
    states = comm.allgather(method.state_dict())
    method.load_state_dict(states[(comm.rank + 1) % comm.size])
    sent += reduced(method, wire, ["a"], 3)["a"]
    given, kept = sum(total_of("a", comm.size, step) for step in range(4)), kept_by_all(method, comm, "a")
    assert near(sent + kept, given, float(given.abs().amax() + kept.abs().amax()) * comm.size)
    assert owners(method, comm, "a").max() == 1


@every_fed
def test_what_is_kept_survives_other_buckets(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    keys = [key for key in SHAPES if key != "b.bias"]
    sent = {key: torch.zeros(SHAPES[key], dtype=torch.float64) for key in keys}
    for step in range(9):
        buckets = (["a", "c", "d"], ["e", "f", "g"]) if step < 3 else (["g", "a"], ["c"], ["f", "e", "d"])
        for bucket in buckets if step < 6 else (keys[::-1],):
            for key, result in reduced(method, wire, bucket, step).items():
                sent[key] += result
    for key in keys:
        given = sum(total_of(key, comm.size, step) for step in range(9))
        kept = kept_by_all(method, comm, key)
        size = float(given.abs().amax() + kept.abs().amax()) if kept.numel() else 0
        assert near(sent[key] + kept, given, size * comm.size)
        assert not kept.numel() or owners(method, comm, key).max() <= 1


@pytest.mark.ranks(2, 4)
@every_fed
def test_what_a_lost_rank_has_kept_is_sent_by_the_others(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    sent, given = torch.zeros(SHAPES["a"], dtype=torch.float64), torch.zeros(SHAPES["a"], dtype=torch.float64)
    for step in range(4):
        sent += reduced(method, wire, ["a"], step)["a"]
        given += total_of("a", comm.size, step)
    lost, states = comm.size - 1, comm.gather(method.state_dict())
    if comm.rank == 0:
        for name in ("own", "summed"):
            for key in states[0][name]:
                states[0][name][key] = states[0][name][key] + states[lost][name][key]
        method.load_state_dict(states[0])
    fewer = comm.Split(int(comm.rank == lost), comm.rank)
    if comm.rank != lost:
        wire = Wire(fewer)
        for step in range(4, 8):
            sent += reduced(method, wire, ["a"], step)["a"]
            given += total_of("a", fewer.size, step)
        kept = kept_by_all(method, fewer, "a")
        assert near(sent + kept, given, float(given.abs().amax() + kept.abs().amax()) * comm.size)
        assert owners(method, fewer, "a").max() == 1
    fewer.Free()


@every_fed
def test_numbers_too_large_to_add_do_not_stay(comm: MPI.Intracomm, make: Make) -> None:
    method, wire = make(), Wire(comm)
    with torch.no_grad():
        huge = one(method, wire, torch.full((6, 6), 3e38), "e")
    assert same(comm, [huge])
    assert all(each.isfinite().all() for each in method.residuals())
    method.state_dict()
    other = make()
    other.load_state_dict(method.state_dict())
    assert one(other, wire, torch.ones(6, 6), "other").isfinite().all()


@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_columns_of_two_values_travel_exactly(comm: MPI.Intracomm, rows: int) -> None:
    # Whatever part of a block is filled: a gap has no part in the means.
    signs = torch.arange(rows * 13) % 3 == 1
    method, wire = OneBit(column=16), Wire(comm)
    for _ in range(3):
        values = torch.where(signs, 3.0 * comm.rank + 1, -comm.rank - 2.0).view(rows, 13)
        exact = [torch.where(signs, 3.0 * rank + 1, -rank - 2.0).view(rows, 13) for rank in range(comm.size)]
        assert torch.equal(one(method, wire, values), sum(exact))
    assert not any(each.any() for each in method.residuals())


@pytest.mark.ranks(1, 2, 3, 5)
def test_numbers_of_one_magnitude_travel_exactly_as_scaled_signs(comm: MPI.Intracomm) -> None:
    signs = torch.where(torch.arange(65) % 3 == 1, 1.0, -1.0).view(5, 13)
    method = SignSGD(feedback=True, block=16)
    assert torch.equal(one(method, Wire(comm), signs * (comm.rank + 1)), signs * sum(range(1, comm.size + 1)))
    assert not any(each.any() for each in method.residuals())


# ---- nothing is biased -----------------------------------------------------------------------------------------------


def unbiased(draws: Tensor, exact: Tensor) -> bool:
    """Is the mean of each column within 5 standard errors of what it should be?

    Bernstein's inequality has a second term for what is drawn seldom; 1e-6 is for float32's own rounding.
    """
    draws = draws.double()
    strays = (draws - exact).abs().max()
    error = (draws.mean(0) - exact).abs()
    allowed = 5 * draws.std(0) / math.sqrt(len(draws)) + 9 * strays / len(draws) + 1e-6 * exact.abs().max()
    return bool((error <= allowed).all())


@pytest.mark.parametrize(
    "make", [lambda: QSGD(bucket=35), lambda: QSGD(bits=4, bucket=35), lambda: QSGD(bits=2, bucket=7), unclipped]
)
def test_the_mean_of_many_is_the_exact_sum(comm: MPI.Intracomm, make: Make) -> None:
    # 2,000 equal rows of whole buckets: as many draws.
    rows = [numbers("c", rank).view(1, 35).repeat(2000, 1) for rank in range(comm.size)]
    drawn = one(make(), Wire(comm), rows[comm.rank].clone())
    assert unbiased(drawn, sum(each[0].double() for each in rows))
    assert len(drawn.unique(dim=0)) > 1000


@pytest.mark.ranks(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "equal", "one", "tiny", "huge"])
def test_a_level_is_unbiased_and_within_the_variance_bound(bits: int, kind: str) -> None:
    draws, n = 2000, 512
    vector = {
        "normal": torch.randn(n, generator=torch.Generator().manual_seed(1)),
        "equal": torch.ones(n),
        "one": torch.arange(float(n)) == 5,
        "tiny": torch.linspace(-1, 1, n) * 1e-30,
        "huge": torch.linspace(-1, 1, n) * 1e30,
    }[kind].float()
    noise = Noise(3)
    noise.begin(0, vector.device)
    codec = Levels(bits, n, noise)
    payload = codec.encode(vector.expand(draws, n).contiguous(), torch.full((draws, 1), float(n)))
    decoded = codec.decode(payload, n).double()
    exact = vector.double()
    assert payload.shape == (draws, 4 + n * bits // 8)
    assert unbiased(decoded, exact)
    ratio = float(decoded.square().sum(1).mean() / exact.square().sum())
    # E||Q||**2 is ||v||**2 and the variance; the mean of 2,000 draws strays by a hundredth or two of it.
    bound = 1 + min(n / codec.levels**2, math.sqrt(n) / codec.levels)
    assert 0.99 <= ratio <= bound


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("make", [QSGD, TernGrad])
def test_ranks_do_not_round_alike(comm: MPI.Intracomm, make: Make) -> None:
    # With the same noise on all of them the errors of equal numbers would add up, and not partly cancel.
    method = make()
    one(method, Wire(comm), torch.ones(6, 6))
    states = comm.allgather(method.state_dict()["noise"]["state"].numpy().tobytes())
    assert len(set(states)) == comm.size


# ---- each of them ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4, 5)
def test_signs_are_voted_for(comm: MPI.Intracomm) -> None:
    def of(rank: int) -> Tensor:
        return (torch.arange(77) * (2 * rank + 3) % 5 - 2.0).view(7, 11)

    votes = sum(torch.where(of(rank) >= 0, 1, -1) for rank in range(comm.size))
    if comm.size in (2, 4, 8):
        assert (votes == 0).any()
    result = one(SignSGD(), Wire(comm), of(comm.rank))
    assert torch.equal(result, torch.where(votes >= 0, 1.0, -1.0))


@pytest.mark.ranks(1, 2, 3, 5)
def test_a_number_alone_in_its_bucket_is_not_rounded(comm: MPI.Intracomm) -> None:
    values = torch.zeros(40, 8)
    values[::5, 3] = 127.0 * (comm.rank + 1)
    values[::10, 3] *= -1
    exact = values / (comm.rank + 1) * sum(range(1, comm.size + 1))
    assert torch.equal(one(QSGD(bucket=40), Wire(comm), values), exact)


@pytest.mark.ranks(1, 2, 3, 5)
def test_ternary_sums_are_integers_times_the_largest_of_all(comm: MPI.Intracomm) -> None:
    pieces = [Piece("w", torch.ones(60, 6) * (comm.rank + 1), True), Piece("v", torch.zeros(3, 3), True)]
    pieces[0].values[0, 0] = 64.0 if comm.rank == comm.size - 1 else 0
    unclipped().reduce(pieces, Wire(comm))
    counts = pieces[0].values / 64
    assert torch.equal(counts, counts.round())
    assert counts.min() >= 0 and counts.max() <= comm.size and counts[0, 0] == 1
    assert 0 < counts.sum() < 360 * comm.size / 4
    assert not pieces[1].values.any()


@pytest.mark.parametrize("rank_has", [1.0, -3.0])
def test_a_single_number_is_not_clipped_away(comm: MPI.Intracomm, rank_has: float) -> None:
    assert one(TernGrad(), Wire(comm), torch.full((1, 1), rank_has)) == comm.size * rank_has


def test_the_clip_makes_the_scale_smaller(comm: MPI.Intracomm) -> None:
    values = torch.ones(100, 10)
    values[0, 0] = 1000.0
    most = 2.5 * math.sqrt((999 + 1e6) / 1000)
    result = one(TernGrad(), Wire(comm), values)
    assert result[0, 0] == pytest.approx(comm.size * most)
    assert float(result.max()) <= comm.size * most * 1.00001


@pytest.mark.ranks(1)
def test_terngrad_refuses_more_ranks_than_a_byte_can_add() -> None:
    wire: Any = SimpleNamespace(size=128, rank=0)
    with pytest.raises(ValueError, match="serves 127 ranks, not 128"):
        TernGrad().reduce([Piece("w", torch.ones(2, 2), True)], wire)


# ---- on the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("make", "bits", "values_a_block"),
    [
        (OneBit, 1, 2),
        (QSGD, 8, 1),
        (lambda: QSGD(bits=4), 4, 1),
        (lambda: QSGD(bits=2), 2, 1),
        (SignSGD, 1, 0),
        (lambda: SignSGD(feedback=True), 1, 1),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
def test_as_many_bytes_are_sent_as_are_claimed(
    comm: MPI.Intracomm, make: Make, bits: int, values_a_block: int, apart: bool
) -> None:
    n, p = 512 * 12 * 5, comm.size
    with pretended(comm, "+".join("1" * p) if apart else str(p)) as among:
        method, wire = make(), Wire(among)
        for _ in range(2):  # a bound plan sends as much as the first time
            values = torch.randn(512, 60)
            before = hpcdl.sent_bytes()
            one(method, wire, values)
            sent = hpcdl.sent_bytes() - before
            assert sent == 2 * (p - 1) * (n // p * bits // 8 + n // p // 512 * 4 * values_a_block)
        wire.close()


@pytest.mark.ranks(2, 4)
def test_terngrad_sends_a_byte_for_each_number(comm: MPI.Intracomm) -> None:
    n, p = 512 * 60, comm.size
    with pretended(comm, "+".join("1" * p)) as among:
        wire = Wire(among)
        before = hpcdl.sent_bytes()
        one(TernGrad(), wire, torch.randn(512, 60))
        sent = hpcdl.sent_bytes() - before
        assert 2 * (p - 1) * n // p <= sent <= 2 * (p - 1) * n // p + 64
        wire.close()


# ---- as a hook -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("make", "rate"), [(make, 0.005 if make is SignSGD else 0.05) for make in PLAIN])
def test_a_network_learns(comm: MPI.Intracomm, make: Make, rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    ddp = DistributedDataParallel(model, comm, overlap=False, bucket_cap_mb=1e-4, first_bucket_mb=1e-4)
    compression = Compression(ddp, make())
    x = torch.randn(32, 10, generator=torch.Generator().manual_seed(comm.rank))
    losses = []
    for _ in range(40):
        ddp.zero_grad()
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= rate * each.grad
        losses.append(float(hpcdl.allreduce(loss.detach(), comm, op="mean")))
    assert same(comm, [each.detach() for each in model.parameters()])
    assert losses[-1] < losses[0] / 2
    assert compression.told().steps == 40


@pytest.mark.ranks(4)
@every_plain_method
def test_nodes_exchange_what_they_have_added_up(comm: MPI.Intracomm, make: Make) -> None:
    with pretended(comm, "2+2") as among:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
        ddp = DistributedDataParallel(model, among, overlap=False)
        compression = Compression(ddp, make(), exchange="by_node")
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.randn(8, 10, generator=torch.Generator().manual_seed(4 * step + comm.rank))).sum().backward()
            assert same(comm, [each.grad for each in model.parameters()])
        assert compression.told().steps == 3
