"""The methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hpcdl.compress.dgc import DGC
from hpcdl.compress.half import Half
from hpcdl.compress.method import Method
from hpcdl.compress.powersgd import PowerSGD
from hpcdl.compress.quantise import QSGD, OneBit, SignSGD, TernGrad
from hpcdl.compress.sparse import RandomK, TopK


def _fp16() -> Half:
    return Half(torch.float16)


def _bf16() -> Half:
    return Half(torch.bfloat16)


METHODS: dict[str, Callable[..., Method]] = {
    "dgc": DGC,
    "topk": TopK,
    "randomk": RandomK,
    "onebit": OneBit,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "signsgd": SignSGD,
    "powersgd": PowerSGD,
    "fp16": _fp16,
    "bf16": _bf16,
}
"""What makes each of them."""


def make(name: str, **options: Any) -> Method:
    """The method of that name. ValueError: there is none, or it has no such option, or not of that value."""
    if name not in METHODS:
        raise ValueError(f"{name!r} is no method of compression: there are {', '.join(METHODS)}")
    known = inspect.signature(METHODS[name]).parameters
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{name} has no option {option}: {has}")
    return METHODS[name](**options)
