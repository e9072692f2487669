"""The command line: wrong arguments get one line and status 2, help needs no MPI."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import run_ranks

from hpcdl import environment
from hpcdl.cli.main import UsageError, main, parse
from hpcdl.logs import host


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--batch-size 0", "argument --batch-size: 0 is no whole number from 1 upwards"),
        ("--batch-size 1.5", "argument --batch-size: 1.5 is no whole number"),
        ("--epochs -1", "argument --epochs: -1 is no whole number"),
        ("--threads 0", "argument --threads: 0 is no whole number"),
        ("--lr nan", "argument --lr: nan is no finite number above 0"),
        ("--lr inf", "argument --lr: inf is no finite number above 0"),
        ("--lr 0", "argument --lr: 0 is no finite number above 0"),
        ("--lr fast", "argument --lr: fast is no finite number above 0"),
        ("--momentum 1", "argument --momentum: 1 is no number from 0 to below 1"),
        ("--momentum nan", "argument --momentum: nan is no number from 0 to below 1"),
        ("--seed 4294967296", "argument --seed: 4294967296 is no whole number from 0 to 4294967295"),
        ("--target-accuracy 93", "argument --target-accuracy: 93 is no share from 0 to 1, such as 0.93"),
        ("--target-accuracy nan", "argument --target-accuracy: nan is no share"),
        ("--model vgg", "argument --model: invalid choice: 'vgg'"),
        ("--epo 3", "there is no --epo 3"),
        ("--lr", "argument --lr: expected one argument"),
        ("mnist5k", "there is no mnist5k"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.RANKS:
        monkeypatch.delenv(name, raising=False)
    assert main(["train", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"hpcdl: {complaint}")
    assert err.endswith("(see hpcdl train --help)\n")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("argv", [[], ["tarin"], ["--bogus"]])
def test_a_wrong_command_is_a_usage_error(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="see hpcdl --help"):
        parse(argv)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"]])
def test_help_starts_neither_mpi_nor_torch(argv: list[str]) -> None:
    code = f"""
import atexit, sys
from hpcdl.cli.main import main
atexit.register(lambda: print([name for name in ("mpi4py.MPI", "torch", "rich") if name in sys.modules]))
main({argv})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
    assert "hpcdl" in done.stdout


def test_the_commands_arguments_have_the_documented_defaults() -> None:
    arguments = parse(["train"])
    assert (arguments.batch_size, arguments.seed, arguments.target_accuracy) == (32, 0, None)


def on_a_terminal(script: str) -> str:
    """What a shell script prints on a terminal that is 77 characters wide."""
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "24", "cols", "77"], stdin=theirs, check=True, timeout=10)
    done = subprocess.run(["/bin/sh", "-c", script], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, timeout=60)
    os.write(theirs, b"end")  # so that there is something to read
    text = os.read(ours, 10000).decode()
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0, text
    return text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="mpiexec is found in /proc, which is not here")
def test_the_terminal_that_counts_is_that_of_mpiexec(tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"  # a shell by that name
    mpiexec.symlink_to("/bin/sh")
    ask, inner = tmp_path / "ask", tmp_path / "inner.py"
    ask.write_text(f"{sys.executable} -c 'from hpcdl.cli.launch import terminal; print(terminal())'\n")
    inner.write_text(f"import pty; pty.spawn(['/bin/sh', '{ask}'])")

    assert "columns=77" in on_a_terminal(f". {ask}")
    assert "None" in on_a_terminal(f". {ask} | cat")
    # MPICH's mpiexec gives its ranks pipes, whatever it writes to itself.
    assert "columns=77" in on_a_terminal(f"{mpiexec} -c '. {ask} | cat'")
    assert "None" in on_a_terminal(f"{mpiexec} -c '. {ask} | cat' | cat")
    # Open MPI's gives them terminals of their own.
    on_a_terminal(f"{mpiexec} -c '{sys.executable} {inner}; true' > {tmp_path}/log")
    assert "None" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("command", ["train --data /nowhere", "bench --algorithms rign", "tune --min 9 --max 8"])
def test_ranks_that_outnumber_the_cores_are_told_so_once(command: str) -> None:
    alone = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    script = f"{alone}; from hpcdl.cli.main import main; main({command.split()!r})"
    done = run_ranks(2, "-c", script)
    assert done.stderr.count("2 ranks share 1 core of a node") == 1, done.stderr


LOGS = """
import logging, os, warnings
import hpcdl
from hpcdl.logs import configure
from mpi4py import MPI

comm, log = MPI.COMM_WORLD, logging.getLogger("hpcdl")
log.warning("nobody listens")
for _ in range(2):  # the second time changes nothing
    configure(comm)
for rank in range(comm.size):
    comm.Barrier()
    if rank == comm.rank:
        log.info("all goes well")
        log.warning("look:\\nhere")
        log.error("that was wrong")
        warnings.warn("old")
comm.Barrier()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_log_lines_tell_rank_and_host_and_only_rank_0_says_how_it_goes(ranks: int) -> None:
    done = run_ranks(ranks, "-c", LOGS)
    expected = []
    for rank in range(ranks):
        ahead = f"[rank {rank} on {host()}] " if ranks > 1 else ""
        expected += [f"{ahead}hpcdl: note: all goes well"] if rank == 0 else []
        expected += [f"{ahead}hpcdl: warning: look:", f"{ahead}here", f"{ahead}hpcdl: that was wrong"]
        expected += [f"{ahead}<string>:17: UserWarning: old"]
    # Each rank's lines in order; whose come first is the launcher's affair.
    lines = [line for line in done.stderr.splitlines() if "warnings.warn(" not in line]
    assert sorted(lines) == sorted(expected), done.stderr
    for rank in range(ranks):
        mine = f"[rank {rank} " if ranks > 1 else ""
        assert [line for line in lines if mine in line] == [line for line in expected if mine in line]
