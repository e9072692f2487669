"""The environment variables, all in one place. Read when the first collective is called."""

from __future__ import annotations

import os


def _seconds(name: str, usual: str) -> float:
    text = os.environ.get(name, usual)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text} is no number of seconds, such as {usual}") from None


CHECK = os.environ.get("HPCDL_CHECK", "1") != "0"
"""HPCDL_CHECK=0 drops the agreement ahead of every collective: ranks that disagree then hang, or get garbage."""

NODES = os.environ.get("HPCDL_NODES", "")
"""HPCDL_NODES=3+1 (or 0,0,0,1) has the ranks of COMM_WORLD behave as if they were on nodes of so many, for tests."""

SHARED = os.environ.get("HPCDL_SHARED", "1") != "0"
"""HPCDL_SHARED=0 has no memory shared between ranks: everything goes through messages."""

STALL_S = _seconds("HPCDL_STALL_SECONDS", "60")
"""HPCDL_STALL_SECONDS=60: who has waited so long for ranks of its node says which, once, and waits on."""

TUNING = os.environ.get("HPCDL_TUNING")
"""HPCDL_TUNING=FILE names the tuning table, HPCDL_TUNING=0 has none; else the user's own is taken, if there is one."""
