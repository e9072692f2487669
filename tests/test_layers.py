"""Imports go down only: no part of hpcdl imports from a floor above its own."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import TESTS

SOURCE = TESTS.parent / "src" / "hpcdl"
FLOORS = {
    "errors": 0,
    "collectives": 0,
    "verdict": 0,
    "settings": 0,
    "units": 0,
    "buffers": 1,
    "device": 1,
    "topology": 1,
    "environment": 1,
    "ends": 1,
    "logs": 1,
    "record": 1,
    "trace": 2,
    "watch": 2,
    "shared": 2,
    "channel": 2,
    "inside": 2,
    "execute": 2,
    "choice": 3,
    "tuning": 3,
    "check": 3,
    "call": 4,
    "api": 4,
    "__init__": 4,  # the public face
    "preemption": 4,
    "data": 5,
    "text": 5,
    "torch": 5,
    "compress": 5,
    "sgd": 5,
    "survive": 5,
    "cli": 6,
    "run": 6,
    "__main__": 6,
}

ABOUT_TORCH = ("torch", "compress", "sgd")
"""They are of no use without it."""
TRAINING = (SOURCE / "survive" / "training.py").resolve()
"""Nor is this, and nothing else of its part imports it."""


def files() -> Iterator[tuple[Path, str]]:
    """Every file of the package with the part it belongs to; glob would not follow the link to collectives/."""
    for top in sorted(SOURCE.iterdir()):
        for file in sorted(top.resolve().rglob("*.py")) if top.is_dir() else [top]:
            if file.suffix == ".py":
                yield file, top.stem


def imports(file: Path, part: str) -> Iterator[tuple[str, str]]:
    """The modules that a file imports by full name, and where: at its "top", further "down", or for "types" alone."""
    tree = ast.parse(file.read_text())
    for_types = {
        node
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        where = "top" if node in tree.body else "types" if node in for_types else "down"
        if isinstance(node, ast.Import):
            yield from ((name.name, where) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # relative to the package itself, or to the part
                inside = file.parent == SOURCE or node.level > 1
                module = ".".join(filter(None, ["hpcdl", "" if inside else part, module]))
            yield from ((f"{module}.{name.name}", where) for name in node.names)


def imported_part(module: str) -> str | None:
    """Which part of hpcdl a module belongs to; None for other packages."""
    package, _, rest = module.partition(".")
    if package != "hpcdl":
        return None
    part = rest.partition(".")[0]
    return part if part and ((SOURCE / part).is_dir() or (SOURCE / f"{part}.py").exists()) else "__init__"


@pytest.mark.parametrize(("file", "part"), list(files()), ids=lambda value: getattr(value, "name", value))
def test_imports_go_down_only(file: Path, part: str) -> None:
    assert part in FLOORS, f"{part} has no floor yet: give it one in {Path(__file__).name}"
    for module, where in imports(file, part):
        package = module.partition(".")[0]
        below = imported_part(module)
        if where != "types":  # what a type checker alone reads imports nothing
            assert below is None or FLOORS[below] <= FLOORS[part], f"{file.name} imports upwards: {module}"
        if part == "collectives":
            assert below == part or package in sys.stdlib_module_names, f"{file.name} imports {module}"
        if part not in ABOUT_TORCH and file != TRAINING and where == "top":
            assert package not in ("torch", "cupy"), f"{file.name} imports {package} at its top"
