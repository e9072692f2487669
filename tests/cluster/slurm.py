"""A SLURM over the hosts of one machine: a controller on the first, a node on each, and fake GPUs; needs root."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import hosts
from cluster.hosts import ADDRESSES, NAMES, Hosts

DAEMONS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
SBIN = "/usr/sbin:/sbin"
"""Where Debian has the daemons, which is not on everybody's path."""

START_S = 60
LIMIT_S = 240
POLL_S = 0.1
TAIL = 4000
"""Characters of a log to show."""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

# Cores are handed out but nobody is bound to them: the nodes' together are more than the machine has.
CONFIGURATION = """\
ClusterName=hpcdl
SlurmctldHost={names}1({addresses}1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
EnforcePartLimits=ALL
GresTypes=gpu
MinJobAge=3600
KillWait=15
PartitionName=main Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""
NODE = (
    "NodeName={names}{number} NodeAddr={addresses}{number} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=2000 Gres=gpu:{gpus} State=UNKNOWN\n"
)


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    if why := hosts.missing():
        return why
    lacking = [daemon for daemon in DAEMONS if not shutil.which(daemon, path=f"{os.environ['PATH']}:{SBIN}")]
    return f"there is no {lacking[0]}: apt-get install {DAEMONS[lacking[0]]}" if lacking else ""


class Slurm:
    """A SLURM of so many nodes with so many CPUs and GPUs each; nothing of it outlives the `with` block."""

    def __init__(self, nodes: int, folder: Path, *, cpus: int = 4, gpus: int = 2) -> None:
        self.hosts, self.folder, self.cpus, self.gpus = Hosts(nodes), folder, cpus, gpus
        self.conf = folder / "slurm.conf"

    def __enter__(self) -> Slurm:
        self.hosts.__enter__()
        try:
            self._bring_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()  # daemons, steps and ranks all run on the hosts

    def _bring_up(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = range(1, self.hosts.count + 1)
        known = {"names": NAMES, "addresses": ADDRESSES, "folder": self.folder, "cpus": self.cpus, "gpus": self.gpus}
        nodes = "".join(NODE.format(number=number, **known) for number in numbers)
        self.conf.write_text(nodes + CONFIGURATION.format(**known))
        for gpu in range(self.gpus):
            os.mknod(self.folder / f"gpu{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{self.gpus - 1}]\n")

        # A munged of our own, so that the machine's, if it has one, is left alone.
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key} | {f"{what}-file": self.folder / f"munge.{what}" for what in ("pid", "log", "seed")}
        options = [f"--{name}={file}" for name, file in files.items()]
        self.on(1, "munged", "--force", f"--socket={self.folder}/munge.socket", *options)
        self.on(1, "slurmctld", "-c")
        for number in numbers:
            self.start_node(number)
        self._wait_until_idle()

    def start_node(self, number: int) -> None:
        """Start a node's slurmd, which knows of nothing that was before."""
        spool = self.folder / f"spool.{NAMES}{number}"
        shutil.rmtree(spool, ignore_errors=True)
        spool.mkdir()
        self.on(number, "slurmd", "-N", f"{NAMES}{number}")

    def lose_node(self, number: int) -> None:
        """Cut a node off and kill all that runs there; SLURM is told so, which else it would find out in minutes."""
        assert number > 1, "the controller is on node 1"
        node = f"{NAMES}{number}"
        hosts.ip("-n", node, "link", "set", "eth0", "down")  # first, so that nobody hears of it
        hosts.kill_all([node])
        self.on(1, "scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, number: int) -> None:
        """Start a lost node anew, and wait until SLURM has heard from it."""
        node = f"{NAMES}{number}"
        hosts.ip("-n", node, "link", "set", "eth0", "up")
        self.start_node(number)
        until(lambda: node in self._idle(), START_S, self.log, f"{node} is idle")

    def _wait_until_idle(self) -> None:
        until(lambda: len(self._idle()) == self.hosts.count, START_S, self.log, "all nodes are idle")

    def _idle(self) -> list[str]:
        """The nodes without work; SLURM puts a star behind the state of one that it has not heard from."""
        lines = self.on(1, "sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return [line.removesuffix(" idle") for line in lines if line.endswith(" idle")]

    def on(self, host: int, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What a command prints on that host; RuntimeError with what it complains of if it fails."""
        path = f"{os.environ['PATH']}:{SBIN}"
        variables = {**(os.environ if env is None else env), "PATH": path, "SLURM_CONF": str(self.conf)}
        command = self.hosts.command(host, argv)
        with tempfile.TemporaryFile("w+") as said:  # not a pipe: a daemon that stays would keep its reader waiting
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            done = subprocess.run(command, cwd=cwd or self.folder, env=variables, timeout=30, **streams)
            said.seek(0)
            text = said.read()
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} on {NAMES}{host}: {text.strip()}\n{self.log()}")
        return text

    def submit(self, *argv: str | Path, cwd: Path, env: Mapping[str, str]) -> Job:
        """Hand a script to sbatch, with options ahead and its arguments behind; cwd will hold its log."""
        # Where the job before is not over on each node, what that node still does to end it may meet this one's start.
        self._wait_until_idle()
        words = map(str, argv)
        return Job(self, int(self.on(1, "sbatch", "--parsable", *words, cwd=cwd, env=env).split()[-1]), cwd)

    def log(self) -> str:
        """The end of the controller's log."""
        file = self.folder / "slurmctld.log"
        return f"slurmctld's log:\n{file.read_text()[-TAIL:]}" if file.exists() else "slurmctld has no log"


class Job:
    """One that was submitted."""

    def __init__(self, slurm: Slurm, number: int, cwd: Path) -> None:
        self.slurm, self.number, self.cwd = slurm, number, cwd
        self.looked = 0.0

    def log(self) -> str:
        """What it has written so far, the parts of an array one after the other."""
        return "".join(file.read_text() for file in sorted(self.cwd.glob(f"*-{self.number}*.log")))

    def states(self) -> list[str]:
        """Where it stands, by `scontrol show job`; an array's parts."""
        said = self.slurm.on(1, "scontrol", "--oneliner", "show", "job", str(self.number))
        return [word.removeprefix("JobState=") for word in said.split() if word.startswith("JobState=")]

    def wait(self, state: str, limit_s: float = LIMIT_S) -> None:
        """Wait until it is in that state, and no longer if it has ended in another."""

        def there() -> bool:
            states = set(self.states())
            assert not states & ENDED - {state}, f"job {self.number} is {states}, not {state}\n{self.logs()}"
            return states == {state}

        until(there, limit_s, self.logs, f"job {self.number} is {state}")

    def wait_for(self, pattern: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a line of its log begins with what matches the pattern."""

        def there() -> bool:
            found = re.search(f"^{pattern}", self.log(), re.MULTILINE)
            if not found and time.monotonic() > self.looked + 2:  # not each time: it takes longer than to read the log
                states, self.looked = set(self.states()), time.monotonic()
                assert not states & ENDED, f"job {self.number} is {states} and has not said {pattern}\n{self.logs()}"
            return bool(found)

        until(there, limit_s, self.logs, f"job {self.number} says {pattern}")

    def begin_now(self) -> None:
        """Let it begin again; by itself SLURM has a job wait two minutes."""
        # Those of its first run take away, at their end, sockets that the second one's have by the same name. And nodes
        # tell the two runs apart by the second in which they began and ended.
        until(lambda: not self._steps(), LIMIT_S, self.logs, f"the steps of job {self.number} have ended")
        self.slurm.on(1, "scontrol", "update", f"JobId={self.number}", "StartTime=now+2")

    def _steps(self) -> list[int]:
        """The processes that look after its steps."""
        found = []
        for pid in hosts.pids([f"{NAMES}{number}" for number in range(1, self.slurm.hosts.count + 1)]):
            with suppress(OSError):  # it ended just now
                if f"slurmstepd: [{self.number}." in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def logs(self) -> str:
        """The end of the controller's log, and of its own."""
        return f"{self.slurm.log()}\njob {self.number}'s log:\n{self.log()[-TAIL:]}"


def until(true: Callable[[], object], limit_s: float, log: Callable[[], str], what: str) -> None:
    """Wait for it; TimeoutError with the log if it does not come."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s: {what}\n{log()}")
        time.sleep(POLL_S)
