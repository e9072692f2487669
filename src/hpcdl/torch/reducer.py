"""When which gradients are reduced: the machinery below DistributedDataParallel and DistributedOptimizer.

A hook on every parameter moves its gradient into a bucket, where it stays. From that moment until the reduction is over
bucket memory is the library's; at all other times it is this rank's alone, so clipping and optimisers that write into
gradients are safe. All ranks reduce the buckets in one order, which is fixed when they are made, whatever order the
gradients come in.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

import hpcdl
from hpcdl.torch.buckets import Bucket, Named, Slot, group
from hpcdl.torch.hooks import GradBucket
from hpcdl.torch.memory import zeros
from hpcdl.torch.sparse import add_up

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.execute import Plan
    from hpcdl.torch.scaler import GradScaler

MIB = 1 << 20

NAP_S = 5e-5
"""How long the progress thread sleeps between two looks. It never spins: the core is the backward pass's."""

CommHook: TypeAlias = Callable[[Any, GradBucket], "torch.futures.Future[Any] | Tensor"]


class Reducer:
    """The gradients of some parameters in buckets, and their reduction."""

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        comm: MPI.Comm | None,
        *,
        bucket_cap_mb: float,
        first_bucket_mb: float,
        algorithm: str,
        average: bool,
        overlap: bool,
        sparse: frozenset[str] = frozenset(),
        static: bool = False,
    ) -> None:
        self.comm = own_communicator(comm)
        self.named = [Named(*each) for each in named]
        self.average, self.overlap, self.static = average, overlap, static
        self._caps = int(bucket_cap_mb * MIB), int(first_bucket_mb * MIB)
        self._algorithm, self._sparse_names = algorithm, sparse
        self.hook: tuple[Any, CommHook] | None = None
        self.scaler: GradScaler | None = None
        """It looks at this rank's gradients before they are reduced."""
        self.unused: list[str] = []
        """The parameters that no rank used before the last reduction."""
        self.buckets: list[Bucket] = []
        self._handles: list[Any] = []
        self._progress: Progress | None = None
        self.unannounced: Callable[[], object] = lambda: None
        """Called when a gradient comes from a backward pass that nobody has announced."""
        self._build()

    # ---- buckets -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Put all parameters that want a gradient into new buckets (a collective call)."""
        self._release()
        self._look = self._as_they_are()
        wanting = [each for each in self.named if each.parameter.requires_grad]
        dense = [each for each in wanting if each.name not in self._sparse_names]
        self._sparse = [each for each in wanting if each.name in self._sparse_names]
        self.buckets = []
        for index, numbers in enumerate(group([each.parameter for each in dense], *self._caps)):
            self.buckets.append(Bucket(index, [dense[number] for number in numbers], numbers, self.comm))
        self.slots = sorted((slot for bucket in self.buckets for slot in bucket.slots), key=lambda slot: slot.number)
        for bucket in self.buckets:
            bucket.bind(self._plan)
            assert bucket.plan is not None and bucket.plan.about is not None
            bucket.plan.about.bucket = bucket.index
        # Who has used what: a parameter that no rank has used keeps its gradient as it was, and None above all, since
        # AdamW would decay a weight whose gradient is zeros.
        self._used = zeros(max(1, len(self.slots)), torch.uint8, self.comm)
        self._used_plan = hpcdl.plan_allreduce(self._used, self.comm, op="max")
        me = weakref.ref(self)
        for slot in self.slots:
            self._listen(slot.parameter, partial(_arrived, me, slot))
            if slot.parameter.grad is not None:
                slot.take(slot.parameter.grad)
        for each in self._sparse:
            self._listen(each.parameter, partial(_arrived, me, None))
        # How often each parameter's hook is called in one backward pass, more than once where a block is recomputed.
        self._expected = [0] * len(self.slots)
        self._knows_use = False
        self.reset()

    def _listen(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _plan(self, flat: Tensor) -> Plan:
        op = "mean" if self.average else "sum"
        return hpcdl.plan_allreduce(flat, self.comm, op=op, algorithm=self._algorithm)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bucket in self.buckets:
            bucket.close()

    def _as_they_are(self) -> list[tuple[object, ...]]:
        return [(each.requires_grad, each.dtype, each.shape, each.device) for _, each in self.named]

    def refresh(self) -> None:
        """Make the buckets anew if a parameter was frozen, unfrozen or converted: on all ranks at the same step."""
        if self._look != self._as_they_are():
            self._build()

    # ---- one backward pass ---------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Be ready for a backward pass, also behind one that raised."""
        self.running = self._synchronising = False
        self._counts = [0] * len(self.slots)
        self._missing = [sum(self._expected[slot.number] for slot in bucket.slots) for bucket in self.buckets]
        self._launched = 0

    def begin(self, *, synchronise: bool, then: Callable[[], None]) -> None:
        """A backward pass has begun, to reduce or not; `then` is called at its end."""
        if not self.running:
            self.running = True
            at_the_end_of_backward(then)
            self._refuse_twice()
        self._synchronising |= synchronise

    def end(self) -> bool:
        """The backward pass has ended: was it one to reduce?"""
        synchronising = self._synchronising
        self._expected = [max(pair) for pair in zip(self._expected, self._counts, strict=True)]
        return synchronising

    def arrived(self, slot: Slot) -> None:
        """A parameter's gradient has been added up."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) gave {slot.name} a gradient that cannot be kept in a bucket: take second "
                "derivatives by torch.autograd.grad, whose result is not reduced"
            )
        if not slot.holds(gradient):
            slot.take(gradient)
        slot.used = True
        self._counts[slot.number] += 1
        if self.overlap and self._synchronising and self.hook is None:
            self._launch_what_is_ready(slot)

    def _launch_what_is_ready(self, slot: Slot) -> None:
        """Hand over the next buckets in the order, as far as all that they wait for is there."""
        index, count = slot.bucket.index, self._counts[slot.number]
        if index < self._launched:
            raise RuntimeError(
                f"{slot.name} got a gradient for the {count}th time in one backward pass, which has never been so many "
                "before: its bucket is on its way already. Pass overlap=False"
            )
        if count <= self._expected[slot.number]:
            self._missing[index] -= 1
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            bucket = self.buckets[self._launched]
            if not all(self._expected[slot.number] for slot in bucket.slots):
                return  # one that was never used may be now; if it is not, its zeros are put in at the end
            if self.scaler is not None:
                self.scaler.look(self, [bucket])
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        if self._progress is None:
            self._progress = Progress()
            weakref.finalize(self, self._progress.stop)
        self._launched += 1
        assert bucket.plan is not None
        self._progress.put(partial(run_asleep, bucket.plan))

    # ---- the reduction -------------------------------------------------------------------------------------------

    def reduce(self, *, joined: bool = False) -> None:
        """Reduce all gradients, those on their way too (a collective call). A joined rank puts in zeros.

        Behind it the used parameters' gradients are in their buckets, the same on all ranks.
        """
        self._agree()
        waiting = [] if joined else self._fill_in()
        rest = self.buckets[self._launched :]
        if joined:
            for bucket in rest:
                bucket.flat.zero_()
        spoilt = self._look_at(rest, [] if joined else self._sparse)
        for bucket in rest:
            if spoilt:
                for slot in bucket.slots:  # not the gaps between them, which stay zeros
                    slot.view.fill_(torch.nan)
            elif self.hook is not None:
                self._hand_to_hook(bucket, *self.hook)
            elif self.overlap:
                self._launch(bucket)
            else:
                assert bucket.plan is not None
                bucket.plan()
        if self._progress is not None:
            self._progress.wait()
        for each in self._sparse:
            add_up(each.parameter, self.comm, average=self.average, joined=joined)
        self._share_use(waiting, joined)
        self.reset()

    def _agree(self) -> None:
        """All ranks come to reduce: the plans would not notice that one is elsewhere, as in a forward pass."""
        from hpcdl.call import channel
        from hpcdl.check import agree
        from hpcdl.execute import finish

        finish(agree(channel(self.comm), f"the reduction of {len(self.slots)} gradients")).end()

    def _fill_in(self) -> list[Slot]:
        """Put in zeros for what this rank has not used; what slots are those?

        A gradient from before counts too: it is put in, and kept aside for the case that nobody has used it.
        """
        waiting = []
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is None:  # also if the user has thrown it away since
                slot.used = False
                slot.view.zero_()
            elif not slot.holds(gradient):
                slot.view.copy_(gradient)
            elif slot.used:
                continue
            else:
                slot.parameter.grad = gradient.clone()
            waiting.append(slot)
        return waiting

    def _look_at(self, rest: Sequence[Bucket], sparse: Sequence[Named]) -> bool:
        """Have the scaler look. Must hooks not be called, as some rank would mix an inf or nan into what they keep?"""
        if self.scaler is None:
            return False
        found = self.scaler.look_at_rest(self, rest, sparse)
        return self.hook is not None and bool(hpcdl.allreduce(torch.tensor([int(found)]), self.comm, op="max"))

    def _share_use(self, waiting: Sequence[Slot], joined: bool) -> None:
        """Find out what any rank has used: that has a gradient on all ranks now, the rest keeps what it had."""
        if not (self.static and self._knows_use):
            self._used.copy_(torch.tensor([not joined and slot.used for slot in self.slots] or [False]))
            self._used_plan()
            self._knows_use = True
        used = self._used.tolist()
        for slot in waiting:
            if used[slot.number]:
                slot.parameter.grad = slot.view
        self.unused = [slot.name for slot in self.slots if not used[slot.number]]
        for slot in self.slots:
            slot.used = False

    def _hand_to_hook(self, bucket: Bucket, state: Any, hook: CommHook) -> None:
        result = hook(state, GradBucket(bucket, len(self.buckets)))
        result = result.wait() if isinstance(result, torch.futures.Future) else result
        if isinstance(result, list | tuple):  # as futures of torch's own collectives give it
            (result,) = result
        if result.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(result.view(-1))

    def _refuse_twice(self) -> None:
        """What was reduced is not reduced again with something added to it: that is right for a mean only."""
        if self.average and self.hook is None:
            return
        for slot in self.slots:
            gradient = slot.parameter.grad
            if not slot.used and gradient is not None and slot.holds(gradient) and bool(gradient.any()):
                raise RuntimeError(
                    f"the gradient of {slot.name} was reduced in an earlier backward pass and would be once more: call "
                    "zero_grad() in between, or run all but the last backward pass under no_sync()"
                )

    def scale(self, factor: float) -> None:
        """Multiply all gradients, as they stand in the buckets behind a reduction."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)
        for each in self._sparse:
            if each.parameter.grad is not None:
                each.parameter.grad.mul_(factor)


def _arrived(me: weakref.ref[Reducer], slot: Slot | None, _: Tensor) -> None:
    """The hook of a parameter, which must not keep the reducer alive: the module may be wrapped anew."""
    reducer = me()
    if reducer is None:
        return
    if not reducer.running:
        if slot is not None:
            slot.used = True  # it is new, which the search for what was reduced already must know
        reducer.unannounced()
    if slot is not None:
        reducer.arrived(slot)


def at_the_end_of_backward(then: Callable[[], None]) -> None:
    """Call it once when the outermost backward pass is over, from inside that pass.

    torch's own FullyShardedDataParallel and DistributedDataParallel use the same entry; it has no public name.
    """
    torch.autograd.Variable._execution_engine.queue_callback(then)


def run_asleep(plan: Plan) -> None:
    """Run a plan without taking the core from the backward pass."""
    from hpcdl.record import ENDED, now

    operation = plan.enter(0)
    try:
        for awaited in plan.steps():
            while not awaited.Test():
                time.sleep(NAP_S)
    finally:
        operation[ENDED] = now()


class Progress:
    """A thread that does what it is given, in that order."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # A daemon: a rank that ends on an error must not wait for it.
        threading.Thread(target=self._work, name="hpcdl progress", daemon=True).start()

    def put(self, task: Callable[[], object]) -> None:
        """Do this behind what was given before."""
        self._tasks.put(task)

    def wait(self) -> None:
        """Until all is done. Raises what went wrong."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread behind what it has been given."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # told by wait()
                self._error = self._error or error


def own_communicator(comm: MPI.Comm | None) -> MPI.Intracomm:
    """The communicator that gradients travel on, one for each of the user's and freed with it.

    A progress thread's collectives must not come between those that the main thread calls.
    """
    from hpcdl.call import channel

    own = channel(comm)
    if own.training is None:
        own.training = own.wire.Dup()
    return own.training
