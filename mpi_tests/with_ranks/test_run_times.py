"""Recorded times of runs: each with its rounds in order, within it; and nothing where nothing is recorded."""

import time
from itertools import pairwise

import numpy as np
import pytest

from collectives.runtime.reports.run_times import recording


def check(run, begin_s, end_s):
    """Check that a run's rounds follow one another within it."""
    times = [(each.begin_s, each.end_s) for each in run.rounds]
    assert begin_s <= run.begin_s <= run.end_s <= end_s
    assert all(run.begin_s <= begin <= end <= run.end_s for begin, end in times)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


@pytest.mark.sizes(2, 3, 5)
def test_rounds_of_messages_are_those_of_the_schedule(comm):
    """A ring's all-reduce has 2(p - 1) rounds: the first sends the chunk before this rank's own."""
    x = np.ones(1000, "float32")
    plan = comm.plan("all_reduce", x, algorithm="ring")
    begin_s = time.perf_counter()
    with recording(comm.context.progress) as runs:
        plan()
    (run,) = [run for run in runs if run.name == "all_reduce ring"]
    check(run, begin_s, time.perf_counter())
    assert (run.calls, run.nbytes) == (comm.context.calls.label, 4000)
    assert [each.words.partition(":")[0] for each in run.rounds] == [f"round {i}" for i in range(2 * (comm.size - 1))]
    chunk, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    assert run.rounds[0].words.startswith(f"round 0: send [{chunk}] to rank {right}, ")
    assert x.tolist() == [comm.size] * 1000


@pytest.mark.sizes(2, 3)
def test_programs_in_shared_memory_have_their_barriers(comm):
    x = comm.empty((5000,), "float32")
    plan = comm.plan("all_reduce", x)
    if not plan.only:
        pytest.skip("needs Numba")
    begin_s = time.perf_counter()
    with recording(comm.context.progress) as runs:
        for _ in range(3):
            plan()
    assert len(runs) == 3
    for run in runs:
        check(run, begin_s, time.perf_counter())
        ends = [int(each.words.split()[-1]) for each in run.rounds]
        assert ends == sorted({*ends})
        assert ends[-1] == int(runs[0].rounds[-1].words.split()[-1]) > 0


@pytest.mark.sizes(2)
def test_started_calls_and_messages_are_recorded_from_begin_to_end(comm):
    x, y = np.ones(3, "float32"), np.zeros(3, "float32")
    with recording(comm.context.progress) as runs:
        reduced = comm.all_reduce(x, blocking=False)
        received = comm.recv(y, 1 - comm.rank, blocking=False)
        comm.send(np.full(3, comm.rank, "float32"), 1 - comm.rank)
        received.wait()
        reduced.wait()
    assert y.tolist() == [1 - comm.rank] * 3
    assert x.tolist() == [2] * 3
    messages = [f"recv from rank {1 - comm.rank} with tag 0", f"send to rank {1 - comm.rank} with tag 0"]
    assert sorted(run.name for run in runs if run.name in messages) == messages
    assert any(run.name.startswith("all_reduce ") and run.nbytes == 12 for run in runs)


@pytest.mark.sizes(1, 2)
def test_nothing_is_recorded_afterwards(comm):
    plan = comm.plan("barrier")
    with recording(comm.context.progress) as runs:
        plan()
    number = len(runs)
    plan()
    plan.start().wait()
    assert len(runs) == number
    assert comm.context.progress.times is None
    assert not comm.context.progress.started
