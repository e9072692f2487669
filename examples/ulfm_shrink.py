"""A rank is lost in the middle of the work, and the others go on without it; Open MPI only, and no hpcdl yet.

mpiexec --with-ft ulfm -n 4 python examples/ulfm_shrink.py
"""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

STEPS, LOST_AT = 200, 50


def ring_sum(comm: MPI.Intracomm, value: float) -> float:
    """The sum over all ranks: every value travels once round the ring."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    total, leaving, coming = value, np.array([value], float), np.empty(1)
    for _ in range(comm.size - 1):
        comm.Sendrecv(leaving, right, recvbuf=coming, source=left)
        total += coming[0]
        leaving[:] = coming
    return total


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The ranks that are left."""
    comm.Revoke()  # a rank whose neighbours live would wait for its message for ever
    comm = comm.Shrink()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def main() -> None:
    """Add up for some steps, in one of which the last rank kills itself."""
    if MPI.get_vendor()[0] != "Open MPI":
        sys.exit(f"ulfm_shrink.py: {MPI.get_vendor()[0]} ends the job with its first lost rank: take Open MPI 5")
    comm, name = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    lost, total, step = comm.size - 1, 0.0, 0
    while step < STEPS:
        try:
            if name == lost and step == LOST_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            total = ring_sum(comm, name)
            step += 1
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
            comm = survivors(comm)
            step = comm.allreduce(step, MPI.MIN)  # some had done one more
    print(f"rank {name}: {step} steps, at last with {comm.size} ranks whose sum is {total:g}", flush=True)
    # MPI's own end may wait for the lost rank for ever.
    comm.Agree(1)
    os._exit(0)


if __name__ == "__main__":
    main()
