"""Hosts and a network in one thread, all chance from one seed; a witness of everything checks the laws at each step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hpcdl.survive.raft import Entry, Membership, Message, Node, Outgoing, State, Vote

CHAOS_TICKS = 70
FAIR_TICKS = 1000
"""Within so many ticks of fair weather all must be settled; the most seen in 8,000 schedules are 92."""
REPORT_TICKS = 5
"""So much later all have heard of a death in fair weather."""


KINDS = ("kill", "two", "blink", "cut", "heal", "freeze", "join", "inquire", "contest", "lie", "back")
"""What can go wrong, see `_trouble`."""
JOINS = 2
"""So many at most, in one schedule."""


class Violation(AssertionError):
    """A law of the consensus is broken; the message begins with the law."""


@dataclass
class Witness:
    """All that ever happened: a law may be broken between two ranks that never see each other."""

    lines: dict[tuple[int, int], tuple[Membership, int]] = field(default_factory=dict)
    """(index, term) -> the membership there, and the term of the line before."""
    chain: list[Entry] = field(default_factory=list)
    """What was committed, by anyone."""
    committed_in: list[int] = field(default_factory=list)
    """In which term."""
    elected: dict[int, tuple[int, tuple[Entry, ...]]] = field(default_factory=dict)
    """term -> who led it, with what log it began."""
    decided: list[Membership] = field(default_factory=list)
    before: dict[int, State] = field(default_factory=dict)
    decisions: dict[int, int] = field(default_factory=dict)
    """How many a rank has made."""

    def begins(self, node: Node) -> None:
        """A node starts, perhaps from what it kept."""
        state = node.state()
        for _, membership in state.log[: state.commit + 1]:
            if membership.epoch > len(self.decided):
                self.decided.append(membership)
        self.decisions[node.rank] = node.committed.epoch
        self.look(node, [], False, False)

    def look(self, node: Node, out: Outgoing, was_out: bool, was_lost: bool) -> None:
        """Check all laws after a step of one node, which before it may have been excluded or without a quorum."""
        rank, state, decisions = node.rank, node.state(), node.decisions()
        before = self.before.get(rank)
        if state != before:
            self._log_matching(rank, state)
            self._committed_stays(rank, state, before)
            self.before[rank] = state
        if node.role == "leader":
            self._one_leader(rank, state)
        if was_out and (out or decisions or node.role != "follower"):
            raise Violation(f"excluded is silent: rank {rank} sends {out}, decides {decisions}, is {node.role}")
        helps = all(isinstance(message, Vote) and not message.granted for _, message in out)
        if was_lost and (not helps or decisions or node.role != "follower"):
            raise Violation(f"lost is silent: rank {rank} sends {out}, decides {decisions}, is {node.role}")
        for decision in decisions:
            self._same_decisions(rank, decision)
        if any(destination == rank for destination, _ in out):
            raise Violation(f"no message to oneself: rank {rank} sends {out}")

    def is_out(self, node: Node) -> bool:
        """Was it a member, and is it none in what it knows to be committed? Not asked of the node itself."""
        *old, new = node.state().log[: node.state().commit + 1]
        return node.rank not in new.membership.members and any(node.rank in each.membership.members for each in old)

    def _log_matching(self, rank: int, state: State) -> None:
        previous = 0
        for index, (term, membership) in enumerate(state.log):
            if self.lines.setdefault((index, term), (membership, previous)) != (membership, previous):
                raise Violation(f"log matching: rank {rank}, line {index} of term {term} differs: {state.log}")
            previous = term

    def _committed_stays(self, rank: int, state: State, before: State | None) -> None:
        if before is not None and (state.term < before.term or state.commit < before.commit):
            raise Violation(f"what is promised stays: rank {rank} went back from {before} to {state}")
        for index in range(state.commit + 1):
            entry = state.log[index] if index < len(state.log) else None
            if index == len(self.chain):
                assert entry is not None
                self.chain.append(entry)
                self.committed_in.append(state.term if index else 0)
                for term, (leader, log) in self.elected.items():
                    if term > state.term and entry not in log[index : index + 1]:
                        raise Violation(f"leader completeness: {leader} led {term} without {entry} of {state.term}")
            if entry != self.chain[index]:
                raise Violation(f"state machine safety: rank {rank} has {entry} for the committed {self.chain[index]}")

    def _one_leader(self, rank: int, state: State) -> None:
        leader, log = self.elected.setdefault(state.term, (rank, state.log))
        if leader != rank:
            raise Violation(f"one leader a term: {leader} and {rank} lead term {state.term}")
        if state.log[: len(log)] != log:
            raise Violation(f"leaders only append: rank {rank} had {log}, has {state.log}")
        if state.log is log:
            for index, (entry, term) in enumerate(zip(self.chain, self.committed_in, strict=True)):
                if term < state.term and entry not in log[index : index + 1]:
                    raise Violation(f"leader completeness: {rank} leads {state.term} without {entry} of {term}")

    def _same_decisions(self, rank: int, decision: Membership) -> None:
        number = self.decisions[rank] = self.decisions.get(rank, 0) + 1
        if number > len(self.decided):
            self.decided.append(decision)
        if self.decided[number - 1] != decision or decision.epoch != number:
            raise Violation(f"same decisions: rank {rank} decides {decision}, another {self.decided[number - 1]}")


@dataclass(frozen=True)
class Weather:
    """How bad it gets. `lies`: the living are reported dead, and the reported dead come back."""

    lies: bool
    loss: float
    doubled: float
    longest_delay: int
    trouble: float
    """Faults a tick."""
    kinds: tuple[str, ...] = KINDS
    """Of which kinds."""

    @classmethod
    def of(cls, random: Random) -> Weather:
        return cls(
            lies=random.random() < 0.5,
            loss=random.choice((0.0, 0.05, 0.3)),
            doubled=random.choice((0.0, 0.2)),
            longest_delay=random.choice((1, 4, 12)),
            trouble=random.choice((0.03, 0.1, 0.25)),
            # Not all kinds in each schedule: some of them hide what others would bring to light.
            kinds=tuple(kind for kind in KINDS if random.random() < 0.6) or KINDS,
        )


class Simulation:
    """One schedule: chaos, then fair weather."""

    def __init__(
        self,
        seed: int,
        kind: type[Node] = Node,
        *,
        size: int | None = None,
        weather: Weather | None = None,
        states: Mapping[int, State] | None = None,
    ) -> None:
        self.random = Random(seed)
        self.kind = kind
        size = size or self.random.choice((1, 2, 3, 3, 4, 4, 5, 5, 5, 6, 7))
        self.weather = weather or Weather.of(self.random)
        self.first = tuple(range(size))
        self.backups = {rank: [(rank + step) % size for step in (1, 2) if step < size] for rank in range(size)}
        self.witness = Witness()
        self.now = 0
        self.serial = 0
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []
        """(when, a number that makes it unique, what)"""
        self.nodes: dict[int, Node] = {}
        self.kept = dict(states or {})
        self.dead: set[int] = set()
        """For good, as all may be told."""
        self.down: set[int] = set()
        """Crashed, dead or not."""
        self.frozen: dict[int, int] = {}
        self.cut: set[tuple[int, int]] = set()
        self.told: set[tuple[int, int]] = set()
        """(who, of whom) it was reported."""
        self.joiners: list[int] = []
        self.fair = False
        self.must_go_on: set[int] = set()
        for rank in self.first:
            self._start(rank)

    # ---- the machine -------------------------------------------------------------------------------------------------

    def later(self, ticks: int, what: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.agenda, (self.now + ticks, self.serial, what))

    def step(self, rank: int, act: Callable[[Node], Outgoing]) -> None:
        """One input of one node; its messages are under way, and all laws hold."""
        node = self.nodes[rank]
        was_out, was_lost = self.witness.is_out(node), node.lost_quorum
        try:
            out = act(node)
        except Exception as error:
            raise Violation(f"no step fails: rank {rank}: {error!r}") from error
        self.witness.look(node, out, was_out, was_lost)
        self.kept[rank] = node.state()
        for destination, message in out:
            self._post(rank, destination, message)

    def tick(self) -> None:
        """A tick of time: what is due is done, and most nodes that want it are told of the time."""
        self.now += 1
        while self.agenda and self.agenda[0][0] <= self.now:
            heapq.heappop(self.agenda)[2]()
        for rank in sorted(self.nodes):
            if self._runs(rank) and self.nodes[rank].wants_ticks and (self.fair or self.random.random() < 0.9):
                self.step(rank, lambda node: node.tick())

    def _runs(self, rank: int) -> bool:
        return rank in self.nodes and rank not in self.down and rank not in self.frozen

    def _start(self, rank: int) -> None:
        state = self.kept.get(rank)
        node = self.kind(rank, self.first, Random(self.random.random()), self.backups, state)
        self.nodes[rank], self.kept[rank] = node, node.state()
        self.down.discard(rank)
        self.told = {(who, whom) for who, whom in self.told if who != rank}
        self.witness.begins(node)

    def _post(self, source: int, destination: int, message: Message) -> None:
        random, weather = self.random, self.weather
        copies = 1 + (not self.fair and random.random() < weather.doubled)
        for _ in range(copies):
            if not self.fair and random.random() < weather.loss:
                continue
            delay = random.randint(1, 2 if self.fair else weather.longest_delay)
            if not self.fair and random.random() < 0.03:
                delay = random.randint(1, CHAOS_TICKS)
            self.later(delay, partial(self._deliver, source, destination, message))

    def _deliver(self, source: int, destination: int, message: Message) -> None:
        if destination in self.frozen:
            self.later(self.frozen[destination] - self.now + 1, partial(self._deliver, source, destination, message))
        elif self._runs(destination) and (source, destination) not in self.cut:
            self.step(destination, lambda node: node.receive(source, message))

    # ---- faults ------------------------------------------------------------------------------------------------------

    def crash(self, *ranks: int, for_good: bool = True) -> None:
        self.down |= set(ranks)
        if for_good:
            self.dead |= set(ranks)

    def report(self, rank: int, failed: Iterable[int]) -> None:
        failed = sorted(set(failed) - {rank})
        if rank in self.frozen:
            self.later(self.frozen[rank] - self.now + 1, partial(self.report, rank, failed))
        elif self._runs(rank):
            self.told |= {(rank, each) for each in failed}
            self.step(rank, lambda node: node.report(failed))

    def report_to_all(self, failed: Iterable[int], within: int) -> None:
        failed = tuple(failed)
        for rank in self.nodes:
            self.later(self.random.randint(0, within), partial(self.report, rank, failed))

    def freeze(self, rank: int, ticks: int) -> None:
        self.frozen[rank] = self.now + ticks
        self.later(ticks, partial(self._thaw, rank))

    def _thaw(self, rank: int) -> None:
        self.frozen.pop(rank, None)

    def partition(self, side: set[int], one_way: bool = False) -> None:
        others = set(self.nodes) - side
        self.cut |= {(one, other) for one in side for other in others}
        if not one_way:
            self.cut |= {(other, one) for one in side for other in others}

    def join(self, at: int) -> int:
        """A new rank knocks at the door of a member; its number."""
        rank = 100 + len(self.joiners)
        self.joiners.append(rank)
        self._start(rank)
        self.step(at, lambda node: node.propose_join(rank))
        return rank

    def _trouble(self, kind: str) -> None:
        random, lies = self.random, self.weather.lies
        running = [rank for rank in sorted(self.nodes) if self._runs(rank)]
        if not running:
            return
        victim, other = random.choice(running), random.choice(running)
        match kind:
            case "kill":
                self.crash(victim)
                self.report_to_all([victim], within=random.choice((0, 5, 40)))
            case "two":
                self.crash(victim, other)
                self.report_to_all({victim, other}, within=random.choice((0, 5, 40)))
            case "blink":
                self.crash(victim, for_good=False)
                self.later(random.randint(1, random.choice((1, 5, 30))), partial(self._restart, victim))
            case "cut":
                side = {rank for rank in self.nodes if random.random() < 0.5}
                self.partition(side, one_way=random.random() < 0.3)
                if lies and random.random() < 0.7:
                    for rank in list(self.nodes):
                        unheard = {source for source, destination in self.cut if destination == rank}
                        self.later(random.randint(0, 10), partial(self.report, rank, unheard))
            case "heal":
                self.cut.clear()
            case "freeze":
                self.freeze(victim, random.randint(5, 50))
                if lies:
                    self.report_to_all([victim], within=10)
                    self.later(51, partial(self._inquire, victim))
            case "join" if len(self.joiners) < JOINS and not self.nodes[victim].excluded:
                self.join(victim)
            case "inquire":
                self._inquire(victim)
            case "contest":
                self._inquire(victim)
                self._inquire(other)
            case "lie" if lies:
                self.report(victim, [other])
            case "back" if lies and self.down:
                self._restart(random.choice(sorted(self.down)), anyway=True)

    def _inquire(self, rank: int) -> None:
        if self._runs(rank):
            self.step(rank, lambda node: node.inquire())

    def _restart(self, rank: int, anyway: bool = False) -> None:
        if rank in self.down and (anyway or rank not in self.dead):
            self.dead.discard(rank)
            self._start(rank)

    # ---- the whole ---------------------------------------------------------------------------------------------------

    def run(self, script: Sequence[str] | None = None) -> int:
        """The ticks of fair weather until all was settled. A script says what goes wrong at each tick, or ""."""
        for now in range(CHAOS_TICKS if script is None else len(script)):
            if script is not None:
                self._trouble(script[now])
            elif self.random.random() < self.weather.trouble:
                self._trouble(self.random.choice(self.weather.kinds))
            self.tick()
        self.clear_up()
        return self.settle()

    def clear_up(self) -> None:
        """Fair weather: nothing more goes wrong, and all hear of all deaths."""
        self.fair = True
        self.cut.clear()
        self.frozen.clear()
        for rank in sorted(self.down - self.dead):
            self._start(rank)
        self.must_go_on = self._must_go_on()

    def settle(self) -> int:
        """Run until nothing is outstanding; then all who are in agree that they, and no others, are the members."""
        began = self.now
        while self.now < began + FAIR_TICKS:
            gone = self.dead | {rank for rank, node in self.nodes.items() if node.excluded or node.lost_quorum}
            for rank in self.nodes:
                if new := {each for each in gone if (rank, each) not in self.told} - {rank}:
                    self.told |= {(rank, each) for each in new}
                    self.later(self.random.randint(0, REPORT_TICKS), partial(self.report, rank, new))
            if not self.agenda and not any(self.nodes[rank].wants_ticks for rank in self.nodes if self._runs(rank)):
                # Who was excluded while it could not hear of it finds its communicators revoked, and asks.
                unaware = [node for node in self.members() if node.rank not in self._decided().members]
                if not unaware:
                    break
                self._inquire(unaware[0].rank)
            self.tick()
        else:
            raise Violation(f"liveness: not settled within {FAIR_TICKS} ticks: {self}")
        self._agree()
        return self.now - began

    def members(self) -> list[Node]:
        """Those who live and may act."""
        living = [node for rank, node in sorted(self.nodes.items()) if self._runs(rank)]
        known = [node for node in living if not node.excluded and not node.lost_quorum]
        return [node for node in known if any(node.rank in e.membership.members for e in node.state().log)]

    def _decided(self) -> Membership:
        """The last of all."""
        return self.witness.decided[-1] if self.witness.decided else Membership(0, self.first)

    def _agree(self) -> None:
        members = self.members()
        ranks = tuple(node.rank for node in members)
        for node in members:
            if node.committed != members[0].committed or node.committed.members != ranks:
                raise Violation(
                    f"liveness: the members should be {ranks}, rank {node.rank} has {node.committed}: {self}"
                )
        if members and members[0].committed != self._decided():
            raise Violation(f"one chain: {members[0].committed} is not the last, {self._decided()}")
        if self.must_go_on and not self.must_go_on <= set(ranks):
            raise Violation(f"liveness: {self.must_go_on} are a quorum and live, but {ranks} are left: {self}")

    def _must_go_on(self) -> set[int]:
        """Who has to be left: all who live, where nothing false was said and they are a quorum by all their logs."""
        living = {rank for rank in self.nodes if rank not in self.dead}
        states = [self.nodes[rank].state() for rank in sorted(living)]
        if self.weather.lies or not states:
            return set()
        commit, committed = max((state.commit, state.log[state.commit].membership.members) for state in states)
        for state in states:
            for _, membership in state.log[commit:]:
                here = [rank for rank in membership.members if rank in living]
                if 2 * len(here) < len(membership.members):
                    return set()
                if 2 * len(here) == len(membership.members) and min(membership.members) not in here:
                    return set()
        return living & set(committed)

    def __str__(self) -> str:
        lines = [
            f"rank {rank}: {node.role} of {node.leader}, term {node.term}, "
            f"{'down' if rank in self.down else 'excluded' if node.excluded else 'lost' if node.lost_quorum else ''} "
            f"commit {node.state().commit} log {[(e.term, e.membership.members) for e in node.state().log]}"
            for rank, node in sorted(self.nodes.items())
        ]
        return "\n".join([f"{self.weather}", *lines])
