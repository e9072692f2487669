"""Synchronous data-parallel training, plain: forward and backward on my share, one summed gradient, the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hpcdl
from hpcdl.data import part, shares
from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from hpcdl.torch.growth import BatchGrowth, split
from hpcdl.torch.parallel import DistributedDataParallel
from hpcdl.torch.scaler import GradScaler, is_finite
from hpcdl.torch.tasks import Numbers, Task

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.compress import Compression

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What the forward and backward passes compute in, where that loses little; None is the model's own type."""
SUMS = 11
"""How many numbers a trainer adds up in an epoch."""


class Scheduler(Protocol):
    """What a trainer asks of a schedule of rates; torch's have it."""

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Compressed(NamedTuple):
    """What compression came to on all ranks together, NaN where there is nothing to tell."""

    ratio: float  # how many times as many bytes a ring all-reduce in float32 would have sent
    compressing: float  # the share of the ranks' time in which they compressed and decompressed
    reduction_s: float  # of a step: to compress, to exchange and to decompress
    error: float = math.nan  # of the epoch's first exchanged gradient, as a share of that without compression
    residual: float = math.nan  # the length of what was not sent yet at the epoch's end
    plain_s: float = math.nan  # what the epoch's first gradient took to be added up without compression


class Epoch(NamedTuple):
    """What one epoch came to, the same on all ranks; losses are the mean over the labels."""

    number: int
    loss: float
    test_loss: float
    accuracy: float
    per_s: float  # images, or characters
    communication: float  # see Measured
    batch: int  # samples of all ranks in one update
    lr: float  # of its last update
    skipped: int  # updates that were left out for gradients that were not finite
    compressed: Compressed | None = None


class Measured(NamedTuple):
    """What some steps came to on all ranks together.

    `communication` is the share of the ranks' time between the end of the local backward and the end of the reduction:
    what training waits for it, and for slower ranks. What overlaps with backward is not in it.
    """

    loss: float
    per_s: float
    communication: float
    compressed: Compressed | None


class NotFinite(NamedTuple):
    """Where a loss was first no number, or infinite."""

    step: int  # from 1
    rank: int
    parameter: str | None  # the first one whose gradient was not finite then, as summed over the ranks


class _Timed(DistributedDataParallel):
    """Adds up the time that backward waits for the reduction."""

    waited_s = 0.0

    def _end(self) -> None:
        began = perf_counter()
        super()._end()
        self.waited_s += perf_counter() - began


class Trainer:
    """One rank's part in a training: the wrapped model, its optimiser, and how far they have come."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: MPI.Intracomm,
        *,
        batch_size: int,
        seed: int = 0,
        accumulate: int = 1,
        growth: BatchGrowth | None = None,
        most: int | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        settings: dict[str, Any] | None = None,
        compression: Callable[[DistributedDataParallel], Compression] | None = None,
        **wrapping: Any,
    ) -> None:
        """`batch_size` samples of each rank in each of `accumulate` backward passes; `wrapping` is the wrapper's.

        With `growth` the global batch is what that says, in as many passes as leave at most `most` samples to each, or
        `accumulate`. `compression` gives the wrapped model one, whose state is part of a checkpoint. `settings` is what
        else must be the same to go on from there.
        """
        self.task, self.comm, self.optimizer = task, comm, optimizer
        self.scaler = GradScaler(comm) if precision == "fp16" else None
        # The sum: each rank's loss is divided by the samples of all.
        self.model = _Timed(model, comm, average=False, scaler=self.scaler, **wrapping)
        self.compression = compression(self.model) if compression else None
        batch = batch_size * accumulate * comm.size
        self.growth = growth or BatchGrowth(batch, (), factor=2, limit=batch)
        self.batch_size, self.seed, self.accumulate, self.most = batch_size, seed, accumulate, most
        self.precision, self.clip_norm = precision, clip_norm
        self.scheduler: Scheduler | None = None
        self.steps = 0
        self.epochs: list[Epoch] = []
        self._more_settings = settings or {}
        # Of this epoch so far: my part of the loss, seconds, of these waited, all samples, those of steps that were
        # taken, and the steps that were not; bytes sent, those without compression, seconds in which it compressed, in
        # which it reduced, and the steps of that.
        self._sums = np.zeros(SUMS)
        self._told = np.zeros(SUMS)
        self._looked = math.nan, math.nan  # the last error, and the seconds of the exact sum
        self._not_finite: tuple[int, str | None] | None = None

    # ---- where in the training -----------------------------------------------------------------------------------

    def updates(self, epochs: float) -> int:
        """How many updates come before this time in epochs."""
        whole, rest = divmod(epochs, 1)
        before = self.growth.updates(self.task.train_count, int(whole))
        return before + round(rest * -(-self.task.train_count // self.growth.batch(int(whole))))

    @property
    def passes(self) -> int:
        """Of backward, in one update of this epoch."""
        if self.most is None:
            return self.accumulate
        return split(self.growth.batch(len(self.epochs)), self.comm.size, self.most)[1]

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    # ---- the training --------------------------------------------------------------------------------------------

    def train(self, epochs: int, on_step: Callable[[int], bool | None] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result.

        `on_step` is told each global batch's samples; on all ranks alike it may end the training there, by True.
        """
        task, comm = self.task, self.comm
        while (epoch := len(self.epochs)) < epochs:
            self.model.train()
            if self.compression:
                self.compression.method.begin_epoch(epoch)
                self.compression.look = True
            batch, lr = self.growth.batch(epoch), self.lr
            batches = shares(task.train_count, epoch, seed=self.seed, batch=batch, rank=comm.rank, size=comm.size)
            for mine, total in islice(batches, self.steps - self.updates(epoch), None):
                lr = self.lr
                self.step(mine, total)
                if on_step(total):
                    return
            loss, per_s, communication, compressed = self._measure(self._sums)
            if self.compression and compressed:
                compressed = compressed._replace(
                    error=self._looked[0],
                    residual=self.compression.residual_norm(),
                    plain_s=float(hpcdl.allreduce(np.array(self._looked[1:]), comm, op="mean")[0]),
                )
            told = evaluate(self.model, task, comm, within=self.autocast)
            skipped = int(self._sums[5])
            self.epochs.append(Epoch(epoch + 1, loss, *told, per_s, communication, batch, lr, skipped, compressed))
            self._sums, self._told, self._looked = np.zeros(SUMS), np.zeros(SUMS), (math.nan, math.nan)
            yield self.epochs[-1]

    def step(self, mine: Numbers, total: int) -> None:
        """Take one step on a global batch of `total` samples, these being mine."""
        began, waited_s, loss = perf_counter(), self.model.waited_s, 0.0
        self.optimizer.zero_grad()
        passes = self.passes
        for number in range(passes):
            inputs, labels = self.task.train(mine[part(len(mine), number, passes)])
            # Divided by the samples of all ranks and passes, the losses' sum is the mean over the global batch, however
            # unevenly the samples lie. A mean of means would weigh a short share too much, and the mean over no sample
            # is NaN where the sum is 0.
            with nullcontext() if number == passes - 1 else self.model.no_sync():
                with self.autocast():
                    some = cross_entropy(self.model(inputs), labels) / (total * self.task.labels)
                scaled = self.scaler.scale(some) if self.scaler else some
                scaled.backward()  # type: ignore[no-untyped-call]
            loss += some.item()
        taken = self._update()
        self.steps += 1
        if taken and not math.isfinite(loss) and self._not_finite is None:
            self._not_finite = self.steps, self._first_spoilt()
        samples = total if taken else 0
        spent = perf_counter() - began, self.model.waited_s - waited_s
        self._sums += loss * total if taken else 0.0, *spent, total, samples, not taken, *self._compressed()

    def _compressed(self) -> tuple[float, ...]:
        """What compression has added to the last five of the sums since it was last asked."""
        if not self.compression:
            return (0.0,) * 5
        told = self.compression.told()
        if not math.isnan(told.error):
            self._looked = told.error, told.plain_seconds
        return told.sent_bytes, told.dense_bytes, told.seconds - told.exchange_seconds, told.seconds, told.steps

    def _update(self) -> bool:
        """Change the parameters by the gradients, which all ranks have alike; was it done?"""
        taken = True
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm:  # of the mean over the global batch, and of its true size
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            taken = not self.scaler.skipped
        else:
            self.optimizer.step()
        if self.scheduler and taken:
            self.scheduler.step()
        return taken

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward runs within."""
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    # ---- what came of it -----------------------------------------------------------------------------------------

    def measure(self) -> Measured:
        """What came of this epoch's steps since it was last asked; a collective call."""
        news, self._told = self._sums - self._told, self._sums.copy()
        return self._measure(news)

    def _measure(self, sums: NDArray[np.float64]) -> Measured:
        total = hpcdl.allreduce(sums.copy(), self.comm, op="sum").tolist()
        loss, seconds, waited_s, samples, counted, _, sent, without, compressing_s, reducing_s, reduced = total
        mean = loss * self.comm.size / counted if counted else math.nan
        compressed = None
        if self.compression:
            ratio = without / sent if sent else math.nan
            compressed = Compressed(ratio, compressing_s / seconds, reducing_s / reduced if reduced else math.nan)
        # All ranks have counted all samples, and each its seconds.
        return Measured(mean, samples * self.task.labels / seconds, waited_s / seconds, compressed)

    def first_not_finite(self) -> NotFinite | None:
        """The first step of which a rank's loss was not finite; a collective call."""
        every = self.comm.allgather(self._not_finite)
        found = [NotFinite(each[0], rank, each[1]) for rank, each in enumerate(every) if each is not None]
        return min(found, key=lambda each: each[:2], default=None)

    def _first_spoilt(self) -> str | None:
        named = self.model.module.named_parameters()
        return next((name for name, each in named if each.grad is not None and not is_finite(each.grad)), None)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    # What must be the same for the rest of the training to be the same.
    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "data": f"{self.task.counts}, shape {self.task.shape}",
            "batch size": self.batch_size,
            "accumulation": self.accumulate,
            "seed": self.seed,
            "optimizer": type(self.optimizer).__name__,
            "precision": self.precision,
            "compression": self.compression and self.compression.method.name,
            **self._more_settings,
        }

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "comm": self.comm,
        }

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint of where the training is; a collective call."""
        return save_checkpoint(
            folder,
            step=self.steps,
            sampler=self._settings,
            extra={
                # As plain lists, which a checkpoint can hold.
                "epochs": [[*each[:-1], each.compressed and [*each.compressed]] for each in self.epochs],
                "sums": self._sums.tolist(),
                "looked": list(self._looked),
                "compression": self.compression and self.compression.state_dict(),
            },
            **self._parts,
        )

    def resume(self, folder: str | Path) -> Checkpoint | None:
        """Go to where the newest whole checkpoint was, None if there is none; a collective call.

        CheckpointError, on all ranks: it was saved by another number of ranks, of another model, data, batch, seed,
        precision, compression or kind of optimiser, or is of other `settings`. The rate, the momentum and the decay are
        for whoever resumes to choose, unless a schedule has them.
        """
        chosen = [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]
        checkpoint = load_checkpoint(folder, **self._parts)
        if checkpoint is None:
            return None
        for name, ours in self._settings.items():
            if (saved := checkpoint.sampler.get(name)) != ours:
                raise CheckpointError(f"{checkpoint.path} is of a training with {name} {saved}, this one has {ours}")
        if self.scheduler is None:
            for group, mine in zip(self.optimizer.param_groups, chosen, strict=True):
                group.update(mine)
        self.steps = checkpoint.step
        extra = checkpoint.extra
        epochs = [Epoch(*each) for each in extra["epochs"]]
        self.epochs = [each._replace(compressed=each.compressed and Compressed(*each.compressed)) for each in epochs]
        self._sums = np.array(extra["sums"])
        self._told = self._sums.copy()
        if self.compression:
            self._looked = tuple(extra["looked"])
            self.compression.load_state_dict(extra["compression"])
        return checkpoint


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The sum over all labels, each with the scores of its classes."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    comm: MPI.Comm,
    *,
    batch_size: int = 250,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float]:
    """The held-out samples' loss, and which share of labels all ranks name rightly; one rank looks at each sample."""
    model.eval()
    mine = np.arange(task.test_count)[part(task.test_count, comm.rank, comm.size)]
    sums = np.zeros(2)
    for start in range(0, len(mine), batch_size):
        inputs, labels = task.test(mine[start : start + batch_size])
        with within():
            scores = model(inputs)
            sums += cross_entropy(scores, labels).item(), int((scores.argmax(-1) == labels).sum())
    hpcdl.allreduce(sums, comm, op="sum")
    loss, correct = (sums / (task.test_count * task.labels)).tolist()
    return loss, correct


def spread(model: nn.Module, comm: MPI.Comm) -> float:
    """The largest difference of a parameter between ranks; it should be 0, and is finite if all of them are."""
    # MPI's own all-reduce is the witness here: the one that may have gone wrong shall not judge itself.
    # MPI's max and min may drop a NaN, but no infinity.
    highest = torch.cat([each.detach().flatten() for each in model.parameters()])
    highest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lowest = highest.clone()
    hpcdl.allreduce(highest, comm, op="max", algorithm="native")
    hpcdl.allreduce(lowest, comm, op="min", algorithm="native")
    return float((highest - lowest).max())
