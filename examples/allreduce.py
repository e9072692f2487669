"""The sum of 1, 2, ..., p on p ranks, by each algorithm: mpiexec -n 6 python examples/allreduce.py"""

import numpy as np
from mpi4py import MPI

import hpcdl

comm = MPI.COMM_WORLD
for name in hpcdl.algorithms():
    if name == "halving" and comm.size & (comm.size - 1):
        continue  # the only one that asks for 2**k ranks
    x = np.full(1000, comm.rank + 1)
    hpcdl.allreduce(x, comm, algorithm=name)
    if comm.rank == 0:
        print(f"{name:14} sum: {x[0]}")
