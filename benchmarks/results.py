"""RESULTS.md from what was measured: first whether the bars are met, then the tables of all sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from operator import sub, truediv
from statistics import geometric_mean, median
from textwrap import fill
from typing import Any, NamedTuple, TypeAlias

from hpcdl.cli.bench_report import IN, Row, label, shown
from hpcdl.units import show_bytes, show_seconds

MPIS = {"mpich": "MPICH", "openmpi": "Open MPI", "impi": "Intel MPI"}
KIB, MIB = 1 << 10, 1 << 20
WIRE_BYTES_S = 1e9 / 8
"""What the link of each host in the set `hosts` carries."""

Who: TypeAlias = tuple[str, str]
"""An algorithm, and the kind of buffers."""

SHARED = ("shared", "shared")
NATIVE, FLOOR, GLOO, AUTO = ("native", "private"), ("floor", "private"), ("gloo", "private"), ("auto", "private")


class Outcome(NamedTuple):
    """What came of one measurement: a header and rows, or a problem."""

    set: str
    mpi: str
    ranks: str
    variant: str
    problem: str
    machine: str
    header: dict[str, Any]
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        """What its files are called."""
        return file_name(*self[:4])

    @property
    def plotted(self) -> bool:
        """Is there a picture of it?"""
        return bool(self.rows) and (self.set in ("shared", "private") or self.variant == "plan multiple")


def file_name(*parts: str) -> str:
    """Of a set, an MPI, a number of ranks and a variant."""
    return "-".join(filter(None, parts)).replace(" ", "-")


Outcomes: TypeAlias = Sequence[Outcome]


class Found(NamedTuple):
    """A value, and where it was found."""

    value: float
    where: str


# ---- reading what was measured ---------------------------------------------------------------------------------------


def rounds(outcome: Outcome, size: int, who: Who) -> list[float]:
    """The time of every round in place, in us; of MPI's own the better of in place and out of place."""
    rows = [row for row in outcome.rows if (row["size"], row["algorithm"], row["buffers"]) == (size, *who)]
    rows = [row for row in rows if row["place"] == IN or who == NATIVE]
    times: list[float] = min(rows, key=lambda row: row["time_us"])["rounds_us"] if rows else []
    return times


def sizes(outcome: Outcome) -> list[int]:
    """From the smallest."""
    return sorted({row["size"] for row in outcome.rows})


def everybody(outcomes: Outcomes) -> dict[Who, str]:
    """All that competed, and what to call them."""
    return {(row["algorithm"], row["buffers"]): label(row) for outcome in outcomes for row in outcome.rows}


def compare(
    outcome: Outcome, size: int, one: Who, other: Who, how: Callable[[float, float], float] = truediv
) -> float | None:
    """The median of the rounds' comparisons, since two times of one round have met the same noise; None if untimed."""
    pairs = list(zip(rounds(outcome, size, one), rounds(outcome, size, other), strict=False))
    return median(how(*pair) for pair in pairs) if pairs else None


# ---- the bars --------------------------------------------------------------------------------------------------------

Find: TypeAlias = Callable[[Outcomes], list[Found]]


class Bar(NamedTuple):
    """What must be reached."""

    set: str
    what: str
    at_least: bool
    limit: float
    find: Find
    mpis: tuple[str, ...] = ("mpich", "openmpi")
    variants: tuple[str, ...] = ()
    """Those of the set's variants that count; none given, all."""
    unit: str = ""

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.limit:g}{self.unit}"

    def met(self, value: float) -> bool:
        """Is it as good as the limit, or better?"""
        return value >= self.limit if self.at_least else value <= self.limit


def between(
    one: Who, other: Who, smallest: int, largest: int, how: Callable[[float, float], float] = truediv, ranks: str = ""
) -> Find:
    """Finds how one compares to the other, at all sizes from the smallest to the largest."""

    def find(outcomes: Outcomes) -> list[Found]:
        values = [
            (compare(outcome, size, one, other, how), place(outcome, size))
            for outcome in outcomes
            for size in sizes(outcome)
            if smallest <= size <= largest and ranks in ("", outcome.ranks)
        ]
        return [Found(value, where) for value, where in values if value is not None]

    return find


def place(outcome: Outcome, size: int) -> str:
    """Where something was found: 64 KiB, 2 ranks, single."""
    return ", ".join(filter(None, (show_bytes(size), f"{outcome.ranks} ranks", outcome.variant.partition(" ")[2])))


def over_the_wire(outcomes: Outcomes, size: int = 8 * MIB) -> list[Found]:
    """The best by_node's time over that of h hosts' links, 2(h-1)/h n/B, and beside it MPI's own."""
    found = []
    for outcome in outcomes:
        times = {name: median(rounds(outcome, size, who) or [0]) for who, name in everybody([outcome]).items()}
        ours = {name: time for name, time in times.items() if name.startswith("by_node") and time}
        if ours:
            hosts, best = len(outcome.header["ranks_per_host"]), min(ours, key=lambda name: ours[name])
            wire = 1e6 * 2 * (hosts - 1) / hosts * size / WIRE_BYTES_S
            where = f"{best}, {outcome.ranks} ranks; MPI_Allreduce {times['native'] / wire:.2f}"
            found.append(Found(ours[best] / wire, where))
    return found


def growth(outcomes: Outcomes, size: int = 256 * MIB) -> list[Found]:
    """By how many MiB a rank's peak memory grew, the most of all ranks."""
    rows = [row for outcome in outcomes for row in outcome.rows if (row["size"], row["algorithm"]) == (size, "ring")]
    return [Found(max(row["growth_bytes"]) / MIB, show_bytes(size)) for row in rows]


def added(outcome: Outcome, model: str) -> dict[str, float]:
    """By how many us each way to synchronise prolongs a step: the best repeat's median difference to the step alone."""
    repeats = {row["algorithm"]: row["repeats_us"] for row in outcome.rows if row["model"] == model}
    alone = repeats.pop("local", [])
    return {
        who: min(median(map(sub, *pair)) for pair in zip(times, alone, strict=True)) for who, times in repeats.items()
    }


def share_of_gloo(model: str, ranks: str, ours: str = "ours") -> Find:
    """Finds what of gloo's share of a step is left under ours."""

    def find(outcomes: Outcomes) -> list[Found]:
        found = []
        for outcome in outcomes:
            if outcome.ranks == ranks and (costs := added(outcome, model)):
                found.append(Found(costs[ours] / costs["gloo"], f"{ranks} ranks"))
        return found

    return find


def whole_steps(outcomes: Outcomes) -> list[Found]:
    """Our steps of the network of many small tensors, as a part of those over gloo."""
    found = []
    for outcome in outcomes:
        times = {row["algorithm"]: [*chain(*row["repeats_us"])] for row in outcome.rows if row["model"] == "cnn"}
        if times:
            found.append(Found(median(map(truediv, times["ours"], times["gloo"])), f"{outcome.ranks} ranks"))
    return found


def backend_us(outcome: Outcome, size: int, who: str) -> float:
    """What an all_reduce of torch.distributed takes: the best repeat's median."""
    (row,) = (row for row in outcome.rows if (row["size"], row["model"], row["algorithm"]) == (size, "", who))
    return min(median(times) for times in row["repeats_us"])


def backend_sizes(outcome: Outcome) -> list[int]:
    """What was all-reduced, from the smallest."""
    return sorted({row["size"] for row in outcome.rows if not row["model"]})


def times_gloo(smallest: int, largest: int) -> Find:
    """Finds how many times as long gloo's all_reduce takes as our backend's, at each size."""

    def find(outcomes: Outcomes) -> list[Found]:
        return [
            Found(backend_us(outcome, size, "gloo") / backend_us(outcome, size, "hpcdl"), place(outcome, size))
            for outcome in outcomes
            for size in backend_sizes(outcome)
            if smallest <= size <= largest
        ]

    return find


def mean_times_gloo(outcomes: Outcomes) -> list[Found]:
    """The same in the geometric mean over the sizes from 64 KiB to 64 MiB."""
    found = []
    for outcome in outcomes:
        if values := [each.value for each in times_gloo(64 * KIB, 64 * MIB)([outcome])]:
            found.append(Found(geometric_mean(values), f"{outcome.ranks} ranks"))
    return found


LARGE, QUARTER = between(NATIVE, SHARED, MIB, 64 * MIB), between(NATIVE, SHARED, 256 * KIB, 256 * KIB)
EXTRA = between(AUTO, NATIVE, 8, KIB, sub, ranks="2")
BARS = (
    Bar("shared", "MPI_Allreduce / `shared` on shared arrays, 1 MiB to 64 MiB", True, 3, LARGE),
    Bar("shared", "MPI_Allreduce / `shared` on shared arrays, 1 MiB to 64 MiB", True, 2, LARGE, ("impi",)),
    Bar("shared", "MPI_Allreduce / `shared` on shared arrays, 256 KiB", True, 2, QUARTER),
    Bar("shared", "MPI_Allreduce / `shared` on shared arrays, 256 KiB", True, 1.5, QUARTER, ("impi",)),
    Bar(
        "shared",
        "`shared` on shared arrays / the floor, 256 KiB to 64 MiB",
        False,
        1.3,
        between(SHARED, FLOOR, 256 * KIB, 64 * MIB),
        (*MPIS,),
    ),
    Bar(
        "shared",
        "gloo / `shared` on shared arrays, 256 KiB to 64 MiB",
        True,
        4,
        between(GLOO, SHARED, 256 * KIB, 64 * MIB),
        (*MPIS,),
    ),
    Bar(
        "private",
        "`auto` / MPI_Allreduce, 1 MiB to 256 MiB",
        False,
        1.05,
        between(AUTO, NATIVE, MIB, 256 * MIB),
        (*MPIS,),
    ),
    Bar("private", "MPI_Allreduce / `auto`, 64 MiB", True, 2, between(NATIVE, AUTO, 64 * MIB, 64 * MIB), (*MPIS,)),
    *(
        Bar("private", f"`{name}` / MPI_Allreduce, 1 MiB to 256 MiB", False, 1, between(who, NATIVE, MIB, 256 * MIB))
        for name, who in (("ring", ("ring", "private")), ("binary_blocks", ("binary_blocks", "private")))
    ),
    *(
        Bar(
            "small",
            f"a plan of `auto` - MPI_Allreduce, up to 1 KiB, thread level {level}",
            False,
            1.5,
            EXTRA,
            variants=(f"plan {level}",),
            unit=" us",
        )
        for level in ("multiple", "single")
    ),
    *(
        Bar(
            "small",
            f"gloo / {what} of `auto`, 8 B to 64 KiB",
            True,
            4,
            between(GLOO, AUTO, 8, 64 * KIB),
            variants=(f"{form} multiple", f"{form} single"),
        )
        for form, what in (("plan", "a plan"), ("call", "a plain call"))
    ),
    Bar("hosts", "the best `by_node` / the wire's limit, 8 MiB on 4 hosts", False, 1.15, over_the_wire),
    *(
        Bar("training", f"added to a step of 10 million parameters, ours / gloo, {ranks} ranks", False, limit, find)
        for ranks, limit, find in (("2", 1 / 3, share_of_gloo("mlp", "2")), ("4", 1 / 2, share_of_gloo("mlp", "4")))
    ),
    Bar("training", "a step of a network of 122 small tensors, ours / gloo", False, 1, whole_steps),
    Bar("backend", "gloo / the backend `hpcdl`, 64 B", True, 5, times_gloo(64, 64)),
    Bar("backend", "gloo / the backend `hpcdl`, 64 KiB to 64 MiB", True, 2, times_gloo(64 * KIB, 64 * MIB)),
    Bar("backend", "gloo / the backend `hpcdl`, 64 KiB to 64 MiB, geometric mean", True, 3, mean_times_gloo),
    *(
        Bar(
            "backend",
            f"added to a step under torch's DDP, `hpcdl` / gloo, {ranks} ranks",
            False,
            2 / 3,
            share_of_gloo("mlp", ranks, "hpcdl"),
        )
        for ranks in "24"
    ),
    Bar("memory", "`ring` on 256 MiB, 4 ranks: peak memory, n/p + 16 MiB", False, 80, growth, unit=" MiB"),
)


class Verdict(NamedTuple):
    """What was found about a bar under one MPI."""

    bar: Bar
    mpi: str
    found: list[Found]
    """The worst first."""
    problems: list[str]

    def missed(self) -> list[Found]:
        """All that is not as good as the bar."""
        return [each for each in self.found if not self.bar.met(each.value)]

    def __str__(self) -> str:
        lacking = f"not measured: {'; '.join(self.problems)}" if self.problems else ""
        if not self.found:
            return lacking or "not measured"
        said = f"**missed** by {self._by()}" if self.missed() else "met"
        return f"{said}, in part {lacking}" if lacking else said

    def _by(self) -> str:
        worst, limit = self.found[0].value, self.bar.limit
        if self.bar.unit:
            return f"{shown(abs(worst - limit))}{self.bar.unit}"
        share = 100 * abs(worst / limit - 1)
        return f"{share:.0f} %" if share >= 1 else "less than 1 %"


def judge(bar: Bar, mpi: str, outcomes: Outcomes) -> Verdict:
    """Hold what was measured against a bar."""
    mine = [
        outcome
        for outcome in outcomes
        if (outcome.set, outcome.mpi) == (bar.set, mpi) and (not bar.variants or outcome.variant in bar.variants)
    ]
    found = sorted(bar.find(mine), key=lambda each: each.value, reverse=not bar.at_least)
    return Verdict(bar, mpi, found, list(dict.fromkeys(outcome.problem for outcome in mine if outcome.problem)))


def bars_section(outcomes: Outcomes) -> list[str]:
    """The table of all bars, and where exactly some were missed."""
    verdicts = [judge(bar, mpi, outcomes) for bar in BARS for mpi in bar.mpis]
    lines = ["| what | under | bar | found, the worst | |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        worst = next((f"{value(each, verdict.bar)} ({each.where})" for each in verdict.found), "-")
        lines.append(f"| {verdict.bar.what} | {MPIS[verdict.mpi]} | {verdict.bar} | {worst} | {verdict} |")
    missed = [verdict for verdict in verdicts if verdict.missed()]
    if missed:
        lines += ["", "Where they were missed:", ""]
    for verdict in missed:
        places = "; ".join(f"{value(each, verdict.bar)} ({each.where})" for each in verdict.missed())
        lines.append(wrapped(f"- {verdict.bar.what}, {MPIS[verdict.mpi]}, {verdict.bar}: {places}", "  "))
    return lines


def value(each: Found, bar: Bar) -> str:
    """A number as the table has it."""
    return f"{shown(each.value)}{bar.unit}"


# ---- the sets --------------------------------------------------------------------------------------------------------


def ratio_tables(outcomes: Outcomes) -> Iterator[str]:
    """MPI's time and the others' as multiples of it, a table for each MPI and variant, with links to the pictures."""
    for (mpi, variant), group in groupby(outcomes, key=lambda outcome: (outcome.mpi, outcome.variant)):
        mine = list(group)
        names = {who: name for who, name in everybody(mine).items() if who != NATIVE}
        form, _, level = variant.partition(" ")
        said = f", as a {form}, thread level {level}" if variant else ""
        yield f"**{MPIS[mpi]}**{said}:\n"
        yield from head("ranks", "bytes", "MPI_Allreduce", *names.values())
        for outcome in mine:
            for size in sizes(outcome):
                native = rounds(outcome, size, NATIVE)
                ratios = [compare(outcome, size, who, NATIVE) for who in names]
                yield line(outcome.ranks, show_bytes(size), show_seconds(1e-6 * median(native)), *ratios)
        plots = [f"[{one.ranks} ranks](plots/{one.name}.svg)" for one in mine if one.plotted]
        yield f"\nDrawn: {', '.join(plots)}\n" if plots else ""


def memory_table(outcomes: Outcomes) -> Iterator[str]:
    """By how much each algorithm raised the ranks' peak memory."""
    yield from head("", "ranks", "bytes", "algorithm", "grew by, the least", "the most")
    for outcome in outcomes:
        for row in outcome.rows:
            ends = [f"{end(row['growth_bytes']) / MIB:.1f} MiB" for end in (min, max)]
            yield line(MPIS[outcome.mpi], outcome.ranks, show_bytes(row["size"]), row["algorithm"], *ends)


def overlap_table(outcomes: Outcomes) -> Iterator[str]:
    """What of an all-reduce hides behind a computation that takes about as long."""
    yield from head(
        "", "ranks", "bytes", "algorithm", "alone", "computation", "both, asked", "hidden", "never asked", "hidden"
    )
    for outcome in outcomes:
        for row in outcome.rows:
            cells = [show_seconds(1e-6 * row[f"{what}_us"]) for what in ("communication", "computation")]
            for how in ("asked", "unasked"):
                cells += [show_seconds(1e-6 * row[f"{how}_us"]), f"{row[f'{how}_overlap']:.0f} %"]
            yield line(MPIS[outcome.mpi], outcome.ranks, show_bytes(row["size"]), label(row), *cells)


def check_table(outcomes: Outcomes) -> Iterator[str]:
    """A plain call with the agreement and without, and the difference."""
    yield from head("", "ranks", "bytes", "with", "without", "it costs")
    for outcome in outcomes:
        for size in sizes(outcome):
            times = {row["check"]: row["rounds_us"] for row in outcome.rows if row["size"] == size}
            costs = median(map(sub, times[True], times[False]))
            spent = [show_seconds(1e-6 * median(times[check])) for check in (True, False)]
            yield line(MPIS[outcome.mpi], outcome.ranks, show_bytes(size), *spent, f"{costs:.1f} us")


def training_table(outcomes: Outcomes) -> Iterator[str]:
    """A step alone, and what synchronising it adds."""
    yield from head("", "ranks", "network", "parameters", "a step alone", "gloo adds", "ours adds", "ours / gloo")
    for outcome in outcomes:
        for row in outcome.rows:
            if row["algorithm"] == "local":
                costs = added(outcome, row["model"])
                alone = show_seconds(1e-6 * median([*chain(*row["repeats_us"])]))
                cells = [f"{1e-3 * costs[who]:.2f} ms" for who in ("gloo", "ours")]
                ratio = f"{costs['ours'] / costs['gloo']:.2f}" if costs["gloo"] > 0 else "-"
                yield line(MPIS[outcome.mpi], outcome.ranks, row["model"], f"{row['size']:,}", alone, *cells, ratio)


def backend_tables(outcomes: Outcomes) -> Iterator[str]:
    """Each size over either backend, and what synchronising adds to a step."""
    ways = ("hpcdl", "hpcdl, a work", "gloo", "gloo, a work")
    yield from head("", "ranks", "bytes", *ways, "gloo / hpcdl")
    for outcome in outcomes:
        for size in backend_sizes(outcome):
            times = [backend_us(outcome, size, who) for who in ways]
            cells = [show_seconds(1e-6 * time) for time in times]
            yield line(MPIS[outcome.mpi], outcome.ranks, show_bytes(size), *cells, f"{times[2] / times[0]:.2f}")
    yield ""
    yield from head("", "ranks", "a step alone", "gloo adds", "hpcdl adds", "hpcdl / gloo")
    for outcome in outcomes:
        costs = added(outcome, "mlp")
        (alone,) = (row["repeats_us"] for row in outcome.rows if row["algorithm"] == "local")
        cells = [show_seconds(1e-6 * median([*chain(*alone)])), *(f"{1e-3 * costs[who]:.1f} ms" for who in ways[2::-2])]
        yield line(MPIS[outcome.mpi], outcome.ranks, *cells, f"{costs['hpcdl'] / costs['gloo']:.2f}")


def head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [line(*names), "|---:" * len(names) + "|"]


def line(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(cell if isinstance(cell, str) else shown(cell) for cell in cells)} |"


class Section(NamedTuple):
    """What is said of a set."""

    title: str
    text: str
    tables: Callable[[Outcomes], Iterator[str]]


SECTIONS = {
    "shared": Section(
        "Shared arrays",
        "`shared` as a plan on arrays of `hpcdl.empty` (`shared@shared`), in place. `floor` is the same adds and "
        "copies without synchronisation, times ranks / cores where ranks outnumber cores, plus two barriers; `gloo` "
        "is torch.distributed's all_reduce in the same ranks.",
        ratio_tables,
    ),
    "private": Section("Private arrays", "Plain calls on ordinary NumPy arrays, in place.", ratio_tables),
    "small": Section(
        "Short messages",
        "On ordinary arrays, bound once as a plan, and as plain calls with their agreement; under MPI's thread levels, "
        "which change its speed. On more ranks than cores `single` is not measured: MPICH then takes milliseconds.",
        ratio_tables,
    ),
    "hosts": Section(
        "Between hosts",
        "Four hosts in network namespaces of one machine, 1 or 2 ranks each, whose links carry 1 Gbit/s; plans, in "
        "place. `@shared` is on arrays of `hpcdl.empty`.",
        ratio_tables,
    ),
    "memory": Section(
        "Memory",
        "By how much the first all-reduce of a private array raises a rank's peak resident size.",
        memory_table,
    ),
    "overlap": Section(
        "Overlap",
        "An all-reduce in flight, a computation that takes about as long, and both at once; while it computes, the "
        "program asks for the all-reduce's end some 50 times, or never.",
        overlap_table,
    ),
    "training": Section(
        "Training steps",
        "A step of SGD on a batch of 64 a rank: alone, under torch's DistributedDataParallel over gloo and under ours, "
        "in turns in the same ranks, one thread each. What synchronising adds is the median difference to the step "
        "alone, the best of three repeats. `mlp` is 784-2048-2048-2048-10, `cnn` 60 small convolutions.",
        training_table,
    ),
    "backend": Section(
        "The backend of torch.distributed",
        "dist.all_reduce of float32 over the backend `hpcdl` and over gloo, called and as a work that is waited for, "
        "in turns in the same ranks: medians, the best of three repeats. And a step of the network `mlp` as above "
        "under torch's own DistributedDataParallel over either.",
        backend_tables,
    ),
    "check": Section(
        "The price of the agreement",
        "A plain call of `auto` with the check that all ranks make the same call, and without (HPCDL_CHECK=0).",
        check_table,
    ),
}


READING = (
    "A sum of float32. The competitors take turns in one run; a ratio is the median of the rounds' ratios, a time the "
    "median of the slowest rank's. MPI_Allreduce is called through mpi4py, and the better of its in-place and "
    "out-of-place forms counts. In the tables of the sets it is a time, and all others are multiples of it: below 1 we "
    "are faster. Every result is checked, element by element."
)


def write(outcomes: Outcomes, remarks: str) -> str:
    """The whole of RESULTS.md."""
    measured = [outcome for outcome in outcomes if outcome.rows]
    lines = ["# How fast", "", *introduction(measured), "## Met and missed", "", *bars_section(outcomes), ""]
    lines += ["## What was tried", "", remarks.strip(), ""]
    for name, section in SECTIONS.items():
        mine = [outcome for outcome in outcomes if outcome.set == name]
        some = [outcome for outcome in mine if outcome.rows]
        effort = dict.fromkeys(outcome.header["rounds"] for outcome in some if "rounds" in outcome.header)
        text = f"{section.text} Rounds: {'; '.join(effort)}." if effort else section.text
        lines += [f"## {section.title}", "", wrapped(text), "", *failures(mine)]
        lines += [*section.tables(some), ""] if some else []
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def introduction(measured: Outcomes) -> Iterator[str]:
    """When, where, with what, and how to read it."""
    headers = [outcome.header for outcome in measured]
    if not headers:
        yield "Nothing was measured.\n"
        return
    dates = sorted(header["date"] for header in headers)
    yield f"Made by `make bench` from {dates[0]} to {dates[-1]}; `benchmarks/standard.py` says what is run.\n"
    machines = dict.fromkeys(outcome.machine for outcome in measured)
    versions = {name: version for header in headers for name, version in header["versions"].items()}
    software = [*dict.fromkeys(header["mpi"] for header in headers), *(f"{name} {versions[name]}" for name in versions)]
    yield wrapped(f"{'; '.join(machines)}. {', '.join(software)}; no tuning table.") + "\n"
    yield wrapped(READING) + "\n"


def wrapped(text: str, indent: str = "") -> str:
    """In lines of 120 characters; the later ones indented."""
    return fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def failures(outcomes: Outcomes) -> Iterator[str]:
    """What was not measured, and why."""
    if not outcomes:
        yield "This set was not run.\n"
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.problem:
            which = f"{MPIS[outcome.mpi]} on {outcome.ranks} ranks {outcome.variant}".strip()
            reasons.setdefault(outcome.problem, []).append(which)
    for problem, those in reasons.items():
        yield wrapped(f"Not measured: {', '.join(those)}: {problem}.") + "\n"
