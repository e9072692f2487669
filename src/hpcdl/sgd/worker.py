"""A worker: it fetches parameters, computes gradients and pushes them (Downpour; Dean et al. 2012, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from hpcdl.sgd.letters import End, Header, Kind, Line, Parting, Say

if TYPE_CHECKING:
    from hpcdl.sgd.flat import Flat
    from hpcdl.sgd.pace import Pace

Loss: TypeAlias = Callable[[int], tuple[Tensor, int] | None]
"""By the number of a step the mean loss over some samples, to go backward from, and how many these are; None ends."""


class Worker:
    """One worker, and its lines to the servers, each with the part of the vector that is there."""

    def __init__(
        self,
        flat: Flat,
        lines: Sequence[tuple[Line, slice]],
        *,
        n_fetch: int = 1,
        n_push: int = 1,
        by_version: bool = False,
        clip_norm: float | None = None,
        pace: Pace | None = None,
        rank: int = 0,
    ) -> None:
        """`by_version`: a step has the number that the servers' updates have, and not that of this worker."""
        self.flat, self.lines = flat, lines
        self.n_fetch, self.n_push, self.by_version = n_fetch, n_push, by_version
        self.clip_norm, self.pace, self.rank = clip_norm, pace, rank
        self.steps = self.samples = 0
        self.waited_s = 0.0
        self.versions = [0] * len(lines)
        """Of the parameters that are here, by server."""
        self._lr = 0.0
        self._began = perf_counter()
        self._pushed: tuple[int, float] = 0, 0.0
        self._held = 0
        """How many steps' gradients are in the letters and not sent yet."""
        self._since = [0] * len(lines)
        """The versions from which the first of these was computed."""

    def work(self, loss: Loss) -> End:
        """Work until there is nothing more to do, or a server says so; how all end."""
        going = self._fetch(Kind(0))
        for step in count():
            if not going or not self._step(loss, step):
                break
            push, fetch = (step + 1) % self.n_push == 0, (step + 1) % self.n_fetch == 0
            if fetch:
                going = self._fetch(Kind.PUSH if push else Kind(0))
            elif push:
                self._send(Kind.PUSH)
        self._send(Kind.BYE | (Kind.PUSH if going and self._held else Kind(0)))
        first, _ = self.lines[0]
        while (answer := first.answer()).kind != Say.FAREWELL:
            first.next()
        first.next()
        for line, _ in self.lines:
            line.close()
        return End(answer.number, Parting(answer.version))

    def _step(self, loss: Loss, step: int) -> bool:
        """Compute one gradient, and put it to those that are to be sent; False if there is none."""
        began = perf_counter()
        self.flat.gradients.zero_()
        found = loss(self.versions[0] if self.by_version else step)
        if found is None:
            return False
        value, samples = found
        if samples:
            value.backward()  # type: ignore[no-untyped-call]
            if self.clip_norm:
                nn.utils.clip_grad_norm_(self.flat.model.parameters(), self.clip_norm)
        if self.pace is not None:
            self.pace.wait(self.rank, step, began)
        gradient = self.flat.gradients
        if not self._held:
            self._since = list(self.versions)
        for line, where in self.lines:
            room = line.room()
            if self._held:
                room.add_(gradient[where])
            else:
                room.copy_(gradient[where])
        if self.n_fetch > 1:  # else what is fetched takes its place at once
            with torch.no_grad():
                self.flat.values.add_(gradient, alpha=-self._lr)
        self._held += 1
        self.steps += 1
        self.samples += samples
        count, total = self._pushed
        self._pushed = count + samples, total + value.item() * samples
        return True

    def _send(self, kind: Kind, *, fetch: bool = False) -> None:
        """Send the kind to all servers, and to the first one whether parameters are wanted."""
        samples, loss = self._pushed
        pushes = bool(kind & Kind.PUSH)
        for number, (line, _) in enumerate(self.lines):
            asked = Kind.FETCH if fetch and number == 0 else Kind(0)
            if not kind | asked:
                continue
            header = Header(kind | asked, self._since[number])
            if pushes:
                times = perf_counter() - self._began, self.waited_s
                header = Header(kind | asked, self._since[number], samples, loss, *times, filled=1)
            line.send(header)
        if pushes:
            self._held, self._pushed = 0, (0, 0.0)

    def _fetch(self, kind: Kind) -> bool:
        """Push or not, and get parameters, from the first server and then from the others; False if it is over.

        It is the first one that lets a worker wait: what the others hand out behind it is no older than what it does.
        """
        self._send(kind, fetch=True)
        began = perf_counter()
        going = self._take(0)
        if going:
            for line, _ in self.lines[1:]:
                line.send(Header(Kind.FETCH))
            answers = [self._take(number) for number in range(1, len(self.lines))]  # of all, also behind a no
            going = all(answers)
        self.waited_s += perf_counter() - began
        return going

    def _take(self, number: int) -> bool:
        line, where = self.lines[number]
        answer = line.answer()
        if answer.kind == Say.GO:
            self.flat.values[where].copy_(line.reply.body)
            self.versions[number], self._lr = answer.version, answer.lr
        line.next()
        return answer.kind == Say.GO
