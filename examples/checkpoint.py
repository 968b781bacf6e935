"""Save a divided model on some ranks, and load it on other numbers of ranks.

mpirun -n 4 python examples/checkpoint.py save checkpoints
mpirun -n 2 python examples/checkpoint.py load checkpoints
"""

import sys

import torch
from torch import nn

import collectives
from parallelism import Checkpoints, ColumnParallel, Mesh, RowParallel, model_parts, parallelize


def new_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


action, folder = sys.argv[1:]
comm = collectives.world()
mesh = Mesh(comm, tp=comm.size)  # on any number of ranks that divides 32
model = new_model(seed=1 if action == "save" else 2)
parallelize(model, {"0": ColumnParallel(), "2": RowParallel()}, mesh.tp)
shards = model_parts(model, mesh).values()

checkpoints = Checkpoints(folder, comm)
rows = f"{len(model[0].weight)} of 32 rows"
if action == "save":
    checkpoints.save(step=10, parts=shards, whole={"lr": 0.1})
    checkpoints.wait()
    print(f"rank {comm.rank} of {comm.size} saved {rows}")
else:
    state = checkpoints.load(shards, checkpoints.newest())
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(x), new_model(seed=1)(x))
    print(f"rank {comm.rank} of {comm.size} loaded {rows} of step {state.step}; outputs agree")
checkpoints.close()
