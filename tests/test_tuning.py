"""How `auto` chooses: by the built-in costs, by a tuning table, and what a table must be."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpcdl import collectives, settings, tuning
from hpcdl.buffers import TYPES
from hpcdl.choice import (
    BUILT_IN,
    CLOSE,
    KINDS,
    Explanation,
    Shape,
    candidates,
    choose_for,
    explained,
    predict,
    serves,
    shared_cost,
)
from hpcdl.cli.sizes import parse_bytes
from hpcdl.collectives import COLLECTIVES, Link, find, seconds
from hpcdl.tuning import Rule, Table, fit, merged, parse, read, save, sizes_of
from hpcdl.units import show_bytes, show_seconds

SHAPES = [
    Shape(sizes, memory)
    for sizes in ((1,), (2,), (3,), (4,), (7,), (2, 2), (3, 1), (2, 1, 1), (1, 1, 1, 1), (8,) * 5)
    for memory in (True, False)
]
MADE = {"date": "2026-01-31", "host": "h1", "mpi": "MPICH 5.0.2"}


def a_rule(**changes: Any) -> Rule:
    rule = Rule(
        "allreduce",
        (2, 2),
        "float32",
        "private",
        [(0, "doubling"), (4096, "by_node:ring"), (65536, "ring")],
        {},
    )
    return rule._replace(**changes)


MEASURED = {"ring": [(8, 4e-5), (1024, 8e-5), (65536, 2e-3)], "native": [(8, 1e-5)]}


def a_table(*rules: Rule, **fitted: Link) -> Table:
    return Table(fitted, rules or (a_rule(),), MADE.copy(), "t.json")


# Choosing


def test_what_is_chosen_can_serve() -> None:
    for shape, collective, kind in product(SHAPES, COLLECTIVES, (*KINDS, "mixed")):
        able = candidates(collective, shape, kind)
        assert all(serves(name, collective, shape, kind) for name in able)
        for nbytes in (0, 1, 4096, 1 << 20, 1 << 28):
            assert choose_for(collective, nbytes, shape, kind=kind) in able


def test_shared_serves_the_all_reduce_of_one_node_that_has_memory_only() -> None:
    for shape, collective, kind in product(SHAPES, COLLECTIVES, (*KINDS, "mixed")):
        able = shape.memory and len(shape.sizes) == 1 < shape.size
        assert serves("shared", collective, shape, kind) == (
            able and collective == "allreduce" and kind in ("private", "shared")
        )


def test_the_cheapest_by_the_model_is_taken_where_there_is_no_table() -> None:
    for shape, nbytes in product(SHAPES, (64, 1 << 16, 1 << 24)):
        able = [name for name in candidates("allreduce", shape, "private") if not name.endswith("direct")]
        costs = {name: predict(name, "allreduce", nbytes, shape, "private", BUILT_IN) for name in able}
        assert costs[choose_for("allreduce", nbytes, shape)] <= CLOSE * min(costs.values())


def test_the_links_of_a_table_decide_where_it_has_no_rule() -> None:
    shape = Shape((8,), memory=False)
    free_messages, free_bytes = Link(0, 1e-9, 0), Link(1e-3, 0, 0)
    assert choose_for("allreduce", 1 << 10, shape, table=Table({"inside": free_messages}, (), MADE)) == "ring"
    assert choose_for("allreduce", 1 << 26, shape, table=Table({"inside": free_bytes}, (), MADE)) == "doubling"


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [
        (0, "doubling"),
        (4095, "doubling"),
        (4096, "by_node:ring"),
        (65535, "by_node:ring"),
        (65536, "ring"),
        (1 << 40, "ring"),
    ],
)
def test_a_rule_holds_from_its_bytes_on(nbytes: int, name: str) -> None:
    assert choose_for("allreduce", nbytes, Shape((2, 2), True), table=a_table()) == name


def test_a_rule_is_for_its_collective_its_nodes_in_order_and_its_kind() -> None:
    table = a_table(a_rule(nodes=(3, 1), sizes=[(0, "tree")]))  # which the model never takes
    asked = product(COLLECTIVES, ((3, 1), (1, 3), (2, 2), (4,)), KINDS)
    taken = [
        question
        for question in asked
        if choose_for(question[0], 1 << 20, Shape(question[1], True), kind=question[2], table=table) == "tree"
    ]
    assert taken == [("allreduce", (3, 1), "private")]


def test_a_type_without_a_rule_goes_by_one_as_long_and_then_by_float32() -> None:
    rules = [a_rule(dtype=dtype, sizes=[(0, name)]) for dtype, name in (("int64", "tree"), ("float16", "folded"))]
    table = a_table(a_rule(sizes=[(0, "halving")]), *rules)
    chosen = {dtype: choose_for("allreduce", 64, Shape((2, 2), True), dtype, table=table) for dtype in TYPES}
    long, half = ("int64", "uint64", "float64", "complex64"), ("float16", "bfloat16", "int16", "uint16")
    for dtype, name in chosen.items():
        assert name == ("tree" if dtype in long else "folded" if dtype in half else "halving")


def test_a_rule_says_nothing_of_arrays_far_from_those_that_were_measured() -> None:
    rule = a_rule(sizes=[(0, "tree"), (1024, "folded")], measured=MEASURED)
    assert [rule.algorithm(nbytes) for nbytes in (1, 2, 1024, 4 * 65536, 4 * 65536 + 1)] == [
        None, "tree", "folded", "folded", None,
    ]  # fmt: skip
    assert (rule.reach(2), rule.reach(1024)) == ((2, 1023), (1024, 4 * 65536))
    shape = Shape((2, 2), True)
    assert choose_for("allreduce", 1 << 20, shape, table=a_table(rule)) == choose_for("allreduce", 1 << 20, shape)
    assert "has no rule for this" in explained("allreduce", 1 << 20, shape, table=a_table(rule)).why


def test_a_rule_that_cannot_serve_here_is_passed_over() -> None:
    table = a_table(a_rule(nodes=(4,), sizes=[(0, "shared")]))
    assert choose_for("allreduce", 64, Shape((4,), True), table=table) == "shared"
    without = Shape((4,), False)
    assert choose_for("allreduce", 64, without, table=table) == choose_for("allreduce", 64, without)
    assert "says shared, which cannot serve here" in explained("allreduce", 64, without, table=table).why


def test_mpis_own_is_never_chosen() -> None:
    assert sizes_of({"native": [(8, 1e-9)], "ring": [(8, 1.0)]}) == [(0, "ring")]
    assert not any("native" in candidates("allreduce", shape, kind) for shape, kind in product(SHAPES, KINDS))


# Explaining


def shown(explanation: Explanation) -> list[str]:
    """The name in the row that has the mark."""
    return [line.split()[1] for line in str(explanation).splitlines() if line.startswith("* ")]


def test_an_explanation_names_what_is_chosen_and_every_candidate() -> None:
    for shape, collective, kind in product(SHAPES, COLLECTIVES, (*KINDS, "mixed")):
        for table in (None, a_table()):
            explanation = explained(collective, 25 << 20, shape, kind=kind, table=table)
            chosen = choose_for(collective, 25 << 20, shape, kind=kind, table=table)
            assert explanation.chosen == chosen
            assert str(explanation).splitlines()[0].endswith(f": {chosen}")
            assert shown(explanation) == [chosen]
            names = {row.name for row in explanation.rows} - {"native"}
            assert names == set(candidates(collective, shape, kind))


def test_an_explanation_shows_what_was_measured_beside_what_is_predicted() -> None:
    explanation = explained("allreduce", 1024, Shape((2, 2), True), table=a_table(a_rule(measured=MEASURED)))
    rows = {row.name: row for row in explanation.rows}
    assert rows["ring"].measured == 8e-5
    assert rows["tree"].measured is None
    assert rows["native"].predicted is None
    assert all(row.predicted for row in explanation.rows[:-1])
    assert "t.json (2026-01-31, MPICH 5.0.2 on h1) says so for float32, from 2 B to 4095 B" in explanation.why
    assert "no tuning table" in explained("allreduce", 1024, Shape((2, 2), True)).why
    assert "has no rule for this" in explained("allreduce", 1024, Shape((3,), True), table=a_table()).why


def test_between_two_measured_sizes_time_is_interpolated_and_beyond_them_unknown() -> None:
    rule = a_rule(measured=MEASURED)
    assert rule.time("ring", (8 + 1024) // 2) == pytest.approx(6e-5)
    assert rule.time("ring", 65536) == 2e-3
    assert (rule.time("ring", 7), rule.time("ring", 65537), rule.time("tree", 8)) == (None, None, None)


# Making


PLANTED = [
    Link(4.5e-6, 2e-10, 1.25e-10),
    Link(40e-6, 8e-9, 0),
    Link(1e-6, 0, 3e-10),
    Link(0, 1e-10, 0),
]


@pytest.mark.parametrize("link", PLANTED)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_fit_finds_the_planted_link(link: Link, size: int) -> None:
    costs = [find(name).cost(size, nbytes) for name in ("ring", "doubling", "tree") for nbytes in (64, 4096, 1 << 20)]
    found = fit([(cost, seconds(cost, link)) for cost in costs])
    assert found == pytest.approx(link, rel=1e-9, abs=1e-18)  # a few digits of float64's 16 are lost


def test_the_fit_finds_the_link_of_shared_memory() -> None:
    costs = [shared_cost(4, nbytes, kind) for kind in ("private", "shared") for nbytes in (64, 1 << 16, 1 << 24)]
    assert fit([(cost, seconds(cost, PLANTED[0])) for cost in costs]) == pytest.approx(PLANTED[0], rel=1e-9)


def test_no_part_of_a_fit_is_below_0() -> None:
    costs = [find(name).cost(4, nbytes) for name in ("ring", "doubling") for nbytes in (64, 4096, 1 << 20)]
    slower_by_more_than_added_bytes_explain = [1e-5, 2e-5, 1e-3, 1e-5, 1e-5, 1e-4]
    found = fit(zip(costs, slower_by_more_than_added_bytes_explain, strict=True))
    assert min(found) >= 0 < max(found)


def times_of(**seconds: list[float]) -> dict[str, list[tuple[int, float]]]:
    return {name: list(zip((16, 64, 256, 1024), times, strict=False)) for name, times in seconds.items()}


def test_a_change_comes_half_way_between_the_sizes_where_the_fastest_changes() -> None:
    found = sizes_of(times_of(doubling=[1, 1, 2, 8], ring=[4, 4, 1, 2]))
    assert found == [(0, "doubling"), (128, "ring")]


def test_noise_at_one_size_is_no_reason_to_change() -> None:
    assert sizes_of(times_of(ring=[1, 1.04, 1, 1], tree=[3, 1, 3, 3])) == [(0, "ring")]
    assert sizes_of(times_of(ring=[1, 3, 1, 1], tree=[3, 1, 3, 3])) == [(0, "ring"), (32, "tree"), (128, "ring")]


def test_what_was_given_up_at_long_sizes_is_not_taken_there() -> None:
    assert sizes_of(times_of(ring=[9, 9, 9, 9], tree=[1, 1, 1])) == [(0, "tree"), (512, "ring")]


def test_a_new_rule_replaces_the_one_for_the_same_and_leaves_the_others() -> None:
    other, old, new = a_rule(nodes=(4,)), a_rule(), a_rule(sizes=[(0, "tree")])
    link, memory = Link(1, 2, 3), Link(4, 5, 6)
    before = a_table(other, old, inside=link, memory=memory)
    after = merged(before, replace(a_table(new, inside=memory), made={**MADE, "host": "h2"}))
    assert list(after.rules) == [other, new]
    assert after.fitted == {"inside": memory, "memory": memory}
    assert after.made["host"] == "h2"
    assert merged(None, before) is before


# Files


def test_a_table_survives_the_file(tmp_path: Path) -> None:
    on_one = a_rule(nodes=(4,), kind="shared", sizes=[(0, "shared")])
    table = a_table(a_rule(measured=MEASURED), on_one, between=Link(4e-5, 8e-9, 1e-10))
    table = replace(table, segments={(2, 2): 1 << 20, (3,): 4 << 20})
    table.made["host"] = "a [ {  } ]\n ] host"  # type: ignore[index]
    file = tmp_path / "new" / "folder" / "t.json"
    save(table, file)
    again = read(file)
    assert again.rules == list(table.rules)
    assert (again.links, again.fitted, again.made) == (table.links, table.fitted, table.made)
    assert again.segments == {(2, 2): 1 << 20, (3,): 4 << 20}
    assert os.listdir(file.parent) == ["t.json"]
    assert json.loads(file.read_text())["rules"][0]["sizes"][1] == {"from_bytes": 4096, "algorithm": "by_node:ring"}
    assert "[1024, 8e-05],\n" in file.read_text()  # for people too


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        save(a_table(), tmp_path / "t.json")
    assert os.listdir(tmp_path) == ["t.json"]


def test_only_the_rules_for_as_many_ranks_travel() -> None:
    table = a_table(a_rule(), a_rule(nodes=(4,)), a_rule(nodes=(3,)))
    assert [rule.nodes for rule in table.of_size(4).rules] == [(2, 2), (4,)]
    table = replace(table, segments={(2, 2): 1 << 20, (3,): 4 << 20})
    assert table.of_size(4).segments == {(2, 2): 1 << 20}


def test_an_alias_in_a_file_is_the_algorithms_own_name() -> None:
    text = a_table(a_rule(sizes=[(0, "rabenseifner"), (9, "hierarchical")])).text()
    assert parse(text).rules[0].sizes == [(0, "folded"), (9, "by_node:ring")]


def entry(**changes: Any) -> Callable[[Any], None]:
    return lambda data: data["rules"][0].update(changes)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of another format": (lambda data: data.update(format="hpcdl-tuning-9"), 'lacks "format": "hpcdl-tuning-1"'),
    "without a maker": (lambda data: data.pop("made"), "the table: made is to be of type dict"),
    "without an MPI": (lambda data: data["made"].pop("mpi"), "made: mpi is to be of type str"),
    "an unknown link": (lambda data: data["links"].update(under={}), "no link is called 'under'"),
    "a link of words": (lambda data: data["links"]["inside"].update(beta="fast"), "beta is a number of seconds"),
    "a negative link": (lambda data: data["links"]["inside"].update(alpha=-1), "alpha is a number of seconds from 0"),
    "an infinite link": (lambda data: data["links"]["inside"].update(gamma=float("inf")), "gamma is a number"),
    "a segment of nothing": (
        lambda data: data.update(segments=[{"nodes": [4], "bytes": 0}]),
        "segments 0: bytes are from 131072 to 4194304, not 0",
    ),
    "a segment for nobody": (
        lambda data: data.update(segments=[{"nodes": [], "bytes": 1 << 20}]),
        "segments 0: nodes are numbers of ranks",
    ),
    "segments of another type": (lambda data: data.update(segments=7), "segments is to be of type list"),
    "rules of another type": (lambda data: data.update(rules={}), "rules is to be of type list"),
    "a rule of another type": (lambda data: data["rules"].append(7), "rule 1: collective is to be of type str"),
    "an unknown collective": (entry(collective="alltoall"), "collective is one of allreduce, "),
    "an unknown type": (entry(dtype="float8"), "dtype is one of float16, "),
    "an unknown kind": (entry(kind="mixed"), "kind is one of private, shared, device, not 'mixed'"),
    "no nodes": (entry(nodes=[]), "nodes are numbers of ranks"),
    "an empty node": (entry(nodes=[4, 0]), "nodes are numbers of ranks such as [2, 2], not [4, 0]"),
    "more nodes than memory": (entry(nodes=[10**18]), "nodes are numbers of ranks"),
    "an unknown algorithm": (entry(sizes=[{"from_bytes": 0, "algorithm": "rign"}]), "rule 0: rign cannot serve"),
    "MPI's own": (entry(sizes=[{"from_bytes": 0, "algorithm": "native"}]), "native cannot serve allreduce"),
    "shared on two nodes": (
        entry(sizes=[{"from_bytes": 0, "algorithm": "shared"}]),
        "shared cannot serve allreduce of",
    ),
    "halving on 3 ranks": (
        entry(nodes=[3], sizes=[{"from_bytes": 0, "algorithm": "halving"}]),
        "halving cannot serve allreduce of private arrays on 3 ranks on one node",
    ),
    "sizes from 1": (entry(sizes=[{"from_bytes": 1, "algorithm": "ring"}]), "sizes go up from_bytes 0, not [1]"),
    "no sizes": (entry(sizes=[]), "sizes go up from_bytes 0, not []"),
    "sizes in disorder": (
        entry(sizes=[{"from_bytes": lo, "algorithm": "ring"} for lo in (0, 9, 9)]),
        "sizes go up from_bytes 0, not [0, 9, 9]",
    ),
    "half a size": (entry(sizes=[{"from_bytes": 0}]), "algorithm is to be of type str"),
    "measured in disorder": (entry(measured={"ring": [[9, 1.0], [8, 1.0]]}), "not a list of [bytes, seconds]"),
    "measured in words": (entry(measured={"ring": [["9", 1.0]]}), "rule 0, measured ring: not a list"),
    "measured beyond all": (entry(measured={"ring": [[10**30, 1.0]]}), "rule 0, measured ring: not a list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_every_part_of_a_table_is_checked(case: str, tmp_path: Path) -> None:
    spoil, complaint = WRONG[case]
    data = json.loads(a_table(inside=Link(1, 2, 3)).text())
    parse(json.dumps(data))
    spoil(data)
    file = tmp_path / "t.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="is no valid tuning table") as caught:
        read(file)
    assert complaint in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"\0\1\2", b"\xff\xfe{", b"[" * 100000, b"null", b'{"format"', b"1" * 5000])
def test_a_damaged_file_is_a_value_error(damage: bytes, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_bytes(damage)
    with pytest.raises(ValueError, match="is no valid tuning table"):
        read(file)
    whole = a_table().text()
    for end in range(0, len(whole) - 2, 7):
        file.write_text(whole[:end])
        with pytest.raises(ValueError, match="is no valid tuning table"):
            read(file)


@pytest.fixture
def mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to start MPI for these tests."""
    monkeypatch.setattr(tuning, "mpi", lambda: "MPICH 5.0.3")
    monkeypatch.setattr(tuning, "_known", {})


@pytest.mark.usefixtures("mpich")
def test_the_variable_names_a_file_or_none_and_the_users_own_is_taken_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tmp_path / "hpcdl" / "tuning-mpich.json"
    assert tuning.default_path() == own
    monkeypatch.setattr(settings, "TUNING", None)
    assert tuning.path() is None
    save(a_table(), own)
    assert tuning.path() == own
    for nothing in ("", "0"):
        monkeypatch.setattr(settings, "TUNING", nothing)
        assert tuning.path() is None
    monkeypatch.setattr(settings, "TUNING", "some/file")
    assert tuning.path() == Path("some/file")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.default_path() == tmp_path / ".cache" / "hpcdl" / "tuning-mpich.json"


@pytest.mark.usefixtures("mpich")
def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    monkeypatch.setattr(settings, "TUNING", str(file))
    assert "cannot be read (No such file" in tuning.known()[1]
    assert tuning.known() == (None, "")  # said once
    save(a_table(), file)
    table, problem = tuning.known()
    assert (problem, [rule.nodes for rule in table.rules] if table else None) == ("", [(2, 2)])
    assert tuning.known()[0] is table
    file.write_text("damaged")
    assert "is no valid tuning table" in tuning.known()[1]
    assert tuning.known() == (None, "")


@pytest.mark.usefixtures("mpich")
def test_a_table_of_another_mpi_is_foreign_and_of_another_version_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    monkeypatch.setattr(settings, "TUNING", str(file))
    save(a_table(), file)
    assert tuning.known()[0] is not None
    monkeypatch.setattr(tuning, "mpi", lambda: "Open MPI 5.0.2")
    monkeypatch.setattr(tuning, "_known", {})
    assert tuning.known() == (None, f"the tuning table {file} was made under MPICH 5.0.2, this is Open MPI 5.0.2")


# Sizes on the command line


@pytest.mark.parametrize(
    ("text", "nbytes"),
    {
        "0": 0,
        "8": 8,
        "64B": 64,
        "256KiB": 1 << 18,
        "256KB": 1 << 18,
        "25MB": 25 << 20,
        "1.5 GiB": 3 << 29,
        ".5k": 512,
    }.items(),
)
def test_units_are_powers_of_1024(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_bytes(show_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e3", "1X", "1 2", "0.3", "1..5k", "iB", "1Kib2"])
def test_what_is_no_size_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith(f"{text} is ")


def test_times_are_shown_with_three_digits() -> None:
    times = [3.214e-6, 9.996e-6, 45.64e-6, 999.6e-6, 0.0456, 7.894, 123.4]
    assert [show_seconds(time) for time in times] == [
        "3.21 us", "10.0 us", "45.6 us", "1.00 ms", "45.6 ms", "7.89 s", "123 s",
    ]  # fmt: skip


def test_the_families_that_are_there_to_be_compared_with_are_no_candidates() -> None:
    assert "by_master" in collectives.names(4, nodes=((0, 1), (2, 3)))
    assert not any("by_master" in name for name in candidates("allreduce", Shape((2, 2), True), "private"))
    assert not any("by_node" in name for name in candidates("allreduce", Shape((1, 1, 1), True), "private"))
