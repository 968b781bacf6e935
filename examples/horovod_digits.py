"""Train a classifier by a program of Horovod's, of which one import is changed.

mpirun -n 2 python examples/horovod_digits.py
"""

import torch
from torch.nn import functional as F

import collectives.horovod.torch as hvd  # in place of horovod.torch

hvd.init()
torch.manual_seed(0)
digits = torch.rand(10, 28 * 28).round()  # one picture each
labels = torch.arange(1000) % 10
pictures = digits[labels] + torch.randn(1000, 28 * 28)
own = slice(hvd.rank(), None, hvd.size())
batches = torch.utils.data.DataLoader([*zip(pictures[own], labels[own], strict=True)], batch_size=64 // hvd.size())

model = torch.nn.Sequential(torch.nn.Linear(28 * 28, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for _ in range(5):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

right = (model(digits).argmax(1) == torch.arange(10)).float().mean()
print(f"rank {hvd.rank()} of {hvd.size()} reads {hvd.allreduce(right):.0%} of the digits")
