"""What a collective of a process group returns: torch's Work, from which an error reaches whoever asks for the result.

torch's own works made from futures would lose it: wait() returns True, and DDP takes what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import DistBackendError, Work
from torch.futures import Future, collect_all

from hpcdl.record import WAITS, now
from hpcdl.torch.backend.progress import Lane, Task

NO_LIMIT = timedelta(0)


class GroupWork(Work):
    """A task of a lane, as torch sees it."""

    def __init__(self, lane: Lane, task: Task, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._lane, self._task, self._outputs = lane, task, list(outputs)
        self._future: Future[Any] | None = None

    def is_completed(self) -> bool:
        """Is it over, with success or not? Does not wait."""
        if not self._task.done:
            self._lane.advance()
        return self._task.done

    def is_success(self) -> bool:
        """Is it over, without an error?"""
        return self.is_completed() and self._task.error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it is over."""
        return self._task.error

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until it is over. Raises what went wrong, each time it is asked.

        Past a timeout of its own this raises, and the operation goes on; past the group's the operation has failed.
        """
        self._ask()
        limit_s = timeout.total_seconds() if timeout > NO_LIMIT else None
        if not self._task.done and not self._lane.wait(self._task, limit_s):
            raise DistBackendError(f"not there after {limit_s:g} s, and going on: {self._task.waits_for()}")
        if self._task.error is not None:
            raise self._task.error
        return True

    def synchronize(self) -> None:
        """Wait: what is over is over on the device, too."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as nothing is left to a stream."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors with the result."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> Future[Any]:
        """A future of the tensors with the result; it raises what went wrong, in C++ too."""
        if self._future is None:
            self._ask()
            # A future that is set to an exception from Python holds it as its value, and C++ would take that for
            # tensors. One whose callback raises fails in C++ as well.
            over: Future[None] = Future()
            self._future = over.then(lambda _: self._value())
            self._task.when_done(lambda: over.set_result(None))
        return self._future

    def _value(self) -> list[Any]:
        if self._task.error is not None:
            raise self._task.error
        return list(self._outputs)

    def _ask(self) -> None:
        """From now on somebody waits for it, which the watch must know."""
        if not self._task.done:
            self._task.operation[WAITS] = self._task.operation[WAITS] or now()


class ReceiveWork(GroupWork):
    """A message on its way here, which knows whence when it is there."""

    def __init__(self, lane: Lane, task: Task, outputs: Sequence[Any], source: list[int]) -> None:
        super().__init__(lane, task, outputs)
        self._source = source

    def source_rank(self) -> int:
        """The rank in the group that has sent it; -1 as long as it is not there."""
        return self._source[0] if self._source else -1

    _source_rank = source_rank


class Together(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__()
        self._works = list(works)

    def is_completed(self) -> bool:
        """Are all over?"""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Are all over, without an error?"""
        return all(work.is_success() for work in self._works)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all; raises what went wrong first."""
        for work in self._works:
            work.wait(timeout)
        return True

    def result(self) -> list[Tensor]:
        """The tensors with the results."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        """A future of the tensors with the results."""
        every = collect_all([work.get_future() for work in self._works])
        return every.then(lambda futures: [tensor for each in futures.value() for tensor in each.value()])
