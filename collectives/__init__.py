"""The collective algorithms as data: who sends what to whom, on paper. Standard library only.

>>> from hpcdl import collectives
>>> schedule = collectives.schedule("ring", size=3, n=6)
>>> schedule.rounds(0)[0]
(Send(peer=1, span=Span(lo=4, hi=6)), Reduce(peer=2, span=Span(lo=2, hi=4)))
>>> collectives.verify(schedule)
"""

if __name__ != "hpcdl.collectives":
    # Under a second name there would be two classes Send, and isinstance would fail in silence.
    raise ImportError(f"import this package as hpcdl.collectives, not as {__name__}")

from .by_node import packed
from .catalogue import ALGORITHMS, Algorithm, find, names
from .cost import Cost, Link, counts, seconds
from .play import ScheduleError, play, verify
from .predict import parts, predicted
from .schedule import Copy, Nodes, Reduce, Round, Send, Span, Step, cut, deal, mirror, overlap
from .whole import COLLECTIVES, Program, Schedule, program, schedule

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "Copy",
    "Cost",
    "Link",
    "Nodes",
    "Program",
    "Reduce",
    "Round",
    "Schedule",
    "ScheduleError",
    "Send",
    "Span",
    "Step",
    "counts",
    "cut",
    "deal",
    "find",
    "mirror",
    "names",
    "overlap",
    "packed",
    "parts",
    "play",
    "predicted",
    "program",
    "schedule",
    "seconds",
    "verify",
]
