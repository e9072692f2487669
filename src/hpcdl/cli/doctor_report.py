"""What the doctor has found: findings, and how they are shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
LEVELS = (OK, NOTE, WARNING, ERROR)
FORMAT = "hpcdl doctor 1"

WIDTH = 100
INDENT = " " * 11
MOST_NAMED = 4


class Finding(NamedTuple):
    """One thing that was seen."""

    level: str
    """ok, note, warning or error."""
    topic: str
    seen: str
    do: str = ""
    """How to mend it, or what it means."""
    command: str = ""
    """What a shell can be given for it."""
    host: str = ""
    """Where it was seen, if it concerns one host."""


def status(findings: Iterable[Finding]) -> int:
    """The exit status: 1 if anything is an error."""
    return int(any(finding.level == ERROR for finding in findings))


def merged(findings: Iterable[Finding], hosts: int) -> list[Finding]:
    """What was seen alike on several hosts becomes one finding; a single host goes without saying."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(finding._replace(host=""), []).append(finding.host)
    whole = []
    for finding, seen_on in places.items():
        named = list(dict.fromkeys(filter(None, seen_on)))
        where = ""
        if named and hosts > 1:
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            where = "all hosts" if len(named) == hosts else ", ".join(named[:MOST_NAMED]) + more
        whole.append(finding._replace(host=where))
    return whole


def as_text(findings: Sequence[Finding], head: str) -> str:
    """A report that a person reads from the top: what is wrong stands last, next to the prompt."""
    lines = [head]
    for finding in sorted(findings, key=lambda each: LEVELS.index(each.level)):
        where = f" on {finding.host}" if finding.host else ""
        lines += _wrapped(f"{finding.topic}{where}: {finding.seen}", f"  {finding.level:<9}")
        lines += _wrapped(finding.do, f"{INDENT}-> ") if finding.do else []
        lines += [f"{INDENT}$ {finding.command}"] if finding.command else []
    return "\n".join([*lines, summary(findings)])


def _wrapped(text: str, ahead: str) -> list[str]:
    later = " " * len(ahead)
    return textwrap.wrap(
        text, WIDTH, initial_indent=ahead, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def summary(findings: Sequence[Finding]) -> str:
    """How many are wrong, in one line."""
    counts = {level: sum(finding.level == level for finding in findings) for level in (ERROR, WARNING)}
    if not any(counts.values()):
        return "Nothing is wrong."
    return " and ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts.items() if n) + "."


def as_json(findings: Sequence[Finding], about: Mapping[str, Any]) -> str:
    """One object; the epilog of hpcdl doctor --help describes it."""
    found = [finding._asdict() for finding in findings]
    return json.dumps({"format": FORMAT, "status": status(findings), **about, "findings": found})
