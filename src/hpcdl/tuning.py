"""Tuning tables: which algorithm was measured to be the fastest, and what a message costs; as a JSON file. Floor 3.

`hpcdl tune` makes them. A file holds the links and the rules, near to the shape of Open MPI's rule files:

    {"format": "hpcdl-tuning-1",
     "made": {"date": "2026-01-31", "host": "h1", "mpi": "MPICH 5.0.2", ...},
     "links": {"inside": {"alpha": 4.5e-6, "beta": 2e-10, "gamma": 1.2e-10}, "between": ..., "memory": ...},
     "segments": [{"nodes": [2, 2], "bytes": 1048576}],
     "rules": [{"collective": "allreduce", "nodes": [2, 2], "dtype": "float32", "kind": "private",
                "sizes": [{"from_bytes": 0, "algorithm": "doubling"}, {"from_bytes": 65536, "algorithm": "ring"}],
                "measured": {"ring": [[8, 4.1e-05], [131072, 0.0021]], ...}}, ...]}
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from hpcdl import settings
from hpcdl.buffers import TYPES
from hpcdl.choice import BUILT_IN, KINDS, Links, Shape, serves
from hpcdl.collectives import COLLECTIVES, Cost, Link, find

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = "hpcdl-tuning-1"

SEGMENTS = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""The lengths of segments that are tried. Scratch is two of them."""

MOST_RANKS = 1 << 20
"""A larger number in a file is an error: checking what serves so many ranks would take all memory."""

CHANGE = math.log(1.1)
"""What a change of algorithm must win over all the sizes that it holds for: as much as 10 % at one of them."""

Measured = Mapping[str, Sequence[tuple[int, float]]]
"""Of each algorithm the seconds of some sizes, ascending: (bytes, seconds)."""


class Rule(NamedTuple):
    """What was found for one collective, node shape, type and kind of array.

    It says nothing of arrays that are less than a quarter as long as any measured, or more than four times.
    """

    collective: str
    nodes: tuple[int, ...]
    dtype: str
    kind: str
    sizes: Sequence[tuple[int, str]]
    """From so many bytes on, this algorithm."""
    measured: Measured

    @property
    def key(self) -> tuple[object, ...]:
        """What it is for."""
        return self[:4]

    def algorithm(self, nbytes: int) -> str | None:
        """The algorithm for so many bytes; None if it does not say."""
        low, high = self._known()
        return self.sizes[self._place(nbytes)][1] if low <= nbytes <= high else None

    def reach(self, nbytes: int) -> tuple[int, float]:
        """From which size to which the algorithm for so many bytes is the same."""
        place, (low, high) = self._place(nbytes), self._known()
        ends = [start - 1 for start, _ in self.sizes[place + 1 : place + 2]]
        return max(low, self.sizes[place][0]), min([high, *ends])

    def time(self, name: str, nbytes: int) -> float | None:
        """An algorithm's seconds, between two measured sizes interpolated; None beyond them."""
        points = self.measured.get(name, ())
        if not points or not points[0][0] <= nbytes <= points[-1][0]:
            return None
        sizes, seconds = zip(*points, strict=True)
        return float(np.interp(nbytes, sizes, seconds))

    def _known(self) -> tuple[int, float]:
        measured = [nbytes for points in self.measured.values() for nbytes, _ in points]
        return (min(measured) // 4, max(measured) * 4) if measured else (0, math.inf)

    def _place(self, nbytes: int) -> int:
        return bisect_right([start for start, _ in self.sizes], nbytes) - 1


@dataclass(frozen=True, eq=False)  # told apart, and hashed, by identity: a table is made once and looked up often
class Table:
    """Rules and links; `str()` says where they come from."""

    fitted: Mapping[str, Link] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    made: Mapping[str, str] = field(default_factory=dict)
    source: str = "?"
    segments: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    """By the ranks of each node: how long the segments are in which messages are added up as they come, in bytes."""

    @property
    def links(self) -> Links:
        """Those that were measured; the others are the built-in ones."""
        return BUILT_IN._replace(**self.fitted)

    def __str__(self) -> str:
        return f"The tuning table {self.source} ({self.made['date']}, {self.made['mpi']} on {self.made['host']})"

    def rule(self, collective: str, nodes: tuple[int, ...], dtype: str, kind: str) -> Rule | None:
        """The rule to go by: of this type, else of one as long, else of float32."""
        fit = [rule for rule in self.rules if (rule.collective, rule.nodes, rule.kind) == (collective, nodes, kind)]
        for alike in (dtype.__eq__, lambda other: _bits(other) == _bits(dtype), "float32".__eq__):
            for rule in fit:
                if alike(rule.dtype):
                    return rule
        return None

    def of_size(self, size: int) -> Table:
        """The same without the rules for other numbers of ranks."""
        rules = [rule for rule in self.rules if sum(rule.nodes) == size]
        segments = {nodes: nbytes for nodes, nbytes in self.segments.items() if sum(nodes) == size}
        return Table(self.fitted, rules, self.made, self.source, segments)

    def text(self) -> str:
        """As JSON."""
        rules = [
            {**rule._asdict(), "sizes": [{"from_bytes": start, "algorithm": name} for start, name in rule.sizes]}
            for rule in self.rules
        ]
        links = {name: link._asdict() for name, link in self.fitted.items()}
        segments = [{"nodes": nodes, "bytes": nbytes} for nodes, nbytes in self.segments.items()]
        text = json.dumps(
            {"format": FORMAT, "made": self.made, "links": links, "segments": segments, "rules": rules}, indent=1
        )
        # What holds nothing but numbers and words goes on one line.
        return re.sub(r"(?<=[\[{])\n[^\[\]{}]*\n\s*(?=[\]}])", lambda match: _one_line(match[0]), text) + "\n"


def _one_line(text: str) -> str:
    return re.sub(r"\n\s*", " ", text).strip()


def _bits(dtype: str) -> int:
    """How long a type is: that of bool has no number in its name."""
    return int("".join(filter(str.isdigit, dtype)) or 8)


# Reading


def path() -> Path | None:
    """The file to go by: HPCDL_TUNING, else the one that `hpcdl tune` writes for this MPI, if it exists; or none."""
    if settings.TUNING is None:
        own = default_path()
        return own if os.path.isfile(own) else None
    return None if settings.TUNING in ("", "0") else Path(settings.TUNING)


def default_path() -> Path:
    """In the user's cache folder; one file for each MPI, whose times have nothing to do with another's."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~"), ".cache")
    return folder / "hpcdl" / f"tuning-{_library(mpi()).lower().replace(' ', '-')}.json"


def mpi() -> str:
    """The MPI library and its version, as "MPICH 5.0.2"."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def same_library(table: Table) -> bool:
    """Was it made under the MPI library that this is, in whatever version?"""
    return _library(table.made["mpi"]) == _library(mpi())


def _library(version: str) -> str:
    """The library alone: of "Open MPI 5.0.11" this is "Open MPI"."""
    return version.rpartition(" ")[0]


def load(comm: MPI.Intracomm, size: int) -> Table | None:
    """What rank 0 finds in its file, for communicators of so many ranks, on all ranks (a collective call).

    Where the file cannot be used rank 0 warns, once, and all ranks get None.
    """
    table, problem = known() if comm.rank == 0 else (None, "")
    table = cast("Table | None", comm.bcast(table and table.of_size(size)))
    if problem:  # behind the broadcast: a warning may have been made an error
        warnings.warn(f"{problem}: the built-in costs are used instead", RuntimeWarning, stacklevel=2)
    return table


_known: dict[Path, tuple[object, Table | None]] = {}


def known() -> tuple[Table | None, str]:
    """This process's table, and what is wrong with it where that is new: an unchanged file is not read again."""
    file = path()
    if file is None:
        return None, ""
    try:
        status = os.stat(file)
        stamp: object = (status.st_mtime_ns, status.st_size, status.st_ino)
    except OSError:
        stamp = None
    if file in _known and _known[file][0] == stamp:
        return _known[file][1], ""
    table, problem = None, ""
    try:
        table = read(file)
        if not same_library(table):
            problem, table = f"the tuning table {file} was made under {table.made['mpi']}, this is {mpi()}", None
    except (OSError, ValueError) as error:
        problem = str(error)
    _known[file] = stamp, table
    return table, problem


def read(file: Path) -> Table:
    """The table in a file. OSError if it cannot be read, ValueError if it is none; both say which file."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("it is no regular file")
        return parse(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise OSError(f"the tuning table {file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no valid tuning table ({error})") from error


def parse(text: str, source: str = "?") -> Table:
    """A table from JSON, with every part of it checked. ValueError says which part is wrong."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'it lacks "format": "{FORMAT}"')
    made = _get(data, "made", dict, "the table")
    for word in ("date", "host", "mpi"):
        _get(made, word, str, "made")
    links = _get(data, "links", dict, "the table")
    unknown = set(links) - set(Links._fields)
    if unknown:
        raise ValueError(f"no link is called {unknown.pop()!r}; there are {', '.join(Links._fields)}")
    fitted = {name: Link(*(_seconds(link, word) for word in Link._fields)) for name, link in links.items()}
    rules = [_rule(entry, f"rule {number}") for number, entry in enumerate(_get(data, "rules", list, "the table"))]
    segments = dict(
        _segment(entry, f"segments {number}")
        for number, entry in enumerate(_get({"segments": [], **data}, "segments", list, "the table"))
    )
    return Table(fitted, rules, made, source, segments)


def _segment(entry: Any, where: str) -> tuple[tuple[int, ...], int]:
    nbytes = _get(entry, "bytes", int, where)
    if not SEGMENTS[0] <= nbytes <= SEGMENTS[-1]:
        raise ValueError(f"{where}: bytes are from {SEGMENTS[0]} to {SEGMENTS[-1]}, not {nbytes}")
    return _nodes(entry, where), nbytes


def _nodes(entry: Any, where: str) -> tuple[int, ...]:
    nodes = tuple(_get(entry, "nodes", list, where))
    if not nodes or not all(type(ranks) is int and ranks > 0 for ranks in nodes) or sum(nodes) > MOST_RANKS:
        raise ValueError(f"{where}: nodes are numbers of ranks such as [2, 2], not {list(nodes)}")
    return nodes


def _rule(entry: Any, where: str) -> Rule:
    collective = _one_of(entry, "collective", COLLECTIVES, where)
    dtype, kind = _one_of(entry, "dtype", TYPES, where), _one_of(entry, "kind", KINDS, where)
    nodes = _nodes(entry, where)
    shape = Shape(nodes, memory=True)
    sizes = []
    for size in _get(entry, "sizes", list, where):
        name = _get(size, "algorithm", str, where)
        if not serves(name, collective, shape, kind):
            raise ValueError(f"{where}: {name} cannot serve {collective} of {kind} arrays on {shape}")
        own = name if name == "shared" else find(name, shape.size, collective, shape.nodes).name
        sizes.append((_get(size, "from_bytes", int, where), own))
    if not sizes or sizes[0][0] != 0 or any(one >= next for (one, _), (next, _) in pairwise(sizes)):
        raise ValueError(f"{where}: sizes go up from_bytes 0, not {[start for start, _ in sizes]}")
    measured = {
        name: _points(points, f"{where}, measured {name}")
        for name, points in _get(entry, "measured", dict, where).items()
    }
    return Rule(collective, nodes, dtype, kind, sizes, measured)


def _points(points: Any, where: str) -> list[tuple[int, float]]:
    pairs = [tuple(point) for point in points if isinstance(point, list)] if isinstance(points, list) else []
    right = all(len(pair) == 2 and _finite(pair[0], int) and _finite(pair[1]) for pair in pairs)
    if not right or len(pairs) != len(points) or any(one[0] >= next[0] for one, next in pairwise(pairs)):
        raise ValueError(f"{where}: not a list of [bytes, seconds] with ascending bytes")
    return [(nbytes, float(seconds)) for nbytes, seconds in pairs]


def _seconds(link: Any, word: str) -> float:
    value: Any = link.get(word) if isinstance(link, dict) else None
    if not _finite(value):
        raise ValueError(f"a link's {word} is a number of seconds from 0, not {value!r}")
    return float(value)


def _finite(value: Any, *kinds: type) -> bool:
    return type(value) in (kinds or (int, float)) and 0 <= value < 1 << 62


def _get(entry: Any, word: str, kind: type, where: str) -> Any:
    value = entry.get(word) if isinstance(entry, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{where}: {word} is to be of type {kind.__name__}, not {value!r:.60}")
    return value


def _one_of(entry: Any, word: str, words: Sequence[str], where: str) -> str:
    value: str = _get(entry, word, str, where)
    if value not in words:
        raise ValueError(f"{where}: {word} is one of {', '.join(words)}, not {value!r}")
    return value


# Making


def fit(samples: Iterable[tuple[Cost, float]]) -> Link:
    """The alpha, beta and gamma that come nearest to the measured seconds, each of which counts alike; none below 0."""
    rows = np.array([[value / spent for value in cost] for cost, spent in samples])
    found, able = np.zeros(3), [0, 1, 2]
    while able:
        part = np.linalg.lstsq(rows[:, able], np.ones(len(rows)), rcond=None)[0]
        if part.min() >= 0:
            found[able] = part
            break
        del able[int(part.argmin())]  # it comes out as 0
    return Link(*map(float, found))


def sizes_of(measured: Measured) -> list[tuple[int, str]]:
    """From how many bytes on which algorithm: as near to the fastest at all sizes as few changes allow.

    What is lost to the fastest is added up over the sizes, as logarithms; a change must win `CHANGE` back. What happens
    to win at one size by a little does not count then: times are noisy. A change comes half-way between two sizes.
    """
    times: dict[int, dict[str, float]] = {}
    for name, points in measured.items():
        for nbytes, seconds in points if name != "native" else ():
            times.setdefault(nbytes, {})[name] = seconds
    paths: dict[str, tuple[float, list[tuple[int, str]]]] = {"": (0, [])}
    before = 0
    for nbytes, at in sorted(times.items()):
        fastest, start = min(at.values()), math.isqrt(before * nbytes)
        best, grown = min(paths.values(), key=itemgetter(0)), {}
        for name, seconds in at.items():
            change = (best[0] + CHANGE, [*best[1], (start, name)])
            lost, path = min(change, paths.get(name, change), key=itemgetter(0))
            grown[name] = lost + math.log(seconds / fastest), path
        paths = grown
        before = nbytes
    return min(paths.values(), key=itemgetter(0))[1]


def merged(old: Table | None, new: Table) -> Table:
    """The new links and rules, and those of the old table that they do not replace."""
    if old is None:
        return new
    replaced = {rule.key for rule in new.rules}
    rules = [rule for rule in old.rules if rule.key not in replaced]
    segments = {**old.segments, **new.segments}
    return Table({**old.fitted, **new.fitted}, [*rules, *new.rules], new.made, new.source, segments)


def save(table: Table, file: Path) -> None:
    """Write a table such that nobody ever reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(table.text(), encoding="utf-8")
        os.replace(draft, file)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
