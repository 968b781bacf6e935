"""Checks of plans, shared by tests of several algorithms."""

import numpy as np


def check_progress(comm, algorithm):
    """Check that plans complete if ranks wait for them in different orders."""
    first, second = comm.empty(50), np.empty(50, "float32")
    direct = comm.plan("all_reduce", first, algorithm=algorithm)
    ring = comm.plan("all_reduce", second, algorithm="ring")
    for _ in range(3):
        first[:], second[:] = comm.rank, comm.rank
        order = (direct, ring) if comm.rank % 2 else (ring, direct)
        for plan in order:
            plan.start()
        for plan in order:
            plan.wait()
        assert first[0] == second[0] == comm.size * (comm.size - 1) // 2
