"""Sum numbers on all ranks, and go on without those that die.

mpirun --with-ft ulfm -n 4 python examples/survive.py
"""

import os
import signal

import numpy as np

import collectives

comm = collectives.world()
number, step, dies = comm.rank + 1.0, 0, comm.rank == 2
while step < 6:
    try:
        if dies and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        total = comm.all_reduce(np.array([number]))[0]
        step += 1
        if comm.rank == 0:
            print(f"step {step}: {total:g} on {comm.size} ranks", flush=True)
    except collectives.RankFailure:
        comm = comm.shrink()  # its ranks are numbered anew
        step = int(comm.all_reduce(np.array([step]), op="min")[0])  # the last step that all have done
