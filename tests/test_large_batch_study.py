"""The study of large batches asks what it says, trains what it asks for, and its report says what was found."""

import importlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import TESTS
from harness.launch import run_ranks
from idx import write_images

pytestmark = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("matplotlib")), reason="torch or matplotlib is not installed"
)
BENCHMARKS = TESTS.parent / "benchmarks"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("large_batch")
    for name in ("large_batch", "large_batch_report"):
        sys.modules.pop(name, None)


def pretended(study: ModuleType, accuracy: Any) -> Any:
    """A farm that trains nothing."""

    class Pretended(study.Farm):
        def __init__(self, *_: object) -> None:
            self.outcomes = {}

        def train(self, runs: Iterable[Any]) -> None:
            for run in runs:
                found = [round(accuracy(run) - 1, 2), accuracy(run)]
                self.outcomes.setdefault(run, study.Outcome(found, [1.0, 0.5], 1000 // (1 + 2 * run.grow), 1.0))

    return Pretended


def best_at(rate: float) -> Any:
    """The accuracy falls from that rate on to both sides; seeds differ by a tenth."""
    return lambda run: 90 - abs(math.log2(run.lr / rate)) + 0.1 * run.seed


@pytest.mark.parametrize(("rate", "found"), [(0.1, 0.1), (0.2, 0.2), (0.3, 0.4), (5.0, 0.8)])
def test_a_search_goes_on_on_the_better_side(study: ModuleType, rate: float, found: float) -> None:
    farm = pretended(study, best_at(rate))()
    chosen = study.study(farm, study.plan_for(60000))
    assert chosen["methods"]["SGD, tuned"][8192].lr == found  # of 0.2 and 0.4, and 0.1 or 0.8
    assert all(run.tuning for runs in chosen["tried"].values() for each in runs.values() for run in each)
    seeds = {run.seed for run in farm.outcomes if run.kind == "lars" and run.batch == 8192 and not run.tuning}
    assert seeds == {0, 1, 2}
    assert chosen["questions"]["growth"]["batch growth"].grow


def test_linear_scaling_begins_at_the_small_batch(study: ModuleType) -> None:
    methods = study.study(pretended(study, best_at(0.05))(), study.plan_for(60000))["methods"]
    scaled = {batch: run.lr for batch, run in methods["SGD, linear scaling"].items()}
    assert scaled == pytest.approx({128: 0.05, 1024: 0.4, 8192: 3.2, 16384: 6.4})


def test_few_images_bring_smaller_batches(study: ModuleType) -> None:
    plan = study.plan_for(4000)
    assert plan.batches == (128, 1024) and plan.large == 1024 and plan.limit == 400


@pytest.mark.parametrize(("lars", "verdict"), [(91.0, "met"), (80.0, "**missed**")])
def test_the_report_says_whether_each_bar_is_met(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lars: float, verdict: str
) -> None:
    usual = best_at(0.05)
    monkeypatch.setattr(study, "Farm", pretended(study, lambda run: lars if run.kind == "lars" else usual(run)))
    monkeypatch.setattr(study, "sent_bytes", lambda precision, ranks: 1000 if precision == "fp32" else 500)
    numbers = json.loads(json.dumps(study.measured(str(write_images(tmp_path / "images", train=3100)))))
    (tmp_path / "large-batch-remarks.md").write_text("the papers\n---\nthe reading\n")
    importlib.import_module("large_batch_report").write(numbers, tmp_path)
    text = (tmp_path / "large-batch.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows["LARS at 1,024 within 1.0 point of the baseline at 128"].endswith(f"| {verdict} |")
    assert rows["at most half the updates by batch growth"].endswith("0.33 of them | met |")
    assert "the papers" in text and text.index("the papers") < text.index("the reading")
    assert "| 2 | 1,000 | 500 | 0.500 |" in text
    for plot in ("batches", "growth", "cycles"):
        assert (tmp_path / "large-batch-plots" / f"{plot}.svg").stat().st_size > 1000


TRAINED = """
import sys
sys.path.insert(0, sys.argv[1])
from large_batch import Run, trained
for run in (
    Run(epochs=3, batch=64),
    Run(kind="lars", lr=5, epochs=3, batch=64, warmup=1, exclude=0.01, tuning=True),
    Run(epochs=3, batch=64, schedule="step", grow=True),
    Run(epochs=3, batch=64, schedule="onecycle", precision="bf16"),
):
    outcome = trained(run, sys.argv[2])
    assert len(outcome.accuracies) == 3 and outcome.updates == (18 if run.tuning else 21), outcome
    assert 0 <= outcome.accuracy <= 100
assert trained(Run(epochs=3, lr=1e30), sys.argv[2]).accuracy == 10.0
"""


def test_a_training_of_the_study_is_a_training(tmp_path: Path) -> None:
    done = run_ranks(1, "-c", TRAINED, str(BENCHMARKS), str(write_images(tmp_path)))
    assert done.returncode == 0, done.stderr
