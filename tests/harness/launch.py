"""Start mpiexec from a test, with a time limit, and leave nothing behind."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def mpiexec() -> list[str]:
    """The launcher's words: $MPIEXEC ("srun --mpi=pmi2"), else the mpiexec beside this python, else on the path."""
    if words := shlex.split(os.environ.get("MPIEXEC", "")):
        return words
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise FileNotFoundError("no mpiexec beside this python or on PATH; name one in the variable MPIEXEC")
    return [found]


def is_open_mpi() -> bool:
    """Does the launcher belong to Open MPI? It installs ompi_info beside it."""
    program = shutil.which(mpiexec()[0])
    return program is not None and Path(program).with_name("ompi_info").exists()


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The variables a job is started with; what the user has set stays."""
    variables = {"OMP_NUM_THREADS": "1"}  # the ranks are the parallelism here
    if is_open_mpi():
        variables |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_osc": "^ucx",  # else a harmless message at each shared window
        }
        if os.geteuid() == 0:  # in a container; Open MPI asks twice
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables | os.environ | (extra or {})


class Job:
    """One mpiexec with all its ranks; nothing of it outlives the `with` block."""

    def __init__(
        self,
        n: int,
        *arguments: str,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.command = [*mpiexec(), *options, "-n", str(n), sys.executable, *arguments]
        self.began = time.time()
        self.mark = f"HPCDL_TEST_JOB={uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            self.command,
            env=environment(env) | dict([self.mark.split("=")]),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill what is left of the job and remove what killed ranks leave in /dev/shm."""
        if self.process.poll() is None:
            self.process.terminate()  # mpiexec ends ranks on other hosts too
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
        # MPICH gives each rank a session of its own and orphans have no parent: only the mark finds them all.
        while pids := marked(self.mark):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # else it stays a zombie
            time.sleep(0.01)
        self.process.wait()
        if files := left_over(self.began):
            time.sleep(0.1)  # a job beside this one may be about to map what it has just made
            for file in {*files} & {*left_over(self.began)}:
                file.unlink(missing_ok=True)


def marked(mark: str) -> list[int]:
    """The live processes whose environment holds the mark."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended just now, or is somebody else's
            if mark.encode() in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
    return pids


def left_over(since: float) -> list[Path]:
    """MPI's shared memory files that are younger than a job and that no process maps: killed ranks leave them."""
    files = []
    for pattern in ("mpich_shm_*", "sm_segment.*"):
        for file in Path("/dev/shm").glob(pattern):
            with suppress(OSError):
                if file.stat().st_mtime >= since:
                    files.append(file)
    if not files:
        return []
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped += maps.read_text()
    return [file for file in files if str(file) not in mapped]


def run_ranks(
    n: int,
    *arguments: str,
    timeout_s: float = 60,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `mpiexec -n N python ARGUMENTS` and return its status and output; past the limit, kill it and raise.

    run_ranks(4, "examples/allreduce.py"), run_ranks(2, "-c", code), run_ranks(4, "-m", "hpcdl", "train")
    """
    # Files, not pipes: a rank that outlives its mpiexec holds a pipe open, and the reader waits for ever.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:

        def text(file: IO[bytes]) -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        with Job(n, *arguments, options=options, env=env, cwd=cwd, stdout=stdout, stderr=stderr) as job:
            try:
                status = job.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                job.end()
                line = shlex.join(job.command)
                raise TimeoutError(f"still running after {timeout_s} s: {line}\n{text(stdout)}{text(stderr)}") from None
        return subprocess.CompletedProcess(job.command, status, text(stdout), text(stderr))


def side_by_side(run: Callable[[Case], Result], cases: Collection[Case]) -> dict[Case, Result]:
    """Run the jobs of all cases at the same time: for those that mostly wait."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))
