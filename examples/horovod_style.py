"""A small network trained as one would with Horovod: mpiexec -n 2 python examples/horovod_style.py"""

import torch
from torch import nn

import hpcdl
from hpcdl.torch import DistributedOptimizer, average_metrics, broadcast_optimizer_state, broadcast_parameters

torch.manual_seed(hpcdl.rank())  # every rank starts with other weights, until they are broadcast
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
broadcast_parameters(model)
broadcast_optimizer_state(optimizer)

random = torch.Generator().manual_seed(hpcdl.rank())  # and has samples of its own
inputs = torch.randn(512, 20, generator=random)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
for epoch in range(5):
    for images, classes in zip(inputs.split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
    means = average_metrics({"loss": loss})
    if hpcdl.rank() == 0:
        print(f"epoch {epoch + 1}: loss {means['loss']:.4f} over {hpcdl.size()} ranks")
