"""What hpcdl bench has found, for people, spreadsheets, programs and eyes: table, csv, json and plot."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from hpcdl.cli.sizes import show_bytes

OUT, IN = "out of place", "in place"

Row: TypeAlias = dict[str, Any]
"""One algorithm on one kind of buffers at one size, and in one place: in place or out of it."""

# What a column of the table is called, its unit and its width.
COLUMNS = {
    "size": ("size", "(B)", 11),
    "count": ("count", "(elements)", 11),
    "type": ("type", "", 8),
    "redop": ("redop", "", 6),
    "algorithm": ("algorithm", "", 22),
    "buffers": ("buffers", "", 9),
    "time_us": ("time", "(us)", 9),
    "p10_us": ("10 %", "(us)", 8),
    "p90_us": ("90 %", "(us)", 8),
    "algbw_gb_s": ("algbw", "(GB/s)", 7),
    "busbw_gb_s": ("busbw", "(GB/s)", 7),
    "wrong": ("#wrong", "", 7),
    "communication_us": ("comm.", "(us)", 10),
    "computation_us": ("comp.", "(us)", 10),
    "unasked_us": ("both", "never asked", 12),
    "unasked_overlap": ("hidden", "(%)", 8),
    "asked_us": ("both", "asked", 12),
    "asked_overlap": ("hidden", "(%)", 8),
}
FIRST = ("size", "count", "type", "redop", "algorithm", "buffers")
TIMES = ("time_us", "p10_us", "p90_us", "algbw_gb_s", "busbw_gb_s", "wrong")
OVERLAP = ("communication_us", "computation_us", "unasked_us", "unasked_overlap", "asked_us", "asked_overlap", "wrong")


class Format(NamedTuple):
    """How results are written: what comes before them, each size's as they come, what comes after."""

    head: Callable[[Row], str]
    size: Callable[[Sequence[Row]], str]
    foot: Callable[[Row, Sequence[Row]], str]


def table_head(header: Row) -> str:
    """The header as comments, and the columns' names and units."""
    lines = [f"{name.replace('_', ' ')}: {_shortened(value)}" for name, value in header.items()]
    fields = (*FIRST, *OVERLAP) if header["form"] == "overlap" else (*FIRST, *TIMES, *TIMES)
    if header["form"] != "overlap":
        widths = [sum(COLUMNS[name][2] for name in names) for names in (FIRST, TIMES)]
        lines.append(" " * widths[0] + f"{OUT:>{widths[1]}}{IN:>{widths[1]}}")
    lines += ["".join(f"{COLUMNS[name][part]:>{COLUMNS[name][2]}}" for name in fields) for part in (0, 1)]
    return "\n".join(f"# {text}".rstrip() for text in lines)


def _shortened(value: object) -> str:
    """Of hundreds of hosts or ranks the first ones."""
    if not isinstance(value, dict):
        return str(value)
    items = [f"{name} {what}" for name, what in value.items()]
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")


def table_size(rows: Sequence[Row]) -> str:
    """One line for each algorithm and kind of buffers."""
    lines = []
    for _, same in groupby(rows, key=lambda row: (row["algorithm"], row["buffers"])):
        group = list(same)
        places = {row.get("place"): row for row in group}
        halves = [(group[0], OVERLAP)] if None in places else [(places.get(place, {}), TIMES) for place in (OUT, IN)]
        cells = [(row.get(name), COLUMNS[name][2]) for row, fields in [(group[0], FIRST), *halves] for name in fields]
        lines.append("  " + "".join(f"{shown(value):>{width}}" for value, width in cells))
    return "\n".join(lines)


def shown(value: object) -> str:
    """A cell: of a number as many digits as mean something."""
    if isinstance(value, float):
        return f"{value:.{2 if value < 100 else 1 if value < 10_000 else 0}f}"
    return "-" if value is None else str(value)


def table_foot(header: Row, rows: Sequence[Row]) -> str:
    """Each size's times in place as multiples of native's."""
    rows = [row for row in rows if row.get("place") == IN and row["ratio"] is not None]
    if not rows:
        return ""
    names = dict.fromkeys(label(row) for row in rows)
    head = "time in place / time of native (the better of in place and out of place): the median of the rounds' ratios"
    lines = ["", head, f"{'size':>9}" + "".join(f"  {name:>6}" for name in names)]
    for size, same in groupby(rows, key=lambda row: row["size"]):
        found = {label(row): row["ratio"] for row in same}
        cells = "".join(f"  {shown(found.get(name)):>{max(6, len(name))}}" for name in names)
        lines.append(f"{show_bytes(size):>9}{cells}")
    return "\n".join(f"# {text}".rstrip() for text in lines)


def label(row: Row) -> str:
    """An algorithm, and what it works on where that is not the usual."""
    return row["algorithm"] if row["buffers"] == "private" else f"{row['algorithm']}@{row['buffers']}"


def csv_head(header: Row) -> str:
    """The names of the columns."""
    return _csv([(*FIRST, *OVERLAP) if header["form"] == "overlap" else (*FIRST, "place", *TIMES, "ratio")])


def csv_size(rows: Sequence[Row]) -> str:
    """A line a row; the rounds are left to json."""
    return _csv([value for name, value in row.items() if name != "rounds_us"] for row in rows)


def _csv(lines: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue().rstrip("\n")


def json_foot(header: Row, rows: Sequence[Row]) -> str:
    """The header and all rows, with the time of every round."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{{"header": {json.dumps(header)},\n "results": [\n  {lines}\n ]}}'


FORMATS = {
    "table": Format(table_head, table_size, table_foot),
    "csv": Format(csv_head, csv_size, lambda header, rows: ""),
    "json": Format(lambda header: "", lambda rows: "", json_foot),
}


def plot(header: Row, rows: Sequence[Row], file: str) -> None:
    """Time and bus bandwidth in place against the size, one line an algorithm: SVG, the same for the same rows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "hpcdl", "svg.fonttype": "none"}):
        sizes = list(dict.fromkeys(row["size"] for row in rows))
        ticks = sizes[:: 1 + len(sizes) // 10]
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        panels = figure.subplots(1, 2)
        for panel, field, title in zip(panels, ("time_us", "busbw_gb_s"), ("time (us)", "busbw (GB/s)"), strict=True):
            panel.set(xscale="log", yscale="log", xlabel="size", ylabel=title)
            panel.set_xticks(ticks, [show_bytes(size) for size in ticks], rotation=30, ha="right")
            panel.minorticks_off()  # they would be most of the file
            panel.grid(alpha=0.3)
            for name in dict.fromkeys(label(row) for row in rows):
                mine = [row for row in rows if label(row) == name and row["place"] == IN]
                style = {"native": "--", "floor": ":"}.get(name, "-")
                panel.plot([row["size"] for row in mine], [row[field] for row in mine], style, marker=".", label=name)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.suptitle(f"{header['type']} {header['redop']}, {header['ranks']} ranks, {header['mpi']}", fontsize=10)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
