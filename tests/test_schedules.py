"""The algorithms on paper: proved for every rank, and shown to be found out when they are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl import collectives
from hpcdl.collectives import Copy, Reduce, Round, Schedule, ScheduleError, Send, Span, counts, schedule, verify
from hpcdl.collectives.binary_blocks import blocks_of

SIZES = [*range(1, 65), 600]


def lengths(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 37})


@pytest.mark.parametrize("name", collectives.ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_counts_once_in_an_allreduce(name: str, size: int) -> None:
    if name not in collectives.names(size):
        with pytest.raises(ValueError, match="2\\*\\*k ranks"):
            schedule(name, size)
        return
    # On 600 ranks one length is enough, of uneven pieces; not every algorithm has an element for every rank.
    for n in lengths(size) if size < 600 else [37 if name in ("doubling", "tree") else 601]:
        verify(schedule(name, size, n))


@pytest.mark.parametrize("collective", ["reduce_scatter", "allgather", "reduce", "broadcast"])
@pytest.mark.parametrize("size", [*range(1, 20), 31, 33, 64])
def test_every_collective_keeps_its_promise(collective: str, size: int) -> None:
    for name in collectives.names(size, collective):
        for n in lengths(size):
            verify(schedule(name, size, n, collective=collective, root=size // 2))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_group_of_ranks_will_do(data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24, unique=True))
    collective = data.draw(st.sampled_from(collectives.COLLECTIVES))
    name = data.draw(st.sampled_from(collectives.names(len(group), collective)))
    n = data.draw(st.integers(0, 80))
    root = data.draw(st.sampled_from(group))
    verify(schedule(name, len(group), n, collective=collective, group=group, root=root))


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


@pytest.mark.parametrize("name", collectives.ALGORITHMS)
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
@pytest.mark.parametrize("size", [3, 4, 6, 8])
def test_a_broken_schedule_is_found_out(mutation: str, collective: str, size: int) -> None:
    broken = 0
    for name in collectives.names(size, collective):
        right = schedule(name, size, 4 * size, collective=collective)
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
    right = schedule(name, 4, 16)
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


def test_aliases_are_names_people_know() -> None:
    assert collectives.find("rabenseifner") is collectives.find("halving_doubling") is collectives.find("folded")
    assert collectives.find("recursive_doubling") is collectives.find("doubling")


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
