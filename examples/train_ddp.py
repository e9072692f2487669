"""Train on MNIST-5k, each rank on its part of every batch: mpiexec -n 4 python examples/train_ddp.py"""

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcdl.data import load_together
from hpcdl.torch import DistributedDataParallel, ExactSampler, average_metrics

comm = MPI.COMM_WORLD
torch.set_num_threads(1)  # the ranks are the parallelism
images = load_together("mnist5k", comm)
train, test = (TensorDataset(torch.from_numpy(x).float() / 255, torch.from_numpy(y)) for x, y in images[1:])
sampler = DistributedSampler(train, num_replicas=comm.size, rank=comm.rank)
batches = DataLoader(train, batch_size=32, sampler=sampler)

model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
ddp = DistributedDataParallel(model, comm)  # all ranks start from the parameters of rank 0
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()  # and the gradients are averaged
        optimizer.step()

mine = ExactSampler(test, comm)  # each test image is looked at by one rank, once
hits = sum(int((ddp(x).argmax(1) == y).sum()) for x, y in DataLoader(test, batch_size=250, sampler=mine))
accuracy = average_metrics({"accuracy": hits / max(1, len(mine))}, comm, weights=len(mine))["accuracy"]
if comm.rank == 0:
    print(f"test accuracy {accuracy:.1%} of {len(test)} images")
