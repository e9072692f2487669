"""Which launch line jobs/env.sh takes, and what it says where something is missing; needs bash alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import TESTS

JOBS = TESTS.parent / "jobs"
pytestmark = [pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash"), pytest.mark.timeout(60)]

OPEN_MPI = "echo 'mpiexec (Open MPI) 5.0.11'"
HYDRA = "echo 'HYDRA build details:'"
PMI2 = "echo 'MPI plugin types are... pmi2'"
NO_PMI2 = "echo 'MPI plugin types are... none'"
SRUN = "srun --mpi=pmi2 --kill-on-bad-exit=1"


def source(
    folder: Path, mpi: str | None, env: dict[str, str] | None = None, **programs: str
) -> subprocess.CompletedProcess[str]:
    """Source env.sh where there are a python whose mpi4py loads that MPI, and these programs."""
    lacks = "echo 'No module named mpi4py' >&2; exit 1"
    programs["python3"] = f"printf '{mpi}\\n{folder}\\n'" if mpi else lacks
    for tool in ("bash", "dirname", "grep", "id", "env"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NAME": "hpcdl-test", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "h[1-4]"}
    script = f'source {JOBS}/env.sh; echo "${{launch[*]}} / $OMP_NUM_THREADS / $here"'
    return subprocess.run(
        [str(folder / "bash"), "-c", script],
        capture_output=True,
        text=True,
        timeout=20,
        env={"PATH": str(folder)} | job | (env or {}),
    )


@pytest.mark.parametrize(
    ("mpi", "programs", "line"),
    [
        ("MPICH", {"srun": PMI2}, SRUN),
        ("Cray MPICH", {"srun": PMI2}, SRUN),
        ("MPICH", {"srun": NO_PMI2, "mpiexec": HYDRA}, "env -u SLURM_NTASKS_PER_NODE {}/mpiexec -n 8"),
        ("Open MPI", {"srun": PMI2, "mpiexec": OPEN_MPI}, "{}/mpiexec -n 8 --bind-to none"),
        ("Intel MPI", {"srun": PMI2, "mpiexec": HYDRA}, "env -u SLURM_NTASKS_PER_NODE {}/mpiexec -n 8"),
    ],
)
def test_the_launch_line_suits_the_mpi(tmp_path: Path, mpi: str, programs: dict[str, str], line: str) -> None:
    done = source(tmp_path, mpi, **programs)
    assert done.returncode == 0, done.stderr
    said, launch = done.stdout.splitlines()
    assert launch == f"{line.format(tmp_path)} / 1 / {JOBS}"
    assert said == f"hpcdl-test, job 7: 8 ranks on h[1-4], {mpi}, {line.format(tmp_path)}"


def test_intels_ranks_are_started_by_srun_where_slurms_library_is_named(tmp_path: Path) -> None:
    library = tmp_path / "libpmi2.so"
    library.touch()
    done = source(tmp_path, "Intel MPI", {"I_MPI_PMI_LIBRARY": str(library)}, srun=PMI2)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith(SRUN), done.stderr


def test_the_user_knows_better(tmp_path: Path) -> None:
    env = {"LAUNCH": "srun --mpi=pmix -c 3", "SLURM_CPUS_PER_TASK": "3"}
    done = source(tmp_path, "LAM", env, srun=PMI2)
    assert done.stdout.splitlines()[-1] == f"srun --mpi=pmix -c 3 / 3 / {JOBS}", done.stderr


@pytest.mark.parametrize(
    ("mpi", "env", "programs", "complaint"),
    [
        (None, {}, {}, "cannot use hpcdl or mpi4py's MPI"),
        ("MPICH", {"PYTHON": "python9"}, {}, "no python9 here"),
        ("Open MPI", {}, {"srun": PMI2}, "there is no mpiexec"),
        ("Open MPI", {}, {"mpiexec": HYDRA}, "mpiexec belongs to another MPI"),
        ("MPICH", {}, {"srun": NO_PMI2, "mpiexec": OPEN_MPI}, "mpiexec is Open MPI's"),
        ("MPICH", {}, {}, "there is no mpiexec"),
        ("LAM", {}, {"srun": PMI2}, "how LAM is started here is not known"),
        ("MPICH", {"LAUNCH": "prun -x"}, {}, "there is no prun"),
    ],
)
def test_what_is_missing_ends_the_job_with_a_line(
    tmp_path: Path, mpi: str | None, env: dict[str, str], programs: dict[str, str], complaint: str
) -> None:
    done = source(tmp_path, mpi, env, **programs)
    assert done.returncode == 1 and done.stdout == ""
    assert complaint in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("env.sh: ")


def test_the_templates_differ_only_where_their_comments_say(tmp_path: Path) -> None:
    find = [line for line in (JOBS / "train.sbatch").read_text().splitlines() if "env.sh" in line or "this=" in line]
    scripts = sorted(JOBS.glob("*.sbatch"))
    assert len(scripts) == 5
    for script in scripts:
        text = script.read_text()
        assert "\n".join(find) in text, script
        for line in text.splitlines():
            if line.startswith(("#SBATCH", "##SBATCH")) and "--job-name" not in line:
                assert " # " in line or "--requeue" in line, f"{script}: no comment on {line}"
        assert subprocess.run(["bash", "-n", str(script)], timeout=20, env=os.environ).returncode == 0
