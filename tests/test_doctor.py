"""hpcdl doctor: from what was gathered to what is said; and real runs, alone, on ranks, and without an MPI."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness.launch import is_open_mpi, run_ranks

from hpcdl import environment
from hpcdl.cli import doctor, doctor_child, doctor_facts, doctor_launch, doctor_node, doctor_probe, doctor_start
from hpcdl.cli.doctor_launch import widen
from hpcdl.cli.doctor_probe import Link
from hpcdl.cli.doctor_report import ERROR, NOTE, OK, WARNING, Finding, as_text, merged, status
from hpcdl.cli.doctor_watch import STARTED, End
from hpcdl.environment import BATCH, HYDRA, INTEL, NOBODY, OPEN_MPI, SRUN, TORCHRUN, UNKNOWN, Launch


def facts(rank: int = 0, size: int = 1, by: str = NOBODY, **changed: Any) -> dict[str, Any]:
    """A rank with nothing wrong."""
    known = {
        "rank": rank,
        "size": size,
        "host": "h1",
        "vendor": "MPICH",
        "mpi": "MPICH 5.0.2",
        "standard": "5.0",
        "libraries": ["/lib/libmpi.so.12"],
        "mpi4py": "4.1.2",
        "python": "3.11.7",
        "numpy": "2.4.6",
        "hpcdl": "0.1.0",
        "prefix": "/nowhere",
        "cores": [0, 1, 2, 3],
        "cpus": 4,
        "thread_level": "multiple",
        "communicators": doctor_probe.TRIED_COMMUNICATORS,
        "wrong_size": None,
        "contradiction": None,
        "slurm": None,
        "launch": Launch(by, size if by != NOBODY else None, rank)._asdict(),
        "environ": {"OMP_NUM_THREADS": "1"},
    }
    return known | changed


def node(**changed: Any) -> dict[str, Any]:
    """A node with nothing wrong."""
    space = {"shm": [8 << 30, 8 << 30], "stale": [], "stale_bytes": 0, "unsure": 0}
    return {"host": "h1", "start_method": "fork", "infiniband": [], "nvidia": 0, **space, **changed}


def worst(findings: Any) -> Finding:
    """The one that matters."""
    found = list(findings)
    assert found
    return max(found, key=lambda each: (OK, NOTE, WARNING, ERROR).index(each.level))


# Launch


@pytest.mark.parametrize("by", [HYDRA, INTEL, OPEN_MPI, SRUN])
def test_ranks_that_know_of_each_other_are_well(by: str) -> None:
    assert worst(doctor_launch.about_launcher([facts(0, 4, by), facts(1, 4, by)])).level == OK


@pytest.mark.parametrize(
    ("launch", "vendor", "level", "seen", "do"),
    [
        (
            Launch(HYDRA, 4, 0, "pmi1"),
            "Open MPI",
            ERROR,
            "started 4 processes with pmi1, but Open MPI",
            "Open MPI's own",
        ),
        (
            Launch(OPEN_MPI, 4, 0, "pmix"),
            "Intel MPI",
            ERROR,
            "with pmix, but Intel MPI says",
            "Intel MPI's own mpiexec",
        ),
        (Launch(SRUN, 4, 0, ""), "MPICH", ERROR, "srun has started 4 processes without any PMI", "srun --mpi=pmi2"),
        (Launch(SRUN, 4, 0, "pmi2"), "Open MPI", ERROR, "srun has started 4 processes with pmi2", "srun --mpi=pmix"),
        (Launch(TORCHRUN, 4, 0), "MPICH", ERROR, "torchrun has started 4 processes", "MPICH's own mpiexec"),
        (Launch(BATCH, 4), "MPICH", WARNING, "one process of a SLURM batch script that asks for 4", "srun --mpi=pmi2"),
        (Launch(NOBODY), "MPICH", NOTE, "there is no mpiexec on the PATH", ""),
        (Launch(UNKNOWN), "MPICH", NOTE, "HPCDL_DETECT=0", ""),
    ],
)
def test_one_rank_where_there_are_several_processes_is_told_how_to_start_them(
    launch: Launch, vendor: str, level: str, seen: str, do: str
) -> None:
    found = worst(doctor_launch.about_launcher([facts(vendor=vendor, launch=launch._asdict())]))
    assert found.level == level
    assert seen in found.seen
    assert do in found.do


def test_sizes_without_a_launcher_are_warned_about() -> None:
    found = worst(doctor_launch.about_launcher([facts(wrong_size=environment.wrong_size(1, {"PMI_SIZE": "4"}))]))
    assert found.level == WARNING
    assert "PMI_SIZE says 4" in found.seen


def test_a_launcher_that_speaks_of_other_numbers_does_not_count() -> None:
    ranks = [facts(rank, 2, launch=Launch(HYDRA, 4, rank, "pmi1")._asdict()) for rank in range(2)]
    assert "but that says 4" in worst(doctor_launch.about_launcher(ranks)).seen


@pytest.mark.parametrize(
    ("whose", "level"), [("MPICH", OK), ("Intel MPI", OK), ("Open MPI", WARNING), ("", OK)], ids=str
)
def test_the_paths_mpiexec_is_to_suit_the_library(whose: str, level: str) -> None:
    assert worst(doctor_launch.about_launcher([facts()], ("/usr/bin/mpiexec", whose))).level == level


@pytest.mark.parametrize(
    ("said", "vendor"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "MPICH"),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (OpenRTE) 4.1.4", "Open MPI"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1", "Intel MPI"),
        ("prun 1.0", ""),
    ],
)
def test_an_mpiexec_is_known_by_its_version(said: str, vendor: str) -> None:
    assert doctor_facts.whose_mpiexec(said) == vendor


def test_nodes_without_ranks_are_named() -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "h[1-3]"}
    ranks = [facts(rank, 2, SRUN, environ=job, host=f"h{rank + 1}.site") for rank in range(2)]
    assert worst(doctor_launch.about_slurm(ranks)).seen == "1 of the job's 3 nodes have no rank: h3"
    ranks[0]["environ"] = job | {"SLURM_JOB_NODELIST": "h[1-2]"}
    assert worst(doctor_launch.about_slurm(ranks)).level == OK
    ranks[0]["environ"] = job | {"SLURM_JOB_NODELIST": "h[1-"}
    assert "'h[1-' is no list of nodes" in worst(doctor_launch.about_slurm(ranks)).seen
    ranks[0] |= {"environ": job, "slurm": "SLURM_NTASKS=1, but"}
    assert "SLURM_NTASKS=1, but" in worst(doctor_launch.about_slurm(ranks)).seen


def test_ranks_with_other_versions_are_named() -> None:
    found = worst(doctor_launch.about_mpi([facts(0, 2), facts(1, 2, numpy="1.26.0", host="h2")]))
    assert (found.level, found.host) == (WARNING, "h2")
    assert found.seen == "rank 1 has NumPy 1.26.0, rank 0 on h1 has 2.4.6"
    assert worst(doctor_launch.about_mpi([facts(0, 2), facts(1, 2, mpi="MPICH 4.2.0")])).level == ERROR
    two = worst(doctor_launch.about_mpi([facts(libraries=["/a/libmpi.so.12", "/b/libmpi.so.40"])]))
    assert "two MPI libraries are loaded: /a/libmpi.so.12 and /b/libmpi.so.40" in two.seen


@pytest.mark.parametrize(("version", "old"), [("4.0.3", True), ("3.1", True), ("4.1.0", False), ("5.0.0a1", False)])
def test_an_old_mpi4py_is_an_error_that_names_the_oldest_that_will_do(version: str, old: bool) -> None:
    found = list(doctor_launch.old_mpi4py(version))
    assert bool(found) == old
    assert all("4.1 or newer" in each.seen and each.level == ERROR for each in found)


def test_rank_and_world_size_that_contradict_mpi_are_warned_about() -> None:
    said = environment.contradiction(0, 2, {"WORLD_SIZE": "7"})
    assert worst(doctor_launch.about_variables_of_torch([facts(0, 2, contradiction=said)])).level == WARNING
    assert list(doctor_launch.about_variables_of_torch([facts(0, 2)])) == []


def test_a_low_thread_level_and_few_communicators_are_said() -> None:
    assert worst(doctor_launch.about_threads_of_mpi([facts()])).level == OK
    assert "needs multiple" in worst(doctor_launch.about_threads_of_mpi([facts(thread_level="funneled")])).seen
    assert "room for 3 more" in worst(doctor_launch.about_threads_of_mpi([facts(communicators=3)])).seen


# Cores


def test_a_rank_bound_to_fewer_cores_than_threads_is_told_its_launchers_flag() -> None:
    for by, flag in (
        (HYDRA, "-bind-to core:2"),
        (OPEN_MPI, "slot:PE=2"),
        (SRUN, "--cpus-per-task=2"),
        (INTEL, "DOMAIN=2"),
    ):
        ranks = [facts(rank, 2, by, cores=[rank], environ={"OMP_NUM_THREADS": "2,1"}) for rank in range(2)]
        found = worst(doctor_launch.about_cores(ranks))
        assert found.level == WARNING
        assert found.seen.startswith(
            "rank 0 may use 1 core, but OMP_NUM_THREADS asks for 2 threads (and 1 more rank alike)"
        )
        assert flag in found.do == widen(Launch(by), 2)
    greedy = [facts(rank, 2, HYDRA, cores=[rank], environ={"OMP_NUM_THREADS": "8"}) for rank in range(2)]
    assert worst(doctor_launch.about_cores(greedy)).do == "Ask for fewer threads"


def test_ranks_that_outnumber_their_cores_are_told_whether_the_node_has_more() -> None:
    few = [facts(rank, 4, OPEN_MPI, vendor="Open MPI", cores=[0]) for rank in range(4)]
    found = worst(doctor_launch.about_cores(few))
    assert "4 ranks share 1 core" in found.seen
    assert environment.YIELD in found.seen
    assert "The node has 4 cores: mpiexec --map-by" in found.do
    many = [facts(rank, 8, HYDRA) for rank in range(8)]
    assert worst(doctor_launch.about_cores(many)).do == "Start fewer ranks a node"


def test_threads_that_nobody_has_limited_are_noted_where_ranks_share_cores() -> None:
    loose = [facts(rank, 2, HYDRA, environ={}) for rank in range(2)]
    found = worst(doctor_launch.about_cores(loose))
    assert (found.level, found.command) == (NOTE, "export OMP_NUM_THREADS=2")
    bound = [facts(rank, 2, HYDRA, cores=[2 * rank, 2 * rank + 1], environ={}) for rank in range(2)]
    assert worst(doctor_launch.about_cores(bound)).level == OK


# Nodes


def test_too_little_shared_memory_is_warned_about() -> None:
    assert worst(doctor_node.about_shm(node())).level == OK
    docker = worst(doctor_node.about_shm(node(shm=[64 << 20, 60 << 20])))
    assert "60 MiB free of 64" in docker.seen
    assert "--shm-size" in docker.do


def left(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(bytes(5000))
        os.utime(folder / name, (0, 0))


def test_only_files_that_nobody_maps_are_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "SETTLED_S", -1)
    left(tmp_path, "mpich_shm_a_0", "mpich_shm_b_0", "sm_segment.h1.0.1", "mine")
    maps = f"7f00-7f01 rw-s 0 00:18 5 {tmp_path}/mpich_shm_a_0\n"
    assert doctor_facts.stale(tmp_path, [maps, None])[::2] == (["mpich_shm_b_0", "sm_segment.h1.0.1"], 1)
    assert doctor_facts.stale(tmp_path, [])[0] == ["mpich_shm_a_0", "mpich_shm_b_0", "sm_segment.h1.0.1"]
    assert doctor_facts.stale(tmp_path, [])[1] >= 3 * 4096
    monkeypatch.setattr(doctor_facts, "SETTLED_S", 60)  # a job may be about to map it
    assert doctor_facts.stale(tmp_path, []) == ([], 0, 0)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="who maps what is read in /proc")
def test_a_file_that_a_live_process_maps_is_not_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "SETTLED_S", -1)
    left(tmp_path, "mpich_shm_a_0", "mpich_shm_b_0")
    file = f"open('{tmp_path}/mpich_shm_a_0', 'r+b')"
    code = f"import mmap; f = {file}; m = mmap.mmap(f.fileno(), 0); f.close(); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        assert doctor_facts.stale(tmp_path)[0] == ["mpich_shm_b_0"]
        other.communicate(b"\n", timeout=20)


def test_the_command_removes_exactly_what_is_left_over(tmp_path: Path) -> None:
    left(tmp_path, "mpich_shm_a_0", "mpich_shm_b_0", "Intel_MPI_odd name")
    found = worst(doctor_node.about_shm(node(stale=["mpich_shm_a_0", "Intel_MPI_odd name"])))
    assert found.level == WARNING
    subprocess.run(["sh", "-c", found.command.replace("cd /dev/shm", f"cd {tmp_path}")], check=True, timeout=10)
    assert [file.name for file in tmp_path.iterdir()] == ["mpich_shm_b_0"]
    unsure = worst(doctor_node.about_shm(node(stale=["mpich_shm_a_0"], unsure=2)))
    assert (unsure.level, unsure.command) == (NOTE, "")


def test_the_mpi_libraries_of_a_process_are_told_from_others() -> None:
    text = "7f r-xp 0 0 1 /a b/libmpi.so.12\n7f r--p 0 0 1 /a b/libmpi.so.12\n7f r 0 0 2 /x/libmpi_cxx.so.1\n"
    assert doctor_facts.loaded(text + "7f r 0 0 3 /x/libmpi_abi.so.0\n7f rw 0 0 0 [heap]\n") == [
        "/a b/libmpi.so.12",
        "/x/libmpi_abi.so.0",
    ]


def test_a_fork_over_infiniband_is_noted() -> None:
    assert worst(doctor_node.about_fork(node())).level == OK
    assert "forkserver" in worst(doctor_node.about_fork(node(infiniband=["mlx5_0"]))).do
    assert worst(doctor_node.about_fork(node(infiniband=["mlx5_0"], start_method="spawn"))).level == OK


TORCH = {"version": "2.13", "devices": ["H200", "H200"]}


@pytest.mark.parametrize(
    ("nvidia", "found", "level", "seen"),
    [
        (0, {"torch": {"version": "2", "devices": []}, "cupy": {"missing": True}, "mpi": {"aware": False}}, OK, ""),
        (2, {"torch": {"version": "2+cpu", "devices": []}}, WARNING, "2+cpu, sees no GPU"),
        (2, {"torch": TORCH, "mpi": {"aware": False}}, NOTE, "stages arrays of GPUs through pinned host memory"),
        (2, {"torch": TORCH, "mpi": {"aware": True, "tried": "right"}}, OK, ""),
        (2, {"torch": TORCH, "mpi": {"aware": True, "tried": "it crashes"}}, ERROR, "device memory, but it crashes"),
        (0, {"torch": {"error": "OSError: libc10.so"}}, WARNING, "torch cannot be used: OSError: libc10.so"),
        (1, {"torch": {"version": "2", "devices": ["A"]}}, NOTE, "2 ranks for 1 GPU: some share one"),
        (0, {"at": "torch", "ended": "was ended by signal 11"}, WARNING, "signal 11 while it was at torch"),
    ],
)
def test_gpus_are_judged_by_what_the_child_found(nvidia: int, found: dict[str, Any], level: str, seen: str) -> None:
    told = worst(doctor_node.about_devices(node(nvidia=nvidia), 2, found))
    assert told.level == level
    assert seen in told.seen


def test_a_child_that_crashes_or_hangs_leaves_what_it_had_found() -> None:
    def ends(last: str, limit_s: float) -> dict[str, Any]:
        say = """print('{"at": "torch", "mpi": {"aware": false}}\\nnoise', flush=True)"""
        code = f"import os, time; {say}; {last}"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        return doctor_child.finish(child, time.monotonic() + limit_s)

    assert ends("os.abort()", 20) == {"at": "torch", "mpi": {"aware": False}, "ended": "was ended by signal 6"}
    assert ends("time.sleep(60)", 2)["ended"] == "did not end in time"
    assert ends("0", 20)["ended"] == ""


# Measurements


def test_a_slow_rank_is_named_with_its_host() -> None:
    hosts = ["h1", "h1", "h2", "h2"]
    even = [(1.0, 1.1), (1.1, 1.2), (1.0, 1.1), (1.2, 1.3)]
    assert worst(doctor_probe.about_speed(even, hosts, False)).level == OK
    found = worst(doctor_probe.about_speed([*even[:3], (1.7, 1.8)], hosts, False))
    assert found.level == WARNING
    assert found.seen.startswith("rank 3 on h2 takes 1.70 s for what the median rank does in 1.05 s")


def test_an_unsteady_rank_is_noted_unless_ranks_share_cores() -> None:
    speeds = [(1.0, 1.1), (1.0, 2.5)]
    assert "rank 1 on h1" in worst(doctor_probe.about_speed(speeds, ["h1", "h1"], False)).seen
    assert worst(doctor_probe.about_speed(speeds, ["h1", "h1"], True)).level == OK


def test_the_median_of_a_computation_leaves_out_its_first_time() -> None:
    ticks = iter([0, 100, *(float(tick) for tick in range(200, 200 + 2 * doctor_probe.REPEATS))])
    seconds = doctor_probe.compute(lambda: next(ticks))
    assert seconds == [1.0] * doctor_probe.REPEATS
    assert doctor_probe.spread([*[1.0] * 17, 5, 5, 5]) == (1.0, 5.0)


def test_pairs_reach_every_node_and_stay_few() -> None:
    assert doctor_probe.pairs(((0,),)) == []
    assert doctor_probe.pairs(((0, 1, 2),)) == [(0, 1)]
    assert doctor_probe.pairs(((0, 2), (1,), (3, 4))) == [(0, 2), (3, 4), (0, 1), (0, 3), (1, 3)]
    assert len(doctor_probe.pairs(tuple((rank,) for rank in range(1000)))) <= 3 * doctor_probe.MOST_PAIRS


def links(**weak: float) -> list[Link]:
    alike = [Link(0, rank, 1e-5, 1.2e-5, 1e9, 0.0, False) for rank in range(1, 5)]
    return [*alike[:3], alike[3]._replace(**weak)]


def test_weak_links_and_clocks_that_are_off_are_named() -> None:
    hosts = [f"h{rank}" for rank in range(5)]
    assert {each.level for each in doctor_probe.about_links(links(), hosts, False)} == {OK}
    slow = worst(doctor_probe.about_links(links(bytes_per_s=4e8), hosts, False))
    assert slow.seen == "rank 0 on h0 and rank 4 on h4: 0.4 GB/s, where 1 are usual"
    assert "rank 4 on h4: 100 us a small" in worst(doctor_probe.about_links(links(usual_s=1e-4), hosts, False)).seen
    late = worst(doctor_probe.about_links(links(offset_s=-2.0), hosts, False))
    assert late.seen == "the clock of h4 is 2.00 s behind h0's"


def test_slow_messages_in_a_node_are_excused_where_ranks_share_cores() -> None:
    slow = [Link(0, 1, 5e-3, 8e-3, 1e9, 0.0, True)]
    assert worst(doctor_probe.about_links(slow, ["h0", "h0"], False)).level == WARNING
    assert worst(doctor_probe.about_links(slow, ["h0", "h0"], True)).level == OK


# Settings


@pytest.mark.parametrize(
    ("name", "value", "seen", "do"),
    [
        ("HPCDL_TUNNING", "0", "hpcdl knows no HPCDL_TUNNING", "Is HPCDL_TUNING meant?"),
        ("HPCDL_XYZZY", "0", "hpcdl knows no HPCDL_XYZZY", "There are HPCDL_ALGORITHM"),
        ("HPCDL_CHECK", "false", "HPCDL_CHECK=false counts as on", ""),
        ("HPCDL_STALL_ABORT", "yes", "HPCDL_STALL_ABORT=yes counts as off", ""),
        ("HPCDL_TRACE", "/nowhere/trace.json", "nothing can be written in /nowhere", ""),
    ],
)
def test_variables_that_are_no_use_are_said(name: str, value: str, seen: str, do: str) -> None:
    found = worst(doctor.settings_problems({name: value}))
    assert seen in found.seen
    assert do in found.do
    assert list(doctor.settings_problems({"HPCDL_CHECK": "0", "HPCDL_STALL_SECONDS": "5"})) == []


def test_ranks_with_other_settings_are_an_error() -> None:
    ranks = [facts(0, 2, environ={"HPCDL_SHARED": "0"}), facts(1, 2)]
    assert worst(doctor.variables(ranks)).seen == "HPCDL_SHARED is 0 on rank 0, but unset on rank 1"


# Report


def test_what_was_seen_alike_on_several_hosts_is_said_once() -> None:
    found = [Finding(NOTE, "t", "s", host=f"h{number}") for number in range(6)]
    assert [each.host for each in merged(found[:2], 3)] == ["h0, h1"]
    assert [each.host for each in merged(found, 6)] == ["all hosts"]
    assert [each.host for each in merged(found, 9)] == ["h0, h1, h2, h3 and 2 more"]
    assert [each.host for each in merged(found[:1], 1)] == [""]


def test_errors_stand_last_and_commands_in_one_line() -> None:
    command = "rm " + " ".join(f"file{number}" for number in range(50))
    text = as_text([Finding(ERROR, "a", "bad"), Finding(OK, "b", "good", command=command)], "head")
    lines = text.splitlines()
    assert lines[0] == "head"
    assert lines[-2:] == ["  error    a: bad", "1 error."]
    assert f"           $ {command}" in lines
    assert status([Finding(WARNING, "", "")]) == 0
    assert status([Finding(ERROR, "", ""), Finding(OK, "", "")]) == 1


# Starts that fail


@pytest.mark.parametrize(
    ("end", "launch", "seen", "do"),
    [
        (
            End(16, "", {"vendor": "MPICH"}, "PMIx unsupported"),
            Launch(OPEN_MPI, 4, 0, "pmix"),
            "has started processes",
            "",
        ),
        (End(-signal.SIGBUS, "", {"vendor": "MPICH"}, ""), Launch(NOBODY), "signal 7", "/dev/shm seems to be full"),
        (End(1, "", {}, "Unable to get the user home directory"), Launch(NOBODY), "status 1", "export HOME"),
        (
            End(None, "", {"vendor": "MPICH"}, ""),
            Launch(HYDRA, 2, 0, "pmi1"),
            "did not get any further",
            "mpiexec -n 1",
        ),
        (
            End(1, "", {"unusable": "RuntimeError: cannot load MPI library"}, ""),
            Launch(NOBODY),
            "finds no MPI",
            "module",
        ),
        (
            End(-11, "messages between rank 0 and rank 3", {STARTED: True}, ""),
            Launch(NOBODY),
            "at: messages betw",
            "fire",
        ),
    ],
)
def test_an_mpi_that_does_not_start_is_explained(end: End, launch: Launch, seen: str, do: str) -> None:
    found = worst(doctor_start.explain(end, launch))
    assert found.level == ERROR
    assert seen in found.seen
    assert do in found.do


def test_of_what_mpi_says_the_gist_is_kept() -> None:
    words = "------\nSorry!  You were supposed\n  a  telling line\na telling line\n<frozen x>: 2\nthe end\n"
    assert doctor_start.briefly(words) == "a telling line / the end"
    assert len(doctor_start.briefly("word " * 1000)) < 400


WATCH = """
import os, sys, time
from hpcdl.cli.doctor_watch import Child, watched
end = watched(start_s=1.5, phase_s=1.5)
if isinstance(end, Child):
    end.tell("first", **{"MPI has started": sys.argv[2] == "started"})
    end.quiet()
    print("MPI's words", flush=True)
    exec(sys.argv[1])
    os._exit(0)
print(end.status, end.phase, end.told, end.words.strip())
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("time.sleep(60)", "None first"),
        ("os.abort()", "-6 first"),
        ("os._exit(3)", "3 first"),
        ("end.tell('second', n=1); time.sleep(0.9); end.tell('third'); time.sleep(0.9)", "0 third"),
    ],
)
def test_the_watcher_tells_how_its_child_ended(code: str, said: str) -> None:
    run = [sys.executable, "-c", WATCH, code, "started"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(said), done.stdout + done.stderr
    assert done.stdout.endswith("MPI's words\n")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux lets a child end with its parent")
def test_the_child_ends_with_its_watcher(tmp_path: Path) -> None:
    code = "open(sys.argv[3], 'w').write(str(os.getpid())); time.sleep(60)"
    file = tmp_path / "pid"
    script = WATCH.replace("1.5", "50")
    with subprocess.Popen([sys.executable, "-c", script, code, "started", str(file)]) as watcher:
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        child = Path("/proc") / file.read_text()
        watcher.kill()
    limit = time.monotonic() + 10
    while child.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not child.exists()


# Real runs


def alone(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("HPCDL_")}
    command = [sys.executable, "-m", "hpcdl", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=known | variables)


def test_alone_it_says_what_one_process_can() -> None:
    done = alone("--quick", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["format"], told["status"], told["ranks"], len(told["hosts"])) == ("hpcdl doctor 1", 0, 1, 1)
    assert {"MPI", "versions", "launcher", "thread level", "cores", "fork", "tuning"} <= {
        each["topic"] for each in told["findings"]
    }
    assert all(set(each) == {"level", "topic", "seen", "do", "command", "host"} for each in told["findings"])


def test_a_value_that_hpcdl_refuses_is_said_in_words() -> None:
    done = alone("--quick", HPCDL_STALL_SECONDS="soon", HPCDL_NODES="7+7", HPCDL_SHRAED="0")
    assert done.returncode == 1
    assert "HPCDL_STALL_SECONDS=soon is no number of seconds" in done.stdout
    assert "HPCDL_NODES must be sizes" in done.stdout
    assert "Is HPCDL_SHARED meant?" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_without_an_mpi_library_it_says_how_to_get_one() -> None:
    done = alone("--quick", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode == 1
    assert "/nowhere/libmpi.so" in done.stdout
    assert "$ unset MPI4PY_LIBMPI" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_several_processes_that_mpi_knows_nothing_of_are_an_error() -> None:
    wrong = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    if is_open_mpi():  # which would look for the launcher
        wrong = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    done = alone("--quick", **wrong)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "has started 4 processes" in " ".join(done.stdout.split())
    silent = alone("--quick", **{name: "3" if name.endswith(("RANK", "PROCID")) else v for name, v in wrong.items()})
    assert silent.stdout == ""
    assert "has started 4" not in alone("--quick", HPCDL_DETECT="0", **wrong).stdout


def test_ranks_are_examined_together_and_reported_once() -> None:
    done = run_ranks(4, "-m", "hpcdl", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    topics = {each["topic"] for each in told["findings"]}
    assert told["ranks"] == len(told["compute_s"]) == 4
    assert {"messages", "torch", "shared memory", "CUDA-aware"} <= topics
    assert [(link["a"], link["b"]) for link in told["links"]] == [(0, 1)]
    assert 0 < told["links"][0]["latency_s"] <= told["links"][0]["usual_s"] < 1


def test_a_wrong_argument_and_a_wrong_setting_end_on_all_ranks_alike() -> None:
    assert run_ranks(2, "-m", "hpcdl", "doctor", "--bogus").stderr.count("there is no --bogus") == 1
    done = run_ranks(2, "-m", "hpcdl", "doctor", "--quick", env={"HPCDL_NODES": "3+4"})
    assert done.returncode == 1
    assert done.stdout.count("HPCDL_NODES must be sizes") == 1


def test_a_rank_whose_part_fails_is_a_finding() -> None:
    code = """
import sys
from hpcdl.cli import doctor, doctor_probe
def fail(): raise OSError("no clock")
if "1" in (__import__("os").environ.get(n) for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
    doctor_probe.compute = fail
    doctor.about_process = fail
from hpcdl.cli.main import main
sys.exit(main(["doctor", "--quick"]))
"""
    done = run_ranks(2, "-c", code)
    assert "this could not be found out: OSError: no clock" in done.stdout, done.stdout + done.stderr
