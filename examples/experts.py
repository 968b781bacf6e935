"""Divide the experts of a mixture over ranks, to which tokens are sent.

mpirun -n 2 python examples/experts.py
"""

import torch
from torch import nn

import collectives
from models.config import ModelConfig
from models.mixture import Mixture
from parallelism import ExpertExchange, ExpertParallel, parallelize


def new_model():
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(ModelConfig(n_embd=16, num_experts=8, experts_per_token=2)))
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    return model


comm = collectives.world()
x = torch.randn(comm.size, 10, 16, generator=torch.Generator().manual_seed(1))  # (batch, seq, width)
plain, model = new_model(), new_model()
expected = plain(x)
expected.square().mean().backward()

exchange = ExpertExchange(comm)
parallelize(model, {"0": ExpertParallel()}, comm.split(comm.rank), ep=exchange)
own = slice(comm.rank, comm.rank + 1)  # every rank has one sequence
y = model(x[own])
y.square().mean().backward()
torch.testing.assert_close(y, expected[own])

experts = 8 // comm.size
first = comm.rank * experts
gradient = plain.get_parameter("0.c_fc.weight").grad[first : first + experts]
torch.testing.assert_close(model.get_parameter("0.c_fc.weight").grad, gradient)
print(f"rank {comm.rank}: experts {first} to {first + experts - 1} of 8; outputs and gradients agree")
