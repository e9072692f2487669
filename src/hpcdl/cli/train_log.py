"""What a training came to, for programs to read: JSON lines, and TensorBoard's scalars."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdl.survive.training import Change
    from hpcdl.torch.train import Epoch, Measured


def plain(unit: str, what: Epoch | Measured) -> dict[str, float]:
    """What is told of steps and of epochs alike, under its names."""
    values = {"loss": what.loss, f"{unit}_per_s": what.per_s, "communication": what.communication}
    if what.compressed:
        told = what.compressed
        values |= {"ratio": told.ratio, "compressing": told.compressing, "reduction_s": told.reduction_s}
    return values


class Log:
    """One rank's log of a training in a folder: log.jsonl, which is appended to, and TensorBoard's files beside it.

    Each line is an object. "kind" is "start", with the settings and the step that is gone on from (what stands above
    of later steps is void), "train" (the steps since the line before), "epoch" (the whole epoch), "loss" (ranks were
    lost, or have joined) or "stop" (with the reason and the checkpoint to go on from).
    """

    def __init__(self, folder: Path, settings: dict[str, Any], step: int) -> None:
        self.missing: str | None = None
        """What is not written, and how to have it."""
        self._file = open(folder / "log.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - closed by the with block
        try:
            from tensorboardX import SummaryWriter

            self._scalars: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        except ImportError:
            self._scalars = None
            self.missing = "no scalars for TensorBoard without tensorboardX: pip install 'hpcdl[log]'"
        self._put({"kind": "start", "time": time.time(), "step": step, "settings": settings})

    def write(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """One line, at once in the file."""
        # JSON has no NaN.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._put({"kind": kind, "step": step, "epoch": epoch, **finite})
        if self._scalars:
            for name, value in values.items():
                self._scalars.add_scalar(f"{kind}/{name}", value, step)

    def stop(self, step: int, reason: str | None, checkpoint: Path) -> None:
        """The last line of a training that was asked to stop."""
        self._put({"kind": "stop", "step": step, "reason": reason, "checkpoint": str(checkpoint)})

    def loss(self, step: int, epoch: int, change: Change) -> None:
        """Who was lost or has joined, and how the training goes on."""
        self._put({"kind": "loss", "step": step, "epoch": epoch, **change._asdict(), "lost": [*map(list, change.lost)]})

    def _put(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._scalars:
            self._scalars.close()
