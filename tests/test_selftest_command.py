"""hpcdl selftest as a person runs it: what is right passes, and every kind of planted mistake is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from harness.launch import run_ranks

import hpcdl
from hpcdl import environment
from hpcdl.buffers import TYPES
from hpcdl.cli.main import main
from hpcdl.cli.selftest import Failure, Outcome, failure, short, total
from hpcdl.cli.selftest_cases import (
    NUMPY,
    OPS,
    TORCH,
    Arranged,
    Case,
    Finding,
    Here,
    Shelf,
    cases,
    combined,
    drawn,
    lengths,
)

HOST_TYPES = [name for name in TYPES if name != "bfloat16"]


def here(ranks: int = 4, nodes: int = 1, torch: bool = False) -> Here:
    dtypes = [*TYPES] if torch else HOST_TYPES
    return Here(ranks, nodes, [*NUMPY, *(TORCH if torch else ())], dtypes, dtypes if torch else [])


def selftest(n: int, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(n, "-m", "hpcdl", "selftest", *arguments, timeout_s=120, env=env)


def ours(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "hpcdl: " in line and "hpcdl: note: " not in line]


# ---- the cases -------------------------------------------------------------------------------------------------------


def test_every_algorithm_meets_every_type_operation_and_layout() -> None:
    found = cases(here(torch=True), [])
    assert len(found) == len(set(found))
    full = [case for case in found if case.collective == "allreduce"]
    for algorithm in hpcdl.algorithms():
        mine = {(case.dtype, case.op, case.layout) for case in full if case.algorithm == algorithm}
        numpy = [layout for layout in NUMPY if layout != "random"]
        assert {(dtype, op, layout) for dtype in HOST_TYPES for op in OPS for layout in (*numpy, *TORCH)} <= mine
        assert ("bfloat16", "mean", "torch") in mine
        assert ("bfloat16", "mean", "strided") not in mine
        assert {case.form for case in full if case.algorithm == algorithm} == {"plain", "i", "plan"}
    for dtype in TYPES:
        assert {case.length for case in full if case.dtype == dtype} == set(lengths(4, dtype))
        assert max(lengths(4, dtype)) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize) > 1 << 20
    for collective in ("reduce_scatter", "allgather", "broadcast", "reduce"):
        assert {case.algorithm for case in found if case.collective == collective} == {*hpcdl.algorithms()}


def test_the_first_tenth_of_the_cases_has_something_of_everything() -> None:
    everything = cases(here(), [])
    first = everything[: len(everything) // 10]
    for field in ("collective", "algorithm", "dtype", "op", "layout", "form"):
        assert {getattr(case, field) for case in first} == {getattr(case, field) for case in everything}, field


def test_on_several_nodes_everything_runs_between_them() -> None:
    algorithms = {case.algorithm for case in cases(here(nodes=2), [])}
    assert {"by_node:tree", "by_node:halving", "by_node:doubling"} <= algorithms
    assert not any(":" in case.algorithm for case in cases(here(), []))


def test_the_words_of_a_case_name_it_alone() -> None:
    everything = cases(here(nodes=2), [])
    for case in [*everything[:3], *everything[3::997]]:
        assert cases(here(nodes=2), case.words().split(",")) == [case]
    (other,) = cases(here(), ["broadcast", "ring", "int8", "out", "12345", "i"])
    assert (other.length, other.form, other.op) == (12345, "i", "")


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 7, 8, 600])
@pytest.mark.parametrize("op", OPS)
def test_what_comes_out_tells_whether_every_rank_was_counted_once(size: int, op: str) -> None:
    """But where an operation forgets: twice the maximum is the maximum."""
    for dtype in HOST_TYPES:
        if dtype.startswith("complex") and op in ("min", "max"):
            continue
        right = combined(dtype, "sum" if op == "mean" else op, False, size)
        ufunc = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
        parts = [drawn(dtype, op, False, rank, size) for rank in range(size)]
        backwards = ufunc.reduce(np.array(parts[::-1]), axis=0, dtype=right.dtype)
        assert (backwards == right).all(), dtype  # small integers: in any order
        for missing in (0, size // 2, size - 1):
            rest = parts[:missing] + parts[missing + 1 :]
            assert (ufunc.reduce(np.array(rest), axis=0, dtype=right.dtype) != right).any(), (dtype, missing)
        if op == "sum" and dtype != "bool":
            assert (right + parts[0] != right).any()


def test_what_is_written_beside_an_array_is_seen() -> None:
    shelf = Shelf(None, 4)  # type: ignore[arg-type]
    for layout in ("contiguous", "strided", "fortran", "reversed"):
        for n in (0, 1, 6, 7):
            array: Arranged = shelf.arrange(layout, "int16", n)
            array.write(np.arange(n))
            assert (np.asarray(array.x).reshape(-1) == np.arange(n)).all()
            assert array.untouched()
            for place in np.flatnonzero(array._around):
                array.write(np.arange(n))
                array.base[place] += 1
                assert not array.untouched(), (layout, n, place)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def test_a_failure_is_that_of_the_first_rank_that_has_one() -> None:
    case = Case("allreduce", "ring", "int8", "sum", "out", 3, "i")
    good, bad = Finding(bits=5), Finding(False, 0, "element 2 is 1, not 3", 2, "1", "3")
    found = failure(case, [(good, "a"), (bad, "b"), (bad, "b")])
    repeat = "hpcdl selftest --only allreduce,ring,int8,sum,out,3,i"
    assert found == Failure(str(case), 1, "b", 2, bad.problem, 2, "1", "3", repeat)
    found = failure(case, [(good, "a"), (good._replace(bits=6), "b")])
    assert (found.rank, found.problem) == (1, "has other bits in its result than rank 0")
    found = failure(case, [(good, "a"), (Finding(refused=True), "b")])
    assert (found.rank, found.problem) == (1, "was refused here, and not on all ranks")


def test_what_was_left_out_is_said_with_the_time_that_it_would_take() -> None:
    passed, refused = Counter({("ring", "int8"): 30}), Counter({"ring": 10})
    outcome = Outcome(passed, refused, left_out=60, seconds=20.0)
    assert total(outcome) == (
        "30 cases passed, 10 were refused as they must be, 0 failed; 20.0 s; "
        "60 left out for want of time: all would take about --seconds 50"
    )
    assert total(Outcome(passed, refused, seconds=20.0)).endswith("0 failed; 20.0 s")


def test_no_two_types_have_the_same_short_name() -> None:
    assert len({short(name) for name in TYPES}) == len(TYPES)
    assert (short("bfloat16"), short("uint8"), short("bool")) == ("bf16", "u8", "bool")


# ---- on ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "only", "env"),
    [
        (1, "contiguous", {}),
        (3, "strided", {}),
        (4, "empty", {}),
        (2, "out", {"HPCDL_CHECK": "0"}),
        (2, "empty", {"HPCDL_SHARED": "0"}),
        (3, "random", {"HPCDL_NODES": "2+1"}),
    ],
)
@pytest.mark.timeout(150)
def test_all_is_well_here(n: int, only: str, env: dict[str, str]) -> None:
    done = selftest(n, "--only", only, "--seconds", "4", "--json", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["failed"], found["failures"]) == (0, [])
    assert found["passed"] > 10
    assert found["passed"] == sum(sum(row["passed"].values()) for row in found["results"].values())
    assert found["refused"] == sum(row["refused"] for row in found["results"].values()) > 0
    assert found["header"]["ranks"] == n
    assert found["header"]["nodes"] == (2 if "HPCDL_NODES" in env else 1)
    assert len(found["results"]) > 8


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("layout", "algorithm"), [("torch", "ring"), ("contiguous", "native")])
def test_the_table_counts_by_algorithm_and_type_once_for_all_ranks(layout: str, algorithm: str) -> None:
    if layout == "torch":
        pytest.importorskip("torch")
    done = selftest(2, "--only", f"allreduce,{algorithm},{layout},plain,17", "--seconds", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hpcdl selftest: 2 ranks on 1 node, ")
    (head,) = [line.split() for line in lines if line.split()[-1:] == ["refused"]]
    (mine,) = [line.split()[1:] for line in lines if line.startswith(f"{algorithm} ")]
    counts = dict(zip(head, map(int, mine), strict=True))
    # Of five operations the mean is refused for integers and bool, min and max for complex numbers.
    assert counts["f32"] == 5
    assert (counts["i8"], counts["u64"], counts["bool"], counts["c64"]) == (4, 4, 4, 3)
    if algorithm == "native":  # and of floats of 16 bits all
        assert (counts.get("f16"), counts["refused"]) == (None, 9 + 4 + 5)
    else:
        assert (counts["f16"], counts["bf16"], counts["refused"]) == (5, 5, 9 + 4)
    assert " 0 failed; " in lines[-1]
    assert "left out" not in lines[-1]


def test_no_case_begins_when_the_time_is_up() -> None:
    done = selftest(2, "--only", "contiguous", "--seconds", "0.001", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] + found["refused"] == 1
    assert found["left_out"] == len(cases(here(2), ["contiguous"])) - 1


PLANTED = """
import sys, time
import numpy as np
import hpcdl
from hpcdl.cli.main import main

def planted(*given, **options):
    comm = given[-1]
    if comm.rank == 1:
        if what == "never come":
            time.sleep(600)
        if what == "raise before":
            raise RuntimeError("planted")
        if what == "change and refuse":
            given[0][...] = 9
    if what == "return at once":
        return
    if what == "refuse":
        raise ValueError("planted")
    if what == "take all":
        options = {{**options, "op": "sum"}}
    result = real(*given, **options)
    if comm.rank == 1:
        flat = result.reshape(-1) if result is not None else None
        if what == "one more":
            flat[2] += 1
        if what == "last bit":
            flat[0] = np.nextafter(flat[0], flat.dtype.type(9))
        if what == "beside":
            given[0].base[1] += 1
        if what == "copy":
            return result.copy()
        if what == "raise":
            raise RuntimeError("planted")
    return result

status = 0
for what, name, *words in {mistakes}:
    real = getattr(hpcdl, name)
    setattr(hpcdl, name, planted)
    status |= main(["selftest", *words])
    setattr(hpcdl, name, real)
sys.exit(status)
"""


def with_planted(n: int, *mistakes: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """One selftest after the other in one start, which takes longest; of each what is planted, where, and its words."""
    return run_ranks(n, "-c", PLANTED.format(mistakes=mistakes), timeout_s=60)


MISTAKES = [
    ("one more", "allreduce", "ring,float32,sum,contiguous,9,plain", "element 2 is 5.0, not 4.0 (1 of 9 are wrong)"),
    ("one more", "reduce_scatter", "ring,int8,max,strided,12,plain", "(1 of 4 are wrong)"),
    ("one more", "allgather", "tree,uint64,out,9,plain", "element 2 is "),
    ("one more", "broadcast", "tree,float16,contiguous,9,plain", "element 2 is "),
    ("last bit", "allreduce", "ring,float64,sum,random,9,plain", "has other bits in its result than rank 0"),
    ("beside", "allreduce", "tree,int16,sum,contiguous,9,plain", "something was written outside of the array"),
    ("copy", "allreduce", "tree,int16,sum,contiguous,9,plain", "should return the array that holds the result"),
    ("raise", "allreduce", "tree,int16,sum,contiguous,9,plain", "raised RuntimeError: planted"),
    ("refuse", "allreduce", "tree,int16,sum,contiguous,9,plain", "raised ValueError: planted"),
    ("take all", "allreduce", "tree,int16,mean,contiguous,9,plain", "should have been refused: would have to be"),
    ("change and refuse", "allreduce", "tree,int8,mean,contiguous,9,plain", "but the array has changed"),
    ("return at once", "barrier", "barrier,plain", "was left before rank 2 had come"),
]


def test_a_planted_mistake_is_found_and_named() -> None:
    asked = [only if name in only else f"{name},{only}" for _, name, only, _ in MISTAKES]
    done = with_planted(
        3, *((what, name, "--only", only, "--json") for (what, name, *_), only in zip(MISTAKES, asked, strict=True))
    )
    assert done.returncode == 1, done.stderr
    reports = "".join(done.stdout.splitlines()).replace("}{", "}\n{").splitlines()
    for (what, name, _, problem), only, report in zip(MISTAKES, asked, reports, strict=True):
        (failure,) = json.loads(report)["failures"]
        assert problem in failure["problem"]
        assert failure["rank"] == (0 if what in ("take all", "refuse", "return at once") else 1)
        assert sorted(failure["repeat"].rpartition(" ")[2].split(",")) == sorted(only.split(","))
        if what == "one more" and name == "allreduce":
            assert (failure["place"], failure["got"], failure["expected"]) == (2, "5.0", "4.0")


def test_after_a_case_that_broke_off_the_others_go_on() -> None:
    done = with_planted(2, ("raise", "allreduce", "--only", "float32,sum,contiguous,9"))
    assert done.returncode == 1, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.stdout.count("hpcdl selftest --only allreduce,") == len(failed) > 0
    assert all(
        " of 9 float32, contiguous, by " in line and line.endswith(": raised RuntimeError: planted") for line in failed
    )
    forms = Counter(case.form for case in cases(here(2), ["float32", "sum", "contiguous", "9"]))
    assert min(forms.values()) > 0
    assert done.stdout.splitlines()[-1].split()[:2] != ["0", "cases"]


@pytest.mark.parametrize(("what", "says"), [("never come", 0), ("raise before", 1)])
def test_a_case_that_hangs_ends_the_job_and_is_named(what: str, says: int) -> None:
    began = time.monotonic()
    words = ("--only", "tree,int16,sum,contiguous,9,plain", "--limit", "2")
    done = with_planted(3, (what, "allreduce", *words))
    assert time.monotonic() - began < 40
    assert done.returncode != 0
    case = "allreduce sum of 9 int16, contiguous, by tree"
    lines = ours(done.stderr)
    assert any(
        f"{case}: took longer than 2 s, and this rank is still in it; the job is ended. " in line for line in lines
    )
    assert "To repeat it: hpcdl selftest --only allreduce,tree,int16,sum,contiguous,9,plain" in done.stderr
    assert done.stderr.count(f"rank 1 of 3 on {hosts()}: {case}: raised RuntimeError: planted") == says
    assert "rank 1 " in done.stderr  # who is missing


def hosts() -> str:
    return Path("/proc/sys/kernel/hostname").read_text().strip()


# ---- what cannot begin -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--seconds 0", "argument --seconds: 0 is no finite number above 0"),
        ("--limit nan", "argument --limit: nan is no finite number above 0"),
        ("--only ,", "argument --only: ',' is no list of names"),
        ("ring", "there is no ring"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.RANKS:
        monkeypatch.delenv(name, raising=False)
    assert main(["selftest", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"hpcdl: {complaint}")


@pytest.mark.parametrize(
    ("only", "complaint"),
    [
        ("rign", "--only rign: nothing is called that; there are collectives allreduce, "),
        (
            "ring,tree,strided",
            "--only ring,tree,strided: there is no case with all of these here (arrays: contiguous, ",
        ),
    ],
)
def test_words_that_name_no_case_are_refused_once_with_status_2(only: str, complaint: str) -> None:
    done = selftest(2, "--only", only)
    (line,) = ours(done.stderr)
    assert line.startswith(f"hpcdl: {complaint}")
    assert (done.stdout, done.returncode) == ("", 2)


def test_ranks_that_were_told_different_things_refuse() -> None:
    code = "import sys; from mpi4py import MPI; from hpcdl.cli.main import main; "
    code += "sys.exit(main(['selftest', '--only', ('ring', 'tree')[MPI.COMM_WORLD.rank]]))"
    done = run_ranks(2, "-c", code)
    (line,) = ours(done.stderr)
    assert line == "hpcdl: all ranks must have the same --only: rank 1 has ['tree'], rank 0 has ['ring']"
    assert done.returncode == 2


def test_its_help_starts_neither_mpi_nor_torch() -> None:
    code = "import sys\nfrom hpcdl.cli.main import main\ntry:\n    main(['selftest', '--help'])\nfinally:\n"
    code += "    print([name for name in ('mpi4py.MPI', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n")
