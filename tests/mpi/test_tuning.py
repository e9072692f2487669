"""A tuning table under MPI: rank 0's is everybody's, and one that cannot be used costs a warning, not a job."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import settings, tuning
from hpcdl.call import channel, shape_of
from hpcdl.choice import choose_for
from hpcdl.execute import WINDOW
from hpcdl.tuning import Rule, Table, save

pytestmark = pytest.mark.ranks(3)

# The first is what `auto` takes of its own accord at no size; they add in different orders.
ODD, OTHER = "ring", "tree"


def a_table(size: int, algorithm: str, **made: str) -> Table:
    rule = Rule("allreduce", (size,), "float64", "private", [(0, algorithm)], {})
    return Table({}, [rule], {"date": "2026-01-31", "host": "h1", "mpi": tuning.mpi(), **made})


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is each rank's own; no table has been read before."""
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(settings, "TUNING", str(tmp_path / "t.json"))
    return tmp_path


def warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and the warnings it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in caught]


def chosen(comm: MPI.Intracomm) -> str:
    """What auto takes, seen in the bits: an order of adding is an algorithm's signature. Alike on all ranks."""
    x = np.random.default_rng(comm.rank).random(1000)
    sums = {name: hpcdl.allreduce(x.copy(), comm, algorithm=name).tobytes() for name in (ODD, OTHER, "auto")}
    assert len(set(comm.allgather(sums["auto"]))) == 1
    assert sums[ODD] != sums[OTHER]
    name = hpcdl.choose(8000, comm, dtype="float64")
    assert (sums["auto"] == sums[ODD]) == (name == ODD)
    return name


def built_in(comm: MPI.Intracomm) -> str:
    """What auto takes without a table."""
    return choose_for("allreduce", 8000, shape_of(channel(comm)))


def test_rank_0s_table_is_everybodys(comm: MPI.Intracomm, folder: Path) -> None:
    save(a_table(comm.size, ODD if comm.rank == 0 else OTHER), folder / "t.json")
    assert chosen(comm) == ODD
    told = comm.allgather(str(hpcdl.explain(8000, comm, dtype="float64")))
    assert set(told) == {told[0]}
    assert f"* {ODD} " in told[0]


def test_messages_are_added_up_in_segments_as_long_as_the_table_says(comm: MPI.Intracomm, folder: Path) -> None:
    x = np.full(1 << 20, comm.rank, np.float32)
    for nbytes in (128 << 10, 512 << 10):
        duplicate = comm.Dup()
        # Each rank's file says something else: rank 0's counts, or messages would not fit their receivers.
        save(replace(a_table(comm.size, ODD), segments={(comm.size,): nbytes << comm.rank}), folder / "t.json")
        with hpcdl.plan_allreduce(x, duplicate, algorithm="ring") as plan:
            assert plan.scratch_bytes == WINDOW * nbytes
            plan()
        assert (x == sum(range(comm.size)) * comm.size ** (nbytes >> 19)).all()
        duplicate.Free()


def test_a_table_that_other_ranks_alone_have_is_nobodys(comm: MPI.Intracomm, folder: Path, monkeypatch: Any) -> None:
    save(a_table(comm.size, ODD), folder / "t.json")
    if comm.rank == 0:
        monkeypatch.setattr(settings, "TUNING", "0")
    assert chosen(comm) == built_in(comm) != ODD


def test_rank_0_of_each_communicator_is_the_one_that_reads(comm: MPI.Intracomm, folder: Path) -> None:
    last_first = comm.Split(0, -comm.rank)
    save(a_table(comm.size, ODD if comm.rank == comm.size - 1 else OTHER), folder / "t.json")
    assert chosen(last_first) == ODD
    assert chosen(comm) == OTHER
    last_first.Free()


def spoilt(size: int, spoil: Callable[[Any], Any]) -> str:
    data = json.loads(a_table(size, ODD).text())
    spoil(data)
    return json.dumps(data)


UNUSABLE: dict[str, tuple[Callable[[int], str | None], str]] = {
    "missing": (lambda size: None, "cannot be read"),
    "damaged": (lambda size: a_table(size, ODD).text()[:-9], "is no valid tuning table"),
    "no JSON": (lambda size: "# Open MPI's rules\n1 # collectives\n", "is no valid tuning table"),
    "foreign": (lambda size: spoilt(size, lambda data: data.update(format="other")), "it lacks"),
    "another MPI's": (lambda size: a_table(size, ODD, mpi="Other MPI 1.0").text(), "was made under Other MPI 1.0"),
    "an unknown name": (lambda size: a_table(size, "rign").text(), "rign cannot serve"),
    "impossible": (
        lambda size: spoilt(
            size,
            lambda data: data["rules"][0].update(nodes=[size, 1], sizes=[{"from_bytes": 0, "algorithm": "shared"}]),
        ),
        "shared cannot serve",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_table_that_cannot_be_used_is_warned_of_once_and_not_used(
    comm: MPI.Intracomm, folder: Path, case: str
) -> None:
    write, complaint = UNUSABLE[case]
    text = write(comm.size)
    if text is not None:
        (folder / "t.json").write_text(text)
    other = comm.Dup()
    first, said = warned(lambda: chosen(comm))
    second, said_again = warned(lambda: chosen(other))
    other.Free()
    assert first == second == built_in(comm) != ODD
    assert said_again == []
    if comm.rank == 0:
        (line,) = said
        assert complaint in line
        assert str(folder / "t.json") in line
        assert line.endswith("the built-in costs are used instead")
    else:
        assert said == []
