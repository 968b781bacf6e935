"""Times of collectives as measured by `collectives.bench` on ranks."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.bench.benchmarks import BENCHMARKS
from collectives.bench.constants import samples
from collectives.bench.timing import contestant, grouped
from collectives.bench.trial import RANK_TIMES, Trial, Workload, element_counts, in_place_choices, trial_of
from collectives.schedule.spec import COLLECTIVES


@pytest.mark.sizes(2, 3)
def test_times_are_the_slowest_ranks(comm):
    def act():
        time.sleep(0.02 * (comm.rank == 1))

    times = samples(comm, [act], repeats=3, warmups=1)
    assert times.shape == (3, 1)
    assert (times >= 0.02).all()


@pytest.mark.sizes(3)
def test_times_may_be_of_other_ranks(comm, monkeypatch):
    """On the test's clock, the action of rank r takes r + 1 seconds."""
    now = iter(range(0, 1000, comm.rank + 1))
    monkeypatch.setattr("collectives.bench.constants.time", SimpleNamespace(perf_counter=lambda: next(now)))
    times = {name: samples(comm, [lambda: None], 2, 0, name).tolist() for name in RANK_TIMES}
    seconds = {"rank 0": 1, "mean of ranks": 2, "fastest rank": 1, "slowest rank": 3}
    assert times == {name: [[s], [s]] for name, s in seconds.items()}


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("name", ["auto", "ring", "mpi"])
def test_calls_of_a_group_come_one_after_the_other(comm, name):
    one = contestant(comm, Trial(comm, Workload("all_reduce", dtype=np.dtype("float64")), 5, in_place=True), name)
    one.trial.x[:] = 1
    grouped(comm, one, 3)()
    assert (one.trial.x == comm.size**3).all()
    one.free()


@pytest.mark.sizes(3)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_may_be_grouped(comm, collective):
    workload = Workload(collective, root=comm.size - 1)
    trial = Trial(
        comm, workload, element_counts(workload, comm.size, [64])[0], in_place=in_place_choices(collective)[0]
    )
    one = contestant(comm, trial, "auto")
    trial.fill()
    grouped(comm, one, 1)()
    assert trial.num_wrong() == 0
    one.free()


@pytest.mark.sizes(1, 2, 3, 5)
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in COLLECTIVES])
def test_every_other_benchmark_moves_what_it_says(new_comm, name):
    """By our own calls and by MPI's, on arrays of every kind, aligned or not."""
    comm = new_comm
    for memory, unalign, whose in (("symmetric", 0, "auto"), ("ordinary", 3, "auto"), ("ordinary", 1, "mpi")):
        workload = Workload(name, memory, root=comm.size - 1)
        for count in element_counts(workload, comm.size, [64, 100_000]):
            trial = trial_of(comm, workload, count, in_place_choices(name)[0], unalign)
            one = contestant(comm, trial, whose, window=5)
            for times in (1, 3):
                trial.fill()
                comm.barrier()
                grouped(comm, one, times)()
                assert trial.num_wrong() == 0 or (times > 1 and trial.spec.reduces and trial.in_place)
            one.free()
