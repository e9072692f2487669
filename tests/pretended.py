"""Ranks of one machine that behave as if on several nodes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mpi4py import MPI

from hpcdl import settings


@contextmanager
def on_nodes(comm: MPI.Intracomm, nodes: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """A duplicate whose ranks, and all communicators made meanwhile, seem to be on such nodes."""
    with monkeypatch.context() as patch:
        patch.setattr(settings, "NODES", nodes)
        duplicate = comm.Dup()
        yield duplicate
        duplicate.Free()
