"""Ranks are killed in the middle of all-reduces, and those who are left get what was promised."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TESTS
from harness.launch import run_ranks
from harness.ulfm import needs_ulfm

from hpcdl.survive import Fault
from hpcdl.survive.exchange import placement

sys.path.append(str(TESTS.parent / "benchmarks"))

import survive_soak
from survive_soak import Line, Played, Scenario, bits, perform, violations


def kill(rank: int, message: int, when: str = "before") -> dict[str, Any]:
    return {"rank": rank, "message": message, "when": when}


def played(*scenarios: Scenario, detector_s: float = 0) -> list[Played]:
    found = perform(scenarios, detector_s=detector_s, limit_s=90)
    for each in found:
        assert not each.problem, (each, each.problem)
        assert violations(each.scenario, each.lines) == [], each.scenario
    return found


def outcomes(group: Played) -> list[Line]:
    """One line of each step: all ranks have the same."""
    return [one for one, *_ in survive_soak.steps_of(group.lines)]


# ---- kills -----------------------------------------------------------------------------------------------------------


@needs_ulfm
@pytest.mark.parametrize("policy", ["exact", "survivors"])
def test_whenever_a_rank_is_killed_the_others_finish_with_the_promised_sum(policy: str) -> None:
    """An all-reduce of 4 ranks takes 14 messages of each in a ring, 10 by binary_blocks, 2 less without the copies.

    These come first. By the end of an all-reduce they have arrived, and not surely before.
    """
    groups = played(
        {"policy": policy, "ranks": 4, "algorithm": "ring", "faults": [kill(1, 25)]},
        {"policy": policy, "ranks": 4, "algorithm": "ring", "faults": [kill(0, 26, "after")]},
        {"policy": policy, "ranks": 4, "algorithm": "binary_blocks", "faults": [kill(2, 18, "completion")]},
        {"policy": policy, "ranks": 5, "algorithm": "by_node", "faults": [kill(0, 15), kill(2, 36)]},
        {"policy": policy, "ranks": 3, "algorithm": "direct", "faults": [kill(2, 18, "completion")]},
    )
    for group in groups:
        killed = {fault["rank"] for fault in group.scenario["faults"]}
        assert set(outcomes(group)[-1]["after"]) == set(range(group.scenario["ranks"])) - killed
        assert not any("error" in line for line in outcomes(group)), group.scenario


@needs_ulfm
def test_eight_ranks_go_on_until_two_are_left() -> None:
    faults = [kill(rank, 35 * (number + 1)) for number, rank in enumerate([7, 3, 5, 1, 6, 2])]
    (group,) = played({"policy": "exact", "ranks": 8, "faults": faults, "steps": 20})
    last = outcomes(group)[-1]
    assert last["after"] == [0, 4] and last["epoch"] <= 6  # two may be lost in one recovery
    assert sorted(rank for rank, _, _ in last["lost"]) == [1, 2, 3, 5, 6, 7]
    assert last["lost"][0] == [7, 3, 0]  # in the third all-reduce, where rank 0 had the copy


def test_copies_go_to_the_next_who_have_none() -> None:
    def preferred(rank: int) -> list[int]:
        return [each for each in (*range(rank + 1, 4), *range(rank)) if each != 1]  # rank 1 is dead

    assert placement({0: {0, 2}, 1: {2}, 2: {2}, 3: {3}}, preferred, 1, {1: 2}) == [(2, 3, 1), (2, 3, 2), (3, 0, 3)]
    assert placement({0: {0}, 1: set()}, preferred, 0, {}) == []


@needs_ulfm
def test_what_cannot_be_promised_is_raised_by_all_and_the_next_goes_on() -> None:
    five = {"policy": "exact", "ranks": 5, "steps": 4}
    pair, apart, twice, first, raises, half, quorum = played(
        five | {"faults": [kill(1, 15), kill(2, 15)]},
        five | {"faults": [kill(1, 23), kill(3, 23)]},
        five | {"copies": 2, "faults": [kill(1, 27), kill(2, 27)]},
        five | {"ranks": 3, "faults": [kill(1, 0)]},
        {"policy": "raise", "ranks": 3, "steps": 4, "faults": [kill(1, 8)]},
        {"policy": "survivors", "ranks": 4, "faults": [kill(0, 9), kill(1, 9)]},
        {"policy": "survivors", "ranks": 4, "faults": [kill(2, 9), kill(3, 9)]},
    )
    errors = [line for line in outcomes(pair) if "error" in line]
    assert [line["failed"] for line in errors] == [[1, 2]]
    assert "nobody who lives holds all that rank 1 put in" in errors[0]["error"]
    assert outcomes(pair)[-1]["result"] == bits((0, 3, 4))
    assert not any("error" in line for line in [*outcomes(apart), *outcomes(twice)])
    assert [line["failed"] for line in outcomes(first) if "error" in line] == [[1]]
    assert ["error" in line for line in outcomes(raises)].count(True) == 1
    assert outcomes(raises)[-1]["result"] == bits((0, 2))
    assert ["no quorum" in line.get("error", "") for line in outcomes(half)] == [False, True, True]
    assert outcomes(quorum)[-1]["after"] == [0, 1]


@needs_ulfm
def test_every_reduction_length_and_type_survives_a_loss() -> None:
    ops = ["sum", "mean", "min", "max"]
    exact, left, halves = played(
        {"policy": "exact", "ranks": 4, "ops": ops, "lengths": [5], "dtype": "float32", "out": True, "steps": 8}
        | {"faults": [kill(3, 18)]},
        {"policy": "survivors", "ranks": 4, "lengths": [0, 1, 3, 100_000], "steps": 8, "faults": [kill(1, 14)]},
        {"policy": "exact", "ranks": 4, "ops": ["mean"], "dtype": "float16", "faults": [kill(1, 18)]},
    )
    third = float(np.float32(7) / np.float32(3))
    assert [line["result"] for line in outcomes(exact)] == [15, 15 / 4, 1, 4, 7, third, 1, 4]
    assert [line["result"] for line in outcomes(left)][4:] == [None, *[bits((0, 2, 3))] * 3]
    assert [line["result"] for line in outcomes(halves)][:2] == [15 / 4, 15 / 4]


# ---- how it is tried, and told ---------------------------------------------------------------------------------------


@needs_ulfm
def test_scenarios_are_played_in_turn_by_those_who_are_left() -> None:
    three = {"policy": "survivors", "ranks": 3, "steps": 2}
    scenarios = [three | {"faults": [kill(rank, 1)]} for rank in (0, 1, 2)]
    assert survive_soak.needed([[each] for each in scenarios]) == 5
    for group in survive_soak.in_turn(scenarios):
        assert group.wrong() == []
        assert len(outcomes(group)[-1]["after"]) == 2
        assert [recovery.kind for recovery in group.recoveries()] == ["kill"]


def told(step: int, rank: int, at: float, **more: Any) -> Line:
    line = {"step": step, "rank": rank, "at": at, "op": "sum", "well": True, "before": [0, 1, 2], "after": [0, 1, 2]}
    return line | {"result": 7.0} | more


def test_a_recovery_ends_with_the_all_reduce_in_which_the_rank_was_struck() -> None:
    """The others come to the end of the one before it only behind the strike; the frozen one wakes much later."""
    left = {"after": [0, 2], "result": 7.0}
    lines = [told(0, 1, 10.0), {"rank": 1, "struck": 10.1, "kind": "stop"}]
    lines += [told(0, 0, 10.2), told(1, 0, 12.5, **left), told(0, 2, 10.2), told(1, 2, 12.6, **left)]
    lines += [told(1, 1, 17.0, error="RankFailedError: no quorum")]
    ((kind, ms),) = Played({}, lines, "").recoveries()
    assert (kind, round(ms)) == ("stop", 2500)


def test_what_was_not_promised_is_found() -> None:
    scenario = {"policy": "exact", "ranks": 3, "steps": 1}
    closed = [{"rank": rank, "closed": True} for rank in range(3)]
    good = [told(0, rank, 1.0) for rank in range(3)]
    assert violations(scenario, good + closed) == []
    for bad in (
        {"result": 5.0},  # on one rank
        {"well": False},
        {"after": [0, 1]},
        {"error": "RankFailedError: no quorum"},  # and the others wait for it in the end
    ):
        assert violations(scenario, [*good[:2], good[2] | bad, *closed]), bad
    short = [line | {"result": 3.0} for line in good]
    assert violations(scenario, short + closed) and not violations(scenario | {"policy": "survivors"}, good + closed)
    assert violations(scenario, good + closed[:2])
    assert violations(scenario | {"steps": 2}, good + closed)


# ---- what is no death ------------------------------------------------------------------------------------------------


@needs_ulfm
def test_a_rank_that_is_late_is_no_loss_and_one_that_is_frozen_is() -> None:
    late = kill(1, 15) | {"kind": "delay", "seconds": 6.0}
    frozen = kill(2, 18) | {"kind": "stop"}
    patient, cold = played(
        {"policy": "exact", "ranks": 3, "faults": [late]},
        {"policy": "exact", "ranks": 4, "faults": [frozen], "wake_s": 9, "pause_s": 1},
        detector_s=4,  # shorter, and while all ranks start on few cores some are silent for too long
    )
    assert not any("error" in line or line["lost"] for line in outcomes(patient))
    awake = [line for line in outcomes(cold) if "error" not in line]
    assert [line["result"] for line in awake] == [15, 15, 11]


PROGRAM = """
import sys, numpy as np
from mpi4py import MPI
from hpcdl import HpcdlError
from hpcdl.survive import Survivors, leave
comm = MPI.COMM_WORLD
x = np.ones(10) * (1 + comm.rank)
def main(survivors):
    WHAT
with Survivors(policy="survivors") as survivors:
    for _ in range(3):
        try:
            main(survivors)
        except HpcdlError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        except ValueError as error:
            print(f"ValueError: {error}", flush=True)
leave(END)
"""


def run(what: str, ranks: int = 3, end: int = 0, options: Iterable[str] = ("--with-ft", "ulfm")) -> Any:
    script = PROGRAM.replace("WHAT", what).replace("END", str(end))
    return run_ranks(ranks, "-c", script, options=list(options), timeout_s=60)


@needs_ulfm
@pytest.mark.usefixtures("open_mpi")
def test_what_one_rank_cannot_serve_or_calls_otherwise_all_refuse() -> None:
    refused = run("survivors.allreduce(x, 'sum' if comm.rank else 'average')")
    assert refused.stdout.count("ValueError: rank 0: op is one of sum") == 9, refused
    differ = run("survivors.allreduce(x[:10 - comm.rank])")
    assert differ.stdout.count("MismatchError: the ranks do not call the same all-reduce:") == 9, differ
    assert "rank 2: all-reduce 3, sum of float64 8 by binary_blocks" in differ.stdout


@needs_ulfm
@pytest.mark.usefixtures("open_mpi")
def test_a_rank_that_raises_ends_alone_with_its_traceback() -> None:
    done = run("if comm.rank == 1: raise KeyError('fed up')\n    print(survivors.allreduce(x.copy())[0], flush=True)")
    assert done.stdout.splitlines() == ["4.0"] * 6
    assert done.stderr.count("KeyError: 'fed up'") == 1


@needs_ulfm
@pytest.mark.usefixtures("open_mpi")
@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_ends_its_program_is_lost_to_the_others(status: int) -> None:
    what = f"if comm.rank == 1: sys.exit({status})\n    print(survivors.allreduce(x.copy())[0], flush=True)"
    done = run(what)
    assert done.stdout.splitlines() == ["4.0"] * 6, done


@pytest.mark.usefixtures("open_mpi")
@needs_ulfm
def test_the_status_that_a_rank_leaves_with_is_the_jobs() -> None:
    assert run("survivors.allreduce(x)", ranks=1, end=7).returncode == 7


@pytest.mark.usefixtures("open_mpi")
@needs_ulfm
def test_a_job_can_see_that_its_ranks_have_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDL_BEGUN", str(tmp_path / "begun"))
    assert run("print((survivors.rank, survivors.size), flush=True)", ranks=2).returncode == 0
    assert (tmp_path / "begun").exists()


def test_without_ulfm_it_says_what_to_take_instead() -> None:
    done = run("pass", ranks=1, options=())
    (last,) = [line for line in done.stderr.splitlines() if line.startswith("RuntimeError")]
    assert "mpiexec --with-ft ulfm" in last and "docs/failures.md" in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rank": -1, "message": 0}, "counted from 0"),
        ({"rank": 0, "message": 0, "when": "during"}, "when is one of before, after, completion"),
        ({"rank": 0, "message": 0, "kind": "burn"}, "kind is one of kill, stop, delay"),
        ({"rank": 0, "message": 0, "kind": "delay"}, "more than 0 seconds"),
        ({"rank": 0, "message": 0, "seconds": 1.0}, "more than 0 seconds"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault(**arguments)
