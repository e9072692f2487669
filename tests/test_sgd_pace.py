"""Steps last as long as they are told to; who meets whom and who has what follows from seeds alone."""

import time

import numpy as np
import pytest

from hpcdl.sgd import Pace, asked, deal, dropped, matching
from hpcdl.sgd.clients import play

# ---- slow ranks ----------------------------------------------------------------------------------------------------


def test_one_rank_takes_so_many_times_as_long() -> None:
    pace = Pace(0.02, slow_rank=2, slow_factor=5)
    assert [pace.late(rank, 7) for rank in range(4)] == [0.02, 0.02, 0.1, 0.02]
    assert Pace().late(3, 0) == 0


def test_jitter_stays_within_its_share_and_repeats_itself() -> None:
    pace = Pace(1.0, slow_rank=1, slow_factor=2, jitter=0.3)
    for rank, least in ((0, 0.7), (1, 1.4)):
        times = np.array([pace.late(rank, step) for step in range(500)])
        assert times.min() >= least and times.max() <= least * 13 / 7
        assert times.std() > 0.1 * least  # uniform: 0.173 of the mean
        assert times.mean() == pytest.approx(least / 0.7, rel=0.05)
        assert [pace.late(rank, step) for step in range(500)] == times.tolist()
    assert pace.late(0, 0) != pace.late(2, 0) != Pace(1.0, jitter=0.3, seed=1).late(2, 0)


def test_a_step_is_slept_out_from_when_it_began() -> None:
    began = time.perf_counter() - 0.03
    before = time.perf_counter()
    Pace(0.05).wait(0, 0, began)
    now = time.perf_counter()
    assert now - began >= 0.05 and now - before > 0.015
    before = time.perf_counter()
    Pace(0.02).wait(0, 0, began)  # it has lasted longer
    assert time.perf_counter() - before < 0.01


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"step_s": -1}, "a step lasts -1 s"),
        ({"step_s": float("nan")}, "a step lasts nan s"),
        ({"step_s": 1, "slow_rank": 0, "slow_factor": 0.5}, "the slow rank takes 0.5 times as long"),
        ({"step_s": 1, "jitter": 1.5}, "a step varies by the share 1.5"),
        ({"step_s": 1, "slow_rank": -1}, "rank -1 is to be slow"),
        ({"step_s": 1, "slow_factor": 5}, "nobody is 5 times as slow"),
        ({"slow_rank": 1}, "a slow rank and jitter are in proportion to the time of a step"),
    ],
)
def test_what_is_no_pace_is_refused(arguments: dict[str, float], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Pace(**arguments)  # type: ignore[arg-type]


# ---- pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
def test_everybody_has_one_partner_and_of_an_odd_number_one_sits_out(size: int) -> None:
    met = set()
    for step in range(200):
        partners = matching(size, step, seed=3)
        assert [partners[partner] for partner in partners] == list(range(size))
        assert sum(partner == rank for rank, partner in enumerate(partners)) == size % 2
        met |= {(rank, partner) for rank, partner in enumerate(partners) if rank < partner}
    assert len(met) == size * (size - 1) // 2  # each with each, in time


def test_pairs_change_with_the_step_and_the_seed() -> None:
    drawn = {tuple(matching(8, step, seed)) for step in range(5) for seed in range(5)}
    assert len(drawn) > 15
    assert matching(8, 3, 4) == matching(8, 3, 4)


# ---- clients -------------------------------------------------------------------------------------------------------

LABELS = np.arange(1000) % 10


@pytest.mark.parametrize("skew", ["none", "sizes", "sizes:0.2", "labels:0.3", "labels:100", "sorted", "sorted:3"])
@pytest.mark.parametrize("clients", [1, 7, 30])
def test_every_sample_is_one_clients(skew: str, clients: int) -> None:
    dealt = deal(LABELS, clients, skew=skew, seed=5)
    assert len(dealt) == clients
    assert sorted(np.concatenate(dealt).tolist()) == list(range(1000))
    again = deal(LABELS, clients, skew=skew, seed=5)
    assert all((one == other).all() for one, other in zip(dealt, again, strict=True))
    if clients > 1:
        assert not np.array_equal(dealt[0], deal(LABELS, clients, skew=skew, seed=6)[0])


def kinds(mine: np.ndarray) -> int:
    return len(np.unique(LABELS[mine]))


def test_even_shares_are_even_and_know_all_labels() -> None:
    dealt = deal(LABELS, 8)
    assert {len(mine) for mine in dealt} == {125} and {kinds(mine) for mine in dealt} == {10}


def test_sizes_differ_and_nobody_has_none() -> None:
    sizes = [len(mine) for mine in deal(LABELS, 30, skew="sizes:0.3")]
    assert min(sizes) >= 1 and max(sizes) > 3 * (1000 / 30)


def test_skewed_labels_are_known_by_few() -> None:
    """The more uneven the smaller the number: how much of a client's samples has its commonest label."""
    shares = []
    for alpha in (0.05, 0.5, 1000):
        dealt = [mine for mine in deal(LABELS, 10, skew=f"labels:{alpha}") if len(mine)]
        shares.append(np.mean([np.bincount(LABELS[mine]).max() / len(mine) for mine in dealt]))
    assert shares[0] > 0.5 > shares[1] > shares[2] and shares[2] == pytest.approx(0.1, abs=0.03)


def test_two_pieces_of_what_is_sorted_hold_few_labels() -> None:
    assert all(kinds(mine) <= 2 and len(mine) == 50 for mine in deal(LABELS, 20, skew="sorted:2"))


@pytest.mark.parametrize(
    ("skew", "clients", "line"),
    [
        ("labels:0", 5, "labels takes a finite number above 0"),
        ("sorted:1.5", 5, "sorted takes a whole number"),
        ("sizes:x", 5, "x is no number"),
        ("wild", 5, "none of none, sizes"),
        ("none:3", 5, "none of none, sizes"),
        ("sorted:20", 100, "1000 samples are too few for 100 clients with 20 pieces"),
        ("none", 1001, "1000 samples are for 1 to 1000 clients, not 1001"),
        ("none", 0, "not 0"),
    ],
)
def test_what_cannot_be_dealt_is_refused(skew: str, clients: int, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        deal(LABELS, clients, skew=skew)


def test_rounds_ask_so_many_clients_and_all_in_time() -> None:
    everybody = set()
    for number in range(100):
        chosen = asked(20, 0.25, number, seed=1)
        assert len(set(chosen)) == 5 and chosen == asked(20, 0.25, number, seed=1)
        everybody |= set(chosen)
    assert everybody == set(range(20))
    assert asked(20, 0.001, 0) and asked(20, 1, 0) == list(range(20))


def test_clients_drop_out_as_often_as_they_should() -> None:
    chosen = list(range(50))
    lost = [dropped(chosen, 0.2, number) for number in range(200)]
    assert sum(map(len, lost)) == pytest.approx(0.2 * 50 * 200, rel=0.1)
    assert lost[0] != lost[1] and dropped(chosen, 0, 0) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_have_about_as_much_to_play(ranks: int) -> None:
    sizes = {client: 1 + client * client % 37 for client in range(40)}
    played = play(sizes, ranks)
    assert sorted(client for mine in played for client in mine) == list(range(40))
    loads = [sum(sizes[client] for client in mine) for mine in played]
    assert max(loads) - min(loads) <= max(sizes.values())
