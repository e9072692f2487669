"""Which rank takes which GPU, and a sum over all of them: what gpu.sbatch runs."""

import os
import sys

from mpi4py import MPI

import hpcdl


def main() -> None:
    """Take a device, say which, and add up a tensor on it."""
    try:
        import torch
    except ImportError as error:
        sys.exit(f"gpu.py: no torch ({error}): pip install 'hpcdl[torch]', or load your cluster's module of it")
    comm, local = MPI.COMM_WORLD, hpcdl.local_rank()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # SLURM counts the GPUs that a rank sees; the rank numbers those from 0.
    wanted = local % len(visible.split(",")) if visible else local
    there = torch.cuda.device_count()
    device = torch.device("cuda", local % there) if there else torch.device("cpu")
    if there:
        torch.cuda.set_device(device)

    who = f"rank {comm.rank} on {MPI.Get_processor_name()}"
    takes = f"takes {device}" if there else f"would take cuda:{wanted}"
    lines = comm.gather(f"{who}: local rank {local}, CUDA_VISIBLE_DEVICES {visible}, {takes}")
    none = comm.allreduce(not there, MPI.LOR)
    if lines:
        print("\n".join(lines))
        if none:
            print("note: torch finds no GPU on some node, so its ranks go on on the CPU")

    x = torch.full((1 << 20,), comm.rank + 1.0, device=device)
    hpcdl.allreduce(x)
    wrong = (x != comm.size * (comm.size + 1) / 2).any().item()
    if comm.allreduce(wrong, MPI.LOR):
        sys.exit(f"gpu.py: rank {comm.rank}: the sum is wrong" if wrong else 1)
    if comm.rank == 0:
        print(f"The sum of {comm.size} tensors is right on every rank.")


if __name__ == "__main__":
    main()
