"""What a server decides, without messages: nobody runs ahead, nobody is waited for in vain, nothing counts twice."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.data import shares
from hpcdl.sgd.order import Asynchronous, Backup, Order
from hpcdl.sgd.stream import Stream

moves = st.lists(st.integers(0, 7), max_size=120)


class Play:
    """Workers that ask, compute and push in some order, and the law that holds after each of these."""

    def __init__(self, order: Order, workers: int) -> None:
        self.order = order
        self.versions: dict[int, int] = {}
        """Of those who compute."""
        self.finished = Counter[int]()
        self.worst = 0
        for worker in range(workers):
            order.ask(worker)
        self.hand_out()

    def hand_out(self) -> None:
        for worker in self.order.ready():
            assert worker not in self.versions
            self.order.answer(worker)
            self.versions[worker] = self.order.version

    def step(self, chosen: int) -> None:
        """One of those who compute has finished, and asks for more."""
        if not self.versions:
            return
        worker = sorted(self.versions)[chosen % len(self.versions)]
        version = self.versions.pop(worker)
        if self.order.push(worker, version):
            self.worst = max(self.worst, self.order.version - version)
            if self.order.full:
                self.order.update()
        self.finished[worker] += 1
        self.order.ask(worker)
        self.hand_out()

    def lose(self, worker: int) -> None:
        self.versions.pop(worker, None)
        self.order.leave(worker)
        if self.order.full:
            self.order.update()
        self.hand_out()


@given(workers=st.integers(1, 5), bound=st.integers(0, 3), group=st.integers(1, 5), chosen=moves)
def test_nobody_who_works_is_more_clocks_ahead_than_the_bound(
    workers: int, bound: int, group: int, chosen: list[int]
) -> None:
    """So a gradient is at most (workers - 1) * (2 * bound + 1) updates stale: the others bring no more meanwhile."""
    play = Play(Asynchronous(range(workers), bound=bound, group=min(group, workers)), workers)
    for each in chosen:
        play.step(each)
        working = [play.finished[worker] for worker in play.versions]
        slowest = min(play.finished[worker] for worker in range(workers))
        assert working, "all wait for each other"
        assert max(working) - slowest <= bound
        assert play.worst <= (workers - 1) * (2 * bound + 1)


def test_the_bound_is_reached_and_the_slow_one_frees_the_fast() -> None:
    play = Play(Asynchronous(range(3), bound=1), 3)
    for _ in range(4):
        play.step(0)  # the lowest of those who may
    assert dict(play.finished) == {0: 2, 1: 2}
    assert sorted(play.versions) == [2]
    play.step(0)
    assert sorted(play.versions) == [0, 1, 2] and play.worst == 4


@given(workers=st.integers(1, 6), bound=st.sampled_from([0, 1, math.inf]), warm=st.integers(0, 4), chosen=moves)
def test_the_lost_are_not_waited_for(workers: int, bound: float, warm: int, chosen: list[int]) -> None:
    play = Play(Asynchronous(range(workers), bound=bound, warm=warm), workers)
    for number, each in enumerate(chosen):
        if number % 5 == 4 and len(play.order.workers) > 1:
            play.lose(play.order.workers[each % len(play.order.workers)])
        play.step(each)
        assert play.versions, "those who are left wait for the lost"
        assert set(play.versions) <= set(play.order.workers)


@pytest.mark.parametrize(("workers", "n", "group"), [(4, 4, 1), (4, 2, 2), (5, 2, 2), (4, 1, 4), (5, 1, 5)])
def test_softsync_takes_workers_over_n_gradients_an_update(workers: int, n: int, group: int) -> None:
    order = Asynchronous(range(workers), group=workers // n)
    for number in range(3 * group):
        assert order.push(number % workers, order.version)
        assert order.full == (number % group == group - 1)
        if order.full:
            order.update()
    assert order.version == 3


def test_a_warm_start_is_one_workers_and_the_others_begin_behind_it() -> None:
    play = Play(Asynchronous(range(3), bound=0, group=3, warm=4), 3)
    for _ in range(4):
        assert sorted(play.versions) == [0]
        play.step(0)
    assert play.finished == {0: 4} and play.order.version == 3  # the fourth gradient waits for two others
    assert {worker: play.versions[worker] for worker in (1, 2)} == {1: 3, 2: 3}


@given(workers=st.integers(1, 6), backups=st.integers(0, 5), chosen=moves)
def test_the_first_gradients_of_a_step_count_and_no_late_one(workers: int, backups: int, chosen: list[int]) -> None:
    backups = min(backups, workers - 1)
    order = Backup(range(workers), backups=backups)
    play = Play(order, workers)
    for each in chosen:
        before, taken, late = order.version, order.taken, sum(order.late.values())
        some = sorted(play.versions)[each % len(play.versions)]
        in_time = play.versions[some] == before
        play.step(each)
        assert play.versions, "all wait for each other"
        assert sum(order.late.values()) - late == (not in_time)
        # A step is over with the last of the first N, and never sooner.
        assert order.version - before == (in_time and taken + 1 == workers - backups)
        assert set(order.staleness) <= {0}


def test_a_step_takes_what_is_left_of_the_workers() -> None:
    play = Play(Backup(range(4), backups=1), 4)
    play.step(0)
    play.step(0)
    play.lose(3)
    assert play.order.version == 0 and sorted(play.versions) == [2]
    play.lose(2)  # of whom the step waits
    assert play.order.version == 1 and sorted(play.versions) == [0, 1]


def test_who_waits_for_an_answer_is_not_silent() -> None:
    order = Asynchronous(range(3), bound=0)
    for worker in range(3):
        order.hear(worker, 0.0)
        order.ask(worker)
        order.answer(worker)
    order.push(0, 0)
    order.ask(0)
    assert order.ready() == []  # it is one clock ahead
    order.hear(2, 8.0)
    assert order.silent(9.0, 10.0) == []
    assert order.silent(11.0, 10.0) == [1]
    order.leave(1)
    assert order.silent(11.0, 10.0) == [] and not order.push(1, 0)
    assert order.late == {1: 1}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Asynchronous(range(0)), "at least one worker"),
        (lambda: Asynchronous(range(2), bound=-1), "0 clocks ahead of the slowest, or more, not -1"),
        (lambda: Asynchronous(range(2), bound=math.nan), "or more, not nan"),
        (lambda: Asynchronous(range(2), group=3), "an update takes 1 to 2 gradients"),
        (lambda: Asynchronous(range(2), warm=-1), "0 gradients or more, not -1"),
        (lambda: Backup(range(3), backups=3), "of 3 workers 0 to 2 can be backups, not 3"),
    ],
)
def test_what_cannot_be_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("n", "batch", "size"), [(23, 6, 3), (10, 4, 4), (5, 5, 1)])
def test_the_streams_of_all_ranks_are_the_epochs_one_behind_the_other(n: int, batch: int, size: int) -> None:
    streams = [Stream(n, seed=3, batch=batch, rank=rank, size=size) for rank in range(size)]
    steps = streams[0].steps
    for epoch in (0, 1, 4):
        seen = np.concatenate([stream[epoch * steps + step].indices for step in range(steps) for stream in streams])
        assert sorted(seen.tolist()) == list(range(n))
        first = next(shares(n, epoch, seed=3, batch=batch, rank=0, size=size))
        assert streams[0][epoch * steps].indices.tolist() == first.indices.tolist()
