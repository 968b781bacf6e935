"""Direct algorithms on devices: ranks that reach each other's device memory, ordered by events only."""

import gc

import numpy as np
import pytest

from collectives import algorithms
from mpi_tests.fake_device import FakeDevice
from mpi_tests.reference import expected, inputs, same

pytestmark = pytest.mark.sizes(1, 2, 3, 4)

DIRECT = [(row.collective, row.name) for row in algorithms.REGISTRY if row.reach and row.collective != "barrier"]
each_direct = pytest.mark.parametrize(("collective", "algorithm"), DIRECT)


@pytest.fixture
def comm(mpi_comm):
    """One for each test: its device memory is that of the test's device."""
    from collectives import Communicator

    made = Communicator(mpi_comm)
    yield made
    gc.collect()
    made.free()


def symmetric(comm, device, values):
    return device.fill(comm._new(device, values.size, values.dtype), values)


def ordinary(comm, device, values):
    return device.put(values)


PLACES = (symmetric, ordinary)


def names(collective, place):
    """The algorithms within reach of arrays that lie there."""
    rows = algorithms.rows(collective)
    return [row.name for row in rows if row.reach and (place is symmetric or row.reach < algorithms.Reach.ARRAYS)]


@each_direct
@pytest.mark.parametrize("shares", ["all", "memory"])
def test_runs_on_new_inputs(comm, collective, algorithm, shares):
    device = FakeDevice(shares=shares)
    for place in PLACES:
        if algorithm not in names(collective, place):
            continue
        for count in (0, comm.size, 30 * comm.size):
            first = inputs(comm.size, count)
            x = place(comm, device, first[comm.rank])
            plan = comm.plan(collective, x, algorithm=algorithm)
            for run in range(3):
                xs = [values + np.float32(run) for values in first]
                device.fill(x, xs[comm.rank])
                got = plan()
                want = expected(collective, xs, comm.rank)
                same(None if got is None else device.get(got), want, (place, count, run))
            plan.free()
