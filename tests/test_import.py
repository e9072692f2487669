"""`import hpcdl` is cheap: it starts no MPI and loads no library that is not needed."""

import multiprocessing
import subprocess
import sys

import pytest

HEAVY = ("mpi4py.MPI", "torch", "cupy", "rich", "mlxtend")


def heavy_modules() -> list[str]:
    """What importing hpcdl has loaded that it should not; for a process that has done nothing else."""
    import hpcdl

    assert hasattr(hpcdl, "allreduce")
    return [name for name in HEAVY if name in sys.modules]


def test_import_loads_neither_mpi_nor_torch() -> None:
    code = f"import sys, hpcdl, hpcdl.collectives; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_loaders_worker_may_import_it(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(heavy_modules).get(timeout=60) == []
