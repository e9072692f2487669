"""HPCDL_TRACE=FILE: what every rank did when, in one file for Perfetto or chrome://tracing.

Floor 2. Rank 0 writes for all; the others send it what has ended, once a second, through their watch. The file is an
array of events (Trace Event Format: "X" events, with microseconds since the beginning on rank 0's clock), and valid
JSON after every write, so also if the job is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any

from hpcdl import record
from hpcdl.record import ABOUT, BEGAN, CAME, CODE, ENDED, INSTRUCTION, NUMBER, RUN, THREAD, WAITS, Operation, now

FILE_BYTES = 64 << 20
"""The file grows no longer: what comes later is counted."""
MOST_PENDING, BATCH = 200_000, 5_000
ALIGN_S, TRIES = 30.0, 5
"""How often to look at rank 0's clock, and how many answers to choose the quickest from."""
TAIL = b"\n]\n"


class Tracer:
    """This process's part of the trace; on rank 0 the file too."""

    def __init__(self, file: str, rank: int, host: str) -> None:
        self.rank, self.host, self.file = rank, host, file
        self.start = now()
        """When the trace begins, on rank 0's clock."""
        self.ended: set[int] = {rank}
        """The ranks that have sent their last."""
        self._offset, self._aligned = 0, -ALIGN_S
        self._pending: deque[Operation] = deque(maxlen=MOST_PENDING)
        self._open: list[Operation] = []
        self._unsent: list[str] = []
        self._threads: dict[int, int] = {}
        self._taken = self._lost = 0
        self._named = False
        self._lock = threading.Lock()
        self._descriptor, self._place = -1, 0
        self._left_out: dict[int, int] = {}
        if rank == 0:
            self._open_file(file)
        record.copy_to(self._pending)

    def _open_file(self, file: str) -> None:
        try:
            self._descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            print(f"hpcdl: HPCDL_TRACE={file}: {error.strerror}; no trace is written", file=sys.stderr, flush=True)
            return
        os.pwrite(self._descriptor, b"[" + TAIL, 0)
        self._place = 1

    # ---- from the record to lines --------------------------------------------------------------------------------

    def collect(self, last: bool = False) -> tuple[list[str], int]:
        """What has ended since, a line of JSON each, and how many have been lost; at the last what has not, too."""
        fresh = []
        with suppress(IndexError):
            while True:
                fresh.append(self._pending.popleft())
        self._taken += len(fresh)
        waiting = self._open + fresh
        self._open = [] if last else [each for each in waiting if not each[ENDED]][-MOST_PENDING:]
        lines, self._unsent = self._unsent, []
        if not self._named:
            self._named = True
            name = json.dumps(f"rank {self.rank} on {self.host}")
            lines.append(f'{{"ph":"M","name":"process_name","pid":{self.rank},"args":{{"name":{name}}}}}')
        lines += [self._line(each) for each in waiting if (last or each[ENDED]) and each[NUMBER]]
        lost, self._lost = self._lost, 0
        return lines, lost

    def batches(self, last: bool) -> Iterator[tuple[list[str], int, bool]]:
        """The same in parts of some lines; the last of them may be empty, and says so if it is the last of all."""
        lines, lost = self.collect(last)
        for first in range(0, max(1, len(lines)), BATCH):
            ends = first + BATCH >= len(lines)
            yield lines[first : first + BATCH], lost if ends else 0, last and ends

    def keep(self, lines: Sequence[str]) -> None:
        """They could not be sent, and are sent with the next."""
        self._unsent += lines
        self._lost += max(0, len(self._unsent) - MOST_PENDING)
        self._unsent = self._unsent[-MOST_PENDING:]

    def _line(self, operation: Operation) -> str:
        about, began, ended = operation[ABOUT], operation[BEGAN], operation[ENDED] or now()
        thread = self._threads.setdefault(operation[THREAD], len(self._threads))
        name, call, algorithm, comm = _words(about.call, about.algorithm, about.comm)
        more = f',"waited_us":{(operation[CAME] - began) / 1e3:.3f}' if operation[CAME] else ""
        more += f',"run":{operation[RUN]}' if operation[RUN] else ""
        more += f',"bucket":{about.bucket}' if about.bucket is not None else ""
        more += "" if operation[WAITS] == began else ',"started":true'  # it was a Work
        more += "" if operation[ENDED] else ',"unfinished":true'
        return (
            f'{{"ph":"X","name":{name},"cat":"collective","ts":{(began + self._offset - self.start) / 1e3:.3f},'
            f'"dur":{(ended - began) / 1e3:.3f},"pid":{self.rank},"tid":{thread},"args":{{"call":{call},'
            f'"number":{operation[NUMBER]},"bytes":{about.nbytes},"algorithm":{algorithm},"comm":{comm},'
            f'"at":{_place(operation[CODE], operation[INSTRUCTION])}{more}}}}}'
        )

    # ---- clocks --------------------------------------------------------------------------------------------------

    def clock(self) -> dict[str, Any]:
        """What a rank must know to use this one's clock."""
        return {"time": now(), "start": self.start, "boot": _boot()}

    def align(self, ask: Callable[[], Any]) -> None:
        """Compare the clock with rank 0's, from time to time."""
        if time.monotonic() - self._aligned < ALIGN_S:
            return
        self._aligned = time.monotonic()
        best = None
        for _ in range(TRIES):
            sent = now()
            answer = ask()
            received = now()
            if not isinstance(answer, dict) or "boot" not in answer:
                return
            self.start = answer["start"]
            if answer["boot"] and answer["boot"] == _boot():
                self._offset = 0  # one machine, one clock
                return
            if best is None or received - sent < best:
                best = received - sent
                self._offset = answer["time"] - (sent + received) // 2

    # ---- the file ------------------------------------------------------------------------------------------------

    def write(self, lines: Sequence[str], lost: int, rank: int, *, last: bool) -> None:
        """Put a rank's lines into the file, as far as there is room."""
        with self._lock:
            if last:
                self.ended.add(rank)
            if self._descriptor < 0:
                return
            room = FILE_BYTES - self._place
            fitting = list(islice(lines, _fitting(lines, room)))
            missing = self._left_out[rank] = self._left_out.get(rank, 0) + lost + len(lines) - len(fitting)
            if last and missing:
                fitting.append(f'{{"ph":"M","name":"hpcdl_left_out","pid":{rank},"args":{{"events":{missing}}}}}')
            if not fitting:
                return
            text = (b",\n" if self._place > 1 else b"\n") + ",\n".join(fitting).encode()
            try:
                # In one go, over the end of the array that stood there: it is valid before and after.
                os.pwrite(self._descriptor, text + TAIL, self._place)
                self._place += len(text)
            except OSError as error:
                print(f"hpcdl: HPCDL_TRACE={self.file}: {error.strerror}; it ends here", file=sys.stderr, flush=True)
                os.close(self._descriptor)
                self._descriptor = -1

    def alone(self, lines: Sequence[str]) -> None:
        """Rank 0 cannot be reached: a file of this rank's own."""
        self.file = f"{self.file}.rank{self.rank}"
        self._open_file(self.file)
        print(
            f"hpcdl: rank 0 cannot be reached; rank {self.rank}'s trace is in {self.file}", file=sys.stderr, flush=True
        )
        self.write(lines, 0, self.rank, last=True)


def _fitting(lines: Sequence[str], room: int) -> int:
    """How many of the lines there is room for."""
    for number, line in enumerate(lines):
        room -= len(line) + 2
        if room < 0:
            return number
    return len(lines)


@lru_cache(maxsize=1024)
def _words(call: str, algorithm: str, comm: str) -> tuple[str, str, str, str]:
    """The call's name, itself and the others, as JSON."""
    return json.dumps(call.partition(" ")[0]), json.dumps(call), json.dumps(algorithm), json.dumps(comm)


@lru_cache(maxsize=1024)
def _place(code: Any, instruction: int) -> str:
    return json.dumps(record.place(code, instruction))


@lru_cache(maxsize=1)
def _boot() -> str:
    """The same for all that runs on one machine since it was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
