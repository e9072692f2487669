"""PyTorch's own usage, and nothing else: mpiexec -n 4 python -m hpcdl.run examples/unchanged_ddp.py

The backend's name is all that is hpcdl's here; with "gloo" the same program runs under torchrun.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="hpcdl")
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()

dist.init_process_group(arguments.backend)
torch.manual_seed(0)
inputs = torch.randn(4096, 32)
labels = (inputs @ torch.randn(32, 10)).argmax(1)  # what there is to learn
dataset = TensorDataset(inputs, labels)
sampler = DistributedSampler(dataset)
batches = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(2)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.4f} over {dist.get_world_size()} ranks")

dist.destroy_process_group()
