"""Raft in bad weather: its laws hold in every schedule, and for each law a planted mistake is seen to break it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from itertools import combinations, permutations
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raft_simulator import KINDS, Simulation, Violation, Weather

from hpcdl.survive.raft import (
    Append,
    Appended,
    Committed,
    Entry,
    Membership,
    Message,
    Node,
    Outgoing,
    RequestVote,
    State,
    Vote,
    is_quorum,
    stand_ins,
)

SCHEDULES = 1500
CALM = Weather(lies=False, loss=0, doubled=0, longest_delay=1, trouble=0)


# ---- all weathers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", range(10))
def test_the_laws_hold_in_every_schedule(part: int) -> None:
    for seed in range(part, SCHEDULES, 10):
        Simulation(seed).run()


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 8),
    weather=st.builds(
        Weather,
        lies=st.booleans(),
        loss=st.floats(0, 0.5),
        doubled=st.floats(0, 0.5),
        longest_delay=st.integers(1, 20),
        trouble=st.just(0.0),
    ),
    script=st.lists(st.sampled_from(("", *KINDS)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_the_laws_hold_whatever_goes_wrong(seed: int, size: int, weather: Weather, script: Sequence[str]) -> None:
    Simulation(seed, size=size, weather=weather).run(script)


def test_a_seed_is_a_schedule() -> None:
    one, other = Simulation(7), Simulation(7)
    assert one.run() == other.run()
    assert one.kept == other.kept
    assert one.witness.lines == other.witness.lines


def test_the_schedules_are_worth_it() -> None:
    """They see joins, exclusions, lost quorums, memberships decided one after another, and elections that fail."""
    seen = [Simulation(seed) for seed in range(60)]
    for simulation in seen:
        simulation.run()
    nodes = [node for simulation in seen for node in simulation.nodes.values()]
    assert any(node.excluded for node in nodes)
    assert any(node.lost_quorum for node in nodes)
    assert any(node.rank >= 100 and node.rank in node.committed.members for node in nodes)
    assert max(len(simulation.witness.decided) for simulation in seen) >= 4
    assert any(len(simulation.witness.elected) < max(simulation.witness.elected) for simulation in seen)
    assert sum(bool(simulation.must_go_on) for simulation in seen) >= 10


# ---- what is decided -------------------------------------------------------------------------------------------------


def left(simulation: Simulation) -> tuple[int, ...]:
    return tuple(node.rank for node in simulation.members())


def calm(size: int, *, states: dict[int, State] | None = None) -> Simulation:
    return Simulation(size, size=size, weather=CALM, states=states)


def kill(simulation: Simulation, *ranks: int) -> tuple[int, ...]:
    """Kill them at once, tell all the others, and see who is left when all is settled."""
    simulation.crash(*ranks)
    simulation.clear_up()
    simulation.settle()
    return left(simulation)


def ticks(simulation: Simulation, many: int) -> None:
    for _ in range(many):
        simulation.tick()


def inquire(simulation: Simulation, rank: int) -> None:
    simulation.step(rank, lambda node: node.inquire())


def deliver(nodes: dict[int, Node], source: int, out: Outgoing) -> int:
    """Deliver messages, and those that they bring about, in order and at once; how many they were."""
    under_way = [(source, *message) for message in out]
    for source, destination, message in under_way:
        if destination in nodes:
            under_way += [(destination, *more) for more in nodes[destination].receive(source, message)]
    return len(under_way)


def group(*ranks: int) -> dict[int, Node]:
    return {rank: Node(rank, ranks, Random(rank)) for rank in ranks}


def test_the_lowest_rank_leads_without_an_election_and_all_is_quiet() -> None:
    nodes = group(3, 5, 9)
    assert [(node.role, node.leader, node.term) for node in nodes.values()] == [
        ("leader", 3, 1),
        ("follower", 3, 1),
        ("follower", 3, 1),
    ]
    for node in nodes.values():
        assert not node.wants_ticks
        assert node.tick() == []
        assert node.committed == Membership(0, (3, 5, 9))
        assert node.decisions() == []


@pytest.mark.parametrize("dead", [0, 1, 3])
def test_a_death_is_settled_without_a_tick_when_nothing_is_lost(dead: int) -> None:
    nodes = group(0, 1, 2, 3)
    del nodes[dead]
    for rank, node in nodes.items():
        deliver(nodes, rank, node.report([dead]))
    for node in nodes.values():
        assert [each.members for each in node.decisions()] == [tuple(nodes)]
        assert node.decisions() == []
        assert not node.wants_ticks


def test_half_with_the_lowest_rank_is_a_quorum_and_the_other_half_is_none() -> None:
    for size in range(1, 8):
        members = range(10, 10 + size)
        quorums = [set(some) for many in range(size + 1) for some in combinations(members, many)
                   if is_quorum(some, members)]  # fmt: skip
        assert all(one & other for one in quorums for other in quorums)
        assert len(quorums) == 2 ** (size - 1)  # of a set and those that it leaves out, one is


def test_two_of_four_go_on_if_rank_0_is_among_them() -> None:
    for dead in combinations(range(4), 2):
        simulation = calm(4)
        assert kill(simulation, *dead) == (() if 0 in dead else tuple(sorted({0, 1, 2, 3} - {*dead})))
        assert bool(simulation.witness.decided) == (0 not in dead)


def test_a_cut_in_two_halves_leaves_the_one_with_rank_0() -> None:
    simulation = calm(4)
    simulation.partition({1, 3})
    for rank in range(4):
        simulation.report(rank, {0, 2} if rank in (1, 3) else {1, 3})
    simulation.settle()
    assert left(simulation) == (0, 2)
    assert [rank for rank, node in simulation.nodes.items() if node.lost_quorum] == [1, 3]
    assert simulation.nodes[3].committed.epoch == 0
    assert simulation.nodes[3].report([1]) == simulation.nodes[3].inquire() == []


def test_one_after_another_may_die_as_long_as_half_are_left_with_the_lowest() -> None:
    for order in permutations(range(4)):
        simulation = calm(4)
        alive = list(range(4))
        for dead in order[:3]:
            goes_on = len(alive) > 2 or dead != min(alive)
            alive.remove(dead)
            assert kill(simulation, dead) == (tuple(alive) if goes_on else ())
        assert len(simulation.witness.decided) == (3 if goes_on else 2)


def test_without_a_quorum_nothing_is_decided() -> None:
    simulation = calm(5)
    assert kill(simulation, 1, 2, 4) == ()
    assert simulation.nodes[0].lost_quorum
    assert simulation.nodes[3].lost_quorum
    assert simulation.witness.decided == []


def test_the_first_living_backup_speaks_for_the_dead() -> None:
    simulation = calm(6)  # the backups of r are r + 1 and r + 2
    assert kill(simulation, 0, 1) == (2, 3, 4, 5)  # the leader, and its first backup with it
    assert simulation.witness.decided == [Membership(1, (2, 3, 4, 5), ((0, 2), (1, 2)))]
    assert kill(simulation, 4) == (2, 3, 5)
    assert simulation.witness.decided[1:] == [Membership(2, (2, 3, 5), ((4, 5),))]
    assert stand_ins([0, 1, 2, 3], [3], {0: [1, 3], 1: [2], 2: ()}) == ((0, 3), (1, None), (2, None))


def test_a_frozen_leader_that_returns_is_excluded_and_silent() -> None:
    simulation = calm(4)
    simulation.freeze(0, 40)
    simulation.report_to_all([0], within=0)
    ticks(simulation, 50)
    asleep = simulation.nodes[0]
    assert simulation.witness.decided == [Membership(1, (1, 2, 3), ((0, 1),))]
    assert asleep.role == "leader"
    assert not asleep.excluded
    simulation.fair = True
    simulation.settle()  # it asks
    assert asleep.excluded
    assert asleep.committed.members == (1, 2, 3)
    assert (asleep.role, asleep.leader, asleep.wants_ticks) == ("follower", None, False)
    assert asleep.report([1]) == asleep.inquire() == asleep.receive(1, RequestVote(99, 9, 9)) == []


def test_one_that_is_reported_dead_and_lives_is_excluded() -> None:
    simulation = calm(5)
    simulation.report(4, [2])
    simulation.fair = True
    simulation.settle()
    assert left(simulation) == (0, 1, 3, 4)
    assert simulation.nodes[2].excluded


@pytest.mark.parametrize("at", [0, 2])
def test_a_new_rank_joins_by_any_member(at: int) -> None:
    simulation = calm(3)
    rank = simulation.join(at)
    assert not simulation.nodes[rank].excluded
    simulation.clear_up()
    simulation.settle()
    assert left(simulation) == (0, 1, 2, rank)
    assert kill(simulation, 0, 1) == ()  # half of four, without the lowest
    with pytest.raises(ValueError, match="rank 1 is or was a member"):
        simulation.nodes[2].propose_join(1)


@pytest.mark.parametrize("at", [1, 2])
def test_a_new_rank_joins_while_the_leader_dies(at: int) -> None:
    simulation = calm(4)
    rank = simulation.join(at)
    assert kill(simulation, 0) == (1, 2, 3, rank)
    assert simulation.witness.decided[-1].members == (1, 2, 3, rank)


def test_who_may_have_missed_a_commit_asks_before_it_despairs() -> None:
    first, second = Membership(0, (0, 1, 2, 3, 4)), Membership(1, (0, 1, 2))
    log = (Entry(0, first), Entry(1, second))
    simulation = calm(5, states={1: State(1, 0, log, 1), 2: State(1, 0, log, 0)})
    simulation.crash(0, 3, 4)
    simulation.report(2, [0, 3, 4])  # it knows of five, of whom two are left
    ticks(simulation, 40)
    assert not simulation.nodes[2].lost_quorum
    assert kill(simulation) == (1, 2)


def test_a_membership_is_committed_by_a_quorum_of_the_old_and_of_the_new_one() -> None:
    nodes = group(0, 1, 2, 3, 4)
    leader = nodes[0]
    out = leader.report([4])
    assert sorted(rank for rank, _ in out) == [1, 2, 3]
    (append,) = {message for _, message in out}
    assert append == Append(1, 0, 0, (Entry(1, Membership(1, (0, 1, 2, 3), ((4, None),))),), 0)
    leader.receive(1, Appended(1, True, 1, 0))
    assert leader.committed.epoch == 0  # two of the five, though half of the four with the lowest
    leader.receive(3, Appended(1, True, 1, 0))
    assert leader.committed.epoch == 1


def test_a_report_is_sent_again_while_the_leader_waits_for_something_else() -> None:
    nodes = group(0, 1, 2)
    leader, follower = nodes[0], nodes[1]
    del nodes[2]
    leader.propose_join(7)  # which never answers
    follower.report([2])  # this report is lost
    for now in range(20):
        deliver(nodes, 0, leader.tick())
        if now % 2:  # its clock is slow
            deliver(nodes, 1, follower.tick())
    assert leader.committed.members == (0, 1, 7)
    assert leader.term == 1


def test_a_new_rank_that_the_leader_takes_for_dead_is_given_up_by_all() -> None:
    nodes = group(0, 1, 2)
    nodes[0].report([7])
    deliver(nodes, 1, nodes[1].propose_join(7))
    for node in nodes.values():
        assert node.committed.epoch == 0
        assert not node.wants_ticks


def test_a_vote_outlives_a_crash() -> None:
    node = Node(2, (0, 1, 2), Random(0))
    assert node.receive(0, RequestVote(5, 0, 0)) == [(0, Vote(5, True, 0, 0))]
    again = Node(2, (0, 1, 2), Random(0), state=node.state())
    assert again.leader is None
    assert again.wants_ticks
    assert again.receive(1, RequestVote(5, 0, 0)) == [(1, Vote(5, False, 0, 0))]
    assert again.receive(0, RequestVote(5, 0, 0)) == [(0, Vote(5, True, 0, 0))]


def test_an_outsider_is_told_what_is_committed_and_does_not_disturb() -> None:
    log = (Entry(0, Membership(0, (0, 1, 2))), Entry(1, Membership(1, (0, 1))))
    node = Node(0, (0, 1, 2), Random(0), state=State(1, 0, log, 1))
    assert node.receive(2, RequestVote(50, 0, 0)) == [(2, Committed(log))]
    assert node.term == 1
    outsider = Node(2, (0, 1, 2), Random(0))
    outsider.receive(0, Committed(log))
    assert outsider.excluded
    assert outsider.decisions() == [log[1].membership]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="members is empty"):
        Node(0, (), Random(0))
    with pytest.raises(ValueError, match=r"begins with the members \(0, 1\), not \(0, 2\)"):
        Node(0, (0, 2), Random(0), state=Node(0, (0, 1), Random(0)).state())


def test_messages_are_plain_tuples_that_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Message] = []
    monkeypatch.setattr(Simulation, "_post", lambda self, source, rank, message: seen.append(message))
    for seed in range(20):
        simulation = Simulation(seed, weather=Weather(lies=True, loss=0, doubled=0, longest_delay=1, trouble=0.5))
        for _ in range(30):
            simulation.tick()
            simulation._trouble(simulation.random.choice(KINDS))

    def plain(value: object) -> bool:
        return value is None or isinstance(value, int) or (isinstance(value, tuple) and all(map(plain, value)))

    assert len({type(message) for message in seen}) >= 2
    for message in seen:
        assert plain(message)
        assert pickle.loads(pickle.dumps(message)) == message


# ---- planted mistakes ------------------------------------------------------------------------------------------------


class VotesTwice(Node):
    def _on_request_vote(self, candidate: int, request: RequestVote) -> None:
        self._voted_for = None
        super()._on_request_vote(candidate, request)


class ForgetsItsVote(Node):
    def state(self) -> State:
        return super().state()._replace(voted_for=None)


class ForgetsItsTerm(Node):
    def state(self) -> State:
        return super().state()._replace(term=1, voted_for=None)


class ForgetsItsLog(Node):
    def state(self) -> State:
        state = super().state()
        return state._replace(log=state.log[: state.commit + 1])


class VotesForOldLogs(Node):
    def _is_up_to_date(self, request: RequestVote) -> bool:
        return True


class CountsOldVotes(Node):
    def _on_vote(self, voter: int, vote: Vote) -> None:
        super()._on_vote(voter, vote._replace(term=self.term))


class LeadsOn(Node):
    """In a later term than that in which it was elected."""

    def receive(self, source: int, message: Message) -> Outgoing:
        led = self.role == "leader"
        out = super().receive(source, message)
        if led and not self.excluded and not self.lost_quorum:
            self.role, self.leader = "leader", self.rank
        return out


class CountsOldTerms(Node):
    """Figure 8, which needs that a leader begins without an entry of its own."""

    def _counts(self, index: int) -> bool:
        return True

    def _lead(self) -> None:
        self.role, self.leader, self._first = "leader", self.rank, len(self._log)
        self._next, self._match, self._told = {}, {}, {}
        self._send_again()


class CommitsAlone(Node):
    def _agreed(self) -> int:
        return self._last


class GivesWay(Node):
    """A leader to a follower whose log is another."""

    def _on_appended(self, follower: int, reply: Appended) -> None:
        if self.role == "leader" and not reply.success:
            del self._log[reply.commit + 1 :]
        super()._on_appended(follower, reply)


class Overwrites(Node):
    """What is behind an entry that it has already."""

    def _take(self, previous_index: int, entries: Sequence[Entry]) -> None:
        del self._log[previous_index + 1 :]
        self._log.extend(entries)


class NeverTruncates(Node):
    def _take(self, previous_index: int, entries: Sequence[Entry]) -> None:
        self._log.extend(entries[self._last - previous_index :])


class AppendsAnywhere(Node):
    def _holds(self, index: int, term: int) -> bool:
        return index <= self._last


class ObeysOldLeaders(Node):
    def _on_append(self, leader: int, append: Append) -> None:
        super()._on_append(leader, append._replace(term=self.term))


class HalfIsEnough(Node):
    def _is_quorum_of_each(self, ranks: Collection[int], index: int) -> bool:
        return all(2 * len({*ranks} & {*each.members}) >= len(each.members) for each in self._needed(index))


class AsksTheNewestOnly(Node):
    def _needed(self, index: int) -> list[Membership]:
        return super()._needed(index)[-1:]


class AsksTheCommittedOnly(Node):
    def _needed(self, index: int) -> list[Membership]:
        return super()._needed(index)[:1]


class NeverExcluded(Node):
    excluded = False  # type: ignore[assignment]


class ActsWhenLost(Node):
    def receive(self, source: int, message: Message) -> Outgoing:
        lost, self.lost_quorum = self.lost_quorum, False
        out = super().receive(source, message)
        self.lost_quorum |= lost
        return out


class MiscountsEpochs(Node):
    def _proposal(self) -> Membership:
        proposal = super()._proposal()
        return proposal._replace(epoch=self.committed.epoch + 1 + self.rank)


class DespairsTooSoon(Node):
    def _nobody_knows_better(self) -> bool:
        return True


class NeverDespairs(Node):
    def _is_hopeless(self) -> bool:
        return False


class KeepsTheDead(Node):
    def _target(self) -> tuple[int, ...]:
        return self._latest.members


class HeedsOutsiders(Node):
    def _is_outsider(self, candidate: int, request: RequestVote) -> bool:
        return False


class AllAtTheSameTime(Node):
    def _election_ticks(self) -> int:
        return 12


Schedule: TypeAlias = Callable[[type[Node]], None]


def seeds(many: int, size: int | None = None, weather: Weather | None = None) -> Schedule:
    """By chance, within so many schedules."""

    def by_chance(kind: type[Node]) -> None:
        for seed in range(many):
            Simulation(seed, kind, size=size, weather=weather).run()

    return by_chance


def scripted(size: int, states: dict[int, State] | None = None) -> Callable[[Callable[[Simulation], None]], Schedule]:
    """In weather that does nothing by itself; in the end it is fair."""

    def decorate(script: Callable[[Simulation], None]) -> Schedule:
        def by_hand(kind: type[Node]) -> None:
            simulation = Simulation(0, kind, size=size, weather=CALM, states=states)
            script(simulation)
            simulation.clear_up()
            simulation.settle()

        return by_hand

    return decorate


FIVE = Membership(0, (0, 1, 2, 3, 4))
FIGURE_8 = {
    0: State(2, 0, (Entry(0, FIVE), Entry(2, FIVE)), 0),
    1: State(2, 0, (Entry(0, FIVE), Entry(2, FIVE)), 0),
    2: State(3, 4, (Entry(0, FIVE),), 0),
    3: State(3, 4, (Entry(0, FIVE),), 0),
    4: State(3, 4, (Entry(0, FIVE), Entry(3, FIVE)), 0),
}
"""Raft's figure 8, (b)."""


@scripted(5, FIGURE_8)
def figure_8(simulation: Simulation) -> None:
    simulation.partition({3, 4})
    inquire(simulation, 0)
    inquire(simulation, 0)  # term 4
    ticks(simulation, 7)  # (c): line 1 of term 2 is on three of five
    simulation.crash(0, 1)
    simulation.cut.clear()
    inquire(simulation, 4)
    ticks(simulation, 2)
    inquire(simulation, 4)
    ticks(simulation, 4)  # (d)


@scripted(5, FIGURE_8)
def two_logs_meet(simulation: Simulation) -> None:
    inquire(simulation, 4)
    ticks(simulation, 4)


@scripted(3)
def asked_again_after_a_crash(simulation: Simulation) -> None:
    simulation.cut = {(1, 2), (2, 1), (2, 0)}
    inquire(simulation, 1)
    inquire(simulation, 2)  # in the same term
    ticks(simulation, 2)
    simulation.crash(0, for_good=False)
    simulation._restart(0)
    simulation.cut = {(1, 2), (2, 1), (1, 0)}
    ticks(simulation, 6)


@scripted(3)
def acknowledged_before_a_crash(simulation: Simulation) -> None:
    simulation.partition({2})
    simulation.join(0)
    ticks(simulation, 2)
    simulation.crash(1, for_good=False)
    simulation._restart(1)
    simulation.crash(0)
    ticks(simulation, 1)
    simulation.cut.clear()


@scripted(3)
def one_sleeps_while_the_others_commit(simulation: Simulation) -> None:
    simulation.partition({2})
    simulation.join(0)
    ticks(simulation, 6)
    simulation.cut.clear()
    inquire(simulation, 2)
    ticks(simulation, 4)


@scripted(3)
def an_old_leader_sends_again(simulation: Simulation) -> None:
    simulation.partition({0})
    simulation.report(0, [2])
    simulation.report(1, [0])
    simulation.report(2, [0])
    ticks(simulation, 4)
    simulation.cut = {(1, 0)}
    ticks(simulation, 6)


@scripted(4)
def two_halves(simulation: Simulation) -> None:
    simulation.partition({0, 1})
    for rank in range(4):
        simulation.report(rank, [2, 3] if rank < 2 else [0, 1])
    ticks(simulation, 20)


@scripted(5)
def two_sides_of_five(simulation: Simulation) -> None:
    simulation.partition({0, 1})
    simulation.report(0, [3, 4])
    simulation.report(2, [0, 1])
    ticks(simulation, 20)


@scripted(5)
def the_third_hears_of_no_commit(simulation: Simulation) -> None:
    simulation.report(0, [3, 4])
    ticks(simulation, 2)
    simulation.partition({0, 1})
    simulation.report(0, [2])
    ticks(simulation, 3)
    simulation.report(2, [0, 1])
    ticks(simulation, 4)


@scripted(4)
def the_leader_is_frozen(simulation: Simulation) -> None:
    simulation.freeze(0, 40)
    simulation.report_to_all([0], within=0)
    ticks(simulation, 50)
    inquire(simulation, 0)
    ticks(simulation, 4)
    simulation.step(0, lambda node: node.receive(1, RequestVote(99, 9, 9)))


@scripted(5)
def three_of_five_die(simulation: Simulation) -> None:
    simulation.crash(1, 2, 3)


@scripted(4)
def one_of_four_dies(simulation: Simulation) -> None:
    simulation.crash(1)


@scripted(4)
def all_start_anew(simulation: Simulation) -> None:
    simulation.crash(0, 1, 2, 3, for_good=False)


MISSED = (Entry(0, FIVE), Entry(1, Membership(1, (0, 1, 2))))


@scripted(5, {1: State(1, 0, MISSED, 1), 2: State(1, 0, MISSED, 0)})
def a_commit_was_missed(simulation: Simulation) -> None:
    simulation.crash(0, 3, 4)
    simulation.report(2, [0, 3, 4])  # it knows of five, of whom two are left
    ticks(simulation, 40)


def bad(*kinds: str, loss: float = 0.0, longest_delay: int = 4) -> Weather:
    return Weather(True, loss, 0.2, longest_delay, 0.4, kinds)


PLANTED: list[tuple[type[Node], Schedule, str]] = [
    (VotesTwice, seeds(30, 3, bad("contest")), "one leader a term"),
    (ForgetsItsVote, asked_again_after_a_crash, "one leader a term"),
    (ForgetsItsTerm, seeds(30), "one leader a term"),
    (ForgetsItsLog, acknowledged_before_a_crash, "leader completeness"),
    (VotesForOldLogs, one_sleeps_while_the_others_commit, "leader completeness"),
    (CountsOldVotes, seeds(30, 3, bad("contest")), "one leader a term"),
    (LeadsOn, seeds(30), "one leader a term"),
    (CountsOldTerms, figure_8, "leader completeness"),
    (CommitsAlone, seeds(30), "state machine safety"),
    (GivesWay, two_logs_meet, "leaders only append"),
    (Overwrites, seeds(30), "no step fails"),
    (NeverTruncates, two_logs_meet, "log matching"),
    (AppendsAnywhere, two_logs_meet, "log matching"),
    (ObeysOldLeaders, an_old_leader_sends_again, "state machine safety"),
    (HalfIsEnough, two_halves, "leader completeness"),
    (AsksTheNewestOnly, two_sides_of_five, "leader completeness"),
    (AsksTheCommittedOnly, the_third_hears_of_no_commit, "leader completeness"),
    (NeverExcluded, the_leader_is_frozen, "excluded is silent"),
    (ActsWhenLost, seeds(30), "lost is silent"),
    (MiscountsEpochs, seeds(30), "same decisions"),
    (DespairsTooSoon, a_commit_was_missed, "liveness"),
    (NeverDespairs, three_of_five_die, "liveness"),
    (KeepsTheDead, one_of_four_dies, "liveness"),
    (HeedsOutsiders, the_leader_is_frozen, "liveness"),
    (AllAtTheSameTime, all_start_anew, "liveness"),
]


@pytest.mark.parametrize(("mistake", "schedule", "law"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_mistake_is_seen(mistake: type[Node], schedule: Schedule, law: str) -> None:
    with pytest.raises(Violation, match=f"^{law}:"):
        schedule(mistake)


@pytest.mark.parametrize("schedule", list(dict.fromkeys(schedule for _, schedule, _ in PLANTED)))
def test_without_the_mistake_its_schedule_is_lawful(schedule: Schedule) -> None:
    schedule(Node)
