"""What all ranks should have alike: objects, parameters, optimiser state, metrics."""

from __future__ import annotations

import hashlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import hpcdl
from hpcdl.buffers import lent
from hpcdl.errors import MismatchError
from hpcdl.verdict import agree, difference

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdl.channel import Channel

Made = TypeVar("Made")
Named: TypeAlias = list[tuple[str, Tensor]]
Parameters: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]

# Small tensors travel together, so that each does not pay a message's latency; their copies are all the memory that a
# broadcast takes.
BATCH_BYTES = 32 << 20

NO_PICKLE, NO_OBJECT = "the object cannot be pickled", "the object cannot be rebuilt from its pickle"


# ---- objects -------------------------------------------------------------------------------------------------------


def broadcast_object(obj: Any, comm: MPI.Comm | None = None, *, root: int = 0) -> Any:
    """Give every rank the root's object; the root gets its own back, the others a copy.

    The object is anything that pickle takes, of any size; what the other ranks pass is not looked at. All ranks get
    the same TypeError where it cannot be pickled, or cannot be rebuilt on some rank.
    """
    own = _channel(comm, root)
    at_root = own.rank == root
    packed = _attempt(own, NO_PICKLE, TypeError, lambda: _pack(obj) if at_root else None)
    received = _hand_out(own, packed, root)
    return _attempt(own, NO_OBJECT, TypeError, lambda: obj if at_root else _unpack(received))


def allgather_object(obj: Any, comm: MPI.Comm | None = None) -> list[Any]:
    """The objects of all ranks, in rank order, on every rank: its own, and copies of the others'.

    An object is anything that pickle takes, of any size. All ranks get the same TypeError where one cannot be pickled,
    or cannot be rebuilt on some rank.
    """
    own = _channel(comm)
    packed = _attempt(own, NO_PICKLE, TypeError, lambda: _pack(obj))
    received = [_hand_out(own, packed, root) for root in range(own.size)]
    return _attempt(
        own, NO_OBJECT, TypeError, lambda: [obj if root == own.rank else _unpack(r) for root, r in enumerate(received)]
    )


def _channel(comm: MPI.Comm | None, root: int = 0) -> Channel:
    """The communicator's channel, once all ranks agree on the root."""
    # Importing it starts MPI, which a data loader's worker must not.
    from hpcdl.call import channel

    own = channel(comm)
    if found := difference(own.wire, "root", root):
        raise MismatchError(found)
    if not 0 <= root < own.size:
        raise ValueError(f"root {root} is no rank of the communicator, which has {own.size}")
    return own


def _attempt(own: Channel, failure: str, error: type[Exception], make: Callable[[], Made]) -> Made:
    """What make gives; where it fails on any rank, all raise the same error."""
    made: Any = None
    problem = None
    try:
        made = make()
    except Exception as raised:
        problem = f"{failure}: {type(raised).__name__}: {raised}"
    if found := agree(own.wire, problem):
        raise error(found)
    result: Made = made
    return result


def _pack(obj: Any) -> list[pickle.PickleBuffer]:
    """The object's pickle, and beside it the memory of the arrays in it, which is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return [pickle.PickleBuffer(data), *buffers]


def _unpack(packed: Any) -> Any:
    data, *buffers = packed
    return pickle.loads(data, buffers=buffers)


def _hand_out(own: Channel, packed: Any, root: int) -> Any:
    """The root's pickle on every rank."""
    from mpi4py.util import pkl5  # which sends buffers of more than 2 GiB too, and without a copy

    return pkl5.Intracomm(own.wire).bcast(packed, root)


# ---- parameters ----------------------------------------------------------------------------------------------------


def broadcast_parameters(parameters: Parameters, comm: MPI.Comm | None = None, *, root: int = 0) -> None:
    """Give every rank the root's parameters, in place.

    Takes a module (its parameters and buffers), a state_dict, named_parameters() or plain tensors: dense ones of any
    shape, layout and type, on all ranks with the same names in the same order, and with the same shapes and types;
    else all ranks get the same `MismatchError`, which names the first parameter that is not, and its rank. What is no
    such tensor is the same TypeError on all ranks.
    """
    own = _channel(comm, root)
    named = _checked(own, parameters)
    compare_kinds(own, kinds_of(named), root)
    _broadcast([tensor for _, tensor in named], comm, root)


def check_consistent(parameters: Parameters, comm: MPI.Comm | None = None) -> str | None:
    """Which parameter is the first that is not bit for bit the same on all ranks, and on which rank; None if all are.

    Takes what `broadcast_parameters` does, with the same TypeError: of a module it compares the buffers too. All ranks
    get the same answer, also where the names, shapes or types differ. Bits are compared, so 0.0 is not -0.0, and a NaN
    is itself; layouts are not. What travels is one hash a rank (BLAKE2b of 16 bytes), and where these differ one a
    parameter.
    """
    own = _channel(comm)
    named = _checked(own, parameters)
    kinds = kinds_of(named)
    hashes = [hashlib.blake2b(lent(_bytes(tensor).cpu()).data, digest_size=16).digest() for _, tensor in named]
    whole = hashlib.blake2b(repr((kinds, hashes)).encode(), digest_size=16).digest()
    if len(set(own.wire.allgather(whole))) == 1:
        return None
    if found := _differing(own, kinds, 0):
        return found
    theirs = own.wire.bcast(hashes)
    first = next((place for place, (mine, its) in enumerate(zip(hashes, theirs, strict=True)) if mine != its), None)
    places = own.wire.allgather(first)
    place, rank = min((place, rank) for rank, place in enumerate(places) if place is not None)
    return f"{named[place][0]!r} on rank {rank} has not the bits that it has on rank 0"


def _checked(own: Channel, parameters: Parameters) -> Named:
    """The tensors with their names, once they are in order on all ranks."""

    def named() -> Named:
        found = list(_named(parameters))
        for name, tensor in found:
            if problem := _problem(tensor):
                raise TypeError(f"{name!r} is {problem}")
        return found

    return _attempt(own, "the parameters cannot be used", TypeError, named)


def _named(parameters: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(parameters, nn.Module):
        yield from parameters.named_parameters()
        yield from parameters.named_buffers()
    elif isinstance(parameters, Mapping):
        yield from parameters.items()
    elif isinstance(parameters, Tensor):
        yield "tensor", parameters  # else its rows
    else:
        for number, entry in enumerate(parameters):
            yield entry if isinstance(entry, tuple) else (f"tensor {number}", entry)


def _problem(tensor: Any) -> str | None:
    """Why something cannot be sent or written to as a tensor, if so."""
    if not isinstance(tensor, Tensor):
        return f"of type {type(tensor).__name__}, no tensor: use broadcast_object for such things"
    if is_lazy(tensor):
        return "not initialised yet: run one batch through the model first"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"no dense tensor (layout {tensor.layout}, type {tensor.dtype})"
    if tensor.device.type == "meta":
        return "on the meta device, where there are no values"
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        return "expanded: several of its elements are one in memory"
    return None


def kinds_of(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """The names, each with the shape and type in words."""
    return [
        (name, f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)} on {one.device.type}")
        for name, one in named
    ]


def compare_kinds(own: Channel, kinds: list[tuple[str, str]], root: int) -> None:
    """All ranks must have the same names and kinds as the root; else all raise, with the first difference."""
    if found := _differing(own, kinds, root):
        raise MismatchError(found)


def _differing(own: Channel, kinds: list[tuple[str, str]], root: int) -> str | None:
    """The first name, shape or type that is not as on the root, as one line that all ranks get alike."""
    theirs: list[tuple[str, str]] = own.wire.bcast(kinds, root)
    return agree(own.wire, _first_difference(kinds, theirs, root))


def _first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]], root: int) -> str | None:
    if mine == theirs:
        return None
    names, their_names = [name for name, _ in mine], [name for name, _ in theirs]
    for name in their_names:
        if name not in set(names):
            return f"{name!r} is missing, which rank {root} has"
    for name in names:
        if name not in set(their_names):
            return f"{name!r} is one that rank {root} has not"
    for (name, kind), (their_name, their_kind) in zip(mine, theirs, strict=False):
        if name != their_name:
            return f"{name!r} stands where rank {root} has {their_name!r}: all ranks must have the same order"
        if kind != their_kind:
            return f"{name!r} is {kind}, and on rank {root} {their_kind}"
    return f"there are {len(mine)} tensors, and on rank {root} {len(theirs)}: some name stands there twice"


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], comm: MPI.Comm | None, root: int) -> None:
    """Give every rank the root's tensors, which have been compared."""
    from hpcdl.call import channel

    own = channel(comm)
    for batch in _batches(tensors):
        flat = torch.cat([_bytes(tensor) for tensor in batch])
        hpcdl.broadcast(flat, comm, root=root)
        if own.rank != root:
            for tensor, piece in zip(batch, torch.split(flat, [one.nbytes for one in batch]), strict=True):
                tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, of one type and together of BATCH_BYTES, or one alone."""
    # Of one type, since within a mixture some would not begin where their type's elements may.
    waiting: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        batch = waiting.setdefault((tensor.dtype, tensor.device), [])
        if batch and sum(one.nbytes for one in batch) + tensor.nbytes > BATCH_BYTES:
            yield batch
            batch = waiting[tensor.dtype, tensor.device] = []
        batch.append(tensor)
    yield from waiting.values()


def _bytes(tensor: Tensor) -> Tensor:
    """The elements in C order, as bytes: they travel whatever their type."""
    flat: Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8)


# ---- optimisers ----------------------------------------------------------------------------------------------------


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, comm: MPI.Comm | None = None, *, root: int = 0) -> None:
    """Give every rank the root's optimiser state and options, such as the learning rate, each of the type it has there.

    What the root has is what all have afterwards, also where it alone has loaded a checkpoint, or has no state yet. A
    state of its parameter's shape lies in memory as this rank's parameter does: fused optimisers rely on it.

    The optimisers must be of one class and hold parameters of the same shapes and types in the same groups; else all
    ranks get the same `MismatchError`. State that cannot be pickled is the same TypeError on all ranks, and what the
    optimiser's load_state_dict refuses on any rank the same ValueError.
    """
    own = _channel(comm, root)
    at_root = own.rank == root
    if found := difference(own.wire, "class of optimiser", type(optimizer).__qualname__):
        raise MismatchError(found)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    named = (
        (f"group {number}, parameter {place}", one)
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
    )
    compare_kinds(own, kinds_of(named), root)

    nothing: tuple[bytes, list[Tensor]] = (b"", [])
    data, tensors = _attempt(
        own,
        "the optimiser's state cannot be pickled",
        TypeError,
        lambda: _set_apart(optimizer.state_dict()) if at_root else nothing,
    )
    data, wanted = broadcast_object(
        (data, [(one.shape, one.dtype, one.device.type == "cpu") for one in tensors]), comm, root=root
    )
    if not at_root:
        device = parameters[0].device if parameters else None
        tensors = [torch.empty(shape, dtype=kind, device="cpu" if cpu else device) for shape, kind, cpu in wanted]
    _broadcast(tensors, comm, root)

    def load() -> None:
        if not at_root:
            _load(optimizer, parameters, _put_back(data, tensors))

    _attempt(own, "the optimiser cannot load the root's state", ValueError, load)


def _set_apart(state: Any) -> tuple[bytes, list[Tensor]]:
    """The state's pickle without its tensors, at whatever depth they are, and these."""
    places: dict[int, int] = {}
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if type(obj) is not Tensor or _problem(obj):
                return None
            if id(obj) not in places:
                places[id(obj)] = len(tensors)
                tensors.append(obj)
            return places[id(obj)]

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(state)
    return file.getvalue(), tensors


def _put_back(data: bytes, tensors: list[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: Any) -> Tensor:
            tensor: Tensor = tensors[place]
            return tensor

    return Unpickler(io.BytesIO(data)).load()


@torch.no_grad()
def _load(optimizer: torch.optim.Optimizer, parameters: list[Tensor], state: dict[str, Any]) -> None:
    """Load the state, and undo load_state_dict's casts: it gives each tensor its parameter's type."""
    optimizer.load_state_dict(state)
    for number, entries in state["state"].items():
        if not isinstance(number, int):
            continue
        parameter = parameters[number]
        for name, value in entries.items():
            if not isinstance(value, Tensor):
                continue
            device = optimizer.state[parameter][name].device
            alike = parameter if value.shape == parameter.shape else value
            optimizer.state[parameter][name] = torch.empty_like(alike, dtype=value.dtype, device=device).copy_(value)


# ---- metrics -------------------------------------------------------------------------------------------------------


def average_metrics(
    metrics: Mapping[str, Any], comm: MPI.Comm | None = None, *, weights: Any = None
) -> dict[str, float]:
    """The mean of each metric over the ranks, in float64, the same bits on all of them.

    A metric is a number or a tensor of one element. `weights` is this rank's number of samples, or a dict of one for
    each metric; without it all ranks count alike. A rank of weight 0 counts for nothing, whatever its value, and where
    all weights are 0 the mean is nan.

    All ranks must have the same metrics, in any order, else they get the same `MismatchError`; for what is no number,
    and for a negative or infinite weight, the same ValueError.
    """
    own = _channel(comm)
    names = _attempt(own, "a metric's name is a str", TypeError, lambda: sorted(map(_text, metrics)))
    if found := difference(own.wire, "metrics", names):
        raise MismatchError(found)

    def parts() -> Tensor:
        weighed = torch.zeros(len(names), 2, dtype=torch.float64)
        for place, name in enumerate(names):
            weight = 1.0 if weights is None else float(weights[name] if isinstance(weights, Mapping) else weights)
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name!r} has weight {weight}, which is no number of samples")
            if weight:  # the mean over no sample is nan, and nan times 0 too
                weighed[place, 0], weighed[place, 1] = float(metrics[name]) * weight, weight
        return weighed

    sums = _attempt(own, "the metrics cannot be averaged", ValueError, parts)
    hpcdl.allreduce(sums, comm)
    means = dict(zip(names, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
    return {name: means[name] for name in metrics}


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is none")
    return name
