"""Train with data parallelism, beside one process on the whole batch: the weights agree.

mpirun -n 2 python examples/data_parallel.py
"""

import torch
from torch import nn

import collectives
from parallelism import DataParallel, DistributedSampler


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


def step(model, optimizer, rows):
    model.zero_grad()  # in place: the gradients lie in memory that is sent
    (model(x[rows]) - y[rows]).square().mean().backward()
    optimizer.step()


comm = collectives.world()
x = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
plain, model = new_model(), DataParallel(new_model(), comm)
plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

batch = 24
own_rows = DistributedSampler(len(x), batch, comm.rank, comm.size)
all_rows = DistributedSampler(len(x), batch, 0, 1)
for _, own, every in zip(range(20), own_rows, all_rows, strict=False):
    step(model, optimizer, own)  # 24 / ranks samples; the gradients are averaged
    step(plain, plain_optimizer, every)  # all 24 samples, as on one process

for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs)
print(f"rank {comm.rank} of {comm.size}: {batch // comm.size} samples a step, weights as on one process")
