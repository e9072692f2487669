"""large-batch.md and its plots, from the numbers of large_batch.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any, TypeAlias

Numbers: TypeAlias = dict[str, Any]
Points: TypeAlias = Sequence[tuple[float, float]]

PLOTS = "large-batch-plots"


class Report:
    """What was found, by the questions that were asked."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers, self.runs, self.found = numbers, numbers["runs"], numbers["found"]
        self.batches: list[int] = numbers["plan"]["batches"]
        self.large: int = numbers["plan"]["large"]
        self.methods: dict[str, dict[str, list[int]]] = self.found["methods"]
        self.questions: dict[str, dict[str, list[int]]] = self.found["questions"]

    def accuracies(self, runs: Sequence[int]) -> list[float]:
        """Of all seeds."""
        return [self.runs[run]["accuracies"][-1] for run in runs]

    def mean(self, runs: Sequence[int]) -> float:
        """The seeds' mean accuracy."""
        return mean(self.accuracies(runs))

    def shown(self, runs: Sequence[int]) -> str:
        """The accuracy with its spread over the seeds."""
        every = self.accuracies(runs)
        return f"{mean(every):.2f}" + (f" +- {stdev(every):.2f}" if len(every) > 1 else "")

    def of(self, method: str, batch: int) -> list[int]:
        """The runs of a method at a batch."""
        return self.methods[method][str(batch)]

    # ---- the bars ------------------------------------------------------------------------------------------------

    def bars(self) -> list[tuple[str, str, bool]]:
        """What was to be reached, what was, and whether it was."""
        base = self.mean(self.of("SGD, linear scaling", self.batches[0]))
        lars = self.mean(self.of("LARS, tuned", self.large))
        plain = self.mean(self.of("SGD, tuned", self.large))
        warm = self.mean(self.of("SGD with warm-up, tuned", self.large))
        growth, precision = self.questions["growth"], self.questions["precision"]
        decay, grown = self.mean(growth["rate decay"]), self.mean(growth["batch growth"])
        share = self._updates(growth["batch growth"]) / self._updates(growth["rate decay"])
        bits = self.mean(precision["bf16"]) - self.mean(precision["fp32"])
        small, large = f"{self.batches[0]:,}", f"{self.large:,}"
        return [
            (
                f"LARS at {large} within 1.0 point of the baseline at {small}",
                f"{lars:.2f} against {base:.2f} %: {lars - base:+.2f}",
                lars >= base - 1,
            ),
            (
                f"LARS at {large} above the best plain SGD there, with warm-up or without",
                f"{lars:.2f} against {max(plain, warm):.2f} %: {lars - max(plain, warm):+.2f}",
                lars > max(plain, warm),
            ),
            (
                "batch growth within 0.5 point of rate decay",
                f"{grown:.2f} against {decay:.2f} %",
                abs(grown - decay) <= 0.5,
            ),
            ("at most half the updates by batch growth", f"{share:.2f} of them", share <= 0.5),
            ("bf16 within 0.5 point of fp32", f"{bits:+.2f}", abs(bits) <= 0.5),
        ]

    def _updates(self, runs: Sequence[int]) -> int:
        updates: int = self.runs[runs[0]]["updates"]
        return updates

    # ---- tables --------------------------------------------------------------------------------------------------

    def methods_table(self) -> str:
        """Accuracy and rate by method and batch."""

        def cell(method: str, batch: int) -> str:
            runs = self.methods[method].get(str(batch))
            return f"{self.shown(runs)} (lr {self.runs[runs[0]]['lr']:.3g})" if runs else ""

        head = ["", *(f"{batch:,}" for batch in self.batches)]
        return table(head, ([method, *(cell(method, batch) for batch in self.batches)] for method in self.methods))

    def updates_line(self) -> str:
        """How few updates large batches leave."""
        each = [f"{self._updates(self.of('LARS, tuned', batch)):,} at {batch:,}" for batch in self.batches]
        return f"Updates in all {self.runs[0]['epochs']} epochs: {', '.join(each)}."

    def question_table(self, question: str, columns: dict[str, Callable[[Sequence[int]], str]]) -> str:
        """One line an answer."""
        answers = self.questions[question]
        rows = ([name, *(column(runs) for column in columns.values())] for name, runs in answers.items())
        return table(["", *columns], rows)

    def tried_table(self) -> str:
        """All rates that were looked at, on held-out training images."""
        rows = []
        for method, batches in self.found["tried"].items():
            for batch, runs in batches.items():
                found = [self.runs[run] for each in runs for run in each]
                rates = ", ".join(f"{run['lr']:.3g}: {run['accuracies'][-1]:.2f}" for run in found)
                rows.append([method, f"{int(batch):,}", rates])
        return table(["", "batch", "rate: accuracy (%)"], rows)

    def reached(self, runs: Sequence[int], target: float) -> str:
        """The first epoch whose accuracy is at least that."""
        for epoch, accuracy in enumerate(self.runs[runs[0]]["accuracies"], 1):
            if accuracy >= target:
                return str(epoch)
        return "never"

    def wire(self) -> str:
        """Bytes sent, as counted."""
        rows = []
        for ranks in (2, 4):
            full, half = (self.numbers["wire"][f"{name} {ranks}"] for name in ("fp32", "bf16"))
            rows.append([str(ranks), f"{full:,}", f"{half:,}", f"{half / full:.3f}"])
        return table(["ranks, each a node", "fp32", "bf16", "ratio"], rows)

    # ---- the page ------------------------------------------------------------------------------------------------

    def text(self, reading: str, papers: str) -> str:
        """The whole page."""
        numbers, runs = self.numbers, self.runs
        bars = table(
            ["to reach", "measured", ""], ([what, got, "met" if ok else "**missed**"] for what, got, ok in self.bars())
        )
        down = self.questions["cycles"]["step decay"]
        target = round(self.mean(down) - 0.3, 1)
        fp32, fp16 = (runs[self.questions["fp16"][name][0]] for name in ("fp32", "fp16"))
        epochs = runs[down[0]]["epochs"]
        parts = [
            "# Large batches on a small network\n\n*Written by `make large-batch`. What it means is at the end.*",
            fill(
                f"An MLP 784-128-10 on {numbers['data']}, {epochs} epochs, momentum 0.9, no weight decay, the rate "
                "going down to 0 with the square of what is left of the training, where nothing else is said. "
                f"{numbers['machine']}, {numbers['date']}; {len(runs)} trainings of one core each in "
                f"{numbers['minutes']:.1f} minutes. Accuracies are of the test images, in %: means with the standard "
                "deviation over three seeds, or of one. 10,000 test images alone bring a standard error of 0.3. Rates "
                "were chosen on a sixth of the training images, seed 0, for each method and batch: from two, the "
                f"second twice the first, and at {self.large:,} a third on the better one's side.",
                120,
            ),
            bars,
            "## Four ways to a large batch",
            self.methods_table(),
            self.updates_line() + " Linear scaling takes the rate of the smallest batch; warm-up is 5 epochs.",
            f"![accuracy by batch]({PLOTS}/batches.svg)",
            f"The rate of biases under LARS at {self.large:,}, as a share of the others':",
            self.question_table("biases", {"accuracy": self.shown}),
            "## A batch that grows, or a rate that falls",
            fill(
                f"At epochs {numbers['milestones']} the rate falls to a fifth, or the batch grows five times, from "
                f"{self.batches[0]} to at most {numbers['plan']['limit']:,}; what is left falls to the rate.",
                120,
            ),
            self.question_table("growth", {"accuracy": self.shown, "updates": lambda runs: f"{self._updates(runs):,}"}),
            f"![accuracy by epoch]({PLOTS}/growth.svg)",
            "## One cycle, or steps down",
            self.question_table(
                "cycles",
                {
                    "lr": lambda runs: f"{self.runs[runs[0]]['lr']:g}",
                    "accuracy": self.shown,
                    f"epochs to {target} %": lambda runs: self.reached(runs, target),
                },
            ),
            f"![accuracy by epoch]({PLOTS}/cycles.svg)",
            "## 16 bits",
            self.question_table(
                "precision",
                {
                    f"accuracy, LARS at {self.large:,}": self.shown,
                    "seconds a training": lambda runs: f"{mean(self.runs[run]['seconds'] for run in runs):.0f}",
                },
            ),
            "Bytes that all ranks send in 4 updates and an evaluation of `hpcdl train`'s MLP (203,530 parameters), "
            "counted where\nthey are sent (`hpcdl.sent_bytes`):",
            self.wire(),
            fill(
                f"fp16, one epoch at batch {fp16['batch']:,}, rate {fp16['lr']:g}: {fp16['accuracies'][-1]:.2f} % in "
                f"{fp16['seconds']:.0f} s, {fp16['skipped']} of {fp16['updates']} updates skipped; fp32 "
                f"{fp32['accuracies'][-1]:.2f} % in {fp32['seconds']:.1f} s. CPUs have no fp16 arithmetic: its "
                "speed is a matter of GPUs, where it has not been run. What the scaler does when gradients overflow is "
                "tested on tiny networks (tests/mpi/test_torch_scaler.py).",
                120,
            ),
            "## What the papers report, for ImageNet",
            papers.strip(),
            "## How to read this",
            reading.strip(),
            "## All rates that were tried",
            self.tried_table(),
        ]
        return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(numbers: Numbers, folder: Path) -> None:
    """The page and its plots."""
    report = Report(numbers)
    remarks = (folder / "large-batch-remarks.md").read_text(encoding="utf-8")
    papers, reading = (part.strip() for part in remarks.split("\n---\n"))
    (folder / "large-batch.md").write_text(report.text(reading, papers), encoding="utf-8")
    plots = folder / PLOTS
    plots.mkdir(exist_ok=True)
    lines = {
        method: [(int(batch), report.mean(runs)) for batch, runs in batches.items()]
        for method, batches in report.methods.items()
    }
    draw(lines, "global batch", plots / "batches.svg", batches=report.batches)
    for question in ("growth", "cycles"):
        curves: dict[str, Points] = {}
        for name, runs in report.questions[question].items():
            curves[name] = list(enumerate(report.runs[runs[0]]["accuracies"], 1))
        draw(curves, "epoch", plots / f"{question}.svg")


def draw(lines: dict[str, Points], across: str, file: Path, *, batches: Sequence[int] = ()) -> None:
    """Accuracies, one line each: SVG, the same for the same numbers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "hpcdl", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        panel = figure.subplots()
        if batches:
            panel.set_xscale("log", base=2)
            panel.set_xticks(batches, [f"{batch:,}" for batch in batches])
        for number, (name, points) in enumerate(lines.items()):
            x, y = zip(*points, strict=True)
            panel.plot(x, y, marker="osv^D"[number % 5], label=name, alpha=0.8)
        panel.set(xlabel=across, ylabel="test accuracy (%)")
        low = max(70.0, min(y for points in lines.values() for _, y in points) - 1)
        panel.set_ylim(low, None)
        panel.grid(alpha=0.3)
        panel.legend()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
