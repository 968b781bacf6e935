"""Have rank 1 come late to all-reduces, and see that the others have waited for it.

mpirun -n 2 python examples/late.py
"""

import time

import numpy as np

import collectives

comm = collectives.world()
x = np.ones(1000, dtype="float32")
comm.health()
for _ in range(10):
    if comm.rank == 1:
        time.sleep(0.02)
    comm.all_reduce(x)
health = comm.health()
if comm.rank == 0:
    late = max(range(comm.size), key=lambda rank: health[rank].awaited_s)
    print(f"the others have waited longest for rank {late}")
