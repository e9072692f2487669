"""Ranks on several hosts are killed, frozen and cut off in mid-run, and the others go on: `make cluster-test`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from harness import TESTS
from harness.ulfm import needs_ulfm

from cluster.hosts import Hosts, missing

sys.path.append(str(TESTS.parent / "benchmarks"))

import survive_soak
from survive_soak import Line, Played, Scenario, bits, lacks_quorum, pulled

WANTED = os.environ.get("HPCDL_TEST_CLUSTER") == "1"
pytestmark = [
    pytest.mark.skipif(not WANTED, reason="make cluster-test runs these: a minute"),
    pytest.mark.skipif(WANTED and bool(missing()), reason=missing()),
    needs_ulfm,
    pytest.mark.timeout(120),
]

FOUR: Scenario = {"policy": "exact", "ranks": 4, "steps": 4}
"""One rank a host. A step takes each of them 10 messages, and each of 8 ranks 14."""
SLOW_MS = 20_000
"""The bounds are measured by benchmarks/survive_soak.py; here other tests may use the cores."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(4) as hosts:
        yield hosts


def played(hosts: Hosts, scenario: Scenario) -> Played:
    found = survive_soak.on_hosts(hosts, scenario, limit_s=90)
    assert found.wrong() == []
    assert all(recovery.ms < SLOW_MS for recovery in found.recoveries())
    return found


def results(group: Played, rank: int) -> list[float | str]:
    """What a rank got in each step: a sum, or the first word of the error."""
    steps: list[Line] = [line for line in group.lines if line["rank"] == rank and "step" in line]
    return [line["error"].partition(":")[0] if "error" in line else line["result"] for line in steps]


def test_when_all_ranks_of_a_host_are_killed_the_others_finish_with_the_sum_of_all(hosts: Hosts) -> None:
    faults = [{"rank": rank, "message": 20} for rank in (2, 6)]
    group = played(hosts, FOUR | {"ranks": 8, "faults": faults})
    left = bits((0, 1, 3, 4, 5, 7))
    assert results(group, 0) == [255, 255, left, left]


def test_a_frozen_rank_that_wakes_gets_nothing_and_harms_nobody(hosts: Hosts) -> None:
    fault = {"rank": 1, "message": 15, "kind": "stop"}
    group = played(hosts, FOUR | {"steps": 16, "pause_s": 0.5, "wake_s": 3.5, "faults": [fault]})
    assert results(group, 0) == [15, 15, *[13] * 14]
    # It raises, or Open MPI itself ends it.
    assert results(group, 1)[0] == 15
    assert {*results(group, 1)[1:]} <= {"RankFailedError"}


def test_a_host_that_is_cut_off_raises_and_the_others_go_on(hosts: Hosts) -> None:
    group = played(hosts, FOUR | {"cut": [3], "faults": [pulled(2, 15)]})
    assert results(group, 0) == [15, 15, 11, 11]
    assert results(group, 2) == [15, *["RankFailedError"] * 3]
    assert all(lacks_quorum(line) and line["well"] for line in group.lines if "error" in line)


def test_of_two_halves_that_with_the_lowest_rank_goes_on(hosts: Hosts) -> None:
    group = played(hosts, FOUR | {"part": [2, 4], "faults": [pulled(1, 15)]})
    assert results(group, 0) == results(group, 2) == [15, 15, 5, 5]
    assert results(group, 1) == results(group, 3) == [15, *["RankFailedError"] * 3]
