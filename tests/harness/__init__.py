"""Tests under MPI: one pytest starts mpiexec for each number of ranks and takes over what the ranks report.

The tests in tests/mpi/ are collected twice. The *parent* (harness.parent) is the pytest a person starts: it shows
each test once per number of ranks, runs none of them, and starts `mpiexec -n N python -m pytest` on all that ask
for N ranks. The *child* (harness.child) is what those ranks run, and also what runs under a user's own
`mpiexec -n 4 python -m pytest tests/mpi`: there all ranks agree on every verdict.
"""

import os
from pathlib import Path

import pytest

RANKS = (1, 2, 3, 4, 5, 7, 8)
TIME_LIMIT_S = 60

# Each launcher tells a rank who it is in a variable of its own. SLURM_PROCID is not among them: it is set in a
# batch script too, where nothing runs under MPI yet.
LAUNCHER_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")

TESTS = Path(__file__).resolve().parents[1]
MPI_FOLDERS = (TESTS / "mpi", TESTS / "planted")


def under_launcher() -> bool:
    """Is this process one of several ranks?"""
    return any(name in os.environ for name in LAUNCHER_VARIABLES)


def needs_ranks(node: pytest.Item) -> bool:
    """Is this a test that runs on several ranks?"""
    return isinstance(node, pytest.Function) and any(folder in node.path.parents for folder in MPI_FOLDERS)


def rank_counts(node: pytest.Item) -> tuple[int, ...]:
    """The numbers of ranks that a test asks for."""
    mark = node.get_closest_marker("ranks")
    return mark.args if mark else RANKS


def time_limit_s(node: pytest.Item) -> float:
    """How long one test may take; pytest-timeout's marker, which cannot interrupt a call into MPI itself."""
    mark = node.get_closest_marker("timeout")
    if mark is None:
        return TIME_LIMIT_S
    return float(mark.args[0] if mark.args else mark.kwargs["timeout"])


def spread(metafunc: pytest.Metafunc, counts: tuple[int, ...]) -> None:
    """Make one item of a test for each number of ranks; parent and child must give them the same names."""
    metafunc.fixturenames.append("ranks")
    metafunc.parametrize("ranks", counts, ids=[f"np{n}" for n in counts])


def register_markers(config: pytest.Config) -> None:
    """Describe the markers of this harness to pytest."""
    config.addinivalue_line("markers", "ranks(n, ...): the numbers of ranks a test under tests/mpi runs on")
    config.addinivalue_line("markers", "timeout(seconds): how long the test may take")


def all_stacks(folder: Path) -> str:
    """The stacks that ranks have left in their folder, each with its rank ahead."""
    text = ""
    for file in sorted(folder.glob("stacks-*"), key=lambda file: int(file.name.partition("-")[2])):
        if stacks := own_frames(file.read_text()):
            text += f"Rank {file.name.partition('-')[2]} stood here:\n{stacks}\n"
    return text


def own_frames(stacks: str) -> str:
    """Stacks without pytest's own frames, thirty under every test, and without threads that only wait."""
    pytests = ("/pluggy/", "/_pytest/", "/pytest/__main__.py", "<frozen runpy>")
    threads = []
    for thread in stacks.split("\n\n"):
        lines = [line for line in thread.splitlines() if not any(part in line for part in pytests)]
        frames = [line for line in lines if line.startswith("  File")]
        if not all("/threading.py" in frame for frame in frames):
            threads.append("\n".join(lines).strip("\n") + "\n")
    return "\n".join(threads)
