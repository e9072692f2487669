"""Training that goes on without lost ranks: whatever the ranks tell each other goes through `Survivors`.

Floor 5. A step is one all-reduce of one buffer of float32:

    | the gradients, one behind the other | the sum of my losses | a flag for each rank that ever was, 1 at mine |

The flags in the sum tell whose samples are in it, under every policy: those of a rank that was lost may be or not. What
is not in it is dealt again in the same epoch. All of that follows from the sum, which all members have alike, so they
deal alike without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from hpcdl.data import part
from hpcdl.errors import HpcdlError, RankFailedError
from hpcdl.logs import logger
from hpcdl.survive.deck import Deck, Numbers
from hpcdl.survive.survivors import Lost, Survivors
from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from hpcdl.torch.growth import BatchGrowth
from hpcdl.torch.scaler import is_finite
from hpcdl.torch.tasks import Task
from hpcdl.torch.train import PRECISIONS, Epoch, Measured, Scheduler, cross_entropy, evaluate

LOSS, SAMPLES, SECONDS, WAITED_S = range(4)
"""What is added up in an epoch: the loss and the samples of all ranks, and this rank's time."""


class Change(NamedTuple):
    """Ranks were lost or have joined, and so the training goes on; the same on all members."""

    where: str
    lost: tuple[Lost, ...]
    joined: tuple[int, ...]
    again: int  # samples that are to be dealt again
    ranks: int
    batch: int
    lr: float

    def __str__(self) -> str:
        news = [_lost(self.lost, self.where)] if self.lost else []
        if self.again:
            news.append(f"{self.again} samples are dealt again")
        if self.joined:
            news.append(f"{_ranks(self.joined)} joined before {self.where}")
        return "; ".join([*news, f"{self.ranks} ranks go on, batch {self.batch}, rate {self.lr:g}"])


class Training:
    """One member's part in a training: the model, its optimiser, the deck of samples, and how far they have come.

    Each rank keeps its batch, so that the global batch follows the number of ranks; and the rate follows the global
    batch in proportion (Goyal et al. 2017, arXiv 1706.02677), from that of the beginning on. A schedule of rates counts
    the samples: it is stepped where a training that loses nobody would be.
    """

    compression = None

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        survivors: Survivors,
        *,
        batch_size: int,
        first: int | None = None,
        seed: int = 0,
        accumulate: int = 1,
        precision: str = "fp32",
        clip_norm: float | None = None,
        settings: dict[str, Any] | None = None,
        start: Callable[[int], tuple[int, ...]] | None = None,
        on_change: Callable[[Change], object] = lambda change: None,
    ) -> None:
        """`batch_size` samples of each rank in each of `accumulate` backward passes.

        `first` is how many ranks there were in the beginning, if there are others now. `settings` is what else must be
        the same to go on from a checkpoint. `start` starts so many ranks in place of lost ones.
        """
        self.task, self.model, self.optimizer, self.survivors = task, model, optimizer, survivors
        self.batch_size, self.accumulate, self.seed = batch_size, accumulate, seed
        self.precision, self.clip_norm = precision, clip_norm
        self.first = first or survivors.size
        batch = self.each * self.first
        self.growth = BatchGrowth(batch, (), factor=2, limit=batch)
        self.scheduler: Scheduler | None = None
        self.steps = 0
        self.epochs: list[Epoch] = []
        self.on_change = on_change
        self._start, self._unproven = start, set[int]()
        """Who has joined and was in no step yet."""
        self._gone = {each.rank for each in survivors.lost}
        self._more_settings = settings or {}
        self._deck: Deck | None = None
        self._scheduled = 0
        self._batch, self._rate = batch, self.lr
        self._sums, self._told = np.zeros(4), np.zeros(4)
        self.not_finite: tuple[int, str | None] | None = None
        """The first step whose loss was not finite, and the first parameter whose gradient was not either then."""
        self.counted = 0
        """How many samples were in the steps of the last whole epoch."""
        self._bind(max(survivors.members) + 1)

    def _bind(self, ever: int) -> None:
        """Have the gradients in one buffer with the loss and the flags of so many ranks."""
        self._ever = ever
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        lengths = [each.numel() for each in parameters]
        total = sum(lengths)
        self._buffer = torch.zeros(total + 1 + ever)
        self._gradients, self._loss, self._flags = torch.split(self._buffer, [total, 1, ever])
        views = torch.split(self._gradients, lengths)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)

    # ---- where in the training -----------------------------------------------------------------------------------

    @property
    def each(self) -> int:
        """A rank's samples in one update."""
        return self.batch_size * self.accumulate

    @property
    def lr(self) -> float:
        """The rate of the next update, if there were as many ranks as in the beginning."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def scale(self) -> float:
        """What the rate is multiplied by for the ranks that are left."""
        return self.survivors.size / self.first

    @property
    def seen(self) -> int:
        """Samples of this epoch that have counted."""
        return self.task.train_count - len(self._deck.left) if self._deck else 0

    def updates(self, epochs: float) -> int:
        """How many updates a training that loses nobody takes up to this time in epochs."""
        whole, rest = divmod(epochs, 1)
        in_one = self.growth.updates(self.task.train_count, 1)
        return int(whole) * in_one + round(rest * in_one)

    # ---- the training --------------------------------------------------------------------------------------------

    def train(self, epochs: int, on_step: Callable[[int], object] = lambda samples: None) -> Iterator[Epoch]:
        """Go on to the given epoch; give each epoch's result. `on_step` is told how many samples were in each step.

        RankFailedError ("no quorum ..."): so few are left that this side may not go on.
        """
        while (epoch := len(self.epochs)) < epochs:
            if self._deck is None:
                self._deck = Deck.shuffled(self.task.train_count, epoch, self.seed)
            self.model.train()
            while len(self._deck.left):
                self._replace()
                on_step(self._step(self._deck))
            loss, samples = self._sums[[LOSS, SAMPLES]].tolist()
            test_loss, correct, seconds, waited_s = self._evaluate()
            self.counted = int(samples)
            labels, test_labels = samples * self.task.labels, self.task.test_count * self.task.labels
            per_s, communication = labels * self.survivors.size / seconds, waited_s / seconds
            results = loss / labels, test_loss / test_labels, correct / test_labels, per_s, communication
            self.epochs.append(Epoch(epoch + 1, *results, self._batch, self._rate, skipped=0))
            self._deck, self._sums, self._told = None, np.zeros(4), np.zeros(4)
            yield self.epochs[-1]

    def _step(self, deck: Deck) -> int:
        """Take a step with all who are there; how many samples were in it."""
        began, members = perf_counter(), self.survivors.members
        dealt = deck.deal(members, self.each)
        mine = dealt[self.survivors.rank]
        self._buffer.zero_()
        for number in range(self.accumulate):
            inputs, labels = self.task.train(mine[part(len(mine), number, self.accumulate)])
            with self.autocast():
                some = cross_entropy(self.model(inputs), labels)
            some.backward()  # type: ignore[no-untyped-call]
            self._loss += some.item()
        self._flags[self.survivors.rank] = 1
        ready = perf_counter()
        done = self._reduce(self._buffer)
        waited_s = perf_counter() - ready
        counted = [rank for rank in members if done and self._flags[rank]]
        samples = deck.settle(dealt, counted)
        if samples:
            self._update(samples, len(counted))
        self._unproven.difference_update(counted)
        where = f"step {self.steps if samples else self.steps + 1}"
        self._tell(where, again=sum(map(len, dealt.values())) - samples)
        self._sums[[SECONDS, WAITED_S]] += perf_counter() - began, waited_s
        return samples

    def _update(self, samples: int, ranks: int) -> None:
        """Change the parameters by the gradients' sum over so many samples of so many ranks, which all have alike."""
        loss = float(self._loss)
        self.steps += 1
        if not math.isfinite(loss) and self.not_finite is None:
            named = self.model.named_parameters()
            spoilt = (name for name, each in named if each.grad is not None and not is_finite(each.grad))
            self.not_finite = self.steps, next(spoilt, None)
        self._gradients /= samples * self.task.labels
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        with _scaled(self.optimizer, ranks / self.first):
            self._batch, self._rate = ranks * self.each, self.lr
            self.optimizer.step()
        self._sums[[LOSS, SAMPLES]] += loss, samples
        whole, seen = len(self.epochs), self.seen
        due = (
            self.updates(whole) + seen // self.growth.first if seen < self.task.train_count else self.updates(whole + 1)
        )
        while self.scheduler and self._scheduled < due:
            self._scheduled += 1
            self.scheduler.step()

    def autocast(self) -> AbstractContextManager[Any]:
        """What forward runs within."""
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    # ---- with the others -----------------------------------------------------------------------------------------

    def _reduce(self, x: Any, op: str = "sum") -> bool:
        """All-reduce among the members; False if that which is promised cannot be had any more. Some may be lost."""
        try:
            self.survivors.allreduce(x, op)
        except RankFailedError:
            if not self.survivors.has_quorum:
                raise
            return False
        return True

    def _tell(self, where: str, *, joined: tuple[int, ...] = (), again: int = 0) -> None:
        """Say who was lost since the last time, and who has joined."""
        lost = tuple(each for each in self.survivors.lost if each.rank not in self._gone)
        self._gone.update(each.rank for each in lost)
        joined = tuple(rank for rank in joined if rank not in self._gone)
        if lost or joined:
            ranks = self.survivors.size
            self.on_change(Change(where, lost, joined, again, ranks, ranks * self.each, self.lr * self.scale))
        if self._start and self._unproven & self._gone:
            # Where one could not even begin, the next one might not either, for ever.
            self._replace_no_more(f"{_ranks(sorted(self._unproven & self._gone))} ended before a first step")

    def _evaluate(self) -> tuple[float, ...]:
        """On what is held out: the loss, how many labels were named rightly, how many samples that were; and my time.

        The sums over all members, who look at a part each.
        """
        while True:
            members, count = self.survivors.members, self.task.test_count
            mine = np.arange(count)[part(count, members.index(self.survivors.rank), len(members))]
            loss, correct, labels = 0.0, 0.0, len(mine) * self.task.labels
            if labels:
                loss, correct = evaluate(self.model, _some(self.task, mine), MPI.COMM_SELF, within=self.autocast)
            times = self._sums[[SECONDS, WAITED_S]]
            sums = np.array([loss * labels, round(correct * labels), *times, len(mine)])
            done = self._reduce(sums)
            self._tell(f"the evaluation behind epoch {len(self.epochs) + 1}")
            if done and sums[-1] == count:
                return tuple(sums[:-1].tolist())

    def spread(self) -> float:
        """The largest difference of a parameter between members; it should be 0, and is finite if all of them are."""
        while True:
            flat = torch.cat([each.detach().flatten() for each in self.model.parameters()])
            flat.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            both = torch.cat([flat, -flat])
            done = self._reduce(both, "max")
            self._tell("the last comparison")
            if done:
                highest, minus_lowest = both.chunk(2)
                return float((highest + minus_lowest).max())

    def measure(self) -> Measured:
        """What came of this epoch's steps since it was last asked; the times are this rank's."""
        news, self._told = self._sums - self._told, self._sums.copy()
        loss, samples, seconds, waited_s = news.tolist()
        labels = samples * self.task.labels
        return Measured(loss / labels if labels else math.nan, labels / seconds, waited_s / seconds, None)

    # ---- ranks in place of lost ones -----------------------------------------------------------------------------

    def _replace(self) -> None:
        """Start as many ranks as are missing, and bring them to where the others are."""
        where = f"step {self.steps + 1}"
        while self._start and (missing := self.first - self.survivors.size) > 0:
            before, problem = self.survivors.size, None
            new: tuple[int, ...] = ()
            try:
                new = self._start(missing)
            except HpcdlError as error:
                if not self.survivors.has_quorum:
                    raise
                problem = error
            self._tell(where)  # who was lost over it, before the new ones are told who was
            if len(new) < missing and self.survivors.size >= before:  # not for a loss, so it will be the same again
                self._replace_no_more(problem or f"of {missing} that were started {len(new)} have joined")
            if new:
                self._unproven.update(new)
                self._bind(max(new) + 1)
                handed_over(self.survivors, self._state())
                self._tell(where, joined=new)

    def _replace_no_more(self, why: object) -> None:
        self._start = None
        if self.survivors.rank == self.survivors.members[0]:
            logger.warning("lost ranks are not replaced any more: %s", why)

    def _state(self) -> dict[str, Any]:
        """All that a rank must be told to be where this one is."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "progress": self._progress(),
            "settings": self._settings,
            "ever": self._ever,
            "gone": self._gone,
            "unproven": self._unproven,
            "replaces": self._start is not None,
            "threads": torch.get_num_threads(),
        }

    def join(self, state: dict[str, Any]) -> None:
        """Go to where the others are, by the state of one of them; ValueError if that is of another training."""
        _check("the others are in", state["settings"], self._settings, ValueError)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler:
            self.scheduler.load_state_dict(state["scheduler"])
        self._go_on_from(state["progress"])
        self._bind(state["ever"])
        self._gone, self._unproven = state["gone"], state["unproven"]
        self._start = self._start if state["replaces"] else None
        self._tell(f"step {self.steps + 1}")  # as the others do at this place

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
            "precision": f"{self.precision} by survivors",  # so that no other training takes it for its own
            **self._more_settings,
        }

    def _progress(self) -> dict[str, Any]:
        # As plain lists, which a checkpoint can hold.
        return {
            "first": self.first,
            "steps": self.steps,
            "scheduled": self._scheduled,
            "left": None if self._deck is None else self._deck.left.tolist(),
            "sums": self._sums.tolist(),
            "epochs": [[*each] for each in self.epochs],
            "not finite": self.not_finite,
        }

    def _go_on_from(self, progress: dict[str, Any]) -> None:
        self.steps, self._scheduled = progress["steps"], progress["scheduled"]
        left = progress["left"]
        self._deck = None if left is None else Deck(np.array(left, np.int64))
        self._sums = np.array(progress["sums"])
        self._told = self._sums.copy()
        self.epochs = [Epoch(*each) for each in progress["epochs"]]
        self.not_finite = progress["not finite"]

    def save(self, folder: str | Path) -> Path | None:
        """The lowest member writes a checkpoint, and has its path; all call it, and get CheckpointError if it cannot.

        If it is lost over it, the next one writes another.
        """
        while True:
            survivors = self.survivors
            writer = survivors.members[0]
            path = problem = None
            if survivors.rank == writer:
                try:
                    path = save_checkpoint(
                        folder,
                        model=self.model,
                        optimizer=self.optimizer,
                        scheduler=self.scheduler,
                        step=self.steps,
                        sampler=self._settings,
                        extra=self._progress(),
                        comm=MPI.COMM_SELF,
                    )
                except CheckpointError as error:
                    problem = str(error)
            word = np.array([path is not None, problem is not None], np.int32)
            done = self._reduce(word, "max")
            self._tell(f"the checkpoint of step {self.steps}")
            if done and word[1]:
                raise CheckpointError(problem or f"rank {writer} could not write a checkpoint into {folder}")
            if done and word[0]:
                return path

    def resume(self, folder: str | Path) -> Checkpoint | None:
        """Go to where the newest whole checkpoint was, None if there is none. Each rank reads it for itself.

        CheckpointError: it is of another model, data, batch, seed, precision, kind of optimiser or other `settings`.
        The rate, the momentum and the decay are for whoever resumes to choose, unless a schedule has them.
        """
        chosen = [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]
        checkpoint = load_checkpoint(
            folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, comm=MPI.COMM_SELF
        )
        if checkpoint is None:
            return None
        _check(f"{checkpoint.path} is of", checkpoint.sampler, self._settings, CheckpointError)
        if self.scheduler is None:
            for group, mine in zip(self.optimizer.param_groups, chosen, strict=True):
                group.update(mine)
        self._go_on_from(checkpoint.extra)
        return checkpoint


def handed_over(survivors: Survivors, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that the lowest member hands over to those who have joined, on all members."""
    while True:
        try:
            handed: dict[str, Any] = survivors.broadcast(state)
            return handed
        except RankFailedError:  # some were lost in it
            if not survivors.has_quorum:
                raise


def begun_with(folder: str | Path, model: nn.Module) -> int | None:
    """How many ranks the training in the folder's newest whole checkpoint began with; loads the model from it."""
    checkpoint = load_checkpoint(folder, model=model, comm=MPI.COMM_SELF)
    return checkpoint and (checkpoint.extra or {}).get("first")


@contextmanager
def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """The rates times the factor, for a while: a scheduler computes the next rate from the one it finds."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _some(task: Task, numbers: Numbers) -> Task:
    """The same task with these of the held-out samples alone."""
    return task._replace(test_count=len(numbers), test=lambda chosen: task.test(numbers[chosen]))


def _check(whose: str, theirs: dict[str, Any] | None, ours: dict[str, Any], kind: type[Exception]) -> None:
    for name, value in ours.items():
        if (other := (theirs or {}).get(name)) != value:
            raise kind(f"{whose} a training with {name} {other}, this one has {value}")


def _lost(lost: tuple[Lost, ...], where: str) -> str:
    """Who was lost, and who spoke for whom."""
    alone = len(lost) == 1
    spoke = [
        f"rank {each.stand_in} spoke for {'it' if alone else each.rank}" for each in lost if each.stand_in is not None
    ]
    said = f" ({', '.join(spoke)})" if spoke else ""
    return f"{_ranks([each.rank for each in lost])} {'was' if alone else 'were'} lost in {where}{said}"


def _ranks(ranks: Any) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
