"""The watch by itself: what it concludes from answers, and from none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hpcdl import record, watch
from hpcdl.watch import GONE, SILENT, UNKNOWN, Peer, Watch


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    made = [Watch(rank) for rank in range(3)]
    yield made
    for each in made:
        each._stop.set()
        each._forget()


class Comm(SimpleNamespace):
    """What a watch sees of a communicator."""

    key = "0.1"

    def runs(self, number: int) -> int | None:
        return self.plan_runs().get(number)

    def plan_runs(self) -> dict[int, int]:
        return {3: 5}

    __hash__ = object.__hash__  # type: ignore[assignment]


def joined(watches: list[Watch], begun: int = 7) -> list[Comm]:
    """One communicator of all of them."""
    peers = [watch.parse(each.card()) for each in watches]
    comms = [Comm(rank=rank, begun=begun, peers=peers) for rank in range(len(watches))]
    for each, comm in zip(watches, comms, strict=True):
        each.channels.add(comm)
    return comms


def waiting(number: int, run: int = 0) -> record.Operation:
    operation = record.begin(record.About("allreduce", "0.1"), number, run, 0)
    record.operations.remove(operation)  # nobody else shall find it
    return operation


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(Watch, "_say", staticmethod(said.append))
    monkeypatch.setattr(watch, "end_job", lambda: said.append("ended"))
    return said


def test_who_is_gone_without_a_word_is_noticed_by_the_next_one_at_the_second_look(
    watches: list[Watch], alarms: list[str]
) -> None:
    comms = joined(watches)
    watches[1]._meet()
    watches[0]._forget()  # as a kill does
    watches[1]._find_the_lost(comms[1], waiting(7))
    assert alarms == []
    watches[1]._find_the_lost(comms[1], waiting(7))
    assert alarms[0].startswith(f"rank 0 ({watches[0].host}) is gone, killed or ended without a word")
    assert alarms[1] == "ended"


def test_who_was_lost_behind_the_operation_is_no_alarm(watches: list[Watch], alarms: list[str]) -> None:
    comms, operation = joined(watches), waiting(7)
    operation[record.ENDED] = 1
    watches[1]._meet()
    watches[0]._forget()
    for _ in range(3):
        watches[1]._find_the_lost(comms[1], operation)
    assert alarms == []


def test_who_was_never_reached_is_not_taken_for_dead(watches: list[Watch], alarms: list[str]) -> None:
    comms = joined(watches)
    watches[0]._forget()
    for _ in range(5):
        watches[1]._find_the_lost(comms[1], waiting(7))
    assert alarms == []


@pytest.mark.parametrize(
    ("number", "run", "lost"), [(7, 0, False), (8, 0, True), (3, 5, False), (3, 6, True), (4, 1, False)]
)
def test_who_has_left_is_missed_only_where_he_never_came(
    number: int, run: int, lost: bool, watches: list[Watch], alarms: list[str]
) -> None:
    comms = joined(watches)
    watches[2]._meet()
    watches[0].leave()
    for _ in range(3):
        watches[2]._find_the_lost(comms[2], waiting(number, run))
    assert bool(alarms) == lost
    assert all("rank 0" in said and "has ended its program" in said for said in alarms if said != "ended")


def test_last_words_are_handed_on(watches: list[Watch], alarms: list[str]) -> None:
    comms = joined(watches)
    watches[0].leave()
    watches[2]._left.clear()  # they were lost on the way
    watches[1].leave()
    assert set(watches[2]._left) == {0, 1}
    watches[2]._find_the_lost(comms[2], waiting(8))
    assert alarms


def test_answers_and_their_lack_are_told_apart(watches: list[Watch]) -> None:
    (peer, *_) = joined(watches)[0].peers
    assert isinstance(watches[1].ask(peer, "time"), dict)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = peer._replace(port=mute.getsockname()[1], token="another", addresses=["127.0.0.1"])
        assert watches[1].ask(silent, "time") == SILENT
    assert watches[1].ask(silent, "time") == UNKNOWN
    watches[0]._forget()
    assert watches[1].ask(peer, "time") == GONE


def test_only_who_knows_the_token_is_answered(watches: list[Watch]) -> None:
    peer = joined(watches)[0].peers[0]
    assert not isinstance(watches[1].ask(peer._replace(token="guessed"), "state", operation=["0.1", 7, 0]), dict)


@pytest.mark.parametrize(
    "nonsense", [b"", b"\n", b"[]\n", b"{}\n", b'{"to": 3}\n', b"\xff\xfe\n", b"GET / HTTP/1.1\r\n"]
)
def test_nonsense_does_not_end_it(nonsense: bytes, watches: list[Watch]) -> None:
    peer = joined(watches)[0].peers[0]
    with socket.create_connection((peer.addresses[0], peer.port), 5) as connection:
        connection.sendall(nonsense)
    assert isinstance(watches[1].ask(peer, "time"), dict)


def test_a_card_goes_into_what_the_ranks_exchange() -> None:
    longest = Peer(10**6, "h" * 40, 10**6, 65535, "f" * 16, ["255.255.255.255"] * 4)
    assert len(json.dumps(longest)) < 200
    assert watch.addresses()


@pytest.mark.parametrize(("number", "came"), [(7, True), (8, False)])
def test_the_state_says_who_has_come(number: int, came: bool, watches: list[Watch]) -> None:
    comms = joined(watches)

    def state(key: str) -> Any:
        return watches[1].ask(comms[0].peers[0], "state", operation=[key, number, 0])

    assert state("0.1")["came"] == came
    assert state("9.9")["came"] is False
