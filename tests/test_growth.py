"""A batch that grows leaves the noise of the gradients as a rate that falls would, in fewer updates."""

import itertools
import math
from dataclasses import FrozenInstanceError

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.growth import BatchGrowth, split

# As wide ResNets are trained on CIFAR-10: the rate is divided by 5 behind 60, 120 and 160 of 200 epochs.
SAMPLES, EPOCHS = 50_000, 200
PAPER = BatchGrowth(128, (60, 120, 160), factor=5, limit=5_120)


def test_the_batch_grows_where_the_rate_would_fall_and_not_an_epoch_earlier() -> None:
    growth = BatchGrowth(128, [10, 15], factor=5, limit=10_000)
    assert [growth.batch(epoch) for epoch in (0, 9, 10, 14, 15, 99)] == [128, 128, 640, 640, 3200, 3200]
    assert {growth.rate(epoch) for epoch in range(20)} == {1.0}
    assert [growth.decay(epoch) for epoch in (0, 9, 10, 14, 15, 99)] == [1, 1, 1 / 5, 1 / 5, 1 / 25, 1 / 25]


def test_behind_the_limit_the_rate_falls_by_what_is_missing() -> None:
    assert [PAPER.batch(epoch) for epoch in (0, 60, 120, 160)] == [128, 640, 3200, 5120]
    assert [PAPER.rate(epoch) for epoch in (0, 60, 120, 160)] == [1, 1, 1, 5120 / 16_000]
    at_once = BatchGrowth(100, [1, 2], factor=10, limit=100)  # nothing may grow: plain step decay
    assert [at_once.batch(epoch) for epoch in range(4)] == [100] * 4
    assert [at_once.rate(epoch) for epoch in range(4)] == [at_once.decay(epoch) for epoch in range(4)]


@pytest.mark.parametrize("factor", [2, 5, 10, 1.3, math.sqrt(10), 2.5])
@pytest.mark.parametrize(("batch", "limit"), [(1, 1), (7, 7), (7, 100), (128, 8192), (100, 10**9)])
def test_rate_over_batch_is_the_step_decays(factor: float, batch: int, limit: int) -> None:
    growth = BatchGrowth(batch, [2, 3, 5, 8], factor=factor, limit=limit)
    for epoch in range(10):
        now = growth.batch(epoch)
        assert type(now) is int and batch <= now <= limit
        # The noise scale lr N / (B (1 - m)), but for N and m, which both have; two divisions round.
        assert growth.rate(epoch) / now == pytest.approx(growth.decay(epoch) / batch, rel=1e-15, abs=0)
        # The batch takes all it may, in whole samples.
        whole = batch / growth.decay(epoch)
        assert now == limit or whole - 1 < now <= whole * (1 + 1e-15)


def test_the_updates_fall_by_the_predicted_factor() -> None:
    steady = BatchGrowth(128, (), factor=5, limit=128)
    assert steady.updates(SAMPLES, EPOCHS) == EPOCHS * 391
    assert PAPER.updates(SAMPLES, EPOCHS) == 60 * 391 + 60 * 79 + 40 * 16 + 40 * 10
    assert PAPER.updates(SAMPLES, 0) == 0
    # Without remainders it is each phase's length over its factor.
    even = BatchGrowth(100, [10, 15], factor=5, limit=2500)
    assert even.updates(2500, 20) == 25 * (10 + 5 / 5 + 5 / 25)


def test_a_batch_of_more_than_all_samples_is_one_update_an_epoch() -> None:
    assert BatchGrowth(64, [1], factor=10, limit=640).updates(100, 3) == 2 + 1 + 1


@pytest.mark.parametrize("factor", [10, 10.0])
def test_many_milestones_reach_the_limit_and_no_infinity(factor: float) -> None:
    growth = BatchGrowth(1, range(1, 500), factor=factor, limit=4096)
    assert growth.batch(499) == 4096 and growth.rate(499) == growth.decay(499) == 0


def test_it_is_a_value() -> None:
    milestones = [10, 15]
    growth = BatchGrowth(128, milestones, factor=5, limit=640)
    milestones.append(20)
    assert growth == BatchGrowth(128, (10.0, 15.0), factor=5, limit=640)  # type: ignore[arg-type]
    assert growth.milestones == (10, 15) and len({growth, growth}) == 1
    with pytest.raises(FrozenInstanceError):
        growth.limit = 1000  # type: ignore[misc]


@pytest.mark.parametrize(
    ("batch", "milestones", "factor", "limit", "says"),
    [
        (0, [1], 5, 10, "a sample at least, not 0"),
        (128, [1], 5, 127, "limit=127 lies below the first batch, 128"),
        (128, [1], 1, 256, "factor=1 "),
        (128, [1], 0.1, 256, "factor=0.1 "),
        (128, [1], math.inf, 256, "factor=inf "),
        (128, [1], math.nan, 256, "factor=nan "),
        (128, [5, 5], 5, 256, r"ascending order, not \[5, 5\]"),
        (128, [5, 4], 5, 256, r"ascending order, not \[5, 4\]"),
        (128, [0, 4], 5, 256, r"from 1 on, .* not \[0, 4\]"),
        (128, [1.5], 5, 256, r"whole epochs .* not \[1.5\]"),
        (128, [math.nan], 5, 256, r"not \[nan\]"),
    ],
)
def test_nonsense_is_refused(batch: int, milestones: list[int], factor: float, limit: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BatchGrowth(batch, milestones, factor=factor, limit=limit)


def test_no_samples_and_no_epochs_are_told_apart() -> None:
    for samples, epochs in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"not {samples}, {epochs}"):
            PAPER.updates(samples, epochs)


def test_a_split_is_the_best_of_all_that_reach_the_batch() -> None:
    for batch, ranks, most in itertools.product(range(1, 40), range(1, 8), range(1, 12)):
        enough = (
            (passes, each)
            for passes in range(1, batch + 1)
            for each in range(1, most + 1)
            if ranks * passes * each >= batch
        )
        passes, each = min(enough)
        assert split(batch, ranks, most) == (each, passes)
        assert ranks * passes * each - batch < ranks * passes


def test_a_split_of_a_large_batch() -> None:
    assert split(8192, 4, 512) == (512, 4)
    assert split(8192, 3, 1000) == (911, 3)
    assert split(2, 8, 32) == (1, 1)  # most of the ranks get nothing
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must each be 1 at least"):
            split(*arguments)
