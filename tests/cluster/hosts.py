#!/usr/bin/env python3
"""Hosts on one machine: network namespaces with a name, an address and a /dev/shm each; needs root and iproute2.

As a script it is to MPI's launchers what ssh is to them elsewhere: hosts.py [ssh's options] HOST COMMAND...
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

NAMES, ADDRESSES = "hpcdl-", "10.77.0."
"""Host 3 is hpcdl-3 with the address 10.77.0.3; nothing without the first prefix is touched."""
SWITCH = f"{NAMES}switch"
BRIDGE, OTHER = "bridge", "other"
"""Where all are plugged in, and where those are that were parted from the rest."""
NAMESPACES = Path("/run/netns")
LOCK = Path("/run/hpcdl-hosts.lock")
HERE = str(Path(__file__).resolve())

WAIT_S = 60
BURST = "128kb"
OPTIONS_WITH_VALUE = ("-o", "-l", "-p", "-F", "-i")

# $0 is the name, $1 what is in /etc/hosts, $2 the command. The second /dev/shm hides the file in the first one, which
# must stay: a host's command runs commands on other hosts, and nothing can be mounted over a file that was removed.
ENTER = """set -e
hostname "$0"
mount -t tmpfs tmpfs /dev/shm
printf %s "$1" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
exec sh -c "$2"
"""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    tools = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
    lacking = [tool for tool in tools if not shutil.which(tool)]
    if lacking:
        return f"there is no {lacking[0]}: apt-get install {tools[lacking[0]]}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--ipc", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Hosts:
    """So many hosts on one switch, each sending at most at the rate; nothing of them outlives the `with` block."""

    def __init__(self, count: int, rate: str = "1gbit") -> None:
        if not 1 <= count <= 254:
            raise ValueError(f"there can be 1 to 254 hosts, not {count}")
        self.count, self.rate = count, rate

    def __enter__(self) -> Hosts:
        self.lock = locked()
        try:
            take_down()  # what a killed run has left behind
            self._bring_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            take_down()
        finally:
            self.lock.close()

    def _bring_up(self) -> None:
        ip("netns", "add", SWITCH)
        for bridge in (BRIDGE, OTHER):
            ip("-n", SWITCH, "link", "add", bridge, "type", "bridge")
            ip("-n", SWITCH, "link", "set", bridge, "up")
        for number in range(1, self.count + 1):
            host, port = f"{NAMES}{number}", self._port(number)
            ip("netns", "add", host)
            ip(*f"link add eth0 netns {host} type veth peer name {port} netns {SWITCH}".split())
            ip("-n", SWITCH, "link", "set", port, "master", BRIDGE, "up")
            ip("-n", host, "addr", "add", f"{ADDRESSES}{number}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", host, "link", "set", link, "up")
            shape = f"qdisc replace dev eth0 root tbf rate {self.rate} burst {BURST} latency 100ms"
            run("tc", "-n", host, *shape.split())

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """What to run for argv to run on that host, numbered from 1."""
        self._port(host)
        return [sys.executable, HERE, f"{NAMES}{host}", shlex.join(argv)]

    def mpiexec(
        self,
        mpi: str,
        bin_dir: str | os.PathLike[str],
        per_host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
    ) -> list[str]:
        """What to run for argv to run in so many ranks on every host, under the mpich or openmpi of that bin/.

        `extra` are options for its mpiexec.
        """
        numbers = range(1, self.count + 1)
        if mpi == "mpich":
            # Else UCX looks for faster networks, and in shared memory that the hosts do not share.
            ours = {"UCX_TLS": "tcp,self" if per_host == 1 else "tcp,self,posix,cma"}
            places = ",".join(f"{ADDRESSES}{number}:{per_host}" for number in numbers)
            options = ["-launcher", "ssh", "-launcher-exec", HERE, "-hosts", places]
        elif mpi == "openmpi":
            ours = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            places = ",".join(f"{NAMES}{number}:{per_host}" for number in numbers)
            # Told how to place them, it takes no other advice from the environment.
            options = ["--prtemca", "plm_ssh_agent", HERE, "--host", places, "--map-by", f"ppr:{per_host}:node"]
            # Without yielding a message takes 8 ms where ranks outnumber cores.
            settings = "pml ob1  btl tcp,self,sm  btl_tcp_if_include eth0  mpi_yield_when_idle 1"
            options += [word for setting in settings.split("  ") for word in ("--mca", *setting.split())]
        else:
            raise ValueError(f"mpi is mpich or openmpi, not {mpi!r}")
        variables = [f"{name}={value}" for name, value in (ours | dict(env or {})).items()]
        launcher = [str(Path(bin_dir) / "mpiexec"), *options, *extra, "-n", str(per_host * self.count)]
        return self.command(1, ["env", *variables, *launcher, *argv])

    def cut(self, number: int) -> None:
        """Pull that host's cable: what is on its way is lost, and no process is told."""
        ip("-n", SWITCH, "link", "set", self._port(number), "down")

    def part(self, *numbers: int) -> None:
        """Put these hosts on a switch of their own: they reach each other, and none of the rest."""
        for port in [self._port(number) for number in numbers]:
            ip("-n", SWITCH, "link", "set", port, "master", OTHER)

    def mend(self, number: int) -> None:
        """Plug that host in again, where the others are, and wait until it has seen that."""
        ip("-n", SWITCH, "link", "set", self._port(number), "master", BRIDGE, "up")
        end = time.monotonic() + 10
        while "LOWER_UP" not in (said := ip("-n", f"{NAMES}{number}", "link", "show", "eth0")) or " UP " not in said:
            if time.monotonic() > end:
                raise TimeoutError(f"host {number} is plugged in, and has no network: {said.strip()}")
            time.sleep(0.01)

    def _port(self, number: int) -> str:
        """Where its cable ends on the switch."""
        if not 1 <= number <= self.count:
            raise ValueError(f"there is no host {number}: they are 1 to {self.count}")
        return f"port{number}"


def locked() -> TextIO:
    """The open file that says that hosts are up; waits while another process has some, and goes with the process."""
    file, end = LOCK.open("a"), time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise TimeoutError(f"another process has hosts up for more than {WAIT_S} s (it locks {LOCK})") from None
            time.sleep(0.1)


def take_down() -> None:
    """End all that runs on the hosts, and remove them."""
    names = sorted(path.name for path in NAMESPACES.glob(f"{NAMES}*"))
    kill_all(names)
    for name in names:
        ip("netns", "del", name)


def kill_all(names: Sequence[str]) -> None:
    """End all that runs on these hosts."""
    end = time.monotonic() + 10
    while running := pids(names):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {running} on {', '.join(names)} cannot be ended")
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def pids(names: Sequence[str]) -> list[int]:
    """The processes that run on these hosts."""
    return [int(pid) for name in names for pid in ip("netns", "pids", name).split()]


def ip(*words: str) -> str:
    """What `ip` prints."""
    return run("ip", *words)


def run(*words: str) -> str:
    """What a command prints; RuntimeError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def enter(host: str, line: str) -> None:
    """Become a shell's command line on that host; unlike ssh, with this process's environment."""
    number = re.fullmatch(rf"(?:{re.escape(NAMES)}|{re.escape(ADDRESSES)})(\d+)", host)
    namespace = NAMESPACES / f"{NAMES}{number[1] if number else ''}"
    if number is None or not namespace.exists():
        sys.exit(f"hosts.py: there is no host {host}")
    others = sorted(int(path.name.removeprefix(NAMES)) for path in NAMESPACES.glob(f"{NAMES}[0-9]*"))
    known = "127.0.0.1 localhost\n" + "".join(f"{ADDRESSES}{other} {NAMES}{other}\n" for other in others)
    apart = ["unshare", "--uts", "--ipc", "--mount", "sh", "-c", ENTER, namespace.name, known, line]
    os.execvp("nsenter", ["nsenter", f"--net={namespace}", *apart])


def main(words: Sequence[str]) -> None:
    """Do what `ssh` would do with these words."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        rest = rest[2 if rest[0] in OPTIONS_WITH_VALUE else 1 :]
    if len(rest) < 2:
        sys.exit("usage: hosts.py [ssh's options] HOST COMMAND...")
    enter(rest[0], " ".join(rest[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
