"""Numbers as people write them on a command line."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 upwards")
    return int(text)


def seed(text: str) -> int:
    """A whole number of 32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 to {2**32 - 1}")
    return int(text)


def rate(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def number_from_0(text: str) -> float:
    """A finite number from 0."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number from 0 upwards")
    return value


def factor(text: str) -> float:
    """A number between 0 and 1."""
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number between 0 and 1")
    return value


def epochs(text: str) -> tuple[int, ...]:
    """Whole numbers from 1, ascending."""
    found = tuple(count(each) for each in text.split(","))
    if list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text}: each epoch comes behind the one before it, as in 30,60,80")
    return found


def momentum(text: str) -> float:
    """A number from 0, below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 to below 1")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1, such as 0.93")
    return value


def number(text: str) -> float:
    """A number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
