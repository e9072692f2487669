"""What the README and the pages on training show, runs."""

import re
from pathlib import Path

import pytest
from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[2]
PAGES = "large-batches", "compression", "asynchronous", "beyond-synchronous"
SNIPPETS = [
    pytest.param(path, snippet, id=f"{path.stem}-{number}")
    for path in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES))
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("path", "snippet"), SNIPPETS)
def test_the_snippets_run(comm: MPI.Intracomm, path: Path, snippet: str) -> None:
    exec(compile(snippet, str(path), "exec"), {"comm": comm})


@pytest.mark.ranks(1)
def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 8
