"""Sum float32 arrays exactly, as integers: the same bits on any number of ranks, by any algorithm.

mpirun -n 3 python examples/exact_sum.py
"""

import hashlib

import numpy as np

import collectives

comm = collectives.world()
arrays = np.random.default_rng(0).standard_normal((12, 1000), dtype="float32")
own = arrays[comm.rank :: comm.size]  # 12 arrays, on any number of ranks up to 12

largest = comm.all_reduce(np.array([np.abs(own).max()]), op="max")[0]
quantum = 2.0 ** (np.frexp(largest)[1] - 51)  # each addend is below 2**51 quanta, and 2048 of them fit in 62 bits
total = comm.all_reduce(np.rint(own / quantum).astype("int64").sum(0))

if comm.rank == 0:
    print(hashlib.sha256(total * quantum).hexdigest()[:16])
