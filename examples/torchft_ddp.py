"""Train with torchft's DistributedDataParallel, one rank a replica, and go on without one that dies.

mpirun --with-ft ulfm -n 3 python examples/torchft_ddp.py
"""

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer

import collectives.torch_backend  # noqa: F401  offers the backend

dist.init_process_group("collectives")
rank = dist.get_rank()
patience = {"join_timeout_ms": 10_000, "heartbeat_timeout_ms": 1000}  # for living replicas, and for others
lighthouse = LighthouseServer("[::]:0", 1, **patience) if rank == 0 else None
addresses = [lighthouse and lighthouse.address()]
dist.broadcast_object_list(addresses)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica alone
torch.manual_seed(0)
net = torch.nn.Linear(1, 1, bias=False)
manager = Manager(
    pg=dist.group.WORLD,  # which torchft reconfigures
    load_state_dict=net.load_state_dict,
    state_dict=net.state_dict,
    min_replica_size=1,
    timeout=timedelta(seconds=20),
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    lighthouse_addr=addresses[0],
    replica_id=f"replica_{rank}",
    init_sync=False,  # the weights are equal
)
dist.barrier()  # all replicas are there
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
while (step := manager.current_step()) < 6:
    if rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()  # agrees on the replicas that are left
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    optimizer.step()  # nothing, if one has died since then
    if rank == 0 and manager.current_step() > step:
        mean = f"mean gradient {net.weight.grad.item():g} of {manager.num_participants()} replicas"
        print(f"step {manager.current_step()}: {mean}", flush=True)
manager.shutdown()
