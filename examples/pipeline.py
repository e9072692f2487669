"""A model on several ranks, by PyTorch's own parts: mpiexec -n 4 python -m hpcdl.run examples/pipeline.py

Two stages of layers, each on two ranks. Of the first stage's two linear layers each rank has a half, as AlexNet's GPUs
had; the second stage is there twice. The backend's name is all that is hpcdl's here.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STAGES, MICRO_BATCHES = 2, 4

dist.init_process_group("hpcdl")
mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("stage", "part"))
number = mesh.get_local_rank("stage")

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
labels = (inputs @ torch.randn(32, 10)).argmax(1)  # what there is to learn
stages = [
    nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
    nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
]
mine = stages[number]
if number == 0:
    parallelize_module(mine, mesh["part"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

stage = PipelineStage(mine, number, STAGES, torch.device("cpu"), group=mesh.get_group("stage"))
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.SGD(mine.parameters(), lr=0.2, momentum=0.9)

for epoch in range(5):
    losses: list[torch.Tensor] = []
    total = 0.0
    for x, y in zip(inputs.split(64), labels.split(64), strict=True):
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            total += sum(each.item() for each in losses) / MICRO_BATCHES
        optimizer.step()
    if stage.is_last and mesh.get_local_rank("part") == 0:
        print(f"epoch {epoch}: loss {total / 32:.4f} over {dist.get_world_size()} ranks", flush=True)

dist.destroy_process_group()
