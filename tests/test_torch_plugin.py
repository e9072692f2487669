"""The backend is known to torch wherever hpcdl is installed, and costs a program that does not use it nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TESTS

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the entry point is found, as an installed package has it."""
    folder = tmp_path / "hpcdl_plugin-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hpcdl-plugin\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nhpcdl = hpcdl_backend:register\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS.parent / "src")])}


def output(code: str, environ: dict[str, str]) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LOADED = "[name for name in ('hpcdl', 'mpi4py') if name in sys.modules]"


def test_importing_torch_makes_the_backend_known_and_loads_nothing(installed: dict[str, str]) -> None:
    code = f"import sys, torch; print(torch.distributed.is_backend_available('hpcdl'), {LOADED})"
    assert output(code, installed) == "True []"
    assert output(code, {**installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == "False []"


def test_torch_can_be_imported_where_mpi_cannot(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')\n")
    code = "import torch; print(torch.distributed.is_backend_available('hpcdl')); import hpcdl.torch"
    assert output(code, installed) == "True"
    code = """
import torch.distributed as dist
try:
    dist.init_process_group("hpcdl", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""
    assert output(code, installed) == "no MPI here"


def test_a_plugin_that_fails_does_not_break_torch() -> None:
    code = """
import torch, hpcdl_backend
torch.distributed.Backend.register_backend = None
torch.distributed.Backend.backend_list = []
hpcdl_backend.register()
"""
    output(code, {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def test_one_process_needs_no_launcher(installed: dict[str, str]) -> None:
    code = """
import torch, torch.distributed as dist
dist.init_process_group("hpcdl", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
print(x.tolist(), dist.get_backend())
dist.destroy_process_group()
"""
    assert output(code, installed) == "[1.0, 1.0] hpcdl"


def test_processes_that_torchrun_starts_are_told_how_to_start(installed: dict[str, str]) -> None:
    code = """
import torch.distributed as dist
try:
    dist.init_process_group("hpcdl", store=dist.HashStore(), rank=1, world_size=4)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = output(code, installed)
    assert said.startswith("HpcdlError torch was told that this is rank 1 of 4, and MPI knows it as rank 0 of 1")
    assert "mpiexec -n 4 python -m hpcdl.run SCRIPT" in said
