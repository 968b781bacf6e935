"""Sum a torch tensor on GPUs, where there are any, and overlap a plan with computation.

mpirun -n 2 python examples/gpu.py
"""

import torch

import collectives

comm = collectives.world()
device = f"cuda:{comm.rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
x = torch.full((1 << 20,), comm.rank + 1.0, device=device)
comm.all_reduce(x)  # ordered after the work on the current stream, and before what follows on it
assert (x == comm.size * (comm.size + 1) / 2).all()

plan = comm.plan("all_reduce", x, op="avg")
plan.start()  # in the background
y = torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
plan.wait()
assert (x == comm.size * (comm.size + 1) / 2).all()  # the average of equal numbers
print(f"rank {comm.rank} of {comm.size}: the sum and the average are right")
