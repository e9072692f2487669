"""hpcdl trace: read what HPCDL_TRACE has written, and say where the time went."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from hpcdl import verdict
from hpcdl.cli.agreed import Refused
from hpcdl.cli.sizes import show_bytes, show_seconds
from hpcdl.environment import under_launcher

# Of hundreds of ranks or kinds of call the table shows the first.
MOST_LINES = 20

CLASSES = [1 << bits for bits in range(10, 40, 4)]
"""A class of sizes ends with one of these: 1 KiB, 16 KiB, 256 KiB ..."""

Span: TypeAlias = tuple[float, float]
Row: TypeAlias = dict[str, Any]


class Event(NamedTuple):
    """One rank's part in an operation; times in microseconds."""

    name: str
    start: float
    end: float
    waited: float
    """At its beginning, for the other ranks to come, as far as the rank itself could tell."""
    rank: int
    beside: bool
    """Did something else go on meanwhile: was it only started, or is it another thread's?"""
    nbytes: int
    algorithm: str
    comm: str
    operation: tuple[int, int]
    """What the other ranks' parts in it have in common, with the communicator."""
    at: str


class Trace(NamedTuple):
    """All that is in a file."""

    events: Sequence[Event]
    names: dict[int, str]
    """By rank: "rank 3 on h2"."""
    left_out: dict[int, int]
    """By rank: how many operations did not fit into the file."""

    def name(self, rank: int) -> str:
        """Who that is."""
        return self.names.get(rank, f"rank {rank}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl trace can be told."""
    parser.description = "Read the file that a program has written under HPCDL_TRACE=FILE."
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    summary = verbs.add_parser("summary", help="say where the time went, and which rank the others wait for")
    summary.description = (
        "Say where the time went: of each rank, of each collective, and which rank the others wait for. "
        "Exit status: 0, or 2 if the file is no such trace."
    )
    summary.add_argument("file", metavar="FILE", type=Path, help="what HPCDL_TRACE named")
    summary.add_argument("--json", action="store_true", help="print all of it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print it, once for all ranks if there are several."""
    if not under_launcher():
        return answered(arguments)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    # A rank that was given a wrong argument has come to this agreement from hpcdl.cli.main.refuse.
    if problem := verdict.agree(comm, None):
        return complained(problem) if comm.rank == 0 else 2
    status: int = comm.bcast(answered(arguments) if comm.rank == 0 else None)
    return status


def answered(arguments: argparse.Namespace) -> int:
    """Print the summary, or why there is none; the exit status."""
    try:
        report = summarise(load(arguments.file))
    except Refused as refusal:
        return complained(str(refusal))
    name = str(arguments.file)
    print(json.dumps({"file": name, **report}) if arguments.json else table(name, report), flush=True)
    return 0


def complained(line: str) -> int:
    """Print one line; the exit status."""
    print(f"hpcdl: {line}", file=sys.stderr, flush=True)
    return 2


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(file: Path) -> Trace:
    """Read a file. Refused, in one line, if it is no trace or holds nothing."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of UTF-8 too
        raise Refused(f"{file} is no trace: {error}") from error
    if not isinstance(found, list):
        raise Refused(f"{file} is no trace: it holds no list of events, as HPCDL_TRACE=FILE writes it")
    events: list[Event] = []
    names: dict[int, str] = {}
    left_out: Counter[int] = Counter()
    threads: dict[int, int] = {}
    for number, each in enumerate(found):
        try:
            rank, what = each["pid"], each["name"]
            if not isinstance(rank, int):
                raise TypeError(f"its pid {rank!r} is no rank")
            if each["ph"] == "X" and each.get("cat") == "collective":
                events.append(_event(each, threads))
            elif what == "process_name":
                names[rank] = str(each["args"]["name"])
            elif what == "hpcdl_left_out":
                left_out[rank] += int(each["args"]["events"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise Refused(f"{file} is no trace of hpcdl: event {number} is {_short(each)}: {why}") from error
    if not events:
        raise Refused(f"{file} holds no operations: the program has called no collective, or ended before the first")
    return Trace(events, names, dict(left_out))


def _short(event: object) -> str:
    text = " ".join(repr(event).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def _event(found: Row, threads: dict[int, int]) -> Event:
    """Of one line; a rank's first thread is the one whose time counts as the rank's."""
    arguments, rank, name = found["args"], found["pid"], str(found["name"])
    start, length = float(found["ts"]), float(found["dur"])
    if not (math.isfinite(start) and 0 <= length < math.inf):
        raise ValueError(f"ts {start} and dur {length} are no time")
    thread = int(found["tid"])
    return Event(
        name,
        start,
        start + length,
        min(length, float(arguments.get("waited_us", 0))),
        rank,
        bool(arguments.get("started")) or thread != threads.setdefault(rank, thread),
        int(arguments["bytes"]),
        str(arguments["algorithm"]),
        str(arguments["comm"]),
        (int(arguments["number"]), int(arguments.get("run", 0))),
        str(arguments["at"]),
    )


# ---- thinking --------------------------------------------------------------------------------------------------------


def summarise(trace: Trace) -> Row:
    """Where the time went, times in microseconds."""
    events = trace.events
    begin, end = min(each.start for each in events), max(each.end for each in events)
    ranks = sorted(trace.names.keys() | {each.rank for each in events})
    waits = [each.waited for each in events]
    late = Lateness(len(ranks))
    complete = meetings(events)
    for parts in complete:
        late.add(events, parts, waits)
    mine: defaultdict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(events):
        mine[each.rank].append(number)
    rows = []
    for rank in ranks:
        blocking = [number for number in mine[rank] if not events[number].beside]
        inside = length(spans(events[number] for number in blocking))
        waiting = length([(events[number].start, events[number].start + waits[number]) for number in blocking])
        rows.append(
            {
                "rank": rank,
                "name": trace.name(rank),
                "waiting_us": waiting,
                "moving_us": inside - waiting,
                "outside_us": end - begin - inside,
                "beside_us": length(spans(events[number] for number in mine[rank] if events[number].beside)),
                "came_last": late.times[rank],
                "others_waited_us": late.blame(rank),
            }
        )
    return {
        "span_us": end - begin,
        "ranks": rows,
        "collectives": kinds(events, waits),
        "operations": len(complete),
        "slowest": late.slowest(rows),
        "left_out": trace.left_out,
    }


def spans(events: Iterable[Event]) -> list[Span]:
    """From when to when they went."""
    return [(each.start, each.end) for each in events]


def length(spans: Iterable[Span]) -> float:
    """How long they are together, where they overlap counted once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def meetings(events: Sequence[Event]) -> list[list[int]]:
    """The operations of several ranks that all members of the communicator have a part in: the events' numbers."""
    members: defaultdict[str, set[int]] = defaultdict(set)
    found: defaultdict[tuple[str, str, tuple[int, int]], list[int]] = defaultdict(list)
    for number, each in enumerate(events):
        members[each.comm].add(each.rank)
        found[each.comm, each.name, each.operation].append(number)
    return [
        parts
        for (comm, _, _), parts in found.items()
        if len(parts) > 1 and sorted(events[number].rank for number in parts) == sorted(members[comm])
    ]


class Lateness:
    """Who came last to what, and how long the others waited for it."""

    def __init__(self, ranks: int) -> None:
        self.others = max(1, ranks - 1)
        self.times: Counter[int] = Counter()
        self._waits: defaultdict[int, defaultdict[str, defaultdict[int, list[Span]]]]
        """By the rank that was late, where it came late, and who waited."""
        self._waits = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))

    def add(self, events: Sequence[Event], parts: Sequence[int], waits: list[float]) -> None:
        """Of one operation; what each event has waited, as its rank knew, grows to what the others' clocks tell."""
        last = max((events[number] for number in parts), key=lambda event: event.start)
        self.times[last.rank] += 1
        waiting = self._waits[last.rank][last.at]
        for number in parts:
            event = events[number]
            until = min(last.start, event.end)
            waits[number] = max(waits[number], until - event.start)
            if until > event.start:
                waiting[event.rank].append((event.start, until))

    def blame(self, rank: int, at: str | None = None) -> float:
        """How long the others waited for a rank, on average; two operations at a time are waited for once."""
        places = self._waits[rank]
        waiting: defaultdict[int, list[Span]] = defaultdict(list)
        for place in places if at is None else [at]:
            for other, found in places[place].items():
                waiting[other] += found
        return sum(map(length, waiting.values())) / self.others

    def slowest(self, rows: Sequence[Row]) -> Row | None:
        """The rank that the others wait for longest, and where; None if nobody waits."""
        row = max(rows, key=lambda row: float(row["others_waited_us"]))
        if not row["others_waited_us"]:
            return None
        places = {at: self.blame(row["rank"], at) for at in self._waits[row["rank"]]}
        at = max(places, key=lambda place: places[place])
        kept = ("rank", "name", "came_last", "others_waited_us")
        return {**{name: row[name] for name in kept}, "at": at, "at_others_waited_us": places[at]}


def kinds(events: Sequence[Event], waits: Sequence[float]) -> list[Row]:
    """By collective, algorithm and class of sizes, the most time first; calls of all ranks together."""
    found: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    for number, each in enumerate(events):
        limit = next((size for size in CLASSES if each.nbytes <= size), 0)
        found[each.name, each.algorithm, limit].append(number)
    rows = []
    for (name, algorithm, limit), numbers in found.items():
        times = [events[number].end - events[number].start for number in numbers]
        rows.append(
            {
                "collective": name,
                "algorithm": algorithm,
                "size": f"up to {show_bytes(limit)}" if limit else f"over {show_bytes(CLASSES[-1])}",
                "calls": len(numbers),
                "bytes": sum(events[number].nbytes for number in numbers),
                "total_us": sum(times),
                "waiting_us": sum(waits[number] for number in numbers),
                "median_us": median(times),
                "worst_us": max(times),
            }
        )
    return sorted(rows, key=lambda row: -row["total_us"])


# ---- printing --------------------------------------------------------------------------------------------------------

RANKS = "{:<24}  {:>15}  {:>15}  {:>15}  {:>15}  {:>9}  {:>13}"
KINDS_HEAD = ("collective", "algorithm", "of size", "calls", "bytes", "total", "waiting", "median", "worst")
KINDS = "{:<18}  {:<16}  {:<14}  {:>8}  {:>10}  {:>8}  {:>8}  {:>8}  {:>8}"


def table(file: str, report: Row) -> str:
    """For people."""
    span, ranks, found = report["span_us"], report["ranks"], report["collectives"]

    def part(time_us: float) -> str:
        return f"{show_seconds(time_us / 1e6)} {time_us / span if span else 0:>5.1%}"

    lines = [
        f"{file}: {len(ranks)} rank{'s' * (len(ranks) > 1)}, {show_seconds(span / 1e6)} from the first operation's "
        "beginning to the last one's end",
        "",
        RANKS.format("", "in collectives:", "in collectives:", "outside", "beside that:", "came", "the others"),
        RANKS.format("", "waiting", "moving data", "of them", "in flight", "last", "waited for it"),
    ]
    # Of many ranks those that the others wait for.
    shown = sorted(ranks, key=lambda row: -row["others_waited_us"])[:MOST_LINES]
    for row in sorted(shown, key=lambda row: int(row["rank"])):
        times = [part(row[name]) for name in ("waiting_us", "moving_us", "outside_us", "beside_us")]
        waited = show_seconds(row["others_waited_us"] / 1e6)
        lines.append(RANKS.format(row["name"], *times, row["came_last"], waited))
    lines += _more(ranks, "ranks")
    lines += ["", KINDS.format(*KINDS_HEAD)]
    for row in found[:MOST_LINES]:
        times = [show_seconds(row[f"{name}_us"] / 1e6) for name in ("total", "waiting", "median", "worst")]
        moved = show_bytes_about(row["bytes"])
        lines.append(KINDS.format(row["collective"], row["algorithm"] or "-", row["size"], row["calls"], moved, *times))
    lines += _more(found, "kinds of call")
    lines += ["calls, bytes and times are those of all ranks together", "", slowest(report)]
    for rank, count in report["left_out"].items():
        lines.append(f"{count} operations of rank {rank} are not in the file, which had reached its largest size")
    return "\n".join(line.rstrip() for line in lines)


def _more(rows: Sequence[Row], what: str) -> list[str]:
    return [f"... and {len(rows) - MOST_LINES} {what} more: see --json"] if len(rows) > MOST_LINES else []


def show_bytes_about(nbytes: int) -> str:
    """In the largest unit that there is one of."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.1f} {unit}"
    return f"{nbytes} B"


def slowest(report: Row) -> str:
    """Who the others wait for, in a sentence."""
    worst, operations = report["slowest"], report["operations"]
    if worst is None:
        return "no rank was waited for"
    waited, there = (show_seconds(worst[name] / 1e6) for name in ("others_waited_us", "at_others_waited_us"))
    return (
        f"the slowest is {worst['name']}: it came last to {worst['came_last']} of {operations} operations, and the "
        f"others waited {waited} for it on average, of that {there} at {worst['at']}"
    )
