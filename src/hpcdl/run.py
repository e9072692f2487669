"""Run an unchanged PyTorch program on MPI's ranks: mpiexec -n 4 python -m hpcdl.run SCRIPT ARGUMENTS

The program finds in its environment what torch.distributed looks for there, and which torchrun would set: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A rank that raises, or exits with a status other
than 0, ends the whole job. `-m MODULE` in place of SCRIPT runs a module.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import hpcdl
import hpcdl_backend
from hpcdl.ends import MOST_IN_TURN, wait_until_read
from hpcdl.environment import contradiction, cores_per_rank, wrong_size

if TYPE_CHECKING:
    from mpi4py import MPI

CONNECT_S = 2.0

_reserved: list[socket.socket] = []


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    module = given[:1] == ["-m"]
    program = given[1:] if module else given
    if not program or program[0] in ("-h", "--help"):
        if world.rank == 0:
            print(__doc__.strip(), file=sys.stdout if program else sys.stderr)
        sys.exit(0 if program else 2)
    _prepare(world)
    _register()
    sys.argv = program
    try:
        if module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        elif not os.path.exists(program[0]):
            sys.exit(f"hpcdl.run: {os.uname().nodename} has no file {os.path.abspath(program[0])}")
        else:
            # As python itself does: beside the script, not where we were started.
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            _end_job(world, end.code)
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _MACHINERY and trace.tb_next is not None:
            trace = trace.tb_next
        error = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)  # which ends the job, if there are other ranks
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


_MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")


def _prepare(world: MPI.Intracomm) -> None:
    """Set the environment, the same way on all ranks."""
    from mpi4py import MPI

    for warning in (contradiction(world.rank, world.size), wrong_size(world.size, vendor=MPI.get_vendor()[0])):
        if warning:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
    # Else each rank's torch takes all cores of the node. What the user has set stays.
    os.environ.setdefault("OMP_NUM_THREADS", str(cores_per_rank(world)))
    address, port = master(world)
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(hpcdl.local_rank()),
        LOCAL_WORLD_SIZE=str(hpcdl.local_size()),
        MASTER_ADDR=address,
        MASTER_PORT=port,
    )


def master(world: MPI.Intracomm) -> tuple[str, str]:
    """Where rank 0 will listen: as the user has it on rank 0, else at a free port of an address that all can reach."""
    own = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    address, port = world.bcast(own)
    if world.rank == 0 and not port:
        # Bound, so that nobody else is given it, but not listening, so that torch's store may, once or several times.
        _reserved.append(_bound())
        port = str(_reserved[0].getsockname()[1])
    return address or _reachable(world), world.bcast(port)


def _bound() -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("", 0))
    return bound


def _reachable(world: MPI.Intracomm) -> str:
    """An address of rank 0's host that all other hosts reach."""
    from hpcdl.watch import addresses

    if hpcdl.local_size() == world.size:
        return "127.0.0.1"
    with _bound() as server:
        server.listen(1024)
        known: list[str] = world.bcast(addresses())
        port = world.bcast(server.getsockname()[1])
        reached = set(known)
        if hpcdl.local_rank() == 0:  # one of each host does
            reached = {address for address in known if _answers(address, port)}
        everybody = world.allgather(reached)
    good = [address for address in known if all(address in each for each in everybody)]
    if not good:
        tried = ", ".join(known)
        raise OSError(
            f"not all hosts reach rank 0's host {world.bcast(socket.gethostname())} at one of its addresses ({tried}): "
            "set MASTER_ADDR to one that they reach"
        )
    return good[0]


def _answers(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), CONNECT_S):
        return True
    return False


def _register() -> None:
    """Have torch know the backend, where the installed package's entry point does not see to it."""
    if entry_points(group="torch.backends", name="hpcdl") and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        return
    with suppress(ImportError):
        import torch  # noqa: F401

        hpcdl_backend.register()


def _end_job(world: MPI.Intracomm, code: Any) -> None:
    """One rank has given up, and the others would wait for it."""
    if world.size == 1:
        return
    sys.stdout.flush()
    time.sleep(0.1 * min(world.rank, MOST_IN_TURN))  # often all do: then one of them says it
    status = code if isinstance(code, int) else 1
    reason = "" if isinstance(code, int) else f"{code}\n"
    sys.stderr.write(f"{reason}rank {world.rank} of {world.size} exited with status {status}, and ends the job\n")
    wait_until_read()
    world.Abort(status)


if __name__ == "__main__":
    main()
