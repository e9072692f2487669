"""A process group of torch.distributed over MPI and hpcdl's collectives.

torch's Python functions call these methods, and its C++ (DDP's reducer, the functional collectives) calls some of them
through pybind11. torch 2.13 has renamed several, so they are there under both names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from hpcdl import call, collectives, watch
from hpcdl.channel import Channel
from hpcdl.execute import Steps
from hpcdl.record import ENDED, NUMBER, WAITS, About, Operation, begin, now
from hpcdl.torch.backend import calls, moves, sparse
from hpcdl.torch.backend.arguments import Lists, Tensors, list_of, one, options_of
from hpcdl.torch.backend.named import NamedGroup
from hpcdl.torch.backend.progress import Health, Lane, Task
from hpcdl.torch.backend.steps import Start, on_devices, together
from hpcdl.torch.backend.work import GroupWork, ReceiveWork, Together

if TYPE_CHECKING:
    from hpcdl.torch.backend import Options

CLOSED = "this process group was destroyed"


class ProcessGroupHpcdl(NamedGroup):
    """Ranks of one MPI communicator, which is the group's own and is freed with it."""

    def __init__(self, comm: MPI.Intracomm, options: Options, timeout_s: float, store: Any) -> None:
        super().__init__(comm.rank, comm.size, timeout_s, store)
        self.comm = comm
        self.channel: Channel = call.channel(comm)
        self.options = options
        self._algorithms = {name: self._algorithm(name) for name in ("allreduce", *OTHERS)}
        self._health = Health()
        self._lane = Lane(self._health)
        self._messages: set[Lane] = set()
        self._coalesced: list[GroupWork] | None = None
        self.monitored = 0
        """The number of the last monitored barrier."""
        self.kept: list[tuple[object, list[MPI.Request]]] = []
        """Messages of monitored barriers that may still be on their way."""

    @property
    def broken(self) -> str:
        """Why the group cannot be used any more; empty if it can."""
        return self._health.broken

    def algorithm(self, collective: str) -> str:
        """What this group runs a collective by."""
        return self._algorithms[collective]

    def _algorithm(self, collective: str) -> str:
        """The group's own algorithm; where that serves all-reduces only, the others are left to "auto"."""
        wanted = self.options.algorithm
        if wanted in ("auto", "native", "shared"):
            return wanted if collective == "allreduce" else "auto"
        try:
            return collectives.find(wanted, self.channel.size, collective, self.channel.nodes).name
        except ValueError:
            if collective == "allreduce":
                raise
            return "auto"

    # ---- running -------------------------------------------------------------------------------------------------

    def _run(
        self, name: str, start: Start, outputs: Sequence[Any], given: Any, inputs: Sequence[Tensor] = ()
    ) -> GroupWork:
        """Start a collective behind those that were called before, and wait for it unless it is an asynchronous one."""
        operation = begin(About(name, self.channel.key), 0, 0, None)
        steps = together(self, operation, start)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            steps = on_devices(steps, [*outputs, *inputs])
        task = Task(steps, operation, self._limit(given), self._missing)
        work = GroupWork(self._lane, task, outputs)
        if given.asyncOp:
            operation[WAITS] = 0  # nobody does yet
            self._put(self._lane, task)
            self._lane.start()
        else:
            self._put(self._lane, task)
            work.wait()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _put(self, lane: Lane, task: Task) -> None:
        try:
            lane.put(task)
        except BaseException:
            task.operation[ENDED] = now()
            raise

    def _message(self, name: str, start: Callable[[], Steps], outputs: Sequence[Tensor], work: Any) -> Any:
        """Start a message, at once: it waits for no collective."""
        operation = begin(About(name, self.channel.key), 0, 0, None)
        operation[WAITS] = 0
        lane = Lane(self._health)
        steps = start()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            steps = on_devices(steps, outputs)
        task = Task(steps, operation, self.timeout_s, lambda _: self._elsewhere(name))
        self._put(lane, task)
        lane.advance()  # posts it
        if lane.tasks:
            self._messages = {other for other in self._messages if other.tasks} | {lane}
            lane.start()
        result = work(lane, task)
        if self._coalesced is not None:
            self._coalesced.append(result)
        return result

    def _limit(self, given: Any) -> float:
        """How long this call may take, in seconds."""
        own: timedelta = given.timeout
        return own.total_seconds() if own > timedelta(0) else self.timeout_s

    def _missing(self, operation: Operation) -> list[str]:
        """Who has not come to an operation, in lines."""
        if self.channel.size == 1:
            return []
        return watch.watch().survey(self.channel, (self.channel.key, operation[NUMBER], 0))

    def _elsewhere(self, name: str) -> list[str]:
        """What the others do while a message does not come, in lines."""
        others = [rank for rank in range(self.channel.size) if rank != self.channel.rank]
        return watch.watch().doing(self.channel, others)

    # ---- collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, op: Any = None) -> GroupWork:
        """Combine all ranks' tensors, in place."""
        given = options_of(dist.AllreduceOptions, opts, timeout, reduceOp=op)
        tensor = one(tensors)
        which = calls.all_reduce if tensor.layout == torch.strided else sparse.all_reduce
        return self._run("all_reduce", lambda to: which(self, tensor, given.reduceOp, to), [tensor], given)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> GroupWork:
        """Combine several tensors each, as few messages."""
        given = options_of(dist.AllreduceCoalescedOptions, opts)
        every = list(tensors)

        def start(to: Operation) -> Steps:
            return calls.all_reduce_together(self, every, given.reduceOp, to)

        return self._run("all_reduce_coalesced", start, every, given)

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: Any = None, *, root: Any = None) -> GroupWork:
        """Give all ranks the root's tensor."""
        given = options_of(dist.BroadcastOptions, opts, timeout, rootRank=root)
        tensor = one(tensors)
        return self._run("broadcast", lambda to: calls.broadcast(self, tensor, given.rootRank, to), [tensor], given)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None
    ) -> GroupWork:
        """Combine all ranks' tensors in the root's."""
        given = options_of(dist.ReduceOptions, opts, timeout, rootRank=root)
        if op is not None:
            given.reduceOp = op
        tensor = one(tensors)

        def start(to: Operation) -> Steps:
            return calls.reduce(self, tensor, given.reduceOp, given.rootRank, to)

        return self._run("reduce", start, [tensor], given)

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Collect all ranks' tensors, in a list."""
        given = options_of(AllgatherOptions, opts, timeout)
        into, mine = list_of(outputs), one(inputs)
        return self._run("all_gather", lambda to: calls.all_gather(self, into, mine, to), [into], given, [mine])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> GroupWork:
        """Collect all ranks' tensors in one, behind each other."""
        given = options_of(AllgatherOptions, opts)
        return self._run("all_gather_single", lambda to: calls.all_gather(self, output, mine, to), [output], given)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """Collect several tensors of all ranks, in a list for each rank."""
        given = options_of(AllgatherOptions, opts)
        # There is a list for each rank, in which tensor i is what the rank has passed as input i.
        outputs = [list(each) for each in zip(*output_lists, strict=True)]
        return self._each("all_gather_coalesced", calls.all_gather, outputs, inputs, given)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """Collect several tensors of all ranks, each in one behind each other."""
        given = options_of(AllgatherOptions, opts)
        return self._each("all_gather_single_coalesced", calls.all_gather, outputs, inputs, given)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> GroupWork:
        """Combine all ranks' lists of tensors; rank r gets tensor r."""
        given = options_of(dist.ReduceScatterOptions, opts, timeout, reduceOp=op)
        output, every = one(outputs), list_of(inputs)

        def start(to: Operation) -> Steps:
            return calls.reduce_scatter(self, output, every, given.reduceOp, to)

        return self._run("reduce_scatter", start, [output], given)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> GroupWork:
        """Combine all ranks' tensors; rank r gets part r."""
        given = options_of(dist.ReduceScatterOptions, opts)

        def start(to: Operation) -> Steps:
            return calls.reduce_scatter(self, output, whole, given.reduceOp, to)

        return self._run("reduce_scatter_single", start, [output], given)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        """Combine several tensors of all ranks each; rank r gets part r of each."""
        given = options_of(dist.ReduceScatterOptions, opts)

        def one(group: ProcessGroupHpcdl, output: Tensor, whole: Tensor, to: Operation) -> Steps:
            return calls.reduce_scatter(group, output, whole, given.reduceOp, to)

        return self._each("reduce_scatter_single_coalesced", one, outputs, inputs, given)

    def _each(self, name: str, one: Callable[..., Steps], outputs: Any, inputs: Any, given: Any) -> GroupWork:
        """The same with each pair of an output and an input, as one work."""
        results = list(outputs)
        pairs = list(zip(results, inputs, strict=True))

        def start(to: Operation) -> Steps:
            for output, mine in pairs:
                yield from together(self, to, partial(one, self, output, mine))

        return self._run(name, start, results, given)

    def gather(
        self, outputs: Lists, inputs: Tensors, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> GroupWork:
        """All ranks' tensors on the root, in a list."""
        given = options_of(dist.GatherOptions, opts, timeout, rootRank=root)
        into, mine = list_of(outputs), one(inputs)
        return self._run("gather", lambda to: moves.gather(self, into, mine, given.rootRank, to), [into], given, [mine])

    def scatter(
        self, outputs: Tensors, inputs: Lists, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> GroupWork:
        """To each rank its own of the root's tensors."""
        given = options_of(dist.ScatterOptions, opts, timeout, rootRank=root)
        output, every = one(outputs), list_of(inputs)
        return self._run("scatter", lambda to: moves.scatter(self, output, every, given.rootRank, to), [output], given)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None, timeout: Any = None
    ) -> GroupWork:
        """Tensor r of each rank's list goes to rank r."""
        given = options_of(dist.AllToAllOptions, opts, timeout)
        into, every = list(outputs), list(inputs)
        return self._run("all_to_all", lambda to: moves.all_to_all(self, into, every, to), into, given)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> GroupWork:
        """Part r of each rank's tensor goes to rank r."""
        given = options_of(dist.AllToAllOptions, opts, timeout)
        splits = list(output_splits or ()), list(input_splits or ())

        def start(to: Operation) -> Steps:
            return moves.all_to_all_single(self, output, whole, *splits, to)

        return self._run("all_to_all_single", start, [output], given)

    def barrier(self, opts: Any = None, timeout: Any = None) -> GroupWork:
        """Wait until all ranks have called it, and all that was called before is over."""
        given = options_of(dist.BarrierOptions, opts, timeout)
        return self._run("barrier", lambda to: call.met(self.channel, "", to), [], given)

    # What they were called before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> GroupWork:
        """Send a tensor to a rank."""
        tensor = one(tensors)
        self._check_message(rank, tag)
        name = f"send of {moves.name_of(tensor)} to rank {rank}, tag {tag}"
        work: GroupWork = self._message(
            name,
            lambda: moves.send(self, tensor, rank, tag),
            [tensor],
            lambda lane, task: GroupWork(lane, task, [tensor]),
        )
        return work

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> ReceiveWork:
        """Receive a tensor from a rank."""
        self._check_message(rank, tag)
        return self._receive(one(tensors), rank, f"rank {rank}", tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> ReceiveWork:
        """Receive a tensor from whatever rank: the work's source_rank() says from which."""
        self._check_message(0, tag)
        return self._receive(one(tensors), MPI.ANY_SOURCE, "any rank", tag)

    def _receive(self, tensor: Tensor, rank: int, whom: str, tag: int) -> ReceiveWork:
        source: list[int] = []
        work: ReceiveWork = self._message(
            f"recv of {moves.name_of(tensor)} from {whom}, tag {tag}",
            lambda: moves.receive(self, tensor, rank, tag, source),
            [tensor],
            lambda lane, task: ReceiveWork(lane, task, [tensor], source),
        )
        return work

    def _check_message(self, rank: int, tag: int) -> None:
        moves.check_root(rank, self.channel.size)
        largest = int(self.comm.Get_attr(MPI.TAG_UB) or 32767)
        if not 0 <= tag <= largest:
            raise ValueError(f"tag is between 0 and {largest} with this MPI, not {tag}")

    def _start_coalescing(self, device: object) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: object) -> Together:
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    # ---- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wait for what is under way, and free the communicator."""
        if self._health.broken == CLOSED:
            return
        for lane in (self._lane, *self._messages):
            for task in list(lane.tasks):
                lane.wait(task)
        usable = not self._health.broken
        self._health.broken = CLOSED
        # Of one that is broken messages may still be on their way: MPI cannot be told to forget them.
        if usable and not MPI.Is_finalized():
            self.comm.Free()

    def abort(self) -> None:
        """Give up all that is under way."""
        for lane in (self._lane, *self._messages):
            lane.abort("this process group was aborted")


OTHERS = ("reduce", "broadcast", "allgather", "reduce_scatter")
"""The collectives besides all-reduce that algorithms serve."""
