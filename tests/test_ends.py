"""How jobs end: a rank that raises takes the others along, a good end prints nothing."""

from __future__ import annotations

import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from harness.launch import run_ranks
from idx import write_images

from hpcdl.logs import host

ROOT = Path(__file__).resolve().parents[1]

WAITS = {
    "a plain call": "hpcdl.allreduce(np.ones(3))",
    "a long one": "hpcdl.allreduce(np.ones(10**6))",
    "a work": "hpcdl.iallreduce(np.ones(3)).wait()",
    "a plan": "plan()",
}


@pytest.mark.parametrize("what", WAITS)
def test_who_waits_for_a_rank_that_has_ended_is_told_its_number(what: str) -> None:
    script = f"""
import numpy as np, hpcdl
from mpi4py import MPI
plan = hpcdl.plan_allreduce(np.ones(10**4), algorithm="shared")
for step in range(5):
    hpcdl.allreduce(np.ones(3))
    plan()
if MPI.COMM_WORLD.rank == 0:
    {WAITS[what]}
"""
    run = run_ranks(2, "-c", script, timeout_s=30)
    assert run.returncode != 0
    assert "RankEndedError: rank 1 has ended its program" in run.stderr


def test_a_good_end_prints_nothing(tmp_path: Path) -> None:
    """Plans left open and communicators not freed: the exit hook frees what it can, and MPI says no word."""
    script = tmp_path / "leaves.py"
    script.write_text(
        """
import atexit, builtins, os, numpy as np, hpcdl
from mpi4py import MPI
# Runs after our own hook; one write, or the ranks' words would mix.
atexit.register(lambda: os.write(1, f"{' '.join(kept.state for kept in builtins.kept)}\\n".encode()))
plan = hpcdl.plan_allreduce(np.ones(100))
plan()
shared = hpcdl.empty(5000)
in_place = hpcdl.plan_allreduce(shared)
staged = [hpcdl.plan_allreduce(np.ones(n), algorithm="shared") for n in (3, 10**6)]
for each in in_place, *staged:
    each()
hpcdl.allreduce(np.ones(10**6), algorithm="shared")
hpcdl.allreduce(shared)
own = MPI.COMM_WORLD.Dup()
other = hpcdl.plan_reduce(np.ones(5), own)
hpcdl.iallreduce(np.ones(7), own).wait()
builtins.kept = plan, other, in_place, *staged
"""
    )
    run = run_ranks(3, str(script), timeout_s=60)
    assert run.returncode == 0
    assert (run.stdout + run.stderr).splitlines() == [" ".join(["closed"] * 5)] * 3


def test_a_forked_child_does_not_hold_up_the_end(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(
        """
import os, time, numpy as np, hpcdl
hpcdl.allreduce(np.ones(4))
if os.fork() == 0:
    os.close(1); os.close(2)
    time.sleep(2)
    os._exit(0)
hpcdl.allreduce(np.ones(4))
"""
    )
    assert run_ranks(2, str(script), timeout_s=60).returncode == 0


@pytest.mark.parametrize("ranks", [1, 6])
def test_the_first_example_prints_the_right_sum_by_each_algorithm(ranks: int) -> None:
    import hpcdl

    run = run_ranks(ranks, str(ROOT / "examples" / "allreduce.py"), timeout_s=60)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    sums = {words[0]: words[1:] for words in lines}
    able = [name for name in hpcdl.algorithms() if name != "halving" or ranks == 1]
    assert set(sums) == set(able)
    assert all(words == ["sum:", str(ranks * (ranks + 1) // 2)] for words in sums.values())


WAYS = {
    "plain python": ["{script}"],
    "mpi4py's runner": ["-m", "mpi4py", "{script}"],
    "hpcdl train": ["{train}", "train", "--data", "{data}", "--epochs", "100000"],
}
SCRIPT = """
import os, signal, sys, threading, time
import hpcdl
import numpy as np
from mpi4py import MPI

comm, at_once = MPI.COMM_WORLD, {at_once}
if not at_once:
    hpcdl.allreduce(np.ones(4))
if comm.rank == 1:
    open({mark!r}, "w").close()
    {what}
while True:
    {others}
"""
TRAIN = """
import os, signal, sys, threading, time
from hpcdl.cli.main import main
from hpcdl.torch.train import Trainer

step = Trainer.step

def sabotaged(trainer, mine, total):
    if trainer.steps == (0 if {at_once} else 2) and trainer.comm.rank == 1:
        open({mark!r}, "w").close()
        {what}
    step(trainer, mine, total)

Trainer.step = sabotaged
sys.exit(main())
"""
RAISE = "raise RuntimeError('rank 1 has had enough')"
THREAD = "threading.Thread(target=time.sleep, args=(60,), daemon={daemon}).start(); " + RAISE
OURS, MPIS = "hpcdl.allreduce(np.ones(4))", "comm.Barrier()"
WORK = "work = hpcdl.iallreduce(np.ones(10**6)); "
ENDS = {
    "raises before the first collective": (True, RAISE, OURS),
    "raises while the others are in MPI's own": (True, RAISE, MPIS),
    "raises while a thread runs": (False, THREAD.format(daemon=False), OURS),
    "raises while a daemon runs": (False, THREAD.format(daemon=True), OURS),
    "raises while a thread runs and a work is in flight": (False, WORK + THREAD.format(daemon=False), OURS),
    "is interrupted": (False, "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", OURS),
    "calls sys.exit": (False, "sys.exit(3)", OURS),
    "calls os._exit": (False, "os._exit(4)", OURS),
    "is killed": (False, "os.kill(os.getpid(), signal.SIGKILL)", OURS),
}
# What ends a process without Python's help is the same in each way.
WITH_PYTHON = [
    "raises before the first collective",
    "raises while a thread runs",
    "is interrupted",
    "calls sys.exit",
]


@pytest.mark.parametrize(
    ("way", "end"),
    [*product(["plain python"], ENDS), *product(["mpi4py's runner", "hpcdl train"], WITH_PYTHON)],
)
def test_a_rank_that_ends_out_of_turn_ends_the_job_within_5_s(way: str, end: str, tmp_path: Path) -> None:
    if way == "hpcdl train":
        if not find_spec("torch"):
            pytest.skip("torch is not installed")
        write_images(tmp_path / "data")
    at_once, what, others = ENDS[end]
    mark = tmp_path / "mark"
    words = {name: str(tmp_path / name) for name in ("script", "train", "data")}
    for name, text in (("script", SCRIPT), ("train", TRAIN)):
        (tmp_path / name).write_text(text.format(at_once=at_once, what=what, others=others, mark=str(mark)))
    run = run_ranks(3, *(word.format(**words) for word in WAYS[way]), timeout_s=60)
    took_s = time.time() - mark.stat().st_mtime
    assert run.returncode != 0
    assert took_s < 5, run.stderr
    if RAISE in what:
        lines = run.stderr.splitlines()
        last = max(number for number, line in enumerate(lines) if "RuntimeError: rank 1 has had enough" in line)
        assert any("Traceback (most recent call last):" in line for line in lines[:last])
        assert f"rank 1 on {host()}" in run.stderr or f"rank 1 of 3 on {host()}" in run.stderr
        assert way != "hpcdl train" or f"[rank 1 on {host()}] RuntimeError: rank 1 has had enough" in run.stderr
        assert not any("hpcdl" in line or "Traceback" in line for line in lines[last + 1 :]), run.stderr
