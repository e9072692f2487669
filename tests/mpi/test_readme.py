"""What the README shows, runs."""

import re
from pathlib import Path

import pytest
from mpi4py import MPI

README = Path(__file__).resolve().parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_readmes_snippets_run(comm: MPI.Intracomm, snippet: str) -> None:
    exec(compile(snippet, str(README), "exec"), {"comm": comm})


@pytest.mark.ranks(1)
def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 2
