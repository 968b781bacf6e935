"""Hang on purpose: rank 1 sleeps, and the watchdog reports what each rank waits for.

COLLECTIVES_TIMEOUT_S=5 mpirun -n 3 python examples/hang.py
"""

import time

import numpy as np

import collectives

comm = collectives.world()
x = np.ones(1000, dtype="float32")
plan = comm.plan("all_reduce", x, algorithm="ring")
plan()
if comm.rank == 1:
    time.sleep(3600)
plan()
