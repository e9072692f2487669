"""New ranks take the places of those that were lost, and know all that the others know."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness.launch import run_ranks
from harness.ulfm import needs_ulfm

pytestmark = [needs_ulfm, pytest.mark.usefixtures("open_mpi")]

# An all-reduce of 4 ranks by binary_blocks takes 10 messages of each, the copies first: the third begins with the 20th.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
from mpi4py import MPI
from hpcdl import HpcdlError
from hpcdl.survive import Fault, Survivors, leave

def die(*_): os.kill(os.getpid(), signal.SIGKILL)

def say(*words): print("rank", survivors.rank, *words, flush=True)

def total(op="sum"):
    return survivors.allreduce(np.full(1000, 2**survivors.rank), op)[0]

if MPI.Comm.Get_parent() != MPI.COMM_NULL:
    BEFORE
    survivors = Survivors.join()
else:
    survivors = Survivors(policy=POLICY, faults=[Fault(2, 28)])
    for _ in range(4):
        total()
    MEMBERS
    try:
        survivors.grow(2, COMMAND, [__file__])
    except HpcdlError as error:
        say("stays without:", error)
AFTER
step = survivors.broadcast({"step": 7} if survivors.rank == 0 else "mine")
say("has", step, "sum", total(), "members", survivors.members, "lost", [each.rank for each in survivors.lost])
survivors.close()
leave()
"""


# Without the second one the launcher ends all that have joined with the first of them that is lost.
OPTIONS = ["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"]


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins has less time."""
    (tmp_path / "sitecustomize.py").write_text("import hpcdl.survive.members as members; members.JOIN_S = 6")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


def played(
    tmp_path: Path,
    policy: str = "exact",
    command: str = "sys.executable",
    options: Sequence[str] = OPTIONS,
    **places: str,
) -> list[str]:
    """What the ranks have said, sorted."""
    text = PROGRAM.replace("POLICY", repr(policy)).replace("COMMAND", command)
    for place in ("before", "members", "after"):
        text = text.replace(place.upper(), places.get(place, "pass"))
    (tmp_path / "grows.py").write_text(text)
    done = run_ranks(4, str(tmp_path / "grows.py"), options=list(options), timeout_s=100)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


@pytest.mark.parametrize("policy", ["exact", "survivors"])
def test_new_ranks_join_with_new_numbers_and_get_the_state_of_a_peer(tmp_path: Path, policy: str) -> None:
    told = "has {'step': 7} sum 59 members (0, 1, 3, 4, 5) lost [2]"
    assert played(tmp_path, policy) == [f"rank {rank} {told}" for rank in (0, 1, 3, 4, 5)]


def test_ranks_that_have_joined_are_survived_as_others_are_and_so_are_those_that_were_there(tmp_path: Path) -> None:
    after = "total(); survivors.rank in (3, 5) and die(); total()"
    told = "has {'step': 7} sum 19 members (0, 1, 4) lost [2, 3, 5]"
    assert played(tmp_path, "survivors", after=after) == [f"rank {rank} {told}" for rank in (0, 1, 4)]


def test_more_may_join_later_with_numbers_of_their_own(tmp_path: Path) -> None:
    """Ranks 4 and 5 take part in starting rank 6, which joins with the next call."""
    again = "survivors.grow(1, sys.executable, [__file__])"
    after = f"survivors.members == (0, 1, 3, 4, 5) and {again}"
    told = "has {'step': 7} sum 123 members (0, 1, 3, 4, 5, 6) lost [2]"
    assert played(tmp_path, after=after) == [f"rank {rank} {told}" for rank in (0, 1, 3, 4, 5, 6)]


def test_if_the_rank_that_has_the_state_is_lost_the_next_one_gives_its_own(tmp_path: Path) -> None:
    after = "survivors.rank == 0 and die()"
    told = "has mine sum 58 members (1, 3, 4, 5) lost [2, 0]"
    assert played(tmp_path, "survivors", after=after) == [f"rank {rank} {told}" for rank in (1, 3, 4, 5)]


@pytest.mark.usefixtures("impatient")
def test_a_member_that_is_lost_while_others_are_started_stops_that_and_no_more(tmp_path: Path) -> None:
    # A launcher that may recover does not always end behind processes that have failed in MPI_Init.
    members = "survivors.rank == 1 and threading.Timer(0.3, die).start()"
    found = played(tmp_path, options=OPTIONS[:2], members=members)
    assert [line for line in found if "stays" not in line] == [
        f"rank {rank} has {{'step': 7}} sum 9 members (0, 3) lost [2, 1]" for rank in (0, 3)
    ]
    assert len([line for line in found if "stays without: no ranks have joined" in line]) == 2


@pytest.mark.usefixtures("impatient")
def test_a_program_that_never_joins_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    found = played(tmp_path, command="'/bin/false'")
    assert len([line for line in found if "/bin/false could not be started, or ended before it" in line]) == 3
    assert len([line for line in found if re.search("sum 11 members .0, 1, 3. lost .2.", line)]) == 3


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    members = "\n    try: survivors.grow(1, '/no/such')\n    except ValueError as error: say(error)"
    members += "\n    try: survivors.grow(0)\n    except ValueError as error: say(error)"
    found = played(tmp_path, members=members)
    assert len([line for line in found if line.endswith("there is no program /no/such that could be started")]) == 3
    assert len([line for line in found if line.endswith("at least one rank joins, not 0")]) == 3


def test_nobody_joins_uninvited() -> None:
    script = "from hpcdl.survive import Survivors; Survivors.join()"
    done = run_ranks(1, "-c", script, options=OPTIONS, timeout_s=60)
    assert "only one that Survivors.grow() has started can join" in done.stderr
