"""compression.md, from the numbers of compression.py."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from large_batch_report import table

Numbers: TypeAlias = dict[str, Any]

DENSE, DGC = "dense", "dgc"
WITHIN = ("topk", "onebit", "qsgd", "terngrad", "powersgd")
"""To be within 1.5 points of dense on images."""
STEPS_TIMES = {"100mbit": (10, 50), "1gbit": (1.5, 20)}
"""How many times as many steps DGC is to take, and how many times shorter its exchange is to be."""
NETWORKS = {"100mbit": "four hosts, 100 Mbit/s", "1gbit": "four hosts, 1 Gbit/s", "one node": "one node"}
MEASURED = {"step_s": "step", "exchange_s": "exchange alone", "compressing_s": "compressing"}


class Report:
    """What was found."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.speed: dict[str, Any] = numbers.get("speed", {})

    def runs(self, task: str, method: str | None = None) -> list[Numbers]:
        """The trainings of a task, by one method or all of them."""
        return [run for run in self.numbers["runs"] if run["task"] == task and method in (None, run["method"])]

    def last(self, task: str, method: str, what: str) -> float:
        """At the end."""
        return float(self.runs(task, method)[0][what][-1])

    # ---- the bars ------------------------------------------------------------------------------------------------

    def bars(self) -> list[tuple[str, str, bool]]:
        """What was to be reached, what was, and whether it was."""
        dense, dgc = (self.last("images", method, "accuracies") for method in (DENSE, DGC))
        found = [
            (
                "DGC at 0.1 % within 1.0 point of dense, images",
                f"{dgc:.2f} against {dense:.2f} %: {dgc - dense:+.2f}",
                dgc >= dense - 1,
            )
        ]
        if self.runs("text", DGC):
            dense_loss, loss = (self.last("text", method, "losses") for method in (DENSE, DGC))
            found.append(
                (
                    "DGC at 0.1 % within 0.05 of dense in loss, text",
                    f"{loss:.3f} against {dense_loss:.3f}: {loss - dense_loss:+.3f}",
                    loss <= dense_loss + 0.05,
                )
            )
        for method in WITHIN:
            ours = self.last("images", method, "accuracies")
            found.append(
                (
                    f"{method} within 1.5 points of dense, images",
                    f"{ours:.2f} against {dense:.2f} %: {ours - dense:+.2f}",
                    ours >= dense - 1.5,
                )
            )
        for name, least in (("float16", 320), ("float32", 240)):
            ratio = self.numbers["matrix"][name]
            found.append(
                (f"of a matrix DGC sends at most 1/{least} with {name} values", f"1/{ratio:.1f}", ratio >= least)
            )
        if "selection" in self.numbers:
            part = self.numbers["selection"]
            found.append(("finding 0.1 % of 10 million takes half of abs and topk", f"{part:.2f} of it", part <= 0.5))
        for network, bars in STEPS_TIMES.items():
            if network in self.speed:
                for what, unit, least in zip(
                    ("step_s", "exchange_s"), ("more steps a second", "shorter exchange"), bars, strict=True
                ):
                    times = self.typical(network, "ring", what) / self.typical(network, DGC, what)
                    where = NETWORKS[network]
                    found.append((f"DGC: {least} times {unit}, {where}", f"{times:.1f} times", times >= least))
        return found

    def typical(self, network: str, way: str, what: str) -> float:
        """The median in seconds, 0 where nothing was measured."""
        values = self.speed[network]["ways"][way][what]
        return median(values) if values else 0.0

    # ---- tables --------------------------------------------------------------------------------------------------

    def trainings(self, task: str) -> str:
        """A line for each method."""
        dense = self.runs(task, DENSE)[0]
        rows = []
        for first in self.runs(task):
            method = first["method"]
            name = " ".join([method, *(f"{key}={value}" for key, value in first["options"])])
            rows.append(
                [
                    name,
                    f"{first['lr']:g}",
                    f"{first['accuracies'][-1]:.2f}",
                    f"{first['accuracies'][-1] - dense['accuracies'][-1]:+.2f}",
                    f"{first['losses'][-1]:.3f}",
                    times(first["ratio"]),
                    share(first["error"]),
                    "" if math.isnan(first["residual"]) else f"{first['residual']:.3g}",
                ]
            )
        names = ("method", "rate", "accuracy", "- dense", "loss", "fewer bytes", "error", "residual")
        return table(names, rows)

    def speeds(self, network: str) -> str:
        """Milliseconds, and what they are of the dense ring's."""
        rows = []
        for way, found in self.speed[network]["ways"].items():
            row = [way]
            for what in MEASURED:
                value = self.typical(network, way, what)
                row.append(f"{1e3 * value:.1f}" if value else "")
            row.append(f"{self.typical(network, 'ring', 'step_s') / self.typical(network, way, 'step_s'):.2f}")
            row.append(f"{self.typical(network, 'ring', 'exchange_s') / self.typical(network, way, 'exchange_s'):.1f}")
            row.append(times(found["dense_bytes"] / found["sent_bytes"] if found.get("sent_bytes") else math.nan))
            rows.append(row)
        heads = [*(f"{name}, ms" for name in MEASURED.values()), "steps a second, x ring", "exchange, times shorter"]
        return table(["", *heads, "fewer bytes"], rows)

    # ---- the page ------------------------------------------------------------------------------------------------

    def text(self, remarks: str) -> str:
        """All of it."""
        numbers, papers, reading = self.numbers, *(part.strip() for part in remarks.split("\n---\n"))
        courses, minutes = numbers["courses"], sum(numbers["seconds"].values()) / 60
        verdicts = [(what, found, "met" if met else "**missed**") for what, found, met in self.bars()]
        parts = [
            "# Compressed gradients: accuracy, bytes and time",
            "*Written by `make compression`. What it means is at the end.*",
            f"Four ranks on {numbers['machine']}, MPICH, {numbers['date']}; {minutes:.1f} minutes.",
            table(("to reach", "measured", ""), verdicts),
            "## Accuracy",
            described(f"An MLP 784-128-10 on {NAMES[numbers['images']]}", courses["images"]),
            self.trainings("images"),
        ]
        if self.runs("text"):
            parts += [described(TEXT, courses["text"], ", gradients clipped at a norm of 0.5"), self.trainings("text")]
        parts += [COLUMNS, papers]
        if self.speed:
            parts += ["## Time of a step", NETWORK]
            for network, name in NETWORKS.items():
                if network in self.speed:
                    rounds = len(self.speed[network]["ways"]["ring"]["step_s"])
                    parts += [f"{name[0].upper()}{name[1:]} ({rounds} rounds):", self.speeds(network)]
        return "\n\n".join([*parts, reading]) + "\n"


NAMES = {"fashion": "Fashion-MNIST", "mnist5k": "5,000 digits of MNIST"}
TEXT = "A transformer (2 layers, width 64, 112,000 parameters) on 120,000 characters of the King James Bible"
COLUMNS = """Rates fall to 0 with the square of what is left of the training, behind one epoch in which they rise.
"fewer bytes" is how many times the bytes of a ring all-reduce in float32 are those that the ranks have sent, in the
last epoch, as the executor counted them. "error" is how far that epoch's first exchanged gradient was from the exact
one, and "residual" the length of what had not been sent at its end. All are of one seed; 10,000 test images bring a
standard error of 0.3. Rates were chosen on data held out of the training's, from two or three for each method, each
twice the one before."""
NETWORK = """A network 784-2048-2048-2048-10 of 10 million parameters, 8 images of each of 4 ranks a step; the ranks
share the machine's cores, in which they compute and compress, so a cluster's steps would be shorter. All methods take
turns in the same ranks; medians of the slowest rank's times. "exchange alone" is measured in steps of its own, in which
the ranks wait for each other ahead of every exchange; ring is the dense all-reduce."""


def described(what: str, course: Numbers, more: str = "") -> str:
    """What was learnt."""
    return f"{what}, {course['epochs']} epochs, batches of 4 x {course['batch']}, SGD with momentum 0.9{more}:"


def times(ratio: float) -> str:
    """A ratio, if there is one."""
    return "" if math.isnan(ratio) else f"{ratio:.3g}x"


def share(error: float) -> str:
    """In %, if there is one."""
    return "" if math.isnan(error) else f"{100 * error:.3g} %"


def write(numbers: Numbers, folder: Path) -> None:
    """The page."""
    remarks = (folder / "compression-remarks.md").read_text(encoding="utf-8")
    (folder / "compression.md").write_text(Report(numbers).text(remarks), encoding="utf-8")
