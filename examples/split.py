"""Divide linear layers over ranks, by a plan beside a plain model.

mpirun -n 2 python examples/split.py
"""

import torch

import collectives
from parallelism import ColumnParallel, RowParallel, parallelize

comm = collectives.world()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
x = torch.randn(2, 5, 8)  # (batch, seq, width)
expected = model(x)

parallelize(model, {"0": ColumnParallel(), "2": RowParallel()}, comm)  # outputs of the first, inputs of the last
same = torch.allclose(model(x), expected, atol=1e-6)
print(f"rank {comm.rank} has {len(model[0].weight)} of 32 rows; the result is {'the same' if same else 'another'}")
