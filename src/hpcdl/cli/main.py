"""hpcdl COMMAND: parse the arguments, run the command, and end on all ranks alike.

Exit status: 0 all is well; 1 it ran and failed; 2 it could not begin (a wrong argument, no data, no torch).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import hpcdl
from hpcdl import verdict
from hpcdl.cli.launch import terminal
from hpcdl.ends import wait_until_read
from hpcdl.environment import under_launcher
from hpcdl.logs import speaker

# Each is a module of this package with add_arguments(parser) and run(arguments) -> exit status.
COMMANDS = {
    "train": "train a network on images or text, each rank on its share of every batch",
    "bench": "time the all-reduce algorithms against MPI's own, with every result checked",
    "tune": "measure which all-reduce is the fastest here, and write it down for all programs",
    "explain": "say which algorithm is taken for a size, and why",
    "doctor": "say what is wrong with this machine, the launch and the settings, and how to mend it",
    "selftest": "check every algorithm, type, operation and layout on these ranks, and print what passed",
    "trace": "say where the time went that HPCDL_TRACE has written down, and who was slowest",
}


class UsageError(Exception):
    """A wrong argument, in one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser that leaves it to main to say what is wrong, once for all ranks."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that argv names; give the exit status."""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        return refuse(str(error))
    try:
        status: int = arguments.run(arguments)
        return status
    except BrokenPipeError as error:  # as in hpcdl explain | head
        if under_launcher():
            return die(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        return die(error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse with the arguments of the named command only: the other commands' modules are not imported."""
    parser = Parser("hpcdl", description="Distributed deep-learning training over MPI.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hpcdl {hpcdl.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    named, speaker = next((word for word in argv if not word.startswith("-")), None), parser
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, allow_abbrev=False)
        if name == named:
            module = import_module(f"hpcdl.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            speaker = command
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        speaker.error(f"there is no {' '.join(unknown)}")
    return arguments


def refuse(line: str) -> int:
    """Print one line, once for all ranks, and give the exit status 2."""
    if under_launcher():
        from mpi4py import MPI

        # Ranks that were given other arguments and have begun are at an agreement too, and learn it there.
        agreed = verdict.agree(MPI.COMM_WORLD, line)
        line = (agreed or line) if MPI.COMM_WORLD.rank == 0 else ""
    if line:
        print(f"hpcdl: {line}", file=sys.stderr, flush=True)
    return 2


def die(error: BaseException) -> int:
    """Take the whole job down: the other ranks would wait for this one for ever."""
    # What never imported MPI has no other ranks.
    MPI = sys.modules.get("mpi4py.MPI")
    world = MPI.COMM_WORLD if MPI and MPI.Is_initialized() and not MPI.Is_finalized() else None
    who = speaker(world) if world else ""
    if watch := sys.modules.get("hpcdl.watch"):
        watch.flush()
    interrupted = isinstance(error, KeyboardInterrupt)
    text = "interrupted\n" if interrupted else "".join(traceback.format_exception(error))
    # In one write, each line with its rank and host in front: other ranks may be printing theirs.
    sys.stdout.flush()
    sys.stderr.write("".join(f"{who}{line}\n" for line in text.splitlines()))
    sys.stderr.flush()
    status = 130 if interrupted else 1
    if world and world.size > 1:
        if terminal():
            # Rank 0, if it is another, cannot show the cursor again that its progress bar has hidden.
            sys.stderr.write("\033[?25h")
            sys.stderr.flush()
        wait_until_read()
        world.Abort(status)
    return status
