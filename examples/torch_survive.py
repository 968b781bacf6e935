"""Train with DistributedDataParallel, and go on without a rank that dies.

mpirun --with-ft ulfm -n 3 python examples/torch_survive.py
"""

import os
import signal
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mpi4py import MPI

import collectives.torch_backend  # noqa: F401  offers the backend

dist.init_process_group("collectives")
group, name, world = dist.group.WORLD, dist.get_rank(), MPI.COMM_WORLD
handles: list[str] = [""] * dist.get_world_size()
dist.all_gather_object(handles, group.get_reconfigure_handle())
net = torch.nn.Linear(1, 1, bias=False)
model = torch.nn.parallel.DistributedDataParallel(net)
step = 0
while step < 6:
    if name == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.tensor([[name + 1.0]])).sum().backward()
    except RuntimeError:  # torch's kind, with the rank that has died
        dead = world.Get_failed()
        numbers = MPI.Group.Translate_ranks(dead, range(dead.size), world.Get_group())
        left = [handle for number, handle in enumerate(handles) if number not in numbers]
        group.reconfigure(SimpleNamespace(uuid=len(left), handles=left)).wait()  # from torch 2.14 on, dist._reconfigure
        model = torch.nn.parallel.DistributedDataParallel(net)
        reached = torch.tensor(step)
        dist.all_reduce(reached, dist.ReduceOp.MIN)
        step = int(reached)  # the last step that all have done
    else:
        step += 1
        if dist.get_rank() == 0:
            print(f"step {step}: mean gradient {net.weight.grad.item():g} of {dist.get_world_size()} ranks", flush=True)
    net.zero_grad()
dist.destroy_process_group()
