"""python -m hpcdl.run: PyTorch programs that know nothing of MPI, on its ranks."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import TESTS
from harness.launch import Job, marked, run_ranks

pytest.importorskip("torch", reason="torch is not installed")

RUN = ("-m", "hpcdl.run")
EXAMPLE = str(TESTS.parent / "examples" / "unchanged_ddp.py")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def write(folder: Path, text: str) -> str:
    """A script."""
    file = folder / "script.py"
    file.write_text(text)
    return str(file)


SHOW = f"""
import json, os, sys
variables = {{name: os.environ.get(name) for name in {VARIABLES}}}
sys.stdout.write(json.dumps([variables, sys.argv, __name__, sys.path[0]]) + "\\n")
"""


def test_the_program_finds_what_torch_looks_for(tmp_path: Path) -> None:
    script = write(tmp_path, SHOW)
    run = run_ranks(3, *RUN, script, "--epochs", "3", env={"HPCDL_NODES": "2+1", "MASTER_ADDR": "", "MASTER_PORT": ""})
    assert run.returncode == 0, run.stderr
    told = sorted((json.loads(line) for line in run.stdout.splitlines()), key=lambda each: each[0]["RANK"])
    assert [each[0]["RANK"] for each in told] == ["0", "1", "2"]
    assert [each[0]["LOCAL_RANK"] for each in told] == ["0", "1", "0"]
    assert [each[0]["LOCAL_WORLD_SIZE"] for each in told] == ["2", "2", "1"]
    assert {each[0]["WORLD_SIZE"] for each in told} == {"3"}
    assert len({(each[0]["MASTER_ADDR"], each[0]["MASTER_PORT"]) for each in told}) == 1
    assert all(each[1:] == [[script, "--epochs", "3"], "__main__", str(tmp_path)] for each in told)


def test_what_the_user_has_set_for_the_master_stays_and_mpis_ranks_count(tmp_path: Path) -> None:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "7", "WORLD_SIZE": "9"}
    run = run_ranks(2, *RUN, write(tmp_path, SHOW), env=env)
    assert run.returncode == 0, run.stderr
    told = [json.loads(line)[0] for line in run.stdout.splitlines()]
    assert {each["MASTER_PORT"] for each in told} == {"29555"} and {each["RANK"] for each in told} == {"0", "1"}
    assert "RANK=7 and WORLD_SIZE=9 contradict MPI" in run.stderr


def test_a_module_is_run_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, SHOW)
    run = run_ranks(2, *RUN, "-m", "script", "--lr", "1", env={"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0, run.stderr
    assert [json.loads(line)[1][1:] for line in run.stdout.splitlines()] == [["--lr", "1"]] * 2


def test_without_a_program_it_says_how_to_use_it() -> None:
    run = run_ranks(2, *RUN)
    assert run.returncode == 2 and run.stderr.count("python -m hpcdl.run SCRIPT") == 1
    assert run_ranks(2, *RUN, "--help").stdout.count("LOCAL_RANK") == 1


def test_pytorchs_own_usage_learns_the_same_over_hpcdl_and_over_gloo() -> None:
    runs = [run_ranks(2, *RUN, EXAMPLE, "--backend", backend, timeout_s=120) for backend in ("hpcdl", "gloo")]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr + runs[1].stderr
    ours, theirs = (re.findall(r"^epoch (\d): loss (\S+) over 2 ranks$", run.stdout, re.MULTILINE) for run in runs)
    assert len(ours) == 3 and float(ours[-1][1]) < float(ours[0][1])
    assert ours == theirs  # to the four digits that are shown


def test_a_group_can_be_made_again(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
import sys, torch, torch.distributed as dist
for backend in ("hpcdl", "gloo", "hpcdl"):
    dist.init_process_group(backend)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2]
    dist.barrier()
    dist.destroy_process_group()
""",
    )
    run = run_ranks(2, *RUN, script)
    assert run.returncode == 0, run.stderr


# ---- the end -------------------------------------------------------------------------------------------------------

START = """
import sys, time
import torch
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("hpcdl", timeout=timedelta(seconds=TIMEOUT))
rank = dist.get_rank()
dist.barrier()
"""


def ended(tmp_path: Path, rest: str, timeout: str = "100", launch: tuple[str, ...] = RUN) -> tuple[int, str, float]:
    """How a job of three ranks ends: the status, what it said, and how long that took behind the start."""
    script = write(tmp_path, START.replace("TIMEOUT", timeout) + "if rank == 0:\n    print(time.time())\n" + rest)
    run = run_ranks(3, *launch, script, env={"PYTHONUNBUFFERED": "1"})
    began = float(run.stdout.split()[0])
    return run.returncode, run.stderr, time.time() - began


def test_a_rank_that_raises_ends_the_job_and_shows_why(tmp_path: Path) -> None:
    rest = "if rank == 1:\n    raise ValueError('rank 1 has had enough')\ndist.all_reduce(torch.ones(1))\n"
    status, text, took_s = ended(tmp_path, rest)
    assert status != 0 and took_s < 15
    assert "ValueError: rank 1 has had enough" in text and "script.py" in text and "rank 1 of 3" in text
    assert "runpy" not in text.partition("ValueError")[0]


def test_a_rank_that_exits_with_a_status_ends_the_job_with_it(tmp_path: Path) -> None:
    status, text, took_s = ended(tmp_path, "if rank == 2:\n    sys.exit(3)\ndist.all_reduce(torch.ones(1))\n")
    assert status == 3 and took_s < 15 and "rank 2 of 3 exited with status 3, and ends the job" in text
    status, text, _ = ended(tmp_path, "if rank == 0:\n    sys.exit('no data')\ndist.all_reduce(torch.ones(1))\n")
    assert status == 1 and "no data" in text


def test_a_timeout_ends_the_job_and_names_the_rank(tmp_path: Path) -> None:
    rest = "if rank == 2:\n    time.sleep(60)\ndist.all_reduce(torch.ones(1))\n"
    status, text, took_s = ended(tmp_path, rest, timeout="2")
    assert status != 0 and took_s < 25
    assert "timed out after 2 s" in text and re.search(r"rank 2 \(\S+\) has not come.* at script.py:\d+", text), text


def test_a_rank_that_ends_while_others_wait_for_it_ends_the_job(tmp_path: Path) -> None:
    status, text, took_s = ended(tmp_path, "if rank:\n    dist.all_reduce(torch.ones(1))\n")
    assert status != 0 and took_s < 25 and "rank 0" in text and "has ended its program" in text


def test_an_exception_is_shown_without_hpcdl_run_too(tmp_path: Path) -> None:
    """torch puts an excepthook around ours, and would show what it has collected only behind the end."""
    head = """
import os, tempfile
from mpi4py import MPI
world = MPI.COMM_WORLD
os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1")
import socket
free = socket.create_server(("127.0.0.1", 0))
os.environ["MASTER_PORT"] = str(world.bcast(free.getsockname()[1]))
free.close()
import hpcdl.torch
"""
    script = write(
        tmp_path,
        head
        + START.replace("TIMEOUT", "60")
        + "if rank == 1:\n    raise ValueError('rank 1 has had enough')\ndist.all_reduce(torch.ones(1))\n",
    )
    run = run_ranks(2, script)
    assert run.returncode != 0 and "ValueError: rank 1 has had enough" in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    there = tmp_path / "there"
    script = write(
        tmp_path,
        START.replace("TIMEOUT", "100") + f"open({str(there)!r} + str(rank), 'w')\n"
        "if rank == 0:\n    time.sleep(100)\ndist.all_reduce(torch.ones(1))\n",
    )
    with open(tmp_path / "output", "wb") as output, Job(2, *RUN, script, stdout=output, stderr=output) as job:
        until = time.monotonic() + 60
        while not all(Path(f"{there}{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < until and job.process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        # One that waits in a collective, where a call of MPI would not let it notice.
        waiting = next(pid for pid in marked(job.mark) if rank_of(pid) == 1)
        os.kill(waiting, signal.SIGINT)
        assert job.process.wait(30) != 0
    assert "KeyboardInterrupt" in (tmp_path / "output").read_text()


def rank_of(pid: int) -> int | None:
    """The rank of a process of the job, as its launcher has it."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    found = [word for word in words if word.startswith((b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK="))]
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return int(found[0].partition(b"=")[2]) if found and b"hpcdl.run" in command else None


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = run_ranks(2, *RUN, str(tmp_path / "nothere.py"))
    assert run.returncode != 0
    assert f"has no file {tmp_path / 'nothere.py'}\n" in run.stderr and "Traceback" not in run.stderr
