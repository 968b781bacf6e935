"""Times of collectives, as `collectives.bench` takes them on ranks."""

import time

import pytest

from collectives.bench.constants import samples


@pytest.mark.sizes(2, 3)
def test_times_are_the_slowest_ranks(comm):
    def act():
        time.sleep(0.02 * (comm.rank == 1))

    times = samples(comm, [act], repeats=3, warmups=1)
    assert times.shape == (3, 1)
    assert (times >= 0.02).all()
