"""hpcdl trace summary: small traces whose answer was computed by hand, and what is no trace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from harness.launch import run_ranks

from hpcdl import environment
from hpcdl.cli.main import main
from hpcdl.cli.trace import length

MS = 1000.0


def event(rank: int, ts: float, dur: float, name: str = "allreduce", number: int = 1, **args: Any) -> dict[str, Any]:
    tid = args.pop("tid", 0)
    usual = {"call": name, "number": number, "bytes": 4000, "algorithm": "ring", "comm": "0.1", "at": "train.py:17"}
    return {
        "ph": "X",
        "name": name,
        "cat": "collective",
        "ts": ts,
        "dur": dur,
        "pid": rank,
        "tid": tid,
        "args": usual | args,
    }


def named(rank: int, host: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {host}"}}


def written(file: Path, *events: dict[str, Any]) -> str:
    file.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return str(file)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.RANKS:
        monkeypatch.delenv(name, raising=False)


Capture = pytest.CaptureFixture[str]


def summary(capsys: Capture, file: str) -> dict[str, Any]:
    assert main(["trace", "summary", file, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["file"] == file
    return found


# Rank 1 comes 30 us late to the first operation, from a place of its own, and rank 0 10 us late to the second.
TWO = (
    named(0, "h1"),
    named(1, "h2"),
    event(0, 0, 50, number=1, waited_us=25),
    event(1, 30, 20, number=1, waited_us=1, at="slow.py:3"),
    event(1, 100, 30, number=2),
    event(0, 110, 20, number=2),
)


def test_waiting_ends_when_the_last_has_come(tmp_path: Path, capsys: Capture) -> None:
    found = summary(capsys, written(tmp_path / "t.json", *TWO))
    assert (found["span_us"], found["operations"], found["left_out"]) == (130, 2, {})
    first, second = found["ranks"]
    # Rank 0: 50 + 20 in collectives; 30 of the first waiting, by the other's clock, though it says 25 itself.
    assert (first["waiting_us"], first["moving_us"], first["outside_us"], first["beside_us"]) == (30, 40, 60, 0)
    # Rank 1: 20 + 30; it says 1 of the first itself, and was 10 early for the second.
    assert (second["waiting_us"], second["moving_us"], second["outside_us"]) == (11, 39, 80)
    assert (first["came_last"], first["others_waited_us"]) == (1, 10)
    assert (second["came_last"], second["others_waited_us"]) == (1, 30)
    assert found["slowest"] == {
        "rank": 1,
        "name": "rank 1 on h2",
        "came_last": 1,
        "others_waited_us": 30,
        "at": "slow.py:3",
        "at_others_waited_us": 30,
    }


def test_calls_are_counted_by_collective_algorithm_and_size(tmp_path: Path, capsys: Capture) -> None:
    parts = [event(0, 10 * number, number, number=number, bytes=1024) for number in (1, 2, 3)]
    parts += [event(0, 100, 9, number=4, bytes=1025), event(0, 200, 1, number=5, bytes=1024, algorithm="tree")]
    parts += [event(0, 300, 2, "broadcast", 6, bytes=1 << 40)]
    found = summary(capsys, written(tmp_path / "t.json", *parts))
    rows = [tuple(row.values()) for row in found["collectives"]]
    assert rows == [
        # collective, algorithm, size, calls, bytes, total, waiting, median, worst; the most time first
        ("allreduce", "ring", "up to 16 KiB", 1, 1025, 9, 0, 9, 9),
        ("allreduce", "ring", "up to 1 KiB", 3, 3072, 6, 0, 2, 3),
        ("broadcast", "ring", "over 256 GiB", 1, 1 << 40, 2, 0, 2, 2),
        ("allreduce", "tree", "up to 1 KiB", 1, 1024, 1, 0, 1, 1),
    ]


def test_of_three_ranks_the_one_that_the_others_wait_for_longest_is_the_slowest(
    tmp_path: Path, capsys: Capture
) -> None:
    starts = [(0, 20, 5), (100, 100, 140), (200, 210, 260), (400, 300, 300)]
    ends = (50, 150, 270, 410)
    parts = [
        event(rank, start, end - start, number=number, run=number, at=f"train.py:{number}")
        for number, (row, end) in enumerate(zip(starts, ends, strict=True), start=7)
        for rank, start in enumerate(row)
    ]
    found = summary(capsys, written(tmp_path / "t.json", *parts))
    # The others' mean waits: rank 1 (20 + 15) / 2; rank 2 (40 + 40) / 2 + (60 + 50) / 2; rank 0 (100 + 100) / 2.
    assert [row["others_waited_us"] for row in found["ranks"]] == [100, 17.5, 95]
    assert [row["came_last"] for row in found["ranks"]] == [1, 1, 2]
    assert found["slowest"]["name"] == "rank 0"
    assert (found["slowest"]["at"], found["slowest"]["at_others_waited_us"]) == ("train.py:10", 100)


def test_operations_that_are_waited_for_together_are_waited_for_once(tmp_path: Path, capsys: Capture) -> None:
    """Ten buckets are started, and the rank that is late is so with all of them."""
    parts = [
        event(0, bucket, 200 - bucket, "iallreduce", bucket, bucket=bucket, started=True) for bucket in range(1, 11)
    ]
    parts += [event(1, 101, 99, "iallreduce", bucket, bucket=bucket, started=True) for bucket in range(1, 11)]
    found = summary(capsys, written(tmp_path / "t.json", *parts))
    assert found["slowest"]["others_waited_us"] == 100
    assert (found["ranks"][1]["came_last"], found["operations"]) == (10, 10)
    # All of it was in flight, while the rank did something else.
    zero = found["ranks"][0]
    assert (zero["beside_us"], zero["waiting_us"], zero["moving_us"], zero["outside_us"]) == (199, 0, 0, 199)


def test_what_another_thread_does_is_beside_the_ranks_own_time(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path / "t.json", event(0, 0, 10), event(0, 5, 30, number=2, tid=1), event(0, 90, 10, number=3))
    (rank,) = summary(capsys, file)["ranks"]
    assert (rank["moving_us"], rank["beside_us"], rank["outside_us"]) == (20, 30, 80)


def test_who_has_left_before_the_last_comes_has_not_waited_for_it(tmp_path: Path, capsys: Capture) -> None:
    """The root of a broadcast may go on."""
    file = written(tmp_path / "t.json", event(0, 0, 5, "broadcast"), event(1, 100, 10, "broadcast"))
    found = summary(capsys, file)
    assert found["slowest"]["others_waited_us"] == 5
    assert found["ranks"][0]["waiting_us"] == 5


def test_only_operations_with_all_members_of_the_communicator_count(tmp_path: Path, capsys: Capture) -> None:
    parts = [event(0, 0, 10), event(1, 2, 8), event(2, 4, 6)]
    parts += [event(0, 20, 10, number=2), event(1, 29, 1, number=2)]  # rank 2 has no room for it in the file
    parts += [event(1, 50, 10, comm="1.1"), event(2, 57, 3, comm="1.1")]  # another communicator of two
    parts += [event(0, 70, 10, number=3), event(1, 70, 10, number=3, run=1), event(2, 79, 1, number=3, run=2)]
    found = summary(capsys, written(tmp_path / "t.json", *parts))
    assert found["operations"] == 2
    assert [row["came_last"] for row in found["ranks"]] == [0, 0, 2]
    # Ranks 0 and 1 have waited 4 and 2, and rank 1 7: by the mean of both others.
    assert found["slowest"]["others_waited_us"] == (4 + 2 + 7) / 2


def test_one_rank_waits_for_nobody(tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path / "t.json", named(0, "h1"), event(0, 0, 10), event(0, 20, 10, number=2))
    assert summary(capsys, file)["slowest"] is None
    assert main(["trace", "summary", file]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}: 1 rank, 30.0 us from ")
    assert "no rank was waited for" in out


def test_the_table_says_it_in_words(tmp_path: Path, capsys: Capture) -> None:
    left_out = {"ph": "M", "name": "hpcdl_left_out", "pid": 1, "args": {"events": 12}}
    file = written(tmp_path / "t.json", *TWO, left_out)
    assert main(["trace", "summary", file]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"{file}: 2 ranks, 130 us from the first operation's beginning to the last one's end"
    assert "rank 0 on h1 30.0 us 23.1% 40.0 us 30.8% 60.0 us 46.2% 0.00 us 0.0% 1 10.0 us" in lines
    assert "allreduce ring up to 16 KiB 4 15.6 KiB 120 us 41.0 us 25.0 us 50.0 us" in lines
    assert (
        "the slowest is rank 1 on h2: it came last to 1 of 2 operations, and the others waited 30.0 us for it on "
        "average, of that 30.0 us at slow.py:3"
    ) in lines
    assert lines[-1] == "12 operations of rank 1 are not in the file, which had reached its largest size"


def test_of_hundreds_of_ranks_those_are_shown_that_are_waited_for(tmp_path: Path, capsys: Capture) -> None:
    parts = [event(rank, 50 if rank == 77 else rank % 7, 100, number=1) for rank in range(100)]
    file = written(tmp_path / "t.json", *parts)
    assert len(summary(capsys, file)["ranks"]) == 100
    assert main(["trace", "summary", file]) == 0
    out = capsys.readouterr().out
    assert "\nrank 77 " in out
    assert "... and 80 ranks more: see --json" in out


def test_time_that_overlaps_counts_once() -> None:
    assert length([]) == 0
    assert length([(5, 9), (0, 4), (3, 4), (1, 6), (20, 20)]) == 9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file or directory"),
        ("", " is no trace: Expecting value: line 1 column 1 (char 0)"),
        ("[", " is no trace: Expecting value: line 1 column 2 (char 1)"),
        ("[" * 100_000, " is no trace: "),
        ('{"traceEvents": []}', " is no trace: it holds no list of events, as HPCDL_TRACE=FILE writes it"),
        ("[]", " holds no operations: the program has called no collective, or ended before the first"),
        (json.dumps([named(0, "h1")]), " holds no operations: "),
        ("[7]", " is no trace of hpcdl: event 0 is 7: "),
        ('[{"name": "a", "ph": "X"}]', " is no trace of hpcdl: event 0 is {'name': 'a', 'ph': 'X'}: it has no 'pid'"),
        (json.dumps([event(0, 0, -1)]), "ts 0.0 and dur -1.0 are no time"),
        (json.dumps([event(0, float("nan"), 1)]), "ts nan and dur 1.0 are no time"),
        (json.dumps([event(0, 0, 1, number=None)]), " is no trace of hpcdl: event 0 is "),  # type: ignore[arg-type]
        (json.dumps([{**event(0, 0, 1), "pid": "zero"}]), "its pid 'zero' is no rank"),
    ],
)
def test_what_is_no_trace_gets_one_line_and_status_2(
    text: str | None, complaint: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "t.json"
    if text is not None:
        file.write_text(text)
    assert main(["trace", "summary", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"hpcdl: {file}")
    assert complaint in err


def test_a_folder_and_bytes_are_no_trace_either(tmp_path: Path, capsys: Capture) -> None:
    assert main(["trace", "summary", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"hpcdl: {tmp_path}: Is a directory\n"
    (tmp_path / "b").write_bytes(b"\xff\xfe[\xd8")
    assert main(["trace", "summary", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith(f"hpcdl: {tmp_path}/b is no trace: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("trace", "the following arguments are required: VERB"),
        ("trace sumary t", "argument VERB: invalid choice: 'sumary'"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(words: str, complaint: str, capsys: Capture) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"hpcdl: {complaint}")


def test_under_mpiexec_it_speaks_once(tmp_path: Path) -> None:
    file = written(tmp_path / "t.json", *TWO)
    done = run_ranks(2, "-m", "hpcdl", "trace", "summary", file)
    assert (done.returncode, done.stdout.count("the slowest is rank 1 on h2")) == (0, 1), done.stderr
    done = run_ranks(2, "-m", "hpcdl", "trace", "summary", file + "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count(f"hpcdl: {file}x: No such file or directory") == 1


def test_what_the_library_writes_is_what_is_read(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "t.json"
    code = """
import time
import numpy as np
from mpi4py import MPI
import hpcdl
x = np.ones(1000, "float32")
for step in range(20):
    if hpcdl.rank() == 1 and step % 2:
        time.sleep(0.02)
    hpcdl.allreduce(x, algorithm="ring")
with hpcdl.plan_allreduce(x) as plan:
    for _ in range(5):
        plan()
hpcdl.iallreduce(x).wait()
"""
    done = run_ranks(3, "-c", code, env={"HPCDL_TRACE": str(file)})
    assert done.returncode == 0, done.stderr
    found = summary(capsys, str(file))
    calls = {(row["collective"], row["algorithm"]): row["calls"] for row in found["collectives"]}
    assert calls["allreduce", "ring"] >= 3 * 20
    assert found["slowest"]["rank"] == 1
    assert found["slowest"]["name"].startswith("rank 1 on ")
    assert found["slowest"]["others_waited_us"] > 9 * 20 * MS
    assert found["operations"] >= 20 + 5 + 1


def test_a_file_of_the_largest_size_is_read_in_time(tmp_path: Path, capsys: Capture) -> None:
    """A tenth of 64 MiB, in a tenth of the time: 2 s, and on a machine that has more to do."""
    parts = [event(rank, 100 * n + rank, 50, number=n) for n in range(1, 7000) for rank in range(4)]
    file = written(tmp_path / "t.json", *parts)
    began = time.monotonic()
    found = summary(capsys, file)
    assert time.monotonic() - began < 10
    assert found["ranks"][3]["came_last"] == found["operations"] == 6999
