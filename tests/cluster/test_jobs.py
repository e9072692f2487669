"""The jobs of jobs/ on a SLURM of four nodes, with two ranks on each: `make cluster-test`."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import TESTS
from harness.launch import is_open_mpi, marked

from cluster.hosts import NAMES
from cluster.slurm import Job, Slurm, missing, until

JOBS = TESTS.parent / "jobs"
WANTED = os.environ.get("HPCDL_TEST_CLUSTER") == "1"
pytestmark = [
    pytest.mark.skipif(not WANTED, reason="make cluster-test runs these: a minute or two"),
    pytest.mark.skipif(WANTED and bool(missing()), reason=missing()),
    pytest.mark.timeout(400),
]
OPEN_MPI = WANTED and is_open_mpi()
needs_mpich = pytest.mark.skipif(OPEN_MPI, reason="shown with MPICH alone")
needs_open_mpi = pytest.mark.skipif(not OPEN_MPI, reason="needs Open MPI: make cluster-test MPI=openmpi")

# At 1 Gbit/s from host to host an epoch of sixteen steps takes a third of a second on any machine.
EPOCHS = 10
TRAINING = ("--epochs", str(EPOCHS), "--data", "mnist5k")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(4, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def variables(**more: str) -> dict[str, str]:
    """All that a job is given; nothing that would help one template on this machine alone."""
    ours = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHON": sys.executable, "HPCDL_TUNING": "0"}
    # More ranks than cores, on several hosts: else each message takes milliseconds.
    return ours | {"OMPI_MCA_mpi_yield_when_idle": "1"} | more


class Trained(NamedTuple):
    """What a training came to: each epoch's line without its speed, and the last checkpoint's parameters."""

    epochs: dict[int, str]
    parameters: dict[str, object]


def trained(job: Job, folder: Path) -> Trained:
    import torch

    line = rf"^epoch (\d+)/{EPOCHS}  (loss \S+  test loss \S+  test accuracy \S+%)"
    found = re.findall(line, job.log(), re.MULTILINE)
    newest = max(folder.glob("checkpoint-*"))
    state = torch.load(newest / "model.pt", weights_only=True)
    assert json.loads((newest / "manifest.json").read_text())["ranks"] == 8
    return Trained({int(epoch): line for epoch, line in found}, state["model"])


def assert_equal(one: Trained, other: Trained) -> None:
    import torch

    assert one.epochs == other.epochs and sorted(one.epochs) == list(range(1, EPOCHS + 1))
    assert one.parameters.keys() == other.parameters.keys() and one.parameters
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name


@pytest.fixture(scope="module")
def uninterrupted(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = slurm.submit(JOBS / "train.sbatch", *TRAINING, cwd=folder, env=variables(CHECKPOINTS="saved"))
    job.wait("COMPLETED")
    return trained(job, folder / "saved")


def test_an_allreduce_is_measured_on_all_nodes(slurm: Slurm, tmp_path: Path) -> None:
    arguments = ["--max", "4KiB", "--factor", "16", "--seconds", "0.1", "--algorithms", "ring,by_node"]
    # From another folder than that of the jobs, by a path from there.
    script = os.path.relpath(JOBS / "allreduce.sbatch", tmp_path)
    job = slurm.submit(script, *arguments, cwd=tmp_path, env=variables())
    job.wait("COMPLETED")
    measured = json.loads((tmp_path / "results" / f"hpcdl-allreduce-{job.number}.json").read_text())
    assert measured["header"]["ranks_per_host"] == {f"{NAMES}{host}": 2 for host in range(1, 5)}
    found = {(result["algorithm"], result["size"]) for result in measured["results"]}
    assert found == {(algorithm, size) for algorithm in ("ring", "by_node") for size in (16, 256, 4096)}
    assert all(result["wrong"] == 0 for result in measured["results"])


def test_a_training_goes_on_to_the_same_bits_after_its_limit_and_after_the_loss_of_a_node(
    slurm: Slurm, tmp_path: Path, uninterrupted: Trained
) -> None:
    job = slurm.submit(JOBS / "train.sbatch", *TRAINING, cwd=tmp_path, env=variables(CHECKPOINTS="saved", EVERY="5"))
    job.wait_for("epoch 2/")
    slurm.on(1, "scancel", "--batch", "--signal=USR1", str(job.number))  # what --signal does ahead of the limit
    job.wait("PENDING")
    stops = re.findall(r"stopped at step (\d+) by SIGUSR1", job.log())
    assert len(stops) == 1, job.logs()

    job.begin_now()
    done = len(trained(job, tmp_path / "saved").epochs)
    job.wait_for(f"epoch {done + 2}/")
    slurm.lose_node(3)
    job.wait("PENDING")
    slurm.bring_back(3)

    job.begin_now()
    job.wait("COMPLETED")
    first, second = (int(step) for step in re.findall(r"going on from .*, step (\d+)", job.log()))
    assert [first] == [int(step) for step in stops] and second > first
    assert len(re.findall("stopped at step", job.log())) == 1
    assert_equal(trained(job, tmp_path / "saved"), uninterrupted)


def test_a_cancelled_training_leaves_no_process_and_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    mark = f"HPCDL_TEST_JOB={tmp_path}"
    training = [*TRAINING, "--epochs", "10000"]
    job = slurm.submit(JOBS / "train.sbatch", *training, cwd=tmp_path, env=variables(HPCDL_TEST_JOB=str(tmp_path)))
    job.wait_for("epoch 1/")
    assert len(marked(mark)) > 8
    slurm.on(1, "scancel", str(job.number))
    job.wait("CANCELLED")
    until(lambda: not marked(mark), 30, job.logs, "no process is left")
    assert job.states() == ["CANCELLED"]
    # Open MPI's daemons end at SLURM's SIGTERM, and the ranks with them.
    assert OPEN_MPI or "by SIGTERM" in job.log(), job.logs()


@needs_mpich
def test_a_sweep_has_a_log_for_each_value_in_one_folder(slurm: Slurm, tmp_path: Path) -> None:
    env = variables(OPTION="--algorithm", VALUES="ring halving")
    job = slurm.submit("--array=0-1", JOBS / "array.sbatch", "--epochs", "1", cwd=tmp_path, env=env)
    job.wait("COMPLETED")
    folder = tmp_path / "results" / f"hpcdl-array-{job.number}"
    assert sorted(path.name for path in folder.iterdir()) == ["algorithm=halving", "algorithm=ring"]
    for name in ("ring", "halving"):
        first = json.loads((folder / f"algorithm={name}" / "log.jsonl").read_text().splitlines()[0])
        assert first["settings"]["algorithm"] == name and first["settings"]["ranks"] == 8


@needs_mpich
def test_each_rank_takes_the_gpu_of_its_local_rank(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(JOBS / "gpu.sbatch", cwd=tmp_path, env=variables())
    job.wait("COMPLETED")
    for rank in range(8):
        host, local = rank // 2 + 1, rank % 2
        line = f"rank {rank} on {NAMES}{host}: local rank {local}, CUDA_VISIBLE_DEVICES 0,1, would take cuda:{local}"
        assert line in job.log().splitlines(), job.log()
    assert "so its ranks go on on the CPU" in job.log()
    assert "The sum of 8 tensors is right on every rank." in job.log()


@needs_open_mpi
def test_six_ranks_finish_the_training_when_a_node_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    # Eight ranks on few cores may be silent for long, above all while they start.
    env = variables(SILENT="10", INTERFACE="eth0")
    job = slurm.submit(JOBS / "fault_tolerant.sbatch", *TRAINING, cwd=tmp_path, env=env)
    job.wait_for("epoch 2/")
    slurm.lose_node(3)
    job.wait("COMPLETED")
    slurm.bring_back(3)
    log = job.log()
    assert re.search(r"ranks 2, 6 were lost in .*; 6 ranks go on, batch 192, rate 0.0375$", log, re.MULTILINE), log
    assert re.search(r", lost ranks 2, left 6; largest difference of a parameter between ranks: 0$", log, re.MULTILINE)
    assert f"epoch {EPOCHS}/{EPOCHS}  loss " in log and not list(tmp_path.glob(".*.status"))


@needs_open_mpi
def test_a_job_in_which_all_ranks_are_lost_has_failed(slurm: Slurm, tmp_path: Path) -> None:
    faults = [word for rank in range(8) for word in ("--fault", f"{rank}:50")]
    env = variables(SILENT="10", INTERFACE="eth0")
    job = slurm.submit(JOBS / "fault_tolerant.sbatch", *TRAINING, *faults, cwd=tmp_path, env=env)
    job.wait("FAILED")
    assert "no rank has come to the end; mpiexec ended with status " in job.log()


@needs_mpich
def test_ranks_that_cannot_go_on_are_refused(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(JOBS / "fault_tolerant.sbatch", cwd=tmp_path, env=variables())
    job.wait("FAILED")
    assert "only Open MPI's ULFM lets ranks go on without a lost one" in job.log()


LOSES_ONE = """#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=2 --output=log
srun --mpi=pmi2 --kill-on-bad-exit=0 "$PYTHON" loses.py
"""
LOSES = """
import os, time, numpy as np, hpcdl
from mpi4py import MPI
hpcdl.allreduce(np.ones(3))
time.sleep(2)
if MPI.COMM_WORLD.rank == 5:
    os.kill(os.getpid(), 9)
hpcdl.allreduce(np.ones(3))
"""


@needs_mpich
def test_a_lost_rank_that_slurm_was_told_to_ignore_is_noticed_by_the_others(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "loses.sbatch").write_text(LOSES_ONE)
    (tmp_path / "loses.py").write_text(LOSES)
    job = slurm.submit("loses.sbatch", cwd=tmp_path, env=variables())
    job.wait("FAILED", 60)
    log = (tmp_path / "log").read_text()
    assert re.search(rf"hpcdl: rank 5 \({NAMES}3\) is gone, killed or ended without a word, and is waited for in", log)
