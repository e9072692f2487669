"""Several hosts on this machine, and all-reduces across them."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch import environment, is_open_mpi, marked

from cluster.hosts import ADDRESSES, NAMES, NAMESPACES, Hosts, missing

MPIEXEC = Path(sys.executable).with_name("mpiexec")
pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(120)]

SUMS = """
import numpy as np, hpcdl
from mpi4py import MPI
from hpcdl.channel import channel
comm = MPI.COMM_WORLD
assert channel(comm).nodes == ((0, 1), (2, 3)), channel(comm).nodes
for length in (3, 100_003):
    total = 10 + 4 * (np.arange(length) % 7)
    for x in (np.empty(length, "float32"), hpcdl.empty(length, "float32", comm)):
        for name in ("by_node", "by_node:binary_blocks", "ring", "auto"):
            x[:] = comm.rank + 1 + np.arange(length) % 7
            hpcdl.allreduce(x, comm, algorithm=name)
            assert (x == total).all(), (name, x, total)
print(f"{comm.rank} on {MPI.Get_processor_name()} is right.", flush=True)
"""

RECEIVE = """
import socket, time
with socket.create_server(("", 7777)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, received = time.monotonic(), 0
    while part := connection.recv(1 << 16):
        received += len(part)
    print(received, time.monotonic() - began)
"""
SEND = f"import socket; socket.create_connection(('{ADDRESSES}1', 7777)).sendall(bytes(4_000_000))"

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7777), timeout=2)  # what is lost at first is sent again
except ConnectionRefusedError:
    print("there")  # and nobody listens
except OSError as error:
    print(error)
"""

KILLED = """
import os, subprocess
from cluster.hosts import Hosts
hosts = Hosts(3).__enter__()
left = subprocess.Popen(hosts.command(3, ["sh", "-c", "echo there; sleep 600"]), stdout=subprocess.PIPE)
left.stdout.readline()
os._exit(0)
"""


def left() -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{NAMES}*")]


def reaches(hosts: Hosts, host: int, other: int) -> bool:
    line = hosts.command(host, [sys.executable, "-c", REACH, f"{ADDRESSES}{other}"])
    return subprocess.run(line, capture_output=True, text=True, timeout=10, check=True).stdout == "there\n"


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec of MPICH or Open MPI beside this python")
def test_sums_over_two_hosts_of_two_ranks_are_right_and_the_hosts_are_known() -> None:
    with Hosts(2) as hosts:
        mpi = "openmpi" if is_open_mpi() else "mpich"
        line = hosts.mpiexec(mpi, MPIEXEC.parent, 2, [sys.executable, "-c", SUMS], {"OMP_NUM_THREADS": "1"})
        done = subprocess.run(line, capture_output=True, text=True, timeout=50, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"{rank} on {NAMES}{rank // 2 + 1} is right." in done.stdout
    assert left() == []


def test_a_host_has_a_name_and_a_shm_of_its_own_and_knows_the_others() -> None:
    with Hosts(2) as hosts:
        for host, other in ((1, 2), (2, 1)):
            script = f"hostname; touch /dev/shm/{host}; ls /dev/shm; getent hosts {NAMES}{other}; echo 'a  b'"
            said = subprocess.run(hosts.command(host, ["sh", "-c", script]), capture_output=True, text=True, timeout=10)
            name, file, address, spaced = said.stdout.splitlines()
            assert (name, file, spaced) == (f"{NAMES}{host}", str(host), "a  b")
            assert address.split() == [f"{ADDRESSES}{other}", f"{NAMES}{other}"]


def test_a_host_sends_no_faster_than_its_rate() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        receiver = hosts.command(1, [sys.executable, "-c", RECEIVE])
        with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            subprocess.run(hosts.command(2, [sys.executable, "-c", SEND]), check=True, timeout=20)
            received, seconds = process.stdout.readline().split()
    burst = 128 << 10
    assert int(received) == 4_000_000
    assert float(seconds) >= (int(received) - 2 * burst) / (100e6 / 8)


def test_a_host_that_is_cut_off_reaches_nobody_until_it_is_mended() -> None:
    with Hosts(3) as hosts:
        assert reaches(hosts, 1, 2)
        hosts.cut(2)
        assert [reaches(hosts, *pair) for pair in ((1, 2), (2, 1), (1, 3))] == [False, False, True]
        hosts.mend(2)
        assert reaches(hosts, 1, 2)


def test_hosts_that_are_parted_from_the_rest_reach_each_other() -> None:
    with Hosts(4) as hosts:
        hosts.part(2, 4)
        assert [reaches(hosts, *pair) for pair in ((2, 4), (1, 3), (1, 2), (4, 3))] == [True, True, False, False]
        hosts.mend(2)
        assert [reaches(hosts, *pair) for pair in ((1, 2), (2, 4))] == [True, False]


def test_what_runs_on_a_host_ends_with_it() -> None:
    mark = "HPCDL_TEST_HOST=it stays"
    with Hosts(1) as hosts:
        line = hosts.command(1, ["env", mark, "sh", "-c", "echo there; sleep 600"])
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert marked(mark)
    assert process.wait(10) < 0
    process.stdout.close()
    assert not marked(mark)
    assert left() == []


def test_what_a_killed_run_has_left_behind_is_taken_down() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{KILLED}"
    mark = {"HPCDL_TEST_HOST": "left behind"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, env=environment(mark))
    assert len(left()) == 4
    with Hosts(1):
        assert not marked("HPCDL_TEST_HOST=left behind")
        assert len(left()) == 2
    assert left() == []


def test_a_second_run_waits_until_the_first_has_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.hosts.WAIT_S", 0)
    with Hosts(1) as hosts:
        with pytest.raises(TimeoutError, match="another process has hosts up"), Hosts(1):
            pass
        subprocess.run(hosts.command(1, ["true"]), check=True, timeout=10)


def test_there_is_no_host_beyond_the_last() -> None:
    with Hosts(1) as hosts:
        for host in (0, 2):
            with pytest.raises(ValueError, match=f"there is no host {host}"):
                hosts.command(host, ["true"])
            with pytest.raises(ValueError, match=f"there is no host {host}"):
                hosts.part(1, host)
        with pytest.raises(ValueError, match="mpich or openmpi, not 'lam'"):
            hosts.mpiexec("lam", "/bin", 1, ["true"])
