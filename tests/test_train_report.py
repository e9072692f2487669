"""What is told of a training, by what it came to."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdl.cli.train_report import pays

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.train import Compressed  # noqa: E402


def after(*epochs: tuple[float, float]) -> Any:
    """A trainer whose reductions took so long in each epoch, and its first one without compression."""
    told = [Compressed(100.0, 0.5, took, plain_s=plain) for took, plain in epochs]
    return SimpleNamespace(epochs=[SimpleNamespace(compressed=each) for each in told])


def test_compression_that_takes_longer_than_it_saves_is_advised_against() -> None:
    assert pays(after((0.03, 0.004), (0.02, 0.004), (0.02, 0.005))) == (
        "compression takes 20 ms a step, to add up the whole gradient would take 4.5 ms: "
        "it costs more time than it saves here, so leave out --compress"
    )


def test_what_compression_saves_is_told() -> None:
    said = pays(after((0.02, 0.5)))
    assert (
        said == "compression takes 20 ms a step, to add up the whole gradient would take 500 ms: it saves 480 ms a step"
    )


def test_the_first_sum_is_only_counted_where_it_is_the_only_one() -> None:
    said = pays(after((0.02, 5.0), (0.02, 0.01)))
    assert said and "would take 10 ms" in said


@pytest.mark.parametrize("epochs", [[], [(math.nan, math.nan)], [(0.1, math.nan)], [(math.nan, 0.1)]])
def test_nothing_is_said_of_what_was_not_measured(epochs: list[tuple[float, float]]) -> None:
    assert pays(after(*epochs)) is None


def test_nothing_is_said_without_compression() -> None:
    assert pays(SimpleNamespace(epochs=[SimpleNamespace(compressed=None)])) is None  # type: ignore[arg-type]
