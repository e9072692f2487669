"""hpcdl tune and hpcdl explain as a person runs them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.launch import run_ranks

from hpcdl.choice import Shape, candidates
from hpcdl.cli import tune as tune_command
from hpcdl.cli.bench_measure import Timed
from hpcdl.cli.main import main
from hpcdl.tuning import read


def ours(stderr: str) -> list[str]:
    """The complaints of hpcdl; a launcher adds lines of its own when a rank's status is not 0."""
    return [line for line in stderr.splitlines() if line.startswith("hpcdl: ") and "hpcdl: note: " not in line]


def tune(n: int, file: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = ("-m", "hpcdl", "tune", "--output", str(file), "--budget", "0.5", *arguments)
    return run_ranks(n, *words, env={"HPCDL_TUNING": "0", **env})


def explain(*arguments: str, **env: str) -> list[str]:
    """What it prints without mpiexec."""
    command = [sys.executable, "-m", "hpcdl", "explain", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def marked(lines: list[str]) -> list[str]:
    """The row of what is chosen: its name, the times predicted and measured."""
    (line,) = [line for line in lines if line.startswith("* ")]
    return line[2:].split("  ")


@pytest.mark.timeout(120)
def test_what_tune_writes_is_what_explain_goes_by(tmp_path: Path) -> None:
    file = tmp_path / "new" / "t.json"
    done = tune(4, file, "--min", "64", "--max", "256", "--kinds", "private", HPCDL_NODES="2+2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hpcdl tune: 4 ranks on 2 nodes of 2, float32, ")
    assert f"\nwritten to {file}\nHPCDL_TUNING={file} has programs go by it\n" in done.stdout

    table = read(file)
    (rule,) = table.rules
    shape = Shape((2, 2), memory=True)
    assert rule.key == ("allreduce", (2, 2), "float32", "private")
    assert rule.measured.keys() == {*candidates("allreduce", shape, "private"), "native"}
    assert {"inside", "between"} <= table.fitted.keys()
    assert "   64 B  " in done.stdout
    for start, name in rule.sizes:
        assert f"{name} from " in done.stdout, start

    asked = ("--bytes", "64", "--nodes", "2+2")
    lines = explain(*asked, HPCDL_TUNING=str(file))
    name, predicted, *_, measured = marked(lines)
    assert lines[0].endswith(f"4 ranks on 2 nodes of 2: {name}")
    assert str(file) in lines[1]
    assert name == rule.algorithm(64)
    assert predicted.strip() != "-" != measured.strip()
    without = explain(*asked, HPCDL_TUNING="0")
    assert "no tuning table" in without[1]
    assert marked(without)[-1].strip() == "-"

    # Another kind on other ranks: what was there stays.
    done = tune(2, file, "--min", "64", "--max", "64", "--kinds", "shared")
    assert done.returncode == 0, done.stderr
    again = read(file)
    assert [one.key for one in again.rules] == [rule.key, ("allreduce", (2,), "float32", "shared")]
    assert again.rules[0] == rule
    assert again.fitted["between"] == table.fitted["between"]
    assert os.listdir(file.parent) == ["t.json"]


def test_under_mpiexec_explain_speaks_once_and_of_those_ranks() -> None:
    done = run_ranks(2, "-m", "hpcdl", "explain", "--bytes", "25MB", env={"HPCDL_TUNING": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("allreduce of 25 MiB of float32 in private arrays, 2 ranks on ") == 1
    assert done.stdout.count("* ") == 1


def test_a_table_that_cannot_be_used_does_not_keep_explain_from_answering(tmp_path: Path) -> None:
    lines = explain("--bytes", "1K", "--ranks", "8", "--kind", "device", HPCDL_TUNING=str(tmp_path / "none"))
    assert lines[0].startswith("allreduce of 1 KiB of float32 in device arrays, 8 ranks on one node: ")


@pytest.mark.parametrize(
    ("n", "arguments", "line"),
    [
        (1, (), "one rank has nothing to tune: run it as mpiexec -n 4 hpcdl tune"),
        (1, ("--min", "1K", "--max", "8"), "--min 1 KiB --max 8 B: sizes go up, from one float32 of 4 B"),
        (2, ("--output", "notes"), "{tmp}/notes is no valid tuning table"),
        (2, ("--output", "notes/t.json"), "{tmp}/notes/t.json cannot be written: "),
    ],
)
def test_what_cannot_begin_is_said_once_with_status_2(
    n: int, arguments: tuple[str, ...], line: str, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("dear diary")
    words = [str(tmp_path / word) if word.startswith("notes") else word for word in arguments]
    done = tune(n, tmp_path / "t.json", *words)
    (said,) = ours(done.stderr)
    assert said.startswith(f"hpcdl: {line.format(tmp=tmp_path)}")
    assert (done.stdout, done.returncode) == ("", 2)
    assert sorted(os.listdir(tmp_path)) == ["notes"]
    assert (tmp_path / "notes").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tune --kinds device", "--kinds: device: the kinds that can be measured are private, shared"),
        ("tune --dtype bfloat16", "--dtype: invalid choice: 'bfloat16'"),
        ("tune --budget 0", "--budget: 0 is no finite number above 0"),
        ("tune --max 64X", "--max: 64X is no size such as 64, 256KiB, 25MB or 1G"),
        ("explain --bytes 0.3", "--bytes: 0.3 is 0.3 bytes, which is no whole number"),
        ("explain --bytes 8 --nodes 2+", "--nodes: 2+ are no numbers of ranks such as 8+8 or 3+1"),
        ("explain --bytes 8 --nodes 0+2", "--nodes: 0+2 are no numbers of ranks"),
        ("explain --bytes 8 --nodes 2,2", "--nodes: 2,2 are no numbers of ranks"),
        ("explain --bytes 8 --ranks 4 --nodes 2+2", "--nodes: not allowed with argument --ranks"),
    ],
)
def test_a_wrong_argument_is_named(words: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert f"argument {complaint}" in capsys.readouterr().err


class Endless:
    """A deadline that never comes, or does after so many questions."""

    def __init__(self, *_: object, questions: float = math.inf) -> None:
        self.questions = questions

    def left(self) -> float:
        self.questions -= 1
        return self.questions


def swept(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], deadline: Endless, **seconds: Callable[[int], float]
) -> dict[int, set[str]]:
    """Which algorithms are measured at which size, if they take so many seconds."""

    def timed(comm: object, names: list[str], kind: str, dtype: str, nbytes: int, until: Endless) -> dict[str, float]:
        return {name: seconds[name](nbytes) for name in names}

    monkeypatch.setattr(tune_command, "timed", timed)
    monkeypatch.setattr(tune_command, "Deadline", Endless)
    names = [name for name in seconds if name != "native"]
    found = tune_command.sweep(None, names, "private", "float32", steps, deadline, lambda text: None)  # type: ignore[arg-type]
    return {nbytes: set(times) for nbytes, times in found}


def test_what_is_hopeless_at_three_long_sizes_is_not_measured_at_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [1 << bits for bits in range(10, 24, 2)]
    found = swept(
        monkeypatch,
        steps,
        Endless(),
        fast=lambda n: n,
        hopeless=lambda n: 3.1 * n,
        slow=lambda n: 2.9 * n,
        slow_at_first=lambda n: 5 * n if n < 1 << 20 else n,  # at 64 and 256 KiB
        native=lambda n: 100 * n,
    )
    for nbytes in steps:
        others = {"fast", "slow", "slow_at_first", "native"}
        assert found[nbytes] == (others if nbytes > 1 << 20 else others | {"hopeless"})


def test_the_first_size_is_measured_even_if_there_is_no_time_and_none_after_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = {"fast": lambda n: n, "native": lambda n: n}
    assert list(swept(monkeypatch, [8, 32, 128, 512], Endless(questions=3), **fast)) == [8, 32]
    assert list(swept(monkeypatch, [8, 32, 128, 512], Endless(questions=-5), **fast)) == [8]


@pytest.mark.parametrize(
    ("faster", "found"), [({}, 1 << 20), ({4 << 20: 0.97}, 1 << 20), ({256 << 10: 0.9, 4 << 20: 0.97}, 256 << 10)]
)
def test_segments_of_another_length_are_taken_if_they_are_clearly_better(
    faster: dict[int, float], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(comm: object, lengths: dict[int, object], **_: object) -> dict[int, Timed]:
        return {length: Timed([faster.get(length, 1.0)], 0) for length in lengths}

    monkeypatch.setattr(tune_command, "measure", measure)
    monkeypatch.setattr(tune_command, "Deadline", partial(Endless, questions=2))
    comm = SimpleNamespace(size=4, bcast=lambda value: value)
    assert tune_command.best_segment(comm, None, "float32", 2 << 20, 1, 1 << 20) == found  # type: ignore[arg-type]
    assert tune_command.best_segment(comm, None, "float32", 1 << 20, 1, 1 << 20) is None  # type: ignore[arg-type]


def test_rounds_go_on_until_the_fastest_stands_apart() -> None:
    apart, mixed = {"a": [1.0, 1.1, 1.2] * 2, "b": [1.3, 2.0, 3.0] * 2}, {"a": [1.0, 2.0, 3.0], "b": [1.5, 2.5, 3.5]}
    assert tune_command.enough(apart)
    assert not tune_command.enough({name: times[:3] for name, times in apart.items()})
    assert not tune_command.enough({name: times * 2 for name, times in mixed.items()})
    assert tune_command.enough({name: times * 10 for name, times in mixed.items()})
