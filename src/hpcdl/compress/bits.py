"""Small unsigned integers and booleans packed into bytes, by operations that every device has."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8)


def packed_bytes(n: int, bits: int) -> int:
    """How many bytes n integers of so many bits take."""
    return -(-n * bits // 8)


def pack(values: Tensor, bits: int) -> Tensor:
    """Each row (the last dimension) of uint8 values below 2**bits, or of booleans, as bytes."""
    _check(bits)
    values = values.view(torch.uint8) if values.dtype is torch.bool else values
    if bits == 8:
        return values.clone()
    n, per_byte = values.shape[-1], 8 // bits
    nbytes = packed_bytes(n, bits)
    if n < nbytes * per_byte:
        values = torch.nn.functional.pad(values, (0, nbytes * per_byte - n))
    # Not neighbours share a byte, but values that are nbytes apart: each operation then runs along contiguous memory.
    planes = values.reshape(*values.shape[:-1], per_byte, nbytes)
    packed = planes[..., 0, :].clone()
    for place in range(1, per_byte):
        packed |= planes[..., place, :] << place * bits
    return packed


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    """The first n values of each row, as uint8."""
    _check(bits)
    if bits == 8:
        return packed[..., :n].clone()
    per_byte, nbytes = 8 // bits, packed_bytes(n, bits)
    planes = packed.new_empty(*packed.shape[:-1], per_byte, nbytes)
    for place in range(per_byte):
        torch.bitwise_right_shift(packed[..., :nbytes], place * bits, out=planes[..., place, :])
    planes &= 2**bits - 1
    return planes.view(*packed.shape[:-1], per_byte * nbytes)[..., :n]


def _check(bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"integers of 1, 2, 4 or 8 bits are packed, not of {bits!r}")
