"""Sizes and times as people read them: 256 KiB, 3.21 us. Floor 0."""

from __future__ import annotations


def show_bytes(nbytes: int) -> str:
    """In the largest unit that it is a whole number of: 25 MiB, 256 KiB, 1000 B."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        whole, rest = divmod(nbytes, 1 << bits)
        if whole and not rest:
            return f"{whole} {unit}"
    return f"{nbytes} B"


def show_seconds(seconds: float) -> str:
    """With three digits and a unit: 3.21 us, 45.6 ms, 7.89 s."""
    scales = (("s", seconds), ("ms", seconds * 1e3))
    unit, value = next(((unit, value) for unit, value in scales if value >= 0.9995), ("us", seconds * 1e6))
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
