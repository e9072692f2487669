"""NumPy, torch and CuPy arrays as one thing: a flat vector that can be cut, added and sent as bytes.

Floor 1: knows arrays, not MPI. torch and CuPy are never imported here: whoever passes their arrays has done so.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcdl.collectives import Span
from hpcdl.errors import UnsupportedArrayError

Array: TypeAlias = Any
"""A NumPy array, a torch tensor, a CuPy array, or an object with the buffer protocol or DLPack."""

Action: TypeAlias = Callable[[], object]

HALVES = ("float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
TYPES = (*HALVES, "float32", "float64", *INTEGERS, "bool", "complex64", "complex128")


class Family:
    """One library's arrays, or one kind of memory: all that the executor asks of it."""

    def owns(self, x: Array) -> bool:
        """Is x one of ours?"""
        raise NotImplementedError

    def look(self, x: Array) -> Look:
        """What x is: type, shape, strides, read-only or not. UnsupportedArrayError if it is hopeless."""
        raise NotImplementedError

    def flat(self, x: Array) -> tuple[Array, bool]:
        """The elements of x in C order as one dimension, and whether they are a copy."""
        raise NotImplementedError

    def empty(self, like: Array, size: int, dtype: str) -> Array:
        """A new flat array beside `like`, on the same device."""
        raise NotImplementedError

    def ufunc(self, name: str) -> Callable[..., object]:
        """The library's add, multiply, minimum, maximum or true_divide: called (a, b, out=c)."""
        raise NotImplementedError

    def shaped(self, flat: Array, shape: Sequence[int]) -> Array:
        """A flat array seen in a shape."""
        return flat.reshape(shape)

    def put(self, target: Array, source: Array) -> None:
        """Copy source into target, which has the same shape, converting the type."""
        target[...] = source

    def copying(self, target: Array, source: Array) -> Action:
        """A bound `put`."""
        return partial(self.put, target, source)

    def at(self, memory: Any, offset: int, size: int, dtype: str) -> Array:
        """A flat array in somebody's memory (an object with the buffer protocol), from the byte `offset` on."""
        raise NotImplementedError

    def unchanged(self, x: Array, look: Look) -> bool:
        """Does x look as it did? Asked at every call on an array whose plan was kept."""
        return self.look(x) == look

    def mark_changed(self, x: Array) -> None:
        """Tell the library that x was written to behind its back."""

    def host(self, flat: Array) -> npt.NDArray[np.uint8] | None:
        """The bytes of a flat array if they lie in host memory, else None."""
        raise NotImplementedError

    def device(self, flat: Array) -> Device:
        """How to reach a flat array's memory where it is not host memory."""
        raise NotImplementedError


class Device:
    """The memory of a flat device array, as the executor sees it."""

    def synchronize(self) -> None:
        """Wait until the kernels that write this array have ended: MPI reads it behind their back."""
        raise NotImplementedError

    def bytes(self, lo: int, hi: int) -> object:
        """What a CUDA-aware MPI may be handed: an object with __cuda_array_interface__."""
        raise NotImplementedError

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New page-locked host memory, which the device can copy from and to at full speed."""
        raise NotImplementedError

    def download(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        """Copy bytes lo to hi to the host; back when they are there."""
        raise NotImplementedError

    def upload(self, lo: int, hi: int, host: npt.NDArray[np.uint8]) -> None:
        """Copy bytes lo to hi from the host; back when the host memory may be used anew."""
        raise NotImplementedError


class Look(NamedTuple):
    """What an array is, as far as a collective must know before any data moves."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    address: int
    read_only: bool

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes in the elements."""
        return self.size * self.itemsize

    def bounds(self) -> tuple[int, int]:
        """The first byte and the one after the last that the array can touch."""
        if not self.size:
            return self.address, self.address
        reach = [(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return self.address + low, self.address + high + self.itemsize

    def overlaps_itself(self) -> bool:
        """Do two elements share memory, as in a broadcast or expanded array? (Errs on the side of yes.)"""
        extent = self.itemsize
        dimensions = sorted((abs(stride), length) for stride, length in zip(self.strides, self.shape, strict=True))
        for stride, length in dimensions:
            if length > 1 and self.size:
                if stride < extent:
                    return True
                extent += stride * (length - 1)
        return False


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # NumPy puts it together anew each time, for 5 us


class NumpyFamily(Family):
    """NumPy arrays, and whatever shows its memory through the buffer protocol or DLPack."""

    def owns(self, x: Array) -> bool:
        return isinstance(x, np.ndarray)

    def look(self, x: Array) -> Look:
        if isinstance(x, np.ma.MaskedArray):
            raise UnsupportedArrayError("a masked array: what the mask means in a sum is yours to say; pass x.data")
        if not x.dtype.isnative:
            raise UnsupportedArrayError(
                f"an array of type {x.dtype.str} has the other byte order than this machine; "
                "convert it with x.astype(x.dtype.newbyteorder('='))"
            )
        address = x.__array_interface__["data"][0]
        return Look(_name(x.dtype), x.shape, x.strides, x.itemsize, address, not x.flags.writeable)

    def flat(self, x: Array) -> tuple[Array, bool]:
        x = np.asarray(x)  # a subclass's own reshape and arithmetic are not wanted
        return (x.reshape(-1), False) if x.flags.c_contiguous else (x.flatten(), True)

    def empty(self, like: Array, size: int, dtype: str) -> Array:
        return np.empty(size, dtype)

    def ufunc(self, name: str) -> Callable[..., object]:
        return getattr(np, name)  # type: ignore[no-any-return]

    def put(self, target: Array, source: Array) -> None:
        with np.errstate(over="ignore"):  # a sum beyond float16's range is inf, as in any float16 arithmetic
            target[...] = source

    def copying(self, target: Array, source: Array) -> Action:
        return partial(np.copyto if target.dtype == source.dtype else self.put, target, source)

    def at(self, memory: Any, offset: int, size: int, dtype: str) -> Array:
        return np.frombuffer(memory, dtype, size, offset)

    def unchanged(self, x: Array, look: Look) -> bool:
        # A quarter of the time of asking look: NumPy takes 1.7 us to put __array_interface__ together.
        return (
            x.flags.writeable
            and x.shape == look.shape
            and x.strides == look.strides
            and _name(x.dtype) == look.dtype
            and ctypes.addressof(ctypes.c_char.from_buffer(x)) == look.address
        )

    def host(self, flat: Array) -> npt.NDArray[np.uint8] | None:
        return flat.view(np.uint8)  # type: ignore[no-any-return]


@cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")  # torch puts it together anew each time


class Lent:
    """A flat CPU tensor as what NumPy takes the memory of. A tensor's own numpy() would have its storage refuse to be
    resized ever after, which torch's sharded training does with its own."""

    def __init__(self, flat: Array) -> None:
        self._flat = flat  # keeps the memory
        kind = np.dtype(_torch_name(flat.dtype))
        self.__array_interface__ = {
            "version": 3,
            "shape": (flat.numel(),),
            "typestr": kind.str,
            "data": (flat.data_ptr(), False),
        }


def lent(flat: Array) -> npt.NDArray[Any]:
    """The memory of a flat CPU tensor as an array, which keeps the tensor."""
    if not flat.numel():  # it may have no address
        return np.empty(0, _torch_name(flat.dtype))
    return np.asarray(Lent(flat))


class TorchFamily(Family):
    """torch tensors. Those on the CPU lend their memory to NumPy, whose calls cost less, where it has the type."""

    def owns(self, x: Array) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(x, torch.Tensor)

    def look(self, x: Array) -> Look:
        import torch

        if x.layout is not torch.strided or x.is_quantized or x.device.type not in ("cpu", "cuda"):
            raise UnsupportedArrayError(
                f"a torch tensor of layout {x.layout}, type {x.dtype} on {x.device}: "
                "dense tensors on a CPU or a CUDA device are served"
            )
        item = x.element_size()
        dtype = _torch_name(x.dtype)
        if x.device.type == "cuda" and dtype in ("uint16", "uint32", "uint64"):  # on a CPU NumPy adds them
            raise UnsupportedArrayError(f"a torch tensor of {dtype} on {x.device}, where torch cannot add {dtype}")
        return Look(dtype, tuple(x.shape), tuple(stride * item for stride in x.stride()), item, x.data_ptr(), False)

    def flat(self, x: Array) -> tuple[Array, bool]:
        import torch

        x = x.detach()
        lazy = x.is_conj() or x.is_neg()  # a view whose memory holds other numbers
        packed = lazy or not x.is_contiguous()
        if packed:
            x = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        x = x.as_strided((x.numel(),), (1,))  # not view(-1): one element alone may have any stride, and keeps it
        if x.device.type == "cpu" and _torch_name(x.dtype) not in HALVES:
            return lent(x), packed
        return x, packed

    def empty(self, like: Array, size: int, dtype: str) -> Array:
        import torch

        return torch.empty(size, dtype=getattr(torch, dtype), device=like.device)

    def ufunc(self, name: str) -> Callable[..., object]:
        import torch

        return getattr(torch, name)  # type: ignore[no-any-return]

    def shaped(self, flat: Array, shape: Sequence[int]) -> Array:
        import torch

        return (torch.from_numpy(flat) if isinstance(flat, np.ndarray) else flat).view(tuple(shape))

    def put(self, target: Array, source: Array) -> None:
        import torch

        with torch.no_grad():
            target.copy_(torch.from_numpy(source) if isinstance(source, np.ndarray) else source)

    def at(self, memory: Any, offset: int, size: int, dtype: str) -> Array:
        import torch

        kind = getattr(torch, dtype)
        return torch.frombuffer(memory, dtype=kind, count=size, offset=offset) if size else torch.empty(0, dtype=kind)

    def unchanged(self, x: Array, look: Look) -> bool:
        # A third of the time of asking look; layout and device cannot change while the address stays.
        return (
            x.data_ptr() == look.address
            and x.shape == look.shape
            and _torch_name(x.dtype) == look.dtype
            and tuple([stride * look.itemsize for stride in x.stride()]) == look.strides
        )

    def mark_changed(self, x: Array) -> None:
        import torch

        # Autograd would else use a saved tensor that holds other numbers by now, without a word.
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)

    def host(self, flat: Array) -> npt.NDArray[np.uint8] | None:
        import torch

        return lent(flat.view(torch.uint8)) if flat.device.type == "cpu" else None

    def device(self, flat: Array) -> Device:
        from hpcdl.device import TorchDevice

        return TorchDevice(flat)


class CupyFamily(Family):
    """CuPy arrays. CuPy's kernels run on the current device, so each of them makes the array's device current."""

    def owns(self, x: Array) -> bool:
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def adopt(self, x: Array) -> Array:
        """Another library's array as CuPy's, in the same memory."""
        try:
            import cupy
        except ImportError:
            raise UnsupportedArrayError(
                f"a {_kind(x)} in CUDA memory: CuPy would add it, and cannot be imported; "
                "pip install cupy-cuda12x (or cupy-cuda13x)"
            ) from None
        address, read_only = x.__cuda_array_interface__["data"]
        if read_only:
            raise UnsupportedArrayError(f"a read-only {_kind(x)} in CUDA memory; pass a copy")
        # cupy.asarray copies what is not on the current device, and the result would go into the copy.
        where = cupy.cuda.runtime.pointerGetAttributes(address).device if address else None
        with nullcontext() if where is None else cupy.cuda.Device(where):
            return cupy.asarray(x)

    def look(self, x: Array) -> Look:
        return Look(x.dtype.name, x.shape, x.strides, x.itemsize, x.data.ptr, False)

    def flat(self, x: Array) -> tuple[Array, bool]:
        with x.device:
            return (x.reshape(-1), False) if x.flags.c_contiguous else (x.flatten(), True)

    def empty(self, like: Array, size: int, dtype: str) -> Array:
        import cupy

        with like.device:
            return cupy.empty(size, dtype)

    def ufunc(self, name: str) -> Callable[..., object]:
        import cupy

        ufunc = getattr(cupy, name)

        def on_its_device(low: Array, high: Array, out: Array) -> None:
            with out.device:
                ufunc(low, high, out=out)

        return on_its_device

    def put(self, target: Array, source: Array) -> None:
        with target.device:
            target[...] = source

    def host(self, flat: Array) -> npt.NDArray[np.uint8] | None:
        return None

    def device(self, flat: Array) -> Device:
        from hpcdl.device import CupyDevice

        return CupyDevice(flat)


NUMPY, CUPY = NumpyFamily(), CupyFamily()
FAMILIES: list[Family] = [NUMPY, TorchFamily(), CUPY]


def family(x: Array) -> tuple[Family, Array]:
    """The family of x, and x itself or what stands for it (a NumPy or CuPy view of other memory)."""
    for known in FAMILIES:
        if known.owns(x):
            return known, x
    if hasattr(x, "__cuda_array_interface__"):
        return CUPY, CUPY.adopt(x)
    if hasattr(x, "__dlpack__"):
        try:
            return NUMPY, np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise UnsupportedArrayError(f"a {_kind(x)} that gives its memory to nobody here: {error}") from None
    try:
        return NUMPY, np.asarray(memoryview(x))
    except (TypeError, ValueError):
        raise UnsupportedArrayError(
            f"a {_kind(x)} is no array that could be changed in place; pass a NumPy, torch or CuPy array"
        ) from None


def _kind(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


class Vector:
    """Somebody's array as a flat vector in C order: its own memory, or a packed copy to be unpacked at the end."""

    def __init__(self, x: Array, *, writable: bool = True) -> None:
        self.given = x
        self.family, self.array = family(x)
        self.look = self.family.look(self.array)
        if self.look.dtype not in TYPES:
            raise UnsupportedArrayError(f"an array of type {self.look.dtype}; served are {', '.join(TYPES)}")
        if writable and self.look.read_only:
            raise UnsupportedArrayError("a read-only array cannot take the result; pass x.copy(), or an out= array")
        if writable and self.look.overlaps_itself():
            raise UnsupportedArrayError(
                f"elements of the array share memory (shape {self.look.shape}, strides {self.look.strides} bytes), "
                "so it cannot take the result; pass a copy, or an out= array"
            )
        self.owner = self.family
        self.flat, self.packed = self.family.flat(self.array)
        if self.packed:
            self._shaped = self.owner.shaped(self.flat, self.look.shape)
        self._reach()

    def _reach(self) -> None:
        if isinstance(self.flat, np.ndarray):
            self.family = NUMPY  # also where the array was torch's
        self.itemsize = self.look.itemsize
        self.host = self.family.host(self.flat)
        self.device = None if self.host is not None else self.family.device(self.flat)

    def pack(self) -> None:
        """Fetch the array's elements, where it is not in C order."""
        if self.packed:
            self.owner.put(self._shaped, self.array)

    def unpack(self) -> None:
        """Give the array its elements back, and tell its library that they have changed."""
        if self.packed:
            self.owner.put(self.array, self._shaped)
        self.owner.mark_changed(self.array)

    @property
    def dtype(self) -> str:
        """The element type's name, the same for every library: "float32"."""
        return self.look.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.look.size

    def empty(self, size: int, dtype: str | None = None) -> Vector:
        """A new vector beside this one, of this type or another."""
        new = object.__new__(Vector)
        new.family = new.owner = self.family
        new.flat, new.packed = self.family.empty(self.flat, size, dtype or self.dtype), False
        new.array = new.flat
        itemsize = new.flat.dtype.itemsize
        new.look = Look(dtype or self.dtype, (size,), (itemsize,), itemsize, 0, False)
        new._reach()
        return new

    def at(self, memory: Any, offset: int, size: int) -> Array:
        """A flat array of this vector's type in host memory that somebody shows."""
        return self.family.at(memory, offset, size, self.dtype)

    @property
    def can_be_borrowed(self) -> bool:
        """Is it an array's own host memory, and the array one that can be watched?"""
        known = type(self.given).__name__ in ("ndarray", "Tensor", "Parameter")
        return known and not self.packed and self.host is not None and self.size > 0

    def borrowed(self) -> Vector:
        """The same memory, not held on to: whoever uses it must know that the array still lives, and looks the same."""
        new: Vector = object.__new__(Vector)
        new.__dict__.update(self.__dict__)
        new.given = None
        memory = (ctypes.c_char * self.look.nbytes).from_address(self.look.address)
        new.array = new.flat = self.at(memory, 0, self.size)
        new._reach()
        return new

    def __getitem__(self, span: Span) -> Array:
        return self.flat[span.lo : span.hi]

    def put(self, span: Span, source: Array) -> None:
        """Copy a flat array into the span."""
        self.family.put(self[span], source)

    def copying(self, target: Array, source: Array) -> Action:
        """A bound copy between flat arrays, of this type or another."""
        return self.family.copying(target, source)

    def combine(self, ufunc: str, low: Array, high: Array, out: Array) -> Action:
        """A bound `out = ufunc(low, high)`."""
        return partial(self.family.ufunc(ufunc), low, high, out=out)


def lengths_of(shape: int | Sequence[int], dtype: str) -> tuple[str, tuple[int, ...]]:
    """The type and the lengths of an array to be made, if it can be."""
    if dtype not in TYPES:
        raise UnsupportedArrayError(f"an array of type {dtype}; served are {', '.join(TYPES)}")
    lengths = tuple(map(index, shape)) if isinstance(shape, Iterable) else (index(shape),)
    if any(length < 0 for length in lengths):
        raise ValueError(f"a shape has no negative lengths, as {lengths} has")
    return dtype, lengths


def shares_memory(one: Vector, other: Vector) -> bool:
    """Do two arrays have a byte in common?"""
    (low, high), (other_low, other_high) = one.look.bounds(), other.look.bounds()
    if high <= other_low or other_high <= low:
        return False
    if isinstance(one.array, np.ndarray) and isinstance(other.array, np.ndarray):
        # x[::2] and x[1::2] have bounds that overlap and no byte in common. Hard cases count as a yes.
        with suppress(np.exceptions.TooHardError):
            return np.shares_memory(one.array, other.array, max_work=100_000)  # type: ignore[arg-type]
    return True


def same_memory(one: Vector, other: Vector) -> bool:
    """Are two arrays element for element the same memory?"""
    mine, theirs = one.look, other.look
    return (mine.address, mine.shape, mine.strides, mine.dtype) == (
        theirs.address,
        theirs.shape,
        theirs.strides,
        theirs.dtype,
    )


def segments(span: Span, longest: int) -> Iterable[Span]:
    """Cut a span into pieces of at most `longest` elements; an empty one into none."""
    return (Span(lo, min(lo + longest, span.hi)) for lo in range(span.lo, span.hi, longest))
