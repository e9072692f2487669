"""The study of the modes writes what it has found, and says what was not reached."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
from harness import TESTS


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(TESTS.parent / "benchmarks"))
    yield importlib.import_module("sgd_variants")
    sys.modules.pop("sgd_variants", None)


def outcome(per_s: float, accuracies: list[float], busy: float = 0.2) -> dict[str, Any]:
    seconds = [1000 * (number + 1) / per_s for number in range(len(accuracies))]
    return {
        "accuracies": accuracies,
        "per_s": per_s,
        "seconds": seconds,
        "epochs": list(range(1, len(accuracies) + 1)),
        "busy": [busy, 0.3, 0.3, 0.3],
        "header": "hpcdl train: ranks 4",
    }


def numbers(served: float = 700, accuracy: float = 85.0, busy: float = 0.2) -> dict[str, Any]:
    runs = {
        "sync": {"even": outcome(1000, [80.0, 84.0, 86.0]), "slow": outcome(205, [80.0, 84.0, 86.0])},
        "parameter-server": {
            "even": outcome(1000, [80.0, 85.0]),
            "slow": outcome(served, [80.0, accuracy], busy),
        },
        "backup-workers": {"even": outcome(900, [85.0]), "slow": outcome(890, [85.0])},
    }
    return {"machine": "m", "date": "d", "data": "x", "epochs": 3, "target": 0.84, "minutes": 1, "runs": runs}


def test_all_that_was_to_be_reached_is_said_to_be(study: ModuleType) -> None:
    assert [reached for _, _, reached in study.bars(numbers())] == [True] * 5
    page = study.report(numbers())
    assert "| sync: all-reduce of every gradient | 1000 | 2 | 2.0 | 86.00 |" in page
    assert "| parameter-server | 700 | 70% | 2 | 2.9 | 85.00 | 20% 30% 30% 30% |" in page
    assert "**no**" not in page


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"served": 590}, "parameter-server keeps 60% or more"),
        ({"accuracy": 84.4}, "every accuracy within 1.5 points"),
        ({"busy": 0.9}, "the server waits asleep"),
    ],
)
def test_what_was_not_reached_is_said(study: ModuleType, wrong: dict[str, float], what: str) -> None:
    (missed,) = (row for row in study.bars(numbers(**wrong)) if not row[2])
    assert missed[0].startswith(what)


@pytest.mark.skipif(not (find_spec("torch") and find_spec("mlxtend")), reason="torch or mlxtend is not installed")
def test_a_variant_is_trained_and_timed(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "STEP_MS", 1)
    found = study.train(study.VARIANTS[0], True, "mnist5k", 1)
    assert len(found.accuracies) == len(found.seconds) == 1 and found.accuracies[0] > 20
    assert len(found.busy) == 4 and all(0 < share < 2 for share in found.busy)
    assert "steps of 1.00 ms or more, of rank 2 5 x" in found.header
