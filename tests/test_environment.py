"""Who has started this process, and how many: read from what launchers and SLURM put into the environment."""

import os
import subprocess
import sys

import pytest

from hpcdl import environment
from hpcdl.environment import (
    BATCH,
    HYDRA,
    INTEL,
    NOBODY,
    OPEN_MPI,
    SHELL,
    SRUN,
    TORCHRUN,
    UNKNOWN,
    classify,
    contradiction,
    crowded,
    slurm_contradiction,
    slurm_nodes,
    slurm_tasks,
    under_launcher,
    wrong_size,
)

# As they were found inside jobs of SLURM, MPICH 5.0, Open MPI 5.0 and Intel MPI 2021.
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
SALLOC = JOB | {"SLURM_JOB_NAME": "interactive"}
SBATCH = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "99"}
STEP = SBATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
PMI2 = STEP | {"PMI_FD": "11", "PMI_JOBID": "7.0", "PMI_RANK": "3", "PMI_SIZE": "4"}
PMIX = STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
MPICH = {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
IMPI = MPICH | {"I_MPI_HYDRA_UUID": "c3", "HYDRA_BSTRAP_NODE_ID": "0"}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
# mpiexec starts one process a node by srun, and those start the ranks.
IN_SLURM = STEP | MPICH | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
TORCH = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "by", "size", "rank", "pmi"),
    [
        ({}, NOBODY, None, None, ""),
        (MPICH, HYDRA, 4, 1, "pmi1"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, HYDRA, 4, 1, "pmi1"),
        (IMPI, INTEL, 4, 1, "pmi1"),
        (OMPI, OPEN_MPI, 4, 1, "pmix"),
        ({"PMIX_RANK": "2"}, OPEN_MPI, None, 2, "pmix"),
        (SALLOC, SHELL, 4, None, ""),
        (SALLOC | {"SLURM_JOB_NAME": "bash"}, SHELL, 4, None, ""),
        (SALLOC | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, SHELL, 4, None, ""),
        (SBATCH, BATCH, 4, None, ""),
        (SBATCH | {"SLURM_JOB_NAME": "interactive"}, BATCH, 4, None, ""),
        (STEP, SRUN, 4, 3, ""),
        (STEP | {"SLURM_JOB_NAME": "bash"}, SRUN, 4, 3, ""),
        (PMI2, SRUN, 4, 3, "pmi2"),
        (PMIX, SRUN, 4, 3, "pmix"),
        (PMIX | OMPI, OPEN_MPI, 4, 1, "pmix"),
        (IN_SLURM, HYDRA, 4, 1, "pmi1"),
        (TORCH, TORCHRUN, 8, 1, ""),
        (PMI2 | TORCH, TORCHRUN, 8, 1, ""),
        (MPICH | {"PMI_SIZE": "many", "PMI_RANK": "-1"}, HYDRA, None, None, "pmi1"),
    ],
)
def test_whoever_started_this_process_is_recognised(
    environ: dict[str, str], by: str, size: int | None, rank: int | None, pmi: str
) -> None:
    assert classify(environ) == (by, size, rank, pmi)
    assert under_launcher(environ) == (by in environment.LAUNCHERS)


@pytest.mark.parametrize("environ", [MPICH, OMPI, SALLOC, SBATCH, STEP, PMI2 | TORCH], ids=str)
def test_one_variable_has_the_environment_left_alone(environ: dict[str, str]) -> None:
    off = environ | {"HPCDL_DETECT": "0", "RANK": "99"}
    assert classify(off).by == UNKNOWN
    assert not under_launcher(off)
    assert wrong_size(1, off) is contradiction(0, 1, off) is slurm_contradiction(1, off | {"SLURM_NTASKS": "9"}) is None


@pytest.mark.parametrize(
    ("size", "environ", "name"),
    [
        (1, {"PMI_SIZE": "4"}, "PMI_SIZE says 4"),
        (1, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE says 2"),
        (1, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_NTASKS says 8"),
        (1, STEP, "SLURM_STEP_NUM_TASKS says 4"),
        (1, IN_SLURM, "PMI_SIZE says 4"),
        (1, {"PMI_SIZE": "1", "SLURM_NTASKS": "8"}, None),  # mpiexec -n 1 inside a larger allocation
        (4, {"PMI_SIZE": "4"}, None),
        (1, {"SLURM_NTASKS": "many"}, None),
        (1, {}, None),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_warned(size: int, environ: dict[str, str], name: str | None) -> None:
    warning = wrong_size(size, environ)
    assert (warning is None) if name is None else (warning is not None and warning.startswith(name))


def test_a_batch_script_is_told_to_start_the_ranks_with_what_its_mpi_needs() -> None:
    assert "batch script is one process. Start the ranks by MPICH's own" in str(wrong_size(1, SBATCH, "MPICH"))
    assert "srun --mpi=pmi2" in str(wrong_size(1, SBATCH, "MPICH"))
    assert "srun --mpi=pmix" in str(wrong_size(1, SBATCH, "Open MPI"))
    assert "each now trains alone" in str(wrong_size(1, PMI2, "Open MPI"))


def test_mpi_wins_over_rank_and_world_size() -> None:
    assert contradiction(1, 4, {"RANK": "1", "WORLD_SIZE": "4"}) is None
    assert contradiction(1, 4, {}) is None
    assert str(contradiction(1, 4, {"RANK": "6", "WORLD_SIZE": "7"})).startswith(
        "RANK=6 and WORLD_SIZE=7 contradict MPI"
    )
    assert str(contradiction(1, 4, {"RANK": "1", "WORLD_SIZE": "nonsense"})).startswith("WORLD_SIZE=nonsense contra")


@pytest.mark.parametrize(
    ("environ", "clash"),
    [
        (SBATCH, None),
        (SBATCH | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, "SLURM_NTASKS_PER_NODE=2 on 1 node would be 2"),
        (PMI2 | {"SLURM_NTASKS": "3"}, "SLURM_NTASKS=3, but SLURM_NTASKS_PER_NODE=2 on 2 nodes would be 4"),
        (SBATCH | {"SLURM_NTASKS_PER_NODE": "", "SLURM_NTASKS": "5"}, "SLURM_TASKS_PER_NODE=2(x2) is 4"),
        (SBATCH | {"SLURM_TASKS_PER_NODE": "two"}, "'two' are no numbers of tasks"),
        (IN_SLURM, None),  # SLURM counts the nodes there
        ({"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NUM_NODES": "1"}, None),  # no job at all
    ],
)
def test_slurm_that_contradicts_itself_is_told_so(environ: dict[str, str], clash: str | None) -> None:
    found = slurm_contradiction(4, environ)
    assert (found is None) if clash is None else (clash in str(found) and "MPI's number of ranks, 4" in str(found))


@pytest.mark.parametrize(
    ("text", "numbers"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x1)", [1]), ("3,1,0(x2)", [3, 1, 0, 0])]
)
def test_slurms_tasks_are_counted_node_by_node(text: str, numbers: list[int]) -> None:
    assert slurm_tasks(text) == numbers


@pytest.mark.parametrize("text", ["", "2(x)", "2x3", "two", "2(x0)", "1,", ",1", "-1", "2(x3", "2(x99999999999)"])
def test_what_are_no_tasks_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="are no numbers of tasks") as error:
        slurm_tasks(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[01-03,7]", "n01 n02 n03 n7"),
        ("login", "login"),
        ("a,b-1", "a b-1"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a[1-2]b[3-4]", "a1b3 a1b4 a2b3 a2b4"),
        ("r[1-2][5,7]", "r15 r17 r25 r27"),
        ("n[1-2]-ib,gpu,m[3]", "n1-ib n2-ib gpu m3"),
        ("n[1-2].site.org", "n1.site.org n2.site.org"),
        ("[1-2]", "1 2"),
    ],
)
def test_slurms_list_of_nodes_is_spelt_out(text: str, names: str) -> None:
    assert slurm_nodes(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n 1",
        *(",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[3-1]", "n[1-]", "n[-1]", "n[1,]", "n[a-b]", "n[[1]]"),
        *("n[1]]", "n[1-2", "n[1-99999999999]", "a[1-9999]b[1-9999]"),
    ],
)
def test_what_is_no_list_of_nodes_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of nodes") as error:
        slurm_nodes(text)
    assert repr(text) in str(error.value)


def test_only_ranks_that_outnumber_the_cores_are_hinted_at_with_what_helps_their_mpi() -> None:
    assert crowded(2, 2, "MPICH", {}) is None
    assert crowded(3, 1, "MPICH", {}) == "3 ranks share 1 core of a node, so they wait for each other"
    assert f"{environment.YIELD}=1" in str(crowded(4, 2, "Open MPI", {}))
    assert environment.YIELD not in str(crowded(4, 2, "Open MPI", {environment.YIELD: "1"}))


@pytest.mark.parametrize("detect", ["1", "0"])
def test_the_first_communicator_warns_of_ranks_that_are_alone_unless_told_not_to_look(detect: str) -> None:
    script = "import numpy as np, hpcdl\nfor _ in range(2):\n    hpcdl.allreduce(np.ones(3))"
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=variables | {"SLURM_NTASKS": "4", "HPCDL_DETECT": detect},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stderr.count("SLURM_NTASKS") == int(detect), done.stderr
