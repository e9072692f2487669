"""What is only moved, not reduced, where ranks hold different things: messages, gather, scatter, all-to-all.

Each function gives the steps of one operation. Tensors travel as bytes, so all types do. A collective begins with the
agreement of all ranks, like those of hpcdl; a message between two ranks does not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import DistBackendError

from hpcdl.buffers import lent, segments
from hpcdl.channel import PLAIN
from hpcdl.check import PRIVATE, agree
from hpcdl.collectives import Span
from hpcdl.errors import UnsupportedArrayError
from hpcdl.execute import Steps
from hpcdl.record import Operation, traffic

if TYPE_CHECKING:
    from hpcdl.torch.backend.group import ProcessGroupHpcdl as Group

Made = TypeVar("Made")

TAG = PLAIN + 1
"""Of the messages in collectives: those of one group come one after the other."""

MESSAGE_BYTES = 1 << 30
"""Longer ones are cut: MPI counts may be C ints."""


class Flat:
    """A tensor's bytes in C order: its own memory, or a copy to be handed back."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedArrayError(
                f"a tensor of layout {tensor.layout} on {tensor.device}: dense ones on a CPU or CUDA device are served"
            )
        self._tensor = tensor
        plain = tensor.detach()
        lazy = plain.is_conj() or plain.is_neg()  # its memory holds other numbers
        self._own = plain.device.type == "cpu" and plain.is_contiguous() and not lazy
        self._flat = plain if self._own else plain.resolve_conj().resolve_neg().cpu().contiguous()
        # One element alone may have any stride.
        self._flat = self._flat.as_strided((plain.numel(),), (1,))
        self.bytes = lent(self._flat.view(torch.uint8))

    def hand_back(self) -> None:
        """The bytes have changed: let the tensor have them."""
        if not self._own:
            with torch.no_grad():
                self._tensor.copy_(self._flat.view(self._tensor.shape))
        elif not self._tensor.is_inference():
            torch.autograd.graph.increment_version(self._tensor)


class Receive:
    """A message that must be just as long as its buffer."""

    def __init__(self, comm: MPI.Comm, buffer: Any, source: int, tag: int) -> None:
        self._request = comm.Irecv([buffer, len(buffer), MPI.BYTE], source, tag)
        self._wanted, self._status = len(buffer), MPI.Status()

    source = property(lambda self: self._status.Get_source())

    def Start(self) -> None:
        """It is on its way."""

    def Test(self) -> bool:
        """Is it there?"""
        try:
            return self._request.Test(self._status) and self._checked()
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise DistBackendError(f"a message is longer than the {self._wanted} bytes of the tensor here") from None

    def Wait(self) -> object:
        """Wait until it is."""
        self._request.Wait(self._status)
        return self._checked()

    def _checked(self) -> bool:
        count = self._status.Get_count(MPI.BYTE)
        if count != self._wanted:
            raise DistBackendError(
                f"rank {self.source} has sent {count} bytes, and the tensor here has {self._wanted}: both sides pass "
                "tensors of the same type and number of elements"
            )
        return True


def messages(size: int) -> Iterable[slice]:
    """What so many bytes are cut into; nothing is a message too."""
    return [slice(*piece) for piece in segments(Span(0, size), MESSAGE_BYTES)] or [slice(0, 0)]


def exchange(group: Group, sends: dict[int, Flat], receives: dict[int, Flat]) -> Steps:
    """One message to, and one from, each of these ranks; empty ones are not sent."""
    wire, me = group.channel.wire, group.channel.rank
    requests: list[Any] = []
    for rank, flat in receives.items():
        if rank == me:
            flat.bytes[:] = sends[me].bytes
        elif len(flat.bytes):
            requests += [Receive(wire, flat.bytes[piece], rank, TAG) for piece in messages(len(flat.bytes))]
    for rank, flat in sends.items():
        if rank != me and len(flat.bytes):
            requests += [wire.Isend(flat.bytes[piece], rank, TAG) for piece in messages(len(flat.bytes))]
            traffic.sent_bytes += len(flat.bytes)
    try:
        yield from requests
    except BaseException:
        group.channel.interrupted = True
        raise
    for flat in receives.values():
        flat.hand_back()


def agreed(group: Group, operation: Operation, call: str, make: Callable[[], Made]) -> Generator[Any, None, Made]:
    """What `make` makes, once all ranks have made theirs in the same call; what one must refuse, all raise."""
    made: Any = None
    refusal = None
    try:
        made = make()
    except (TypeError, ValueError) as error:
        refusal = error
    operation[0].call = call
    check = yield from agree(group.channel, call, PRIVATE, refusal, operation)
    check.end()
    return made  # type: ignore[no-any-return]


def kind_of(tensor: Tensor) -> str:
    """The type of a tensor, as the ranks compare it."""
    return str(tensor.dtype).removeprefix("torch.")


def name_of(tensor: Tensor) -> str:
    """The type and shape of a tensor."""
    return f"{kind_of(tensor)} {'x'.join(map(str, tensor.shape)) or '()'}"


# ---- collectives ---------------------------------------------------------------------------------------------------


def gather(group: Group, outputs: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Steps:
    """Every rank's tensor on the root; each may have its own length."""
    size, me = group.channel.size, group.channel.rank

    def make() -> tuple[dict[int, Flat], dict[int, Flat]]:
        check_root(root, size)
        if me == root:
            check_count(outputs, size, "gather_list on the root")
        sends, receives = {root: Flat(mine)}, {rank: Flat(one) for rank, one in enumerate(outputs) if me == root}
        if me == root:
            check_equal(outputs[me], mine)
        return sends, receives

    sends, receives = yield from agreed(group, operation, f"gather of {kind_of(mine)} to {root}", make)
    yield from exchange(group, sends, receives)


def scatter(group: Group, output: Tensor, inputs: Sequence[Tensor], root: int, operation: Operation) -> Steps:
    """Each rank gets its own of the root's tensors; each may have its own length."""
    size, me = group.channel.size, group.channel.rank

    def make() -> tuple[dict[int, Flat], dict[int, Flat]]:
        check_root(root, size)
        if me == root:
            check_count(inputs, size, "scatter_list on the root")
            check_equal(output, inputs[me])
        return {rank: Flat(one) for rank, one in enumerate(inputs) if me == root}, {root: Flat(output)}

    sends, receives = yield from agreed(group, operation, f"scatter of {kind_of(output)} from {root}", make)
    yield from exchange(group, sends, receives)


def all_to_all(group: Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Steps:
    """Tensor r of a rank goes to rank r, whose tensor of this rank's number it becomes; of any lengths."""
    size, me = group.channel.size, group.channel.rank

    def make() -> tuple[dict[int, Flat], dict[int, Flat]]:
        check_count(outputs, size, "the list of outputs")
        check_count(inputs, size, "the list of inputs")
        check_equal(outputs[me], inputs[me])
        return dict(enumerate(map(Flat, inputs))), dict(enumerate(map(Flat, outputs)))

    kind = kind_of(inputs[0]) if len(inputs) else "nothing"
    sends, receives = yield from agreed(group, operation, f"all_to_all of {kind}", make)
    yield from exchange(group, sends, receives)


def all_to_all_single(
    group: Group,
    output: Tensor,
    given: Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    operation: Operation,
) -> Steps:
    """The same with one tensor on either side, cut along its first dimension: evenly, or as the splits say."""
    size, me = group.channel.size, group.channel.rank
    # Rows lie behind each other only in a contiguous tensor.
    result = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)

    def make() -> tuple[dict[int, Flat], dict[int, Flat]]:
        pieces = cut(given.detach(), input_splits, size, "input")
        places = cut(result.detach(), output_splits, size, "output")
        check_equal(places[me], pieces[me])
        return dict(enumerate(map(Flat, pieces))), dict(enumerate(map(Flat, places)))

    sends, receives = yield from agreed(group, operation, f"all_to_all_single of {kind_of(given)}", make)
    yield from exchange(group, sends, receives)
    if result is not output:
        with torch.no_grad():
            output.copy_(result)


def all_gather_uneven(group: Group, outputs: Sequence[Tensor], mine: Tensor, operation: Operation) -> Steps:
    """Every rank's tensor on every rank, each of its own length, which all ranks know."""
    size, me = group.channel.size, group.channel.rank

    def make() -> tuple[dict[int, Flat], dict[int, Flat]]:
        check_count(outputs, size, "the list of outputs")
        check_equal(outputs[me], mine)
        return dict.fromkeys(range(size), Flat(mine)), dict(enumerate(map(Flat, outputs)))

    lengths = "+".join(str(each.numel()) for each in outputs)
    call = f"all_gather of {kind_of(mine)}, {lengths} elements"
    sends, receives = yield from agreed(group, operation, call, make)
    yield from exchange(group, sends, receives)


# ---- messages ------------------------------------------------------------------------------------------------------


def send(group: Group, tensor: Tensor, rank: int, tag: int) -> Steps:
    """One message."""
    flat = Flat(tensor)
    requests = [group.comm.Isend(flat.bytes[piece], rank, tag) for piece in messages(len(flat.bytes))]
    traffic.sent_bytes += len(flat.bytes)
    yield from requests


def receive(group: Group, tensor: Tensor, rank: int, tag: int, source: list[int]) -> Steps:
    """One message, from this rank or from any (MPI.ANY_SOURCE), and who has sent it."""
    flat = Flat(tensor)
    for piece in messages(len(flat.bytes)):
        # One cut in pieces comes from one rank.
        message = Receive(group.comm, flat.bytes[piece], rank, tag)
        yield message
        rank = message.source
    flat.hand_back()
    source.append(rank)


# ---- arguments -----------------------------------------------------------------------------------------------------


def cut(tensor: Tensor, splits: Sequence[int], size: int, what: str) -> Sequence[Tensor]:
    """The pieces of a tensor for each rank, along its first dimension."""
    rows = len(tensor) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(f"the {what} has {rows} rows, which {size} ranks cannot share evenly: pass split sizes")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"the split sizes of the {what} are {list(splits)}: they must be {size}, one for each rank, and together "
            f"the {rows} rows"
        )
    return torch.split(tensor, list(splits)) if tensor.dim() else [tensor] * size


def check_root(root: int, size: int) -> None:
    """ValueError: the group has no such rank."""
    if not 0 <= root < size:
        raise ValueError(f"rank {root} is none of the group, which has {size}")


def check_count(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """ValueError: there is not one for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what} holds {len(tensors)} tensors: it must hold one for each of the {size} ranks")


def check_equal(output: Tensor, given: Tensor) -> None:
    """ValueError: what a rank keeps for itself does not fit."""
    if output.dtype != given.dtype or output.numel() != given.numel():
        raise ValueError(f"this rank's own part is {name_of(given)}, and is to go into {name_of(output)}")
