"""Sizes as people write them on a command line: 25MB, 256KiB."""

from __future__ import annotations

import argparse
import re

from hpcdl.units import show_bytes, show_seconds

__all__ = ["UNITS", "parse_bytes", "show_bytes", "show_seconds"]

# As nccl-tests and the OSU benchmarks have it: KB and KiB alike are 1024 bytes.
UNITS = "such as 64, 256KiB, 25MB or 1G, where K, M and G are powers of 1024"

_BITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """How many bytes a text stands for."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no size {UNITS}")
    value = float(match[1]) * 2 ** _BITS[match[2].lower()]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is {value:g} bytes, which is no whole number")
    return int(value)
