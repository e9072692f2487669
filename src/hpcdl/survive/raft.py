"""Consensus on who is a member: Raft as a pure state machine, whose log holds nothing but memberships.

After D. Ongaro and J. Ousterhout, "In Search of an Understandable Consensus Algorithm", 2014; "5.3" below is a section
of that paper, and the names are those of its figure 2. What is different here:

- No heartbeats. Reports of failures drive it, and while all is quiet it asks for no ticks.
- The lowest rank leads term 1 without an election, as if all had voted for it.
- Any number of ranks may leave or join at once. Section 6's joint consensus, generalised: an election needs a quorum of
  *each* membership from the last one known to be committed to the last of the log, a commit up to what is committed.
- Half of the members are a quorum too if the lowest rank is among them: any two quorums still share a member.
- The commit index is kept as well: without it a restarted rank would need a quorum of every membership of the past.
- Before it gives up for want of a quorum, a rank asks all who live whether they know of a later commit.

Why this is safe. Let a leader commit entry e while it knows c to be committed; it asked the memberships c to e. Let a
candidate of a later term know c', and lack e, so that c' < e. It asks those from c' to the last of its log. What was
committed before e it holds, by induction, and the leader held what is committed at c'. So both asked the membership at
max(c, c'), of whose members one has acknowledged e and voted; the rest is 5.4.3. Two candidates of one term likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Literal, NamedTuple, TypeAlias

RETRY_TICKS = 3
"""Ticks after which what was not answered is sent again."""
ELECTION_TICKS = 12
"""A rank stands for election when it has heard from no leader for this many ticks to twice as many, at random."""


class Membership(NamedTuple):
    """Who is a member; for each rank that is no longer, who speaks for it.

    `stands_in` compares with the membership that was committed when this one was proposed: pairs of a rank that has
    gone and its stand-in, None where no backup of it lives.
    """

    epoch: int
    members: tuple[int, ...]
    stands_in: tuple[tuple[int, int | None], ...] = ()


class Entry(NamedTuple):
    """One line of the log. One that repeats the membership before it is the no-op of section 8."""

    term: int
    membership: Membership


class State(NamedTuple):
    """What a rank must not forget: to be kept before the messages of the same step are sent (figure 2)."""

    term: int
    voted_for: int | None
    log: tuple[Entry, ...]
    commit: int


class RequestVote(NamedTuple):
    """Elect me (5.2)."""

    term: int
    last_index: int
    last_term: int


class Vote(NamedTuple):
    """The answer, and the last entry that the voter knows to be committed."""

    term: int
    granted: bool
    commit_index: int
    commit_term: int


class Append(NamedTuple):
    """I lead; append these entries behind the previous one, and commit up to this index (5.3)."""

    term: int
    previous_index: int
    previous_term: int
    entries: tuple[Entry, ...]
    commit: int


class Appended(NamedTuple):
    """The answer: up to which index the follower's log is the leader's if it took them, and its commit index."""

    term: int
    success: bool
    match: int
    commit: int


class Report(NamedTuple):
    """To the leader: these have failed, and those want to join. From it: no, those have failed."""

    failed: tuple[int, ...]
    joining: tuple[int, ...]


class Committed(NamedTuple):
    """You ask for a vote and lack what is committed: here it is. It is the truth in any term, whoever says it."""

    log: tuple[Entry, ...]


Message: TypeAlias = RequestVote | Vote | Append | Appended | Report | Committed
Outgoing: TypeAlias = list[tuple[int, Message]]
"""Whom to send what."""
Role: TypeAlias = Literal["follower", "candidate", "leader"]


def is_quorum(ranks: Collection[int], members: Sequence[int]) -> bool:
    """Are these ranks more than half of the members, or half with the lowest?"""
    twice = 2 * sum(member in ranks for member in members)
    return twice > len(members) or (twice == len(members) and min(members) in ranks)


def stand_ins(
    before: Iterable[int], now: Collection[int], backups: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, int | None], ...]:
    """For each rank that was there before and is not now, the first of its backups that is; None if there is none."""
    gone = sorted(set(before).difference(now))
    return tuple((rank, next((each for each in backups.get(rank, ()) if each in now), None)) for rank in gone)


class Node:
    """One rank's part in the consensus.

    Every input (`receive`, `tick`, `report`, `propose_join`, `inquire`) returns the messages to send. Messages may be
    lost, late, doubled and out of order. Ranks are names: one that has gone never comes back under the same number.
    `members` are those at the very beginning, the same on all ranks, also on one that is about to join; `backups` may
    be replaced at any time, and only the leader's counts.
    """

    def __init__(
        self,
        rank: int,
        members: Iterable[int],
        random: Random,
        backups: Mapping[int, Sequence[int]] | None = None,
        state: State | None = None,
    ) -> None:
        first = Membership(0, tuple(sorted(set(members))))
        if not first.members:
            raise ValueError("a membership needs at least one rank, and members is empty")
        if state is not None and state.log[0].membership != first:
            began = state.log[0].membership.members
            raise ValueError(f"the state begins with the members {began}, not {first.members}")
        self.rank = rank
        self.backups = backups or {}
        self.role: Role = "follower"
        self.leader: int | None = None
        self.lost_quorum = False
        """No quorum lives, as far as was reported: this rank decides nothing any more."""
        if state is None:
            self.leader = first.members[0]
            self.role = "leader" if rank == self.leader else "follower"
            state = State(1, self.leader, (Entry(0, first),), 0)
        self.term, self._voted_for, self._commit = state.term, state.voted_for, state.commit
        self._log = list(state.log)
        self._random = random
        self._failed: set[int] = set()
        self._joining: set[int] = set()
        self._decisions: list[Membership] = []
        self._out: Outgoing = []
        # Of a candidate: who has answered what. Of a leader: figure 2's nextIndex and matchIndex, and who knows of
        # which commit.
        self._answers: dict[int, Vote] = {}
        self._first = 1
        self._next: dict[int, int] = {}
        self._match: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self._until_retry, self._until_election = 0, 0
        self._reset_timers()
        self.wants_ticks = self._is_outstanding()
        """Is something outstanding, that time must drive?"""

    # ---- what one may ask --------------------------------------------------------------------------------------------

    @property
    def committed(self) -> Membership:
        """The last membership that this rank knows to be committed."""
        return self._log[self._commit].membership

    @property
    def excluded(self) -> bool:
        """Has this rank been a member, and is it one no longer? Then it never acts again."""
        return self.rank not in self.committed.members and self.rank in self.former

    @property
    def first(self) -> tuple[int, ...]:
        """The members of the very beginning."""
        return self._log[0].membership.members

    @property
    def former(self) -> set[int]:
        """Who was a member once, as far as this rank knows, and is one no longer."""
        ever = {rank for entry in self._log[: self._commit] for rank in entry.membership.members}
        return ever.difference(self.committed.members)

    def decisions(self) -> list[Membership]:
        """The memberships that were committed since this was last asked."""
        taken, self._decisions = self._decisions, []
        return taken

    def state(self) -> State:
        """What must outlive a crash."""
        return State(self.term, self._voted_for, tuple(self._log), self._commit)

    # ---- the inputs --------------------------------------------------------------------------------------------------

    def report(self, failed: Iterable[int]) -> Outgoing:
        """These ranks are said to be dead. A false report is safe: it may cost a member, not the agreement."""
        self._learn(failed, ())
        return self._settle()

    def propose_join(self, rank: int) -> Outgoing:
        """This rank, whose node exists, is to become a member."""
        if any(rank in entry.membership.members for entry in self._log[: self._commit + 1]):
            raise ValueError(f"rank {rank} is or was a member: one that joins needs a number that nobody has had")
        self._learn((), (rank,))
        return self._settle()

    def inquire(self) -> Outgoing:
        """Find out where this rank stands, for instance after a long sleep: it stands for election.

        Whoever wins, it learns of it; and if it has been excluded, of that. Known when `wants_ticks` is False.
        """
        if not self.lost_quorum and not self.excluded and self._has_a_say():
            self._campaign()
        return self._settle()

    def tick(self) -> Outgoing:
        """Some time has passed."""
        if self.wants_ticks:
            self._until_retry -= 1
            self._until_election -= 1
            if self.role != "leader" and self._until_election <= 0:
                self._campaign()
            elif self._until_retry <= 0:
                self._until_retry = RETRY_TICKS
                self._send_again()
        return self._settle()

    def receive(self, source: int, message: Message) -> Outgoing:
        """A message has come from this rank."""
        if self.excluded:
            return []
        if self.lost_quorum:
            # Nothing but what helps others to come to the same conclusion.
            knows_nothing = (False, 0, self._log[0].term)
            return [(source, Vote(message.term, *knows_nothing))] if isinstance(message, RequestVote) else []
        if isinstance(message, Committed):
            self._take(0, message.log[1:])
            self._advance(len(message.log) - 1)
        elif isinstance(message, RequestVote) and self._is_outsider(source, message):
            # It was excluded, or never got in, and does not know it. Its terms must not disturb those inside (6).
            self._send(source, Committed(tuple(self._log[: self._commit + 1])))
        elif isinstance(message, Report):
            self._learn(message.failed, message.joining)
            if self.role == "leader":
                self._send_entries(source)
                if refused := self._failed.intersection(message.joining):
                    self._send(source, Report(tuple(sorted(refused)), ()))
        else:
            if message.term > self.term:  # figure 2, "all servers"
                self.term, self._voted_for = message.term, None
                self.role, self.leader = "follower", None
            match message:
                case RequestVote():
                    self._on_request_vote(source, message)
                case Vote():
                    self._on_vote(source, message)
                case Append():
                    self._on_append(source, message)
                case Appended():
                    self._on_appended(source, message)
        return self._settle()

    # ---- elections (5.2, 5.4.1) --------------------------------------------------------------------------------------

    def _campaign(self) -> None:
        self.term += 1
        self._voted_for = self.rank
        self.role, self.leader = "candidate", None
        self._answers = {}
        self._reset_timers()
        self._send_again()

    def _on_request_vote(self, candidate: int, request: RequestVote) -> None:
        granted = request.term == self.term and self._voted_for in (None, candidate) and self._is_up_to_date(request)
        if granted:
            self._voted_for = candidate
            self._until_election = self._election_ticks()
        self._send(candidate, Vote(self.term, granted, self._commit, self._log[self._commit].term))

    def _is_up_to_date(self, request: RequestVote) -> bool:
        return (request.last_term, request.last_index) >= (self._log[-1].term, self._last)

    def _on_vote(self, voter: int, vote: Vote) -> None:
        if self.role != "candidate" or vote.term < self.term:
            return
        self._answers[voter] = vote
        # Index and term are the same: so is all before (5.3), and what is committed there is committed here.
        if vote.commit_index <= self._last and self._log[vote.commit_index].term == vote.commit_term:
            self._advance(vote.commit_index)

    def _is_elected(self) -> bool:
        votes = {self.rank, *(voter for voter, vote in self._answers.items() if vote.granted)}
        return self._is_quorum_of_each(votes, self._last)

    def _lead(self) -> None:
        self.role, self.leader = "leader", self.rank
        self._next, self._match, self._told = {}, {}, {}
        self._first = len(self._log)
        # An entry of its own term, by which older ones become committed too (5.4.2, 8).
        self._log.append(Entry(self.term, self._proposal()))
        self._send_again()

    # ---- replication (5.3, 5.4.2) ------------------------------------------------------------------------------------

    def _send_entries(self, peer: int) -> None:
        previous = self._next.get(peer, self._first) - 1
        entries = tuple(self._log[previous + 1 :])
        self._send(peer, Append(self.term, previous, self._log[previous].term, entries, self._commit))

    def _on_append(self, leader: int, append: Append) -> None:
        is_old = append.term < self.term
        if not is_old:
            self.role, self.leader = "follower", leader
            self._until_election = self._election_ticks()
        if is_old or not self._holds(append.previous_index, append.previous_term):
            self._send(leader, Appended(self.term, False, 0, self._commit))
            return
        self._take(append.previous_index, append.entries)
        match = append.previous_index + len(append.entries)
        self._advance(min(append.commit, match))
        self._send(leader, Appended(self.term, True, match, self._commit))

    def _holds(self, index: int, term: int) -> bool:
        return index <= self._last and self._log[index].term == term

    def _take(self, previous_index: int, entries: Sequence[Entry]) -> None:
        for index, entry in enumerate(entries, previous_index + 1):
            if index <= self._last and self._log[index].term != entry.term:
                del self._log[index:]
            if index > self._last:
                self._log.append(entry)

    def _on_appended(self, follower: int, reply: Appended) -> None:
        if self.role != "leader" or reply.term < self.term:
            return
        self._told[follower] = max(self._told.get(follower, 0), reply.commit)
        if reply.success:
            self._match[follower] = max(self._match.get(follower, 0), reply.match)
            self._next[follower] = self._match[follower] + 1
        else:
            # What it knows to be committed is in the log of every leader.
            self._next[follower] = reply.commit + 1
            self._send_entries(follower)

    def _agreed(self) -> int:
        """The last index that is committed by now: only entries of my term count (5.4.2)."""
        for index in range(self._last, self._commit, -1):
            holders = {self.rank, *(peer for peer, match in self._match.items() if match >= index)}
            if self._counts(index) and self._is_quorum_of_each(holders, index):
                return index
        return self._commit

    def _counts(self, index: int) -> bool:
        return self._log[index].term == self.term

    def _advance(self, index: int) -> None:
        while self._commit < index and not self.excluded:
            before = self.committed
            self._commit += 1
            if self.committed != before:
                self._decisions.append(self.committed)

    # ---- memberships (6) ---------------------------------------------------------------------------------------------

    @property
    def _last(self) -> int:
        return len(self._log) - 1

    @property
    def _latest(self) -> Membership:
        return self._log[-1].membership

    def _needed(self, index: int) -> list[Membership]:
        """All memberships that may have a say in what is decided up to this index."""
        return [entry.membership for entry in self._log[self._commit : index + 1]]

    def _is_quorum_of_each(self, ranks: Collection[int], index: int) -> bool:
        return all(is_quorum(ranks, membership.members) for membership in self._needed(index))

    def _has_a_say(self) -> bool:
        return any(self.rank in membership.members for membership in self._needed(self._last))

    def _peers(self) -> set[int]:
        """All others that have a say and live, as far as is known."""
        ranks = {rank for membership in self._needed(self._last) for rank in membership.members}
        return ranks - self._failed - {self.rank}

    def _is_hopeless(self) -> bool:
        return not self._is_quorum_of_each(self._peers() | {self.rank}, self._last)

    def _is_outsider(self, candidate: int, request: RequestVote) -> bool:
        """Is it no member, and without a chance to be elected?"""
        lacks = (request.last_term, request.last_index) < (self._log[self._commit].term, self._commit)
        return lacks and candidate not in self.committed.members

    def _target(self) -> tuple[int, ...]:
        """Who should be a member, as far as this rank has heard."""
        new = {rank for rank in self._joining if not any(rank in entry.membership.members for entry in self._log)}
        return tuple(sorted((new | set(self._latest.members)) - self._failed))

    def _proposal(self) -> Membership:
        members = self._target()
        if members == self._latest.members:
            return self._latest
        stands_in = stand_ins(self.committed.members, members, self.backups)
        return Membership(self._latest.epoch + 1, members, stands_in)

    # ---- what drives it ----------------------------------------------------------------------------------------------

    def _learn(self, failed: Iterable[int], joining: Iterable[int]) -> None:
        failed, joining = set(failed) - self._failed - {self.rank}, set(joining) - self._joining
        self._failed |= failed
        self._joining |= joining
        if self.lost_quorum or self.excluded or not (failed or joining) or not self._has_a_say():
            return
        if self.role == "leader" and self._is_hopeless():
            self._campaign()
        elif self.role == "follower" and (self.leader in {None, *self._failed} or self._is_hopeless()):
            # The others wait for a random time: the lowest is likely to be alone. It need not be (5.2).
            if self.rank < min(self._peers(), default=self.rank + 1):
                self._campaign()
        elif self.role == "follower":
            self._send_again()

    def _settle(self) -> Outgoing:
        """What follows from all that is known now; the messages of this step."""
        if self.role == "candidate":
            if self._is_hopeless():
                self.lost_quorum = self._nobody_knows_better()
            elif self._is_elected():
                self._lead()
        if self.role == "leader":
            last, commit = self._last, self._commit
            if self._target() != self._latest.members:
                self._log.append(Entry(self.term, self._proposal()))
            self._advance(self._agreed())
            if (last, commit) != (self._last, self._commit):
                self._send_again()
        if self.lost_quorum or self.excluded or (self.role == "candidate" and not self._has_a_say()):
            self.role, self.leader = "follower", None
        self.wants_ticks = self._is_outstanding()
        if not self.wants_ticks:
            self._reset_timers()
        out, self._out = self._out, []
        return out

    def _is_outstanding(self) -> bool:
        if self.lost_quorum or not self._has_a_say() or self.excluded:
            return False
        if self._commit < self._last or self._target() != self._latest.members or self._is_hopeless():
            return True
        if self.role == "leader":
            return any(self._is_behind(peer) for peer in self._peers())
        return self.leader is None or self.leader in self._failed

    def _nobody_knows_better(self) -> bool:
        """Have all who live answered, and none knows of a later commit, by which fewer would be needed?"""
        answers = [self._answers.get(peer) for peer in self._peers()]
        return all(answer is not None and answer.commit_index <= self._commit for answer in answers)

    def _is_behind(self, peer: int) -> bool:
        return self._match.get(peer, 0) < self._last or self._told.get(peer, 0) < self._commit

    def _send_again(self) -> None:
        """Say what is still to be said in this role."""
        if self.role == "leader":
            for peer in sorted(self._peers()):
                self._send_entries(peer)
        elif self.role == "candidate":
            for peer in sorted(self._peers() - self._answers.keys()):
                self._send(peer, RequestVote(self.term, self._last, self._log[-1].term))
        elif self.leader is not None and self.leader not in self._failed:
            target, latest = set(self._target()), set(self._latest.members)
            if target != latest:
                self._send(self.leader, Report(tuple(sorted(latest - target)), tuple(sorted(target - latest))))

    def _send(self, rank: int, message: Message) -> None:
        self._out.append((rank, message))

    def _reset_timers(self) -> None:
        self._until_retry = RETRY_TICKS
        self._until_election = self._election_ticks()

    def _election_ticks(self) -> int:
        return self._random.randrange(ELECTION_TICKS, 2 * ELECTION_TICKS)
