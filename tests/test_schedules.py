"""The algorithms on paper: proved for every rank, and shown to be found out when they are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl import collectives
from hpcdl.collectives import (
    Copy,
    Link,
    Nodes,
    Reduce,
    Round,
    Schedule,
    ScheduleError,
    Send,
    Span,
    counts,
    find,
    packed,
    parts,
    predicted,
    schedule,
    seconds,
    verify,
)
from hpcdl.collectives.binary_blocks import blocks_of
from hpcdl.collectives.catalogue import FLAT, HIERARCHICAL
from hpcdl.topology import group_by

SIZES = [*range(1, 21), 24, 31, 32, 33, 48, 63, 64, 600]


def lengths(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 37})


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_counts_once_in_an_allreduce(name: str, size: int) -> None:
    if name not in collectives.names(size):
        with pytest.raises(ValueError, match="2\\*\\*k ranks"):
            schedule(name, size)
        return
    if size == 600:  # one length is enough, of uneven pieces
        if name in ("ring", "direct"):  # where all ranks do the same, in hundreds of rounds or messages each
            pytest.skip("takes ten seconds, and shows no more than on 64 ranks")
        verify(schedule(name, size, 601 if name in ("folded", "binary_blocks") else 37))
        return
    for n in lengths(size):
        verify(schedule(name, size, n))


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "reduce", "broadcast"])
@pytest.mark.parametrize("size", [*range(1, 18), 31])
def test_every_collective_keeps_its_promise(collective: str, size: int) -> None:
    for name in collectives.names(size, collective):
        for n in lengths(size) if name in FLAT else []:
            verify(schedule(name, size, n, collective=collective, root=size // 2))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_group_of_ranks_on_any_nodes_will_do(data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24, unique=True))
    labels = data.draw(st.lists(st.integers(0, 5), min_size=len(group), max_size=len(group)))
    nodes = tuple(tuple(group[place] for place in node) for node in group_by(labels))
    collective = data.draw(st.sampled_from(collectives.COLLECTIVES))
    name = data.draw(st.sampled_from(collectives.names(len(group), collective, nodes)))
    n = data.draw(st.integers(0, 80))
    root = data.draw(st.sampled_from(group))
    verify(schedule(name, len(group), n, nodes=nodes, collective=collective, group=group, root=root))


@pytest.mark.parametrize("name", collectives.ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(
    ("add", "start"),
    [(lambda a, b: a + b, 1), (lambda a, b: a * b, 2), (min, 3), (max, 4)],
    ids=["+", "*", "min", "max"],
)
def test_playing_gives_the_numbers_that_a_loop_gives(
    name: str, size: int, add: Callable[[int, int], int], start: int
) -> None:
    if name not in collectives.names(size):
        pytest.skip(f"{name} takes 2**k ranks")
    for n in (0, 1, size - 1, size, size + 1, 17 * size + 3):
        vectors = {rank: [start + (5 * rank + 3 * element) % 11 for element in range(n)] for rank in range(size)}
        expected = vectors[0]
        for rank in range(1, size):
            expected = [add(a, b) for a, b in zip(expected, vectors[rank], strict=True)]
        after = collectives.play(schedule(name, size, n), vectors, add)
        assert all(vector == expected for vector in after.values())


def test_doubling_adds_in_one_bracketing() -> None:
    after = collectives.play(
        schedule("doubling", 5, 1), {rank: [str(rank)] for rank in range(5)}, lambda low, high: f"({low}+{high})"
    )
    assert set(map(tuple, after.values())) == {("(((0+1)+2)+(3+4))",)}


# ---- counts --------------------------------------------------------------------------------------------------------


def worst(name: str, size: int, n: int) -> tuple[float, float]:
    """What the busiest rank sends and adds, in units of n."""
    every = [counts(schedule(name, size, n), rank) for rank in range(size)]
    return max(cost.sent for cost in every) / n, max(cost.added for cost in every) / n


@pytest.mark.parametrize(
    ("size", "blocks", "fold"),
    [
        (3, (1.5, 1.0), (2.0, 1.5)),
        (6, (1.75, 1.0), (2.5, 1.75)),
        (12, (1.875, 1.0), (2.75, 1.875)),
        (13, (2.0, 1.0), (2.75, 1.875)),
        (24, (1.9375, 1.0), (2.875, 1.9375)),
        (600, (2.0, 1.0), (2.99609375, 1.998046875)),
    ],
)
def test_binary_blocks_moves_and_adds_less_than_the_fold(
    size: int, blocks: tuple[float, float], fold: tuple[float, float]
) -> None:
    n = 512 * 16  # every halving is even
    sent, added = worst("binary_blocks", size, n)
    assert sent <= blocks[0]
    assert added == blocks[1]
    assert worst("folded", size, n) == fold


def test_the_fold_leaves_88_of_600_ranks_idle() -> None:
    idle = [rank for rank in range(600) if len(schedule("folded", 600, 600).program(rank).reducing) == 1]
    assert len(idle) == 600 - 512 == 88


def test_600_ranks_are_four_blocks() -> None:
    assert [len(block) for block in blocks_of(600)] == [512, 64, 16, 8]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 8, 12, 13, 16, 24, 33, 64])
def test_the_cost_is_what_the_busiest_rank_does(name: str, size: int) -> None:
    if name not in collectives.names(size):
        pytest.skip(f"{name} takes 2**k ranks")
    n = 64 * 3 * 13 * 11 * 7  # divides evenly among all these sizes
    every = [counts(schedule(name, size, n), rank) for rank in range(size)]
    cost = collectives.find(name).cost(size, n)
    sent, added = max(own.sent for own in every), max(own.added for own in every)
    if name == "binary_blocks" and size & (size - 1):
        # The bound of the literature, whatever the blocks: it is met when the smallest block is one rank.
        assert (0.7 * cost.sent < sent <= cost.sent) and added == cost.added == n
    elif name == "tree":
        # Along the chain from leaf to root and back; no rank is in all of it.
        assert (sent, added) == (cost.sent / 2, cost.added)
    else:
        assert sent == pytest.approx(cost.sent, rel=1e-12)
        assert added == pytest.approx(cost.added, rel=1e-12)
    assert max(own.messages for own in every) <= cost.messages or name == "binary_blocks"


@pytest.mark.parametrize(("size", "chain"), [(3, 4), (6, 6), (12, 8), (600, 34)])
def test_the_chain_of_binary_blocks_goes_up_and_down_again(size: int, chain: int) -> None:
    assert collectives.find("binary_blocks").cost(size, 1).messages == chain


# ---- nodes ---------------------------------------------------------------------------------------------------------

SHAPES: dict[str, Nodes] = {
    "+".join(map(str, sizes)): packed(sizes, range(sum(sizes)))
    for sizes in [(4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1), (2, 2, 1), (4, 4), (3, 3, 2)]
} | {"interleaved": ((0, 2), (1, 3))}
FORMS = [f"{outer}:{flat}" for outer in HIERARCHICAL for flat in FLAT]
EVEN = [(each,) * count for each in (1, 2, 3, 4) for count in (1, 2, 3, 4)]


def able(name: str, sizes: tuple[int, ...], collective: str = "allreduce") -> bool:
    nodes = packed(sizes, range(sum(sizes)))
    return name.removesuffix(":ring") in collectives.names(sum(sizes), collective, nodes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
def test_on_nodes_every_collective_keeps_its_promise(name: str, shape: str) -> None:
    nodes = SHAPES[shape]
    sizes = tuple(map(len, nodes))
    for collective in collectives.COLLECTIVES:
        if not able(name, sizes, collective):
            with pytest.raises(ValueError, match=r"2\*\*k nodes, not 3|serves allreduce only"):
                schedule(name, sum(sizes), nodes=nodes, collective=collective)
            continue
        for n in (0, 1, 3, 17):
            verify(schedule(name, sum(sizes), n, nodes=nodes, collective=collective, root=sum(sizes) // 2))


@pytest.mark.parametrize(("outer", "flat"), [("by_node", "direct"), ("by_master", "tree")])
def test_on_one_node_by_node_is_direct_and_by_master_a_tree(outer: str, flat: str) -> None:
    for size in range(1, 10):
        one, other = schedule(outer, size, 40), schedule(flat, size, 40)
        assert [one.rounds(rank) for rank in range(size)] == [other.rounds(rank) for rank in range(size)]
        assert find(outer).cost(size, 40) == find(flat).cost(size, 40)


def test_the_order_in_which_nodes_are_written_changes_nothing() -> None:
    for name in ("by_node", "by_master"):
        one = schedule(name, 6, 40, nodes=((0, 2), (1, 3), (4, 5)))
        other = schedule(name, 6, 40, nodes=((5, 4), (0, 2), (3, 1)))
        assert [one.rounds(rank) for rank in range(6)] == [other.rounds(rank) for rank in range(6)]


def test_between_nodes_only_owners_of_the_same_lane_talk() -> None:
    whole = schedule("by_node", 8, 24, nodes=(3, 3, 2))
    lanes = {0: 0, 3: 0, 6: 0, 1: 1, 4: 1, 7: 1}
    node = [0, 0, 0, 1, 1, 1, 2, 2]
    across = {
        (rank, step.peer) for rank in range(8) for steps in whole.rounds(rank) for step in steps
        if node[rank] != node[step.peer]
    }  # fmt: skip
    assert across == {(a, b) for a in lanes for b in lanes if lanes[a] == lanes[b] and a != b}


def busiest_link(whole: Schedule, nodes: Nodes) -> int:
    """The elements that leave a node, where most do."""
    return max(
        sum(
            step.span.size for rank in node for steps in whole.rounds(rank) for step in steps
            if isinstance(step, Send) and step.peer not in node
        )
        for node in nodes
    )  # fmt: skip


@pytest.mark.parametrize("name", ["by_node:ring", "by_node:halving", "by_node:direct"])
@pytest.mark.parametrize("sizes", EVEN)
def test_by_node_meets_the_lower_bound_of_data_between_nodes(name: str, sizes: tuple[int, ...]) -> None:
    if not able(name, sizes):
        pytest.skip(f"{name} takes 2**k nodes")
    n, count, size = 144, len(sizes), sum(sizes)
    whole = schedule(name, size, n, nodes=sizes)
    assert busiest_link(whole, packed(sizes, range(size))) == 2 * n * (count - 1) / count


@pytest.mark.parametrize("sizes", EVEN)
@pytest.mark.parametrize("name", FORMS)
def test_on_even_nodes_the_cost_is_what_the_busiest_rank_does(name: str, sizes: tuple[int, ...]) -> None:
    if not able(name, sizes):
        pytest.skip(f"{name} takes 2**k nodes")
    n, size = 144, sum(sizes)
    outer, flat = name.split(":")
    near, far = HIERARCHICAL[outer][1](sizes, n, FLAT[flat].cost)
    cost = find(name, size, nodes=packed(sizes, range(size))).cost(size, n)
    assert cost == tuple(a + b for a, b in zip(near, far, strict=True))
    every = [counts(schedule(name, size, n, nodes=sizes), rank) for rank in range(size)]
    # Along the chain from a tree's leaf to its root and back; no rank is in all of it.
    sent = near.sent / (2 if outer == "by_master" else 1) + far.sent / (2 if flat == "tree" else 1)
    assert max(own.added for own in every) == pytest.approx(cost.added, rel=1e-12)
    if flat == "binary_blocks" and len(sizes) == 3:
        assert max(own.sent for own in every) <= sent  # the bound of the literature
    else:
        assert max(own.sent for own in every) == pytest.approx(sent, rel=1e-12)
        assert max(own.messages for own in every) <= cost.messages


@pytest.mark.parametrize("sizes", [*EVEN, (3, 1), (2, 1, 1), (2, 2, 1), (3, 3, 2), (5, 3), (6, 2), (7, 5, 4)])
def test_no_link_between_nodes_carries_more_than_is_predicted(sizes: tuple[int, ...]) -> None:
    n, size = 5040, sum(sizes)
    near_first = len(set(sizes)) == 1 and not size & (size - 1)
    for name in filter(lambda name: able(name, sizes), [*FLAT, *FORMS]):
        _, far = parts(name, sizes)
        carried = busiest_link(schedule(name, size, n, nodes=sizes), packed(sizes, range(size)))
        inner = name.partition(":")[2]
        if name in ("ring", "direct") or ("tree" not in name and "blocks" not in name and (inner or near_first)):
            assert carried == pytest.approx(far.sent * n), name
        else:
            assert carried <= far.sent * n + 1e-6, name


INSIDE, BETWEEN = Link(1.0, 10.0, 1000.0), Link(7.0, 70.0, float("nan"))


@pytest.mark.parametrize(
    ("name", "sizes", "messages", "sent", "added"),
    [
        ("ring", (2, 2), (0, 6), (0, 1.5), 0.75),
        ("direct", (3, 1), (0, 6), (0, 1.5), 0.75),
        ("halving", (2, 2), (2, 2), (1, 1), 0.75),  # n/2 to the neighbour, n/4 each of two to the other node, twice
        ("halving", (3, 1), (0, 4), (0, 1.5), 0.75),
        ("doubling", (2, 2), (1, 1), (1, 2), 2),
        ("tree", (4, 4), (4, 2), (4, 2), 3),
        ("binary_blocks", (4, 4, 4), (4, 4), (1.5, 2), 1),
        ("by_node", (4,), (6, 0), (1.5, 0), 0.75),
        ("by_node", (2, 2), (2, 2), (1, 1), 0.75),
        ("by_node:doubling", (3, 1), (2, 1), (2, 1), 3),
        ("by_master", (4, 4), (4, 2), (4, 1), 2.5),
        ("by_node:tree", (1, 1), (0, 2), (0, 2), 1),
    ],
)
def test_a_prediction_is_the_two_parts_on_their_links(
    name: str, sizes: tuple[int, ...], messages: tuple[int, int], sent: tuple[float, float], added: float
) -> None:
    for nbytes in (0, 1024):
        expected = messages[0] * 1 + messages[1] * 7 + nbytes * (sent[0] * 10 + sent[1] * 70 + added * 1000)
        assert predicted(name, nbytes, sizes, INSIDE, BETWEEN) == pytest.approx(expected)


@pytest.mark.parametrize("name", [*FLAT, *HIERARCHICAL])
def test_on_one_node_a_prediction_is_the_plain_cost_and_knows_no_network(name: str) -> None:
    cost = find(name).cost(8, 1024)
    assert predicted(name, 1024, (8,), INSIDE, BETWEEN._replace(alpha=1e9, beta=1e9)) == seconds(cost, INSIDE)


def test_masters_take_64_ranks_of_1024_onto_the_ring() -> None:
    near, far = parts("by_master", (16,) * 64)
    assert (near.messages, far.messages) == (2 * 4, 2 * 63)  # a flat ring has 2046


# ---- broken schedules are found out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A schedule of which one rank plays other rounds."""

    right: Schedule
    rank: int
    wrong: list[Round]

    def __getattr__(self, name: str) -> object:
        return getattr(self.right, name)

    def __str__(self) -> str:
        return str(self.right)

    def rounds(self, rank: int) -> list[Round]:
        return self.wrong if rank == self.rank else self.right.rounds(rank)


def with_step(
    rounds: list[Round], at: int, change: Callable[[Send | Reduce | Copy], Send | Reduce | Copy]
) -> list[Round]:
    first, *rest = rounds[at]
    return [*rounds[:at], (change(first), *rest), *rounds[at + 1 :]]


MUTATIONS: dict[str, Callable[[list[Round], int, int], list[Round]]] = {
    "another peer": lambda rounds, at, size: with_step(
        rounds, at, lambda step: type(step)((step.peer + 1) % size, step.span)
    ),
    "a span shifted by one": lambda rounds, at, size: with_step(
        rounds, at, lambda step: type(step)(step.peer, Span(step.span.lo + 1, step.span.hi + 1))
    ),
    "a span shorter by one": lambda rounds, at, size: with_step(
        rounds, at, lambda step: type(step)(step.peer, Span(step.span.lo, step.span.hi - 1))
    ),
    "a round less": lambda rounds, at, size: [*rounds[:at], *rounds[at + 1 :]],
    "a round twice": lambda rounds, at, size: [*rounds[: at + 1], *rounds[at:]],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("collective", collectives.COLLECTIVES)
@pytest.mark.parametrize("size", [3, 4, 6])
def test_a_broken_schedule_is_found_out(mutation: str, collective: str, size: int) -> None:
    broken = 0
    for name in collectives.names(size, collective):
        right = schedule(name, size, 4 * size, nodes=(size - size // 2, size // 2), collective=collective)
        for rank in range(size):
            for at in range(len(right.rounds(rank))):
                wrong = MUTATIONS[mutation](right.rounds(rank), at, size)
                broken += 1
                with pytest.raises(ScheduleError) as error:
                    verify(Broken(right, rank, wrong))  # type: ignore[arg-type]
                assert all(word in str(error.value) for word in (name, f"{size} ranks", "round", "rank", "Span"))
    assert broken >= size


@pytest.mark.parametrize("name", collectives.ALGORITHMS)
def test_a_sum_that_replaces_or_a_copy_that_adds_is_found_out(name: str) -> None:
    right = schedule(name, 4, 16, nodes=(2, 2))
    other = {Reduce: Copy, Copy: Reduce}
    for rank in range(4):
        rounds = right.rounds(rank)
        for at, steps in enumerate(rounds):
            for index, step in enumerate(steps):
                if isinstance(step, Send):
                    continue
                changed = (*steps[:index], other[type(step)](*step), *steps[index + 1 :])
                with pytest.raises(ScheduleError):
                    verify(Broken(right, rank, [*rounds[:at], changed, *rounds[at + 1 :]]))  # type: ignore[arg-type]


class Waiting:
    """Two ranks that each first send and then, in the next round, receive."""

    collective, algorithm, group, size, n, root = "allreduce", "waiting", (0, 1), 2, 1, 0

    def rounds(self, rank: int) -> list[Round]:
        return [(Send(1 - rank, Span(0, 1)),), (Reduce(1 - rank, Span(0, 1)),)]

    def __str__(self) -> str:
        return "allreduce by waiting"


def test_sends_that_need_a_buffer_are_found_out() -> None:
    with pytest.raises(ScheduleError, match=r"round 0, rank 0, Send.*stuck"):
        verify(Waiting())  # type: ignore[arg-type]


def test_a_group_out_of_order_would_break_doubling_but_does_not() -> None:
    # By place, ranks 5 and 2 would add as (2, 5), 5 and 7 as (5, 7): two bracketings. Doubling sorts them.
    verify(schedule("doubling", 4, 3, group=[5, 2, 7, 1]))


# ---- small print ---------------------------------------------------------------------------------------------------


def test_unknown_names_and_impossible_sizes_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="no algorithm is called 'rnig'; there are ring, halving"):
        schedule("rnig", 4)
    with pytest.raises(ValueError, match="halving needs 2\\*\\*k ranks, not 6; folded and binary_blocks take any"):
        schedule("halving", 6)
    with pytest.raises(ValueError, match="serves allreduce only; broadcast has ring"):
        schedule("doubling", 4, collective="broadcast")
    with pytest.raises(ValueError, match="4 different ranks"):
        schedule("ring", 4, group=[1, 2, 3, 3])
    with pytest.raises(ValueError, match="root 9"):
        schedule("ring", 4, root=9)


@pytest.mark.parametrize(
    ("name", "nodes", "message"),
    [
        (
            "by_node:rnig",
            None,
            "'by_node:rnig'.*by_node, by_master, rabenseifner.*by_node:X and by_master:X with X one of",
        ),
        ("by_node:by_node", None, "no algorithm is called 'by_node:by_node'"),
        ("ring:ring", None, "no algorithm is called 'ring:ring'"),
        ("by_node:", None, "no algorithm is called 'by_node:'"),
        ("by_node:halving", (2, 1, 1), r"by_node:halving needs 2\*\*k nodes, not 3; by_node:folded and by_node:binary"),
        ("by_node", (3, 2), r"nodes \(3, 2\) hold 5 ranks, not each of the 4 ranks range\(0, 4\) once"),
        ("by_node", (3,), "hold 3 ranks, not each of the 4"),
        ("ring", (3, 2), "hold 5 ranks, not each of the 4"),
        ("by_node", ((0, 1), (2, 2)), "not each of the 4 ranks"),
        ("by_node", ((0, 1), (2, 4)), "not each of the 4 ranks"),
        ("by_node", (4, 0), r"at least one rank; not so in \(4, 0\)"),
        ("by_node", (5, -1), "at least one rank"),
        ("by_node", ((0, 1, 2, 3), ()), "at least one rank"),
        ("by_node", (), "hold 0 ranks"),
    ],
)
def test_impossible_nodes_say_what_is_wrong(name: str, nodes: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(name, 4, nodes=nodes)  # type: ignore[arg-type]


def test_find_refuses_nodes_of_other_ranks_than_it_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"hold 3 ranks, and by_node is to serve 4"):
        find("by_node", 4, nodes=((0, 1), (2,)))
    with pytest.raises(ValueError, match="one node only, and every node holds a rank"):
        find("by_node", 4, nodes=((0, 1), (1, 2)))
    with pytest.raises(ValueError, match="every node holds a rank"):
        find("by_node", 2, nodes=((0, 1), ()))


def test_names_with_nodes_are_all_that_can_be_asked_for() -> None:
    assert [name for name in collectives.names(6) if ":" in name or name in HIERARCHICAL] == ["by_node", "by_master"]
    three = collectives.names(6, "reduce", ((0, 1), (2, 3), (4, 5)))
    assert {"by_node", "by_node:tree", "by_master:folded"} <= set(three)
    assert not {"by_node:halving", "by_node:doubling", "by_node:ring"} & set(three)


def test_aliases_are_names_people_know() -> None:
    assert collectives.find("rabenseifner") is collectives.find("halving_doubling") is collectives.find("folded")
    assert collectives.find("recursive_doubling") is collectives.find("doubling")
    assert find("hierarchical") is find("by_node") is find("by_node:ring")
    assert find("hierarchical:rabenseifner").name == "by_node:folded"
    assert find("by_master").name == "by_master:ring"


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 40))
def test_a_cut_covers_the_span_with_parts_that_differ_by_one(lo: int, size: int, parts: int) -> None:
    pieces = collectives.cut(Span(lo, lo + size), parts)
    assert [element for piece in pieces for element in range(*piece)] == list(range(lo, lo + size))
    assert max(piece.size for piece in pieces) - min(piece.size for piece in pieces) <= 1
    assert sorted(pieces, key=lambda piece: -piece.size) == pieces


def test_the_package_has_one_name() -> None:
    import importlib.util
    from pathlib import Path

    file = Path(collectives.__file__)
    spec = importlib.util.spec_from_file_location("collectives", file)
    assert spec and spec.loader
    with pytest.raises(ImportError, match="import this package as hpcdl"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
