"""The watch: who is missing where a collective does not go on, asked over sockets of its own.

Floor 2. Each process has two threads that mostly sleep: one answers the other ranks' questions, one looks once a second
at what this rank waits for. They use no MPI, so they work while the ranks are stuck in it, at any thread level. The
addresses travel with the first collective on a communicator. A process answers only who knows its token.

A rank that ends tells some other ranks how far it has come, so those that go on know at once that it will never come.
A rank that is gone without a word, by a kill, is noticed by the next one on the communicator, once that one waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

from mpi4py import MPI

from hpcdl import settings, trace
from hpcdl.ends import wait_until_read
from hpcdl.record import ABOUT, ENDED, NUMBER, RUN, WAITS, Operation, describe, in_flight, now, snapshot, whereabouts

TICK_S = min(1.0, settings.STALL_S / 4) if settings.STALL_S > 0 else 1.0
ASK_S = 2.0
"""How long an answer may take. Who does not answer in that time is stopped, or his host is down."""
MOST_TOLD = 64
"""So many ranks hear that another ends. Each of them tells what it has heard when it ends itself."""
MOST_AT_ONCE = 64
MOST_IN_TURN = 10

Answer: TypeAlias = dict[str, Any]
GONE, SILENT, UNKNOWN = "gone", "silent", "unknown"
"""Why there is no answer: nothing listens where somebody has before; nothing comes; nobody was ever reached there."""


class Peer(NamedTuple):
    """How to reach a process."""

    rank: int
    """In COMM_WORLD."""
    host: str
    serial: int
    """The number of the communicator, as this process counts them."""
    port: int
    token: str
    addresses: Sequence[str]


class Counted(Protocol):
    """What the watch asks of a channel."""

    key: str
    rank: int
    begun: int
    """The number of the last operation."""
    peers: Sequence[Peer]

    def runs(self, number: int) -> int | None:
        """How often the plan that this operation has made was run; None if there is none."""

    def plan_runs(self) -> dict[int, int]:
        """All plans by number."""


class Watch:
    """This process's."""

    def __init__(self, rank: int) -> None:
        self.rank, self.token = rank, secrets.token_hex(8)
        self.host = socket.gethostname().partition(".")[0][:40]
        self.channels: weakref.WeakSet[Any] = weakref.WeakSet()  # of Counted
        self.serial = 0
        self.tracer = trace.Tracer(settings.TRACE, self.rank, self.host) if settings.TRACE else None
        self._reached: dict[str, str] = {}  # by token: the address where somebody has answered
        self._met: set[str] = set()
        self._absent: dict[str, int] = {}  # by token: how often nobody was there
        self._left: dict[int, Answer] = {}  # by rank: the last words of those that have ended
        self._told: set[tuple[str, int, int]] = set()
        self._asked: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._server: socket.socket | None = None
        self._stop = threading.Event()
        self._flushing = threading.Lock()
        with suppress(OSError):
            self._server = socket.create_server(("", 0), backlog=512)
        os.register_at_fork(after_in_child=self._forget)
        # Daemons: a rank that ends must not wait for them.
        for work in (self._serve, self._look):
            threading.Thread(target=work, name="hpcdl watch", daemon=True).start()

    def card(self) -> str:
        """What the other ranks must know to ask this one, for one more communicator."""
        self.serial += 1
        port = self._server.getsockname()[1] if self._server else 0
        return json.dumps([self.rank, self.host, self.serial, port, self.token, addresses()], separators=(",", ":"))

    # ---- being asked ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (server := self._server) is not None:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed: this process ends
            with connection, suppress(Exception):  # whatever comes over a socket, the next question is answered
                connection.settimeout(ASK_S)
                question = _read(connection)
                if question["to"] == self.token:
                    _write(connection, {"from": self.rank, **self._answer(question)})

    def _answer(self, question: Answer) -> Answer:
        match question["ask"]:
            case "time":
                return self.tracer.clock() if self.tracer else {}
            case "state":
                return self._state(*question["operation"])
            case "report":
                self._asked.put(question)
            case "left":
                if self._stop.is_set():
                    return {"leaving": True}
                self._left.update({int(rank): words for rank, words in question["words"].items()})
            case "trace":
                if self.tracer:
                    self.tracer.write(question["lines"], question["lost"], question["rank"], last=question["last"])
        return {}

    def _state(self, key: str, number: int, run: int) -> Answer:
        """How far this rank has come in an operation, and what it does now."""
        channel = self._channel(key)
        came = channel is not None and _has_come(channel.begun, channel.runs(number), number, run)
        mine = [each for each in snapshot() if each[ABOUT].comm == key]
        same = [each for each in mine if each[NUMBER] == number and each[RUN] == run]
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return {
            "came": came,
            "done": came and bool(same and same[-1][ENDED]),
            "last": describe(mine[-1]) if mine else "",
            "now": whereabouts(main) if main and threading.main_thread().is_alive() else "",
        }

    def _channel(self, key: str) -> Counted | None:
        return next((each for each in self._channels() if each.key == key), None)

    def _channels(self) -> list[Counted]:
        """All that there are now."""
        while True:
            try:
                return list(self.channels)
            except RuntimeError:  # the main thread makes one
                continue

    # ---- asking --------------------------------------------------------------------------------------------------

    def ask(self, peer: Peer, question: str, /, **more: Any) -> Answer | str:
        """A rank's answer, or why there is none."""
        reached = self._reached.get(peer.token)
        why = UNKNOWN
        for address in [reached] if reached else peer.addresses:
            try:
                with socket.create_connection((address, peer.port), ASK_S) as connection:
                    why = SILENT
                    _write(connection, {"to": peer.token, "ask": question, **more})
                    answer = _read(connection)
                if answer["from"] == peer.rank:
                    self._reached[peer.token] = address
                    return answer
            except (ConnectionRefusedError, ConnectionResetError):
                why = GONE if reached else UNKNOWN
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                why = SILENT if reached else why
        return why

    def ask_all(self, peers: Sequence[Peer], question: str, /, **more: Any) -> list[Answer | str]:
        """All answers, in the time that one takes."""
        answers: list[Answer | str] = [SILENT] * len(peers)

        def ask(number: int) -> None:
            answers[number] = self.ask(peers[number], question, **more)

        for first in range(0, len(peers), MOST_AT_ONCE):
            numbers = range(first, min(first + MOST_AT_ONCE, len(peers)))
            threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in numbers]
            for thread in threads:
                thread.start()
            end = time.monotonic() + 2 * ASK_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        return answers

    # ---- looking after this rank's operations --------------------------------------------------------------------

    def _look(self) -> None:
        try:
            while not self._stop.wait(TICK_S):
                self._tick()
        except Exception:
            if not self._stop.is_set():
                self._say(f"the watch of rank {self.rank} has failed, and sees nothing more:\n{traceback.format_exc()}")

    def _tick(self) -> None:
        if self.tracer:
            self.flush()
        self._meet()
        seen, time_ns = set[str](), now()
        for operation in in_flight():
            waited_s = (time_ns - operation[WAITS]) / 1e9 if operation[WAITS] else 0.0
            key = operation[ABOUT].comm
            if waited_s < TICK_S or key in seen:
                continue
            seen.add(key)
            if channel := self._channel(key):
                self._find_the_lost(channel, operation)
            if waited_s >= settings.STALL_S > 0:
                self._tell(channel, operation)
        while not self._asked.empty():
            question = self._asked.get()
            key, number, run = question["operation"]
            if channel := self._channel(key):
                self._report(channel, (key, number, run), question["what"], question["waited_s"])

    def _meet(self) -> None:
        """Reach, once, the ranks that this one will notice the loss of: who was never reached may be behind a wall."""
        for channel in self._channels():
            before = channel.peers[channel.rank - 1]
            if before.token not in self._met and before.token != self.token:
                self._met.add(before.token)
                self.ask(before, "time")

    def _find_the_lost(self, channel: Counted, operation: Operation) -> None:
        """End the job if a rank that is waited for can never come."""
        key, number, run = channel.key, operation[NUMBER], operation[RUN]
        for rank, peer in enumerate(channel.peers):
            words = self._left.get(peer.rank)
            if words and key in words:
                last, runs = words[key]
                came = _has_come(last, runs.get(str(number)), number, run)
                if not came and (run == 0 or str(number) in runs):
                    self._alarm(channel, rank, "has ended its program, and will not come to", operation)
        # The nearest before this one that has not taken its leave.
        size = len(channel.peers)
        circle = ((channel.rank - step) % size for step in range(1, size))
        nearest = next((rank for rank in circle if channel.peers[rank].rank not in self._left), None)
        if nearest is None:
            return
        token = channel.peers[nearest].token
        if self.ask(channel.peers[nearest], "time") != GONE:
            self._absent.pop(token, None)
            return
        # Its last words may still be on their way.
        self._absent[token] = self._absent.get(token, 0) + 1
        if self._absent[token] > 1:
            self._alarm(channel, nearest, "is gone, killed or ended without a word, and is waited for in", operation)

    def _alarm(self, channel: Counted, rank: int, what: str, operation: Operation) -> None:
        # All that wait come to know it; one is enough to say it, and ends the others.
        time.sleep(0.1 * min(channel.rank, MOST_IN_TURN))
        if operation[ENDED]:
            return  # the rank was lost behind it
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main else ""
        self._say(
            f"{_name(channel, rank)} {what} {describe(operation)}: all ranks must call the same collectives as often. "
            f"{_name(channel, channel.rank)} waits for it here, and ends the job:\n{stack.rstrip()}"
        )
        end_job()

    def _tell(self, channel: Counted | None, operation: Operation) -> None:
        """See to it that one rank says who is missing: rank 0 if it can."""
        identity = (operation[ABOUT].comm, operation[NUMBER], operation[RUN])
        if identity in self._told:
            return
        what = describe(operation)
        if channel is None:  # the ranks are only getting to know each other
            self._told.add(identity)
            ends = ", and ends the job" if settings.STALL_ABORT else ""
            self._say(
                f"rank {self.rank} ({self.host}) has waited {settings.STALL_S:g} s for the other ranks to come to "
                f"{what}; before that they cannot be asked{ends}"
            )
            if settings.STALL_ABORT:
                end_job()
            return
        request: Answer = {"operation": identity, "what": what, "waited_s": settings.STALL_S}
        for rank, peer in enumerate(channel.peers):
            if rank == channel.rank:
                self._report(channel, identity, what, settings.STALL_S)
                return
            if isinstance(self.ask(peer, "report", **request), dict):
                self._told.add(identity)
                return

    def _report(self, channel: Counted, identity: tuple[str, int, int], what: str, waited_s: float) -> None:
        """Ask all ranks how far they have come, and say it."""
        if identity in self._told:
            return
        self._told.add(identity)
        lines = self.survey(channel, identity)
        then = "the job is ended (HPCDL_STALL_ABORT=1)" if settings.STALL_ABORT else "the ranks wait on"
        ranks = len(channel.peers)
        self._say(f"after {waited_s:g} s of waiting in {what}, of {ranks} ranks; {then}:\n" + "\n".join(lines))
        if settings.STALL_ABORT:
            end_job()

    def survey(self, channel: Counted, identity: tuple[str, int, int]) -> list[str]:
        """How far all ranks have come in an operation (communicator, number, run), in lines; takes seconds."""
        answers = self.ask_all(channel.peers, "state", operation=identity)
        lines: list[str] = []
        present: list[int] = []
        done: list[int] = []
        for rank, answer in enumerate(answers):
            name = _name(channel, rank)
            if isinstance(answer, str):
                lines.append(f"  {name} {_silence(answer, self._left.get(channel.peers[rank].rank))}")
            elif not answer["came"]:
                last = answer["last"] and f"; its last is {answer['last']}"
                doing = f"; it is {answer['now']}" if answer["now"] else "; its main thread has ended"
                lines.append(f"  {name} has not come{last}{doing}")
            else:
                (done if answer["done"] else present).append(rank)
        if not lines:
            lines.append("  all ranks have come; what is missing is data on its way")
        if present:
            lines.append(f"  {_ranks(present)} wait{'s' * (len(present) == 1)} in it")
        if done:
            lines.append(f"  {_ranks(done)} ha{'s' if len(done) == 1 else 've'} done with it")
        return lines

    def doing(self, channel: Counted, ranks: Sequence[int]) -> list[str]:
        """What these ranks do now, in lines; takes seconds."""
        answers = self.ask_all([channel.peers[rank] for rank in ranks], "state", operation=(channel.key, 0, 0))
        lines = []
        for rank, answer in zip(ranks, answers, strict=True):
            if isinstance(answer, str):
                what = _silence(answer, self._left.get(channel.peers[rank].rank))
            else:
                what = f"is {answer['now']}" if answer["now"] else "has ended its main thread"
            lines.append(f"  {_name(channel, rank)} {what}")
        return lines

    @staticmethod
    def _say(text: str) -> None:
        # In one write, or the ranks' words would mix.
        sys.stderr.write(f"hpcdl: {text}\n")
        sys.stderr.flush()

    # ---- the trace -----------------------------------------------------------------------------------------------

    def flush(self, *, last: bool = False) -> None:
        """Bring what has ended since to the file, which rank 0 writes for all."""
        tracer = self.tracer
        assert tracer is not None
        with self._flushing:
            if self.rank == 0:
                tracer.write(*tracer.collect(last), 0, last=last)
                return
            writer = self._peer(0)
            if writer is not None:
                tracer.align(partial(self.ask, writer, "time"))
            elif not last:
                return  # not met yet
            for lines, lost, ends in tracer.batches(last):
                batch = {"lines": lines, "lost": lost, "rank": self.rank, "last": ends}
                if writer is None or isinstance(self.ask(writer, "trace", **batch), str):
                    tracer.keep(lines)
                    writer = None
            if last and writer is None:
                tracer.alone(tracer.collect()[0])

    def _peer(self, rank: int) -> Peer | None:
        peers = (peer for channel in self._channels() for peer in channel.peers)
        return next((peer for peer in peers if peer.rank == rank), None)

    # ---- the end -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The program ends: tell others how far it has come, as long as this process can still be asked."""
        self._stop.set()
        channels = self._channels()
        words = {channel.key: (channel.begun, channel.plan_runs()) for channel in channels}
        heirs = {peer.token: peer for channel in channels for peer in _following(channel)}
        self.ask_all(list(heirs.values()), "left", words={self.rank: words, **self._left})
        if self.tracer:
            self.flush(last=True)
            if self.rank == 0:
                self._wait_for_traces()
        self._forget()

    def _wait_for_traces(self) -> None:
        """Rank 0 writes the trace of all, so it ends last."""
        tracer = self.tracer
        assert tracer is not None
        peers = {peer.rank: peer for channel in self._channels() for peer in channel.peers}
        ask_at = time.monotonic() + TICK_S
        while waiting := [peer for rank, peer in peers.items() if rank not in tracer.ended]:
            time.sleep(0.01)
            if time.monotonic() > ask_at:
                ask_at = time.monotonic() + TICK_S
                tracer.ended.update(peer.rank for peer in waiting if self.ask(peer, "time") == GONE)

    def _forget(self) -> None:
        """Nobody can ask any more; in a forked child this is not the process that is meant."""
        server, self._server = self._server, None
        if server is not None:
            # accept() does not return for a close alone.
            with suppress(OSError):
                if not self._is_child():
                    server.shutdown(socket.SHUT_RDWR)
            server.close()
        self.channels.clear()

    _pid = os.getpid()

    def _is_child(self) -> bool:
        return os.getpid() != self._pid


_watch: Watch | None = None


def watch() -> Watch:
    """This process's watch, which the first communicator of several ranks starts."""
    global _watch
    if _watch is None:
        _watch = Watch(MPI.COMM_WORLD.rank)
    return _watch


def follow(channel: Counted) -> None:
    """Look after what is waited for on this communicator, too."""
    if _watch is not None:
        _watch.channels.add(channel)


def flush() -> None:
    """Bring the trace to its file before the job is ended."""
    if _watch is not None and _watch.tracer:
        with suppress(Exception):
            _watch.flush(last=True)


def leave() -> None:
    """The program ends."""
    if _watch is not None and not _watch._is_child():
        _watch.leave()


def end_job(status: int = 1) -> None:
    """End all ranks, from whatever thread."""
    flush()
    wait_until_read()
    # Should MPI not manage: the launcher ends the job of a process that ends so.
    threading.Timer(3, os._exit, [status]).start()
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def parse(text: str) -> Peer:
    """A peer from its card."""
    return Peer(*json.loads(text))


def addresses() -> list[str]:
    """This host's, up to four, the loopback's only if there is no other."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                # SIOCGIFADDR; the address stands in bytes 20 to 24 of the answer (netdevice(7)).
                reply = fcntl.ioctl(any_socket, 0x8915, struct.pack("256s", name[:15].encode()))
                found.append(socket.inet_ntoa(reply[20:24]))
    return list(islice((each for each in found if not each.startswith("127.")), 4)) or ["127.0.0.1"]


def _following(channel: Counted) -> Iterable[Peer]:
    size = len(channel.peers)
    return (channel.peers[(channel.rank + step) % size] for step in range(1, min(size, MOST_TOLD + 1)))


def _has_come(last: int, runs: int | None, number: int, run: int) -> bool:
    return last >= number if run == 0 else runs is not None and runs >= run


def _name(channel: Counted, rank: int) -> str:
    peer = channel.peers[rank]
    return f"rank {rank} ({peer.host}{'' if peer.rank == rank else f', of the job {peer.rank}'})"


def _ranks(ranks: Sequence[int]) -> str:
    """Rank 3; ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _silence(why: str, words: Answer | None) -> str:
    if words is not None:
        return "has ended its program"
    if why == GONE:
        return "is gone: it was killed, or has ended without a word"
    if why == SILENT:
        return "does not answer: it is stopped, its host is down, or one long call in C holds its Python"
    return "cannot be reached by a socket: it is gone, or a firewall stands between"


def _read(connection: socket.socket) -> Answer:
    """One line of JSON."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(1 << 20)
        if not part:
            raise EOFError("the other end has closed")
        parts.append(part)
    answer = json.loads(b"".join(parts))
    if not isinstance(answer, dict):
        raise ValueError("no question, and no answer")
    return answer


def _write(connection: socket.socket, message: Answer) -> None:
    connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
