"""`comm.health()` counts the waits at barriers, for the rank that comes last."""

import time

import numpy as np
import pytest

from collectives.runtime.reports.waits import RankWaits

NUM_CALLS, DELAY_S = 5, 0.03
NOTHING = RankWaits(0, 0.0, 0, 0.0)


def wait_for(comm, late, calls):
    """Run calls to which a rank comes late; return the health after them."""
    comm.health()
    for call in calls * NUM_CALLS:
        comm.barrier()
        if comm.rank == late:
            time.sleep(DELAY_S)
        call()
    return comm.health()


def test_the_others_wait_for_a_rank_that_comes_late(comm):
    if comm.size == 1:
        assert comm.health() == [NOTHING]
        return
    x, late = np.ones(100), comm.size - 1
    plan = comm.plan("all_reduce", comm.empty(100))
    health = wait_for(comm, late, [plan, lambda: comm.all_reduce(x)])
    if not comm.context.has_numba:
        assert health == [NOTHING] * comm.size
        return
    assert len(health) == comm.size
    assert max(range(comm.size), key=lambda rank: health[rank].awaited_s) == late
    assert all(each.waits for rank, each in enumerate(health) if rank != late)
    assert sum(each.waits for each in health) == sum(each.awaited for each in health)
    assert sum(each.waited_s for each in health) == pytest.approx(sum(each.awaited_s for each in health))


def test_each_communicator_counts_its_own_from_one_call_to_the_next(comm):
    if comm.size == 1:
        return
    other = comm.split(0)
    health = wait_for(comm, 0, [comm.barrier])
    assert (health[0].awaited > 0) == bool(comm.context.has_numba)
    again = comm.health()
    assert again[0].awaited_s < health[0].awaited_s or not comm.context.has_numba
    assert sum(each.awaited for each in other.health()) <= 2 * comm.size  # those of its setup
    other.free()
