"""Bits in bytes: what was packed comes out again, in as few bytes as there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.compress.bits import WIDTHS, pack, packed_bytes, unpack  # noqa: E402


@given(st.data(), st.sampled_from(WIDTHS), st.integers(0, 70), st.integers(1, 3))
def test_what_is_packed_comes_out_again(data: st.DataObject, bits: int, n: int, rows: int) -> None:
    row = st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n)
    values = torch.tensor([data.draw(row) for _ in range(rows)], dtype=torch.uint8)
    packed = pack(values, bits)
    assert packed.dtype is torch.uint8
    assert packed.shape == (rows, packed_bytes(n, bits))
    assert torch.equal(unpack(packed, n, bits), values)
    assert torch.equal(pack(values[0], bits), packed[0])  # of one dimension, and of many, alike


@given(st.lists(st.booleans(), max_size=70))
def test_booleans_take_a_bit_each(values: list[bool]) -> None:
    flags = torch.tensor(values, dtype=torch.bool)
    packed = pack(flags, 1)
    assert len(packed) == -(-len(values) // 8)
    assert torch.equal(unpack(packed, len(values), 1).bool(), flags)


@given(st.sampled_from(WIDTHS), st.integers(1, 70), st.integers(1, 9))
def test_bytes_behind_the_packed_ones_change_nothing(bits: int, n: int, behind: int) -> None:
    values = (torch.arange(2 * n) * 37 % 2**bits).to(torch.uint8).view(2, n)
    packed = torch.nn.functional.pad(pack(values, bits), (0, behind), value=255)
    assert torch.equal(unpack(packed, n, bits), values)


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_leaves_what_it_is_given(bits: int) -> None:
    values = torch.ones(2, 24, dtype=torch.uint8)
    packed = pack(values, bits)
    before = packed.clone()
    packed_again = unpack(packed, 24, bits)
    packed_again.zero_()
    assert values.all() and torch.equal(packed, before)
    packed.zero_()
    assert values.all()


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2, 4 or 8 bits are packed, not of {bits}"):
        pack(torch.zeros(8, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=f"1, 2, 4 or 8 bits are packed, not of {bits}"):
        unpack(torch.zeros(8, dtype=torch.uint8), 8, bits)
