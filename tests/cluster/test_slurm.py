"""A SLURM on this machine: what the tests of the jobs stand on."""

import os
from pathlib import Path

import pytest
from harness.launch import marked

from cluster.hosts import NAMES, NAMESPACES
from cluster.slurm import Job, Slurm, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(120)]

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --output=%x-%j.log
#SBATCH --requeue
#SBATCH --open-mode=append
echo run "${SLURM_RESTART_COUNT:-0}"
srun hostname
"""
MARK = "HPCDL_TEST_JOB=of a slurm"


def left() -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{NAMES}*")]


def submit(slurm: Slurm, folder: Path, then: str) -> Job:
    script = folder / "job.sbatch"
    script.write_text(SCRIPT + then)
    env = dict([MARK.split("=")]) | {"PATH": os.environ["PATH"]}
    return slurm.submit(script, cwd=folder, env=env)


def test_a_job_runs_on_its_nodes_and_again_after_one_was_lost_and_nothing_of_slurm_stays(tmp_path: Path) -> None:
    with Slurm(2, tmp_path / "slurm") as slurm:
        job = submit(slurm, tmp_path, '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || srun --nodes=2 sleep 600\n')
        job.wait_for(f"{NAMES}2", 20)
        slurm.lose_node(2)
        job.wait("PENDING", 40)
        slurm.bring_back(2)
        job.begin_now()
        job.wait("COMPLETED", 40)
        assert "run 0" in job.log() and job.log().count(f"{NAMES}2") >= 2 and "run 1" in job.log()
        submit(slurm, tmp_path, "srun --nodes=2 sleep 600\n").wait("RUNNING", 20)
    assert left() == []
    assert not marked(MARK)


def test_a_job_that_fails_says_so_at_once_with_its_log(tmp_path: Path) -> None:
    with Slurm(2, tmp_path / "slurm") as slurm:
        job = submit(slurm, tmp_path, "echo what went wrong >&2; exit 3\n")
        said = r"is \{'FAILED'\}, not COMPLETED\nslurmctld's log(.*\n)*job \d+'s log:\n(.*\n)*what went wrong\n"
        with pytest.raises(AssertionError, match=said):
            job.wait("COMPLETED", 20)
        job = submit(slurm, tmp_path, "sleep 600\n")
        with pytest.raises(TimeoutError, match=r"not within 1 s: job \d is COMPLETED\n"):
            job.wait("COMPLETED", 1)
        with pytest.raises(RuntimeError, match="Invalid node name"):
            slurm.on(1, "scontrol", "update", "nodename=nowhere", "state=down", "reason=test")


def test_a_slurm_that_does_not_start_takes_its_hosts_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.slurm.CONFIGURATION", "Nonsense=1\n")
    with pytest.raises(RuntimeError, match="Nonsense"), Slurm(2, tmp_path / "slurm"):
        pass
    assert left() == []
