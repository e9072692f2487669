"""The standard set of measurements: its bars, its tables and its scripts. No test looks at how fast anything is."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from operator import sub
from pathlib import Path
from typing import Any

import pytest
from harness.launch import marked, run_ranks

from hpcdl.cli.main import parse

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import standard
from results import (
    AUTO,
    BARS,
    GLOO,
    MIB,
    NATIVE,
    SECTIONS,
    SHARED,
    Bar,
    Found,
    Outcome,
    Verdict,
    between,
    compare,
    judge,
    over_the_wire,
    write,
)

BENCHMARKS = standard.BENCHMARKS
HOSTS_4 = {"hpcdl-1": 2, "hpcdl-2": 2, "hpcdl-3": 2, "hpcdl-4": 2}


def row(
    size: int, algorithm: str, times: list[float], buffers: str = "private", place: str = "in place"
) -> dict[str, Any]:
    return {
        "size": size,
        "algorithm": algorithm,
        "buffers": buffers,
        "place": place,
        "time_us": sorted(times)[len(times) // 2],
        "rounds_us": times,
    }


def outcome(
    *rows: dict[str, Any],
    kind: str = "private",
    mpi: str = "mpich",
    ranks: str = "2",
    variant: str = "",
    problem: str = "",
) -> Outcome:
    header = {
        "date": "2026-11-30 00:00",
        "mpi": "MPICH 5",
        "versions": {"Python": "3.11"},
        "ranks_per_host": HOSTS_4,
        "rounds": "3 to 3",
    }
    return Outcome(kind, mpi, ranks, variant, problem, "2 cores", header, rows)


# ---- bars ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_least", [True, False])
def test_a_bar_is_met_at_its_limit_and_beyond_on_one_side_only(at_least: bool) -> None:
    bar = Bar("private", "speed", at_least, 2, between(AUTO, NATIVE, 0, MIB))
    assert bar.met(2)
    assert bar.met(2.5) == at_least
    assert bar.met(1.5) != at_least


def test_a_comparison_is_the_median_of_the_rounds_against_the_better_of_mpis_two() -> None:
    some = outcome(
        row(8, "auto", [6, 1, 2]),
        row(8, "auto", [0, 0, 0], place="out of place"),
        row(8, "native", [1, 2, 8]),
        row(8, "native", [9, 9, 9], place="out of place"),
        row(8, "shared", [1, 1, 1], buffers="shared"),
        row(8, "shared", [5, 5, 5]),
    )
    assert compare(some, 8, AUTO, NATIVE) == 0.5
    assert compare(some, 8, AUTO, NATIVE, sub) == -1
    assert compare(some, 8, NATIVE, SHARED) == 2
    assert compare(some, 8, GLOO, NATIVE) is None
    assert compare(some, 9, AUTO, NATIVE) is None


def test_the_worst_of_all_sizes_and_ranks_is_told_and_all_that_missed() -> None:
    outcomes = [
        outcome(row(MIB, "auto", [2]), row(MIB, "native", [1]), row(2 * MIB, "auto", [1]), row(2 * MIB, "native", [1])),
        outcome(row(MIB, "auto", [3]), row(MIB, "native", [2]), row(8, "auto", [9]), row(8, "native", [1]), ranks="4"),
    ]
    verdict = judge(Bar("private", "time", False, 1.25, between(AUTO, NATIVE, MIB, 2 * MIB)), "mpich", outcomes)
    assert verdict.found == [(2, "1 MiB, 2 ranks"), (1.5, "1 MiB, 4 ranks"), (1, "2 MiB, 2 ranks")]
    assert verdict.missed() == verdict.found[:2]
    assert str(verdict) == "**missed** by 60 %"
    speed = judge(Bar("private", "speed", True, 0.75, between(NATIVE, AUTO, MIB, 2 * MIB)), "mpich", outcomes)
    assert speed.found[0] == (0.5, "1 MiB, 2 ranks")
    assert str(speed) == "**missed** by 33 %"
    assert judge(speed.bar, "openmpi", outcomes).found == []


@pytest.mark.parametrize(
    ("values", "unit", "problems", "text"),
    [
        ([1.0, 0.5], "", [], "met"),
        ([1.004], "", [], "**missed** by less than 1 %"),
        ([3.25, 1.0], " us", [], "**missed** by 2.25 us"),
        ([], "", [], "not measured"),
        ([], "", ["no root"], "not measured: no root"),
        ([1.0], "", ["no root"], "met, in part not measured: no root"),
        ([2.0], "", ["no root"], "**missed** by 100 %, in part not measured: no root"),
    ],
)
def test_a_verdict_is_in_plain_words(values: list[float], unit: str, problems: list[str], text: str) -> None:
    bar = Bar("private", "time", False, 1, between(AUTO, NATIVE, 0, MIB), unit=unit)
    assert str(Verdict(bar, "mpich", [Found(value, "") for value in values], problems)) == text


def test_the_wires_limit_is_that_of_four_hosts_links() -> None:
    n = 8 * MIB
    limit_us = 1.5 * n * 8 / 1e9 * 1e6
    rows = [row(n, "by_node:ring", [9e9]), row(n, "by_node:ring", [limit_us * 1.25], buffers="shared")]
    rows += [row(n, "ring", [1.0]), row(n, "native", [limit_us * 3]), row(8, "by_node", [1.0])]
    (found,) = over_the_wire([outcome(*rows, kind="hosts", ranks="4x2"), outcome(kind="hosts", problem="no root")])
    assert found.value == pytest.approx(1.25)
    assert found.where == "by_node:ring@shared, 4x2 ranks; MPI_Allreduce 3.00"


# ---- RESULTS.md ------------------------------------------------------------------------------------------------------


def sample() -> list[Outcome]:
    both = [row(64 << 10, "native", [20.0, 10.0, 10.0]), row(64 << 10, "auto", [5.0, 5.0, 5.0])]
    grown = [{"size": 256 * MIB, "algorithm": "ring", "growth_bytes": [81 * MIB, 70 * MIB]}]
    shares = {"asked_us": 3.0, "asked_overlap": 50.0, "unasked_us": 4.0, "unasked_overlap": 0.0}
    hiding = row(MIB, "auto", [1.0]) | shares | {"communication_us": 2.0, "computation_us": 2.0}
    checked = [{"size": 8, "check": check, "rounds_us": [3.0 + check]} for check in (True, False)]
    repeats = {"local": [[5.0, 6.0], [7.0]], "gloo": [[11.0, 12.0], [10.0]], "ours": [[6.0, 7.0], [9.0]]}
    steps = [
        {"size": 1000, "model": model, "algorithm": who, "repeats_us": times}
        for model in ("mlp", "cnn")
        for who, times in repeats.items()
    ]
    return [
        outcome(*steps, kind="training"),
        outcome(*both, kind="shared"),
        outcome(*both),
        outcome(*both, ranks="4"),
        outcome(*both, mpi="openmpi"),
        outcome(*both, kind="small", variant="plan multiple"),
        outcome(kind="hosts", ranks="4x1", problem="hosts need root"),
        outcome(kind="hosts", ranks="4x2", problem="hosts need root"),
        outcome(*grown, kind="memory", ranks="4"),
        outcome(hiding, kind="overlap"),
        outcome(*checked, kind="check"),
    ]


def test_results_hold_every_set_and_every_table_is_whole() -> None:
    text = write(sample(), "We tried hard.\n")
    assert "\n## What was tried\n\nWe tried hard.\n" in text
    for section in SECTIONS.values():
        assert f"\n## {section.title}\n" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 9
    for table in tables:
        head, rule, *lines = table.splitlines()
        assert re.fullmatch(r"(\|---:?)+\|", rule)
        assert lines
        assert {line.count("|") for line in lines} == {head.count("|")} == {rule.count("|")}
    assert "| 2 | 64 KiB | 10.0 us | 0.50 |" in text
    assert "| MPICH | 2 | 1 MiB | auto | 2.00 us | 2.00 us | 3.00 us | 50 % | 4.00 us | 0 % |" in text
    assert "| MPICH | 2 | 8 B | 4.00 us | 3.00 us | 1.0 us |" in text
    assert "| MPICH | 2 | mlp | 1,000 | 6.00 us | 0.00 ms | 0.00 ms | 0.33 |" in text
    assert "| at most 0.333333 | 0.33 (2 ranks) | met |" in text
    assert "[4 ranks](plots/private-mpich-4.svg)" in text
    assert "| at most 80 MiB | 81.00 MiB (256 MiB) | **missed** by 1.00 MiB |" in text
    assert "\n\n\n" not in text
    outside = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, outside)) <= 120


def test_what_failed_is_told_where_it_is_missed() -> None:
    text = write(sample(), "")
    assert "Not measured: MPICH on 4x1 ranks, MPICH on 4x2 ranks: hosts need root.\n" in text
    (bar,) = (line for line in text.splitlines() if "`by_node`" in line and "| MPICH |" in line)
    assert bar.endswith("| - | not measured: hosts need root |")


def test_the_report_has_a_picture_of_each_plotted_run_and_no_old_ones(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(size, name, [1.0]) | {"busbw_gb_s": 1.0} for size in (8, 64) for name in ("auto", "native")]
    one = outcome(*rows)
    one.header.update(type="float32", redop="sum", ranks=2)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").touch()
    assert standard.report([one, outcome(*rows, kind="hosts")], tmp_path) == (tmp_path / "RESULTS.md").read_text()
    assert [file.name for file in (tmp_path / "plots").iterdir()] == ["private-mpich-2.svg"]


# ---- what is run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_hpcdl_bench_understands_every_line_of_the_standard_set(quick: bool) -> None:
    lines = [measurement.words for measurement in standard.measurements(quick)]
    benches = [line for line in lines if list(line[:2]) == ["-m", "hpcdl"]]
    assert len(benches) == len(lines) - 14
    for line in benches:
        assert parse(line[2:]).min <= parse(line[2:]).max


def test_every_set_is_run_and_every_bar_is_measured_by_something() -> None:
    run = list(standard.measurements(False))
    assert {measurement.set for measurement in run} == set(SECTIONS)
    assert len({measurement.file for measurement in run}) == len(run)
    for bar in BARS:
        for mpi in bar.mpis:
            variants = {one.variant for one in run if (one.set, one.mpi) == (bar.set, mpi)}
            assert variants
            assert set(bar.variants) <= variants


def test_a_command_that_fails_or_hangs_is_told_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    mark = uuid.uuid4().hex

    def python(code: str, limit_s: float = 30) -> str:
        return standard.run([sys.executable, "-c", code], {"HPCDL_TEST": mark}, limit_s)

    assert python("print('fine')") == ""
    said = "import sys; print('hpcdl: no | such thing', file=sys.stderr); print('later'); sys.exit(2)"
    assert python(said) == "exit status 2: hpcdl: no | such thing"
    assert python("raise ValueError('bad')") == "exit status 1: ValueError: bad"
    assert python("import os; os._exit(3)") == "exit status 3"
    began = time.monotonic()
    hang = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    assert python(hang, 1) == "still running after 1 s"
    assert time.monotonic() - began < 20
    assert marked(f"HPCDL_TEST={mark}") == []
    assert capfd.readouterr() == ("", "")


def test_a_missing_environment_is_a_problem_and_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(standard.FOLDERS, "impi", ".venv-nowhere")
    found = standard.measure(standard.Measurement("shared", "impi", "2", ["-c", ""]))
    assert found.problem == "there is no .venv-nowhere with an mpiexec, which `make venv MPI=impi` makes"
    assert not found.rows


def test_what_cannot_be_run_is_a_problem_and_not_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hosts(count: int, rate: str) -> None:
        raise RuntimeError("tc: no such | qdisc\n")

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").symlink_to("/bin/true")  # which ends well, and writes nothing
    monkeypatch.setitem(standard.FOLDERS, "mpich", str(tmp_path))
    monkeypatch.setattr(standard, "Hosts", hosts)
    monkeypatch.setattr(standard, "missing", lambda: "")
    found = standard.measure(standard.Measurement("hosts", "mpich", "4x1", []))
    assert (found.problem, found.rows) == ("RuntimeError: tc: no such / qdisc", [])
    found = standard.measure(standard.Measurement("shared", "mpich", "2", []))
    assert found.problem.startswith("FileNotFoundError: ")
    monkeypatch.setattr(standard, "missing", lambda: "hosts need root")
    assert standard.measure(standard.Measurement("hosts", "mpich", "4x1", [])).problem == "hosts need root"


GROWTH = f"""
import sys; sys.path.append({str(BENCHMARKS)!r})
import numpy as np
from peak_memory import growth
np.ones(64 << 17)  # an earlier, higher peak of 64 MiB
grown = growth(lambda: np.ones(8 << 17))
assert 7 << 20 <= grown < 10 << 20, grown  # the kernel counts pages in batches
assert growth(lambda: None) < 1 << 20
"""


def test_growth_is_what_a_call_touches_even_below_an_earlier_peak() -> None:
    subprocess.run([sys.executable, "-c", GROWTH], check=True, timeout=60)


@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("price_of_the_check.py", ("--rounds", "2"), 6),
        ("step_overhead.py", ("--rounds", "1", "--repeats", "1"), 6),
    ],
)
def test_the_scripts_write_what_the_tables_read(
    script: str, options: tuple[str, ...], rows: int, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    done = run_ranks(2, str(BENCHMARKS / script), *options, "--output", str(file), timeout_s=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert len(found["results"]) == rows
    kind, lines = {"price": ("check", 3), "step": ("training", 2)}[script.partition("_")[0]]
    one = Outcome(kind, "mpich", "2", "", "", "", found["header"], found["results"])
    assert len(list(SECTIONS[kind].tables([one]))) == 2 + lines


@pytest.mark.skipif(not (BENCHMARKS.parent / ".venv" / "bin" / "mpiexec").exists(), reason="there is no .venv")
def test_a_quick_run_of_one_set_measures_and_writes_it_up_elsewhere(tmp_path: Path) -> None:
    committed = (BENCHMARKS / "RESULTS.md").read_bytes()
    words = ["--quick", "--only", "memory", "--keep", str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    line = [sys.executable, str(BENCHMARKS / "standard.py"), *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    assert "memory-mpich-4: " in done.stdout
    assert "| MPICH | 4 | 16 MiB | ring |" in (tmp_path / "RESULTS.md").read_text()
    assert json.loads((tmp_path / "memory-mpich-4.json").read_text())["problem"] == ""
    assert (BENCHMARKS / "RESULTS.md").read_bytes() == committed


def test_a_set_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        standard.main(["--only", "shared,hostss"])
    assert "there is no set 'hostss'; there are shared, private, small" in capsys.readouterr().err
