"""hpcdl bench as a person runs it, and the arithmetic it rests on. No test looks at how fast anything is."""

import csv
import io
import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness.launch import run_ranks

from hpcdl import environment
from hpcdl.cli.bench import bounds, ranges, sizes
from hpcdl.cli.bench_measure import Contents, Timed, add_and_copy, count_wrong, floor, percentiles, ratio
from hpcdl.cli.bench_overlap import hidden
from hpcdl.cli.bench_report import plot, table_foot
from hpcdl.cli.main import main


def hpcdl_bench(n: int, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    quick = ("--seconds", "0.01", "--iterations", "3")
    return run_ranks(n, "-m", "hpcdl", "bench", *quick, *arguments, timeout_s=timeout_s)


def ours(stderr: str) -> list[str]:
    """The complaints of hpcdl; a launcher adds lines of its own when a rank's status is not 0."""
    return [line for line in stderr.splitlines() if "hpcdl" in line and "hpcdl: note: " not in line]


def contents(size: int, count: int, dtype: str = "float32", op: str = "sum") -> Contents:
    return Contents(SimpleNamespace(rank=0, size=size), count, dtype, op)  # type: ignore[arg-type]


# ---- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 10, 65])
def test_every_wrong_element_is_counted_once(count: int) -> None:
    period = np.arange(1, 11)
    result = np.resize(period, count)
    assert count_wrong(result, period) == 0
    for wrong, place in enumerate({0, count // 2, count - 1}, start=1):
        result[place] += 1
        assert count_wrong(result, period) == wrong


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 600])
def test_sums_in_place_are_exact_for_as_many_calls_as_it_says(dtype: str, size: int) -> None:
    some = contents(size, 50, dtype)
    calls = int(some.exact_calls())
    assert calls >= 1
    first = sum(some.drawn(rank).astype(int).astype(object) for rank in range(size))
    for number in {1, 2, calls} & set(range(1, calls + 1)):
        exact = first * size ** (number - 1)
        if dtype == "float16" and size == 600:
            assert (some.after(1) == exact.astype(np.float16)).all()  # rounded once
        else:
            assert [int(value) for value in some.after(number)] == list(exact)


@pytest.mark.parametrize(("dtype", "op"), [("int8", "sum"), ("uint64", "sum"), ("float32", "prod"), ("int16", "max")])
def test_any_number_of_other_calls_is_exact(dtype: str, op: str) -> None:
    some = contents(3, 50, dtype, op)
    parts = [some.drawn(rank) for rank in range(3)]
    for _ in range(40):
        total = {"sum": sum, "prod": lambda x: x[0] * x[1] * x[2], "max": lambda x: np.maximum.reduce(x)}[op](parts)
        parts = [total.astype(dtype)] * 3
    assert some.exact_calls() >= 40
    assert (some.after(40) == parts[0]).all()


def test_no_result_looks_like_a_buffer_that_nobody_wrote_to() -> None:
    for op in ("sum", "prod", "min", "max"):
        some = contents(4, 1000, op=op)
        assert (some.after(1) != 0).all()
    assert not any((contents(4, 9).drawn(a) == contents(4, 9).drawn(b)).all() for a in range(4) for b in range(a))


@pytest.mark.parametrize("in_place", [True, False])
def test_who_does_nothing_is_wrong_in_every_round(in_place: bool) -> None:
    some = contents(3, 1000)
    x, out = np.empty(1000, "float32"), np.empty(1000, "float32")
    idle = some.competitor(lambda: None, x, None if in_place else out)
    result = x if in_place else out
    for _ in range(2):
        idle.prepare()
        assert (x == some.drawn(0)).all()
        assert idle.wrong(1) == 1000
        result[:] = some.after(1)
        assert idle.wrong(1) == 0


def test_percentiles_of_known_numbers() -> None:
    assert percentiles([*range(10, -1, -1)]) == (5, 1, 9)
    assert percentiles([4.0]) == (4, 4, 4)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    assert ratio([6, 1, 2], [1, 2, 8]) == 0.5


def test_what_hides_is_a_share_of_the_shorter_one() -> None:
    assert hidden(2, 4, 6) == 0
    assert hidden(2, 4, 4) == 100
    assert hidden(2, 4, 5) == hidden(4, 2, 5) == 50
    assert hidden(2, 4, 9) == 0
    assert hidden(2, 4, 3) == 100


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_floor_adds_every_buffer_and_hands_the_sum_to_all(size: int) -> None:
    for length in (0, 1, 70_000):
        x, out = np.arange(size * length, dtype=float), np.full(size * length, -1.0)
        total = x.reshape(size, length).sum(axis=0)
        add_and_copy("sum", x, out, size)
        assert size == 1 or (out.reshape(size, length) == total).all()
        add_and_copy("sum", x, x, size)
        assert (x.reshape(size, length) == total).all()


def test_the_floor_is_the_work_of_all_ranks_on_the_cores_there_are() -> None:
    work, barriers = Timed([1.0, 2.0]), Timed([0.5, 0.25])
    assert floor(work, barriers, size=4, cores=2).seconds == [2.5, 4.25]
    assert floor(work, barriers, size=2, cores=8).seconds == [1.5, 2.25]


def test_sizes_go_up_by_the_factor_and_end_with_the_largest() -> None:
    assert list(sizes(8, 100, 4)) == [8, 32, 100]
    assert list(sizes(8, 32, 4)) == [8, 32]
    assert list(sizes(8, 8, 4)) == [8]


def test_words_of_the_command_line() -> None:
    assert bounds("5:100") == (5, 100)
    assert bounds("7") == (7, 7)
    assert ranges({3, 0, 1, 7, 2}) == "0-3,7"
    assert ranges([]) == ""


MEASURED = """
import itertools, sys
from mpi4py import MPI
from hpcdl.cli.bench_measure import Competitor, measure

comm, log = MPI.COMM_WORLD, []
rank = comm.rank

def competitor(name, step):
    # Each reading of the clock is so much later than the last one.
    return Competitor(
        call=lambda: log.append(name),
        prepare=lambda: log.append("prepare " + name),
        wrong=lambda calls: calls * (rank + 1) if name == "b" and log.count("prepare b") == 2 else 0,
        clock=itertools.count(0, step).__next__,
    )

found = measure(comm, {"a": competitor("a", 6 - rank), "b": competitor("b", 60)}, 3, {"a": 1, "b": 2}, warm_up=1)
assert found["a"] == ([6, 6, 6], 0), found  # the slowest rank's
assert found["b"] == ([30, 30, 30], 2 + 4 + 6), found  # of one call; all ranks' wrong elements in the worst round
assert log == ["prepare a", "a", "prepare b", "b", "b"] * 4, log
"""


def test_competitors_take_turns_and_the_slowest_rank_counts() -> None:
    done = run_ranks(3, "-c", MEASURED)
    assert done.returncode == 0, done.stderr


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_table_has_nccl_tests_columns_and_ends_with_the_ratios() -> None:
    done = hpcdl_bench(3, "--min", "8", "--max", "64KiB", "--factor", "64", "--algorithms", "ring,auto,native")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert any(re.fullmatch(r"# versions: Python .*, NumPy .*, mpi4py .*, hpcdl .*", line) for line in head)
    for name in ("date", "mpi", "thread level", "ranks", "ranks per host", "cores", "binding", "form"):
        assert sum(line.startswith(f"# {name}: ") for line in head) == 1
    times = ["time", "10", "%", "90", "%", "algbw", "busbw", "#wrong"]
    columns = ["#", "size", "count", "type", "redop", "algorithm", "buffers", *times, *times]
    assert [line.split() for line in head].count(columns) == 1
    rows = [line.split() for line in lines if not line.startswith("#")]
    names = ("ring", "auto", "native")
    expected = [
        [str(n), str(n // 4), "float32", "sum", name, "private"] for n in (8, 512, 32768, 65536) for name in names
    ]
    assert [row[:6] for row in rows] == expected
    for row in rows:
        assert len(row) == 18
        assert row[11] == row[17] == "0"
        assert all(float(value) >= 0 for value in row[6:])
    title = next(number for number, line in enumerate(lines) if line.split() == ["#", "size", *names])
    assert [line.split()[1:3] for line in lines[title + 1 :]] == [
        ["8", "B"],
        ["512", "B"],
        ["32", "KiB"],
        ["64", "KiB"],
    ]


def test_times_bandwidths_and_ratios_are_consistent() -> None:
    given = ("--max", "1KiB", "--factor", "64", "--algorithms", "ring,native,shared", "--buffers", "both", "--floor")
    done = hpcdl_bench(4, *given, "--format", "json", "--form", "call", "--dtype", "float64")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["header"]["ranks"] == 4
    assert found["header"]["form"] == "call"
    rows = found["results"]
    private, shared = (
        [(name, "private") for name in ("ring", "native", "shared", "floor")],
        [("ring", "shared"), ("shared", "shared")],
    )
    for size in (16, 1024):
        mine = [row for row in rows if row["size"] == size]
        expected = {(*pair, place) for pair in private + shared for place in ("in place", "out of place")}
        assert {(row["algorithm"], row["buffers"], row["place"]) for row in mine} == expected
        assert len(mine) == len(expected)
        natives = [row for row in mine if row["algorithm"] == "native"]
        native = min(natives, key=lambda row: row["time_us"])
        for row in mine:
            check_row(row, native, ranks=4)
            assert row["wrong"] == (None if row["algorithm"] == "floor" else 0)


def check_row(row: dict[str, Any], native: dict[str, Any], ranks: int) -> None:
    times = row["rounds_us"]
    assert len(times) == 3
    assert (row["time_us"], row["p10_us"], row["p90_us"]) == pytest.approx(percentiles(times), rel=1e-3)
    assert row["algbw_gb_s"] == pytest.approx(row["size"] / row["time_us"] / 1e3, rel=1e-3)
    assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * 2 * (ranks - 1) / ranks, rel=1e-3)
    assert row["ratio"] == pytest.approx(np.median(np.divide(times, native["rounds_us"])), rel=1e-3)
    assert row["count"] * np.dtype(row["type"]).itemsize == row["size"]


def test_csv_has_a_line_a_result_under_the_names(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    given = ("--min", "12", "--max", "12", "--algorithms", "native", "--op", "max", "--dtype", "int32")
    done = hpcdl_bench(2, *given, "--format", "csv", "--output", str(file))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [row["place"] for row in rows] == ["out of place", "in place"]
    for row in rows:
        first = (row["size"], row["count"], row["type"], row["redop"], row["algorithm"], row["wrong"])
        assert first == ("12", "3", "int32", "max", "native", "0")
        assert float(row["p10_us"]) <= float(row["time_us"]) <= float(row["p90_us"])
    assert min(float(row["ratio"]) for row in rows) == 1


def test_in_place_leaves_out_all_that_is_not_but_for_mpis_own() -> None:
    given = ("--min", "64", "--max", "64", "--algorithms", "ring,shared,native", "--floor", "--in-place")
    done = hpcdl_bench(2, *given, "--buffers", "both", "--format", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["algorithm"] for row in rows if row["place"] == "out of place"} == {"native"}
    inside = [(row["algorithm"], row["buffers"]) for row in rows if row["place"] == "in place"]
    assert sorted(inside) == sorted(
        [(name, kind) for name in ("ring", "shared") for kind in ("private", "shared")]
        + [("native", "private"), ("floor", "private")]
    )
    table = hpcdl_bench(2, *given)
    cells = {line.split()[4]: line.split()[6:] for line in table.stdout.splitlines() if not line.startswith("#")}
    assert cells["ring"][:6] == ["-"] * 6
    assert "-" not in cells["ring"][6:] + cells["native"]


@pytest.mark.parametrize("level", ["single", "multiple"])
def test_mpi_is_asked_for_a_thread_level_and_the_header_has_what_it_gave(level: str) -> None:
    done = hpcdl_bench(1, "--max", "16", "--algorithms", "ring,native", "--threads", level)
    assert done.returncode == 0, done.stderr
    given = re.search(r"^# thread level: (\w+)$", done.stdout, re.MULTILINE)
    assert given is not None
    assert given[1] == level


def test_one_rank_has_no_bus() -> None:
    done = hpcdl_bench(1, "--max", "16", "--algorithms", "ring,native", "--format", "csv", "--floor")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [float(row["busbw_gb_s"]) for row in rows] == [0] * 6, done.stderr
    assert done.returncode == 0


def test_overlap_is_computed_from_the_times_beside_it() -> None:
    given = ("--overlap", "--max", "4KiB", "--factor", "256", "--algorithms", "ring,native", "--format", "json")
    done = hpcdl_bench(2, *given)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    kinds = [("ring", "private"), ("ring", "shared"), ("native", "private")]
    assert [(row["size"], row["algorithm"], row["buffers"]) for row in rows] == [
        (n, *kind) for n in (16, 4096) for kind in kinds
    ]
    for row in rows:
        assert row["wrong"] == 0
        for how in ("unasked", "asked"):
            percent = hidden(row["communication_us"], row["computation_us"], row[f"{how}_us"])
            assert row[f"{how}_overlap"] == pytest.approx(percent, abs=0.1)


@pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
def test_gloo_competes_in_the_same_ranks() -> None:
    done = hpcdl_bench(2, "--max", "1KiB", "--algorithms", "native", "--peer", "gloo", "--format", "csv")
    assert done.returncode == 0, done.stderr
    rows = [row for row in csv.DictReader(io.StringIO(done.stdout)) if row["algorithm"] == "gloo"]
    assert [(row["size"], row["place"], row["wrong"]) for row in rows] == [
        (n, "in place", "0") for n in ("16", "64", "256", "1024")
    ]


def test_without_torch_the_way_to_install_it_is_said_once() -> None:
    code = "import sys; sys.modules['torch'] = None; from hpcdl.cli.main import main; sys.exit(main())"
    done = run_ranks(2, "-c", code, "bench", "--algorithms", "native", "--peer", "gloo")
    (line,) = ours(done.stderr)
    assert line.startswith("hpcdl: --peer gloo needs PyTorch: pip install 'hpcdl[torch]'")
    assert (done.returncode, done.stdout) == (2, "")


SABOTAGE = """
import sys
from mpi4py import MPI
import hpcdl
from hpcdl.cli.main import main

plan_allreduce = hpcdl.plan_allreduce

def planted(x, comm, *, algorithm, out, **others):
    plan = plan_allreduce(x, comm, algorithm=algorithm, out=out, **others)
    return Planted(plan, x if out is None else out) if algorithm == "{algorithm}" else plan

class Planted:
    def __init__(self, plan, result):
        self.plan, self.result = plan, result

    def __call__(self):
        self.plan()
        {what}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.plan.close()

hpcdl.plan_allreduce = planted
sys.exit(main(["bench", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("what", "wrong"), [("self.result[1] += (MPI.COMM_WORLD.rank == 1)", "1"), ("self.result[2:] = 0", "42")]
)
def test_a_competitor_that_is_wrong_is_told_with_status_1(what: str, wrong: str) -> None:
    code = SABOTAGE.format(algorithm="tree", what=what)
    given = ("--min", "64", "--max", "64", "--algorithms", "ring,tree,native", "--iterations", "2", "--format", "csv")
    done = run_ranks(3, "-c", code, *given)
    assert done.returncode == 1, done.stderr
    for row in csv.DictReader(io.StringIO(done.stdout)):
        if row["algorithm"] != "tree":
            assert row["wrong"] == "0"
        elif row["place"] == "out of place":
            assert row["wrong"] == wrong
        else:  # in place a second call may have handed the first one's error to all ranks
            assert int(row["wrong"]) >= int(wrong)
    (line,) = ours(done.stderr)
    assert line == f"hpcdl: 2 of 6 results are wrong; the first: {wrong} elements of tree at 64 B"


CANNOT_BEGIN = {
    "--algorithms rign": "--algorithms rign: ",
    "--algorithms native,halving": "--algorithms halving: ",
    "--min 1MB --max 1KB": "--min 1 MiB --max 1 KiB: sizes go up, from one float32 of 4 B",
    "--min 4 --dtype float64": "--min 4 B --max 64 MiB: sizes go up, from one float64 of 8 B",
    "--output /nowhere/results": "/nowhere/results cannot be written: No such file or directory",
    "--dtype float16": "--algorithms native: MPI has no float16",
    "--overlap --floor": "--overlap goes without --floor, --peer and --plot",
}


def test_what_cannot_begin_is_said_once_with_status_2() -> None:
    commands = [["bench", "--algorithms", "native", *arguments.split()] for arguments in CANNOT_BEGIN]
    code = f"import sys; from hpcdl.cli.main import main; sys.exit({{*map(main, {commands})}} != {{2}})"
    done = run_ranks(3, "-c", code)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for said, line in zip(ours(done.stderr), CANNOT_BEGIN.values(), strict=True):
        assert said.startswith(f"hpcdl: {line}")
        assert ("folded and binary_blocks take any number" in said) == ("halving" in line)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--min 5x", "argument --min: 5x is no size such as 64, 256KiB, 25MB"),
        ("--iterations 5:3", "argument --iterations: 5:3: at least 5, but at most 3"),
        ("--iterations 0", "argument --iterations: 0 is no whole number from 1 upwards"),
        ("--algorithms ring,,auto", "argument --algorithms: 'ring,,auto' is no list of names"),
        ("--factor x", "argument --factor: x is no whole number"),
        ("--seconds 0", "argument --seconds: 0 is no finite number above 0"),
        ("--format xml", "argument --format: invalid choice: 'xml'"),
        ("--peer nccl", "argument --peer: invalid choice: 'nccl'"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.RANKS:
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"hpcdl: {complaint}")
    assert (out, err.count("\n")) == ("", 1)


# ---- the pictures ----------------------------------------------------------------------------------------------------


def some_rows() -> list[dict[str, Any]]:
    competitors = [
        ("ring", "private", 2.0),
        ("ring", "shared", 0.5),
        ("native", "private", 1.0),
        ("floor", "private", 0.25),
    ]
    return [
        {
            "size": size,
            "algorithm": name,
            "buffers": kind,
            "place": place,
            "time_us": size * factor,
            "busbw_gb_s": factor,
            "ratio": factor,
        }
        for size in (1024, 4096)
        for name, kind, factor in competitors
        for place in ("out of place", "in place")
    ]


HEADER = {"type": "float32", "redop": "sum", "ranks": 4, "mpi": "MPICH 5", "form": "plan"}


def test_ratios_stand_under_their_names_by_size() -> None:
    lines = [line.split() for line in table_foot(HEADER, some_rows()).splitlines()]
    assert lines[-3:] == [
        ["#", "size", "ring", "ring@shared", "native", "floor"],
        ["#", "1", "KiB", "2.00", "0.50", "1.00", "0.25"],
        ["#", "4", "KiB", "2.00", "0.50", "1.00", "0.25"],
    ]


@pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")
def test_a_plot_is_small_and_the_same_for_the_same_rows(tmp_path: Path) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        plot(HEADER, some_rows(), str(file))
    one, two = (file.read_text() for file in files)
    assert one == two
    assert one.startswith("<?xml")
    assert "ring@shared" in one
    assert "stroke-dasharray" in one
    assert "base64" not in one
    assert len(one) < 60_000


@pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")
def test_the_command_writes_its_plot(tmp_path: Path) -> None:
    file = tmp_path / "bench.svg"
    done = hpcdl_bench(2, "--max", "64", "--algorithms", "ring,native", "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert "<svg" in file.read_text()
