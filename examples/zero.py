"""Train with ZeRO's three stages: each rank holds its part of the optimizer's states.

mpirun -n 2 python examples/zero.py
"""

import torch
from torch import nn

import collectives
from parallelism import Sharded, ShardGroups


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def adamw(params):
    return torch.optim.AdamW([{"params": list(params)}], lr=1e-3, fused=True)


comm = collectives.world()
x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
plain = new_model()
optimizer = adamw(plain.parameters())
for _ in range(5):
    optimizer.zero_grad()
    plain(x).square().mean().backward()
    optimizer.step()

own_x = x.chunk(comm.size)[comm.rank]
for zero_stage in (1, 2, 3):
    model = Sharded(new_model(), ShardGroups.of(comm), adamw, zero_stage, layers=("0", "2", "4"))
    for _ in range(5):
        model.zero_grad()
        model(own_x).square().mean().backward()
        model.replica.update()
    with model.replica.whole():  # stage 3 gathers the parameters
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    states = sum(t.numel() for state in model.replica.optimizer.state.values() for t in state.values() if t.dim())
    total = 2 * sum(p.numel() for p in plain.parameters())
    print(f"rank {comm.rank}, stage {zero_stage}: {states / total:.0%} of the optimizer states; the weights agree")
