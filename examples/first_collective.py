"""Gather and reduce arrays, by calls and by a plan in symmetric memory.

mpirun -n 3 python examples/first_collective.py
"""

import numpy as np

import collectives

comm = collectives.world()
own = np.random.default_rng(comm.rank).random(1000)  # every rank has its own numbers
everyone = comm.all_gather(own).reshape(comm.size, -1)

total = comm.all_reduce(own.copy())
assert np.allclose(total, everyone.sum(0))
assert np.allclose(total, comm.all_reduce(own.copy(), algorithm="mpi"))

x = comm.empty(1000, "float64")  # symmetric memory
plan = comm.plan("all_reduce", x, op="max")
for step in range(10):
    x[:] = own * step
    plan()
    assert np.allclose(x, everyone.max(0) * step)

print(f"rank {comm.rank} of {comm.size}: the sums and the maxima are right")
