"""The environment variables, all in one place. Read when the first collective is called."""

from __future__ import annotations

import os


def _seconds(name: str, usual: str) -> float:
    text = os.environ.get(name, usual)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text} is no number of seconds, such as {usual}") from None


ALGORITHM = os.environ.get("HPCDL_ALGORITHM", "auto")
BEGUN = os.environ.get("HPCDL_BEGUN", "")
CHECK = os.environ.get("HPCDL_CHECK", "1") != "0"
NODES = os.environ.get("HPCDL_NODES", "")
SHARED = os.environ.get("HPCDL_SHARED", "1") != "0"
STALL_S = _seconds("HPCDL_STALL_SECONDS", "60")
STALL_ABORT = os.environ.get("HPCDL_STALL_ABORT", "0") == "1"
TRACE = os.environ.get("HPCDL_TRACE", "")
TUNING = os.environ.get("HPCDL_TUNING")

VARIABLES = {
    "HPCDL_ALGORITHM": "ring, ...: how the torch.distributed backend all-reduces, if a group is not told otherwise",
    "HPCDL_BEGUN": "FILE: rank 0 of Survivors makes it, when all ranks have found each other",
    "HPCDL_CHECK": "0: no agreement ahead of every collective; ranks that disagree then hang, or get garbage",
    "HPCDL_DETECT": "0: do not look at what SLURM, PMI and Open MPI have put into the environment",
    "HPCDL_JOBS": "FOLDER: where env.sh lies, for a job of jobs/ that was copied elsewhere",
    "HPCDL_NODES": "3+1 or 0,0,0,1: the ranks of COMM_WORLD behave as if on nodes of so many, for tests",
    "HPCDL_SHARED": "0: no memory is shared between ranks, all goes through messages",
    "HPCDL_STALL_SECONDS": "60: when a collective has waited so long it is said, once, who is missing",
    "HPCDL_STALL_ABORT": "1: the job is ended then",
    "HPCDL_TRACE": "FILE: write what every rank did when, for Perfetto, chrome://tracing or hpcdl trace summary",
    "HPCDL_TUNING": "FILE: the tuning table; 0: none; else the user's own, if there is one",
}
"""What each of them does, as hpcdl doctor prints it."""
