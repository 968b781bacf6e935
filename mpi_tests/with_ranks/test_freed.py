"""What a freed communicator leaves behind: nothing but the arrays of its memory that are still in use."""

import gc
import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import CommunicationError, Communicator, InputError
from collectives.job.launch import IN_FLIGHT
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.reference import same

DESCRIPTORS = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /proc")

TURNS = 20 if IS_PROOF else 6


@contextmanager
def without_collection():
    """Run a block without Python's collector of cycles: what it would collect lives much longer in a real program."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resources(comm):
    """Return the numbers of the process's descriptors and windows, and the bytes of its shared memory."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/collectives-" in line]
    ends = [line.split()[0].split("-") for line in maps]
    nbytes = sum(int(end, 16) - int(begin, 16) for begin, end in ends)
    return len(os.listdir(DESCRIPTORS)), len(comm.context.windows.by_key), nbytes


def next_handle(comm):
    """Return the number of a new communicator of MPI, which has that of a freed one, if there is one.  Collective."""
    new = comm.mpi.Dup()
    number = new.py2f()
    new.Free()
    return number


def filled(length, value):
    return np.full(length, value, "float32")


def calls(part):
    part.all_reduce(np.ones(10))
    part.all_gather(np.ones(3), out=np.empty(3 * part.size))


def calls_by_messages(part):
    part.all_reduce(np.ones(10), algorithm="ring")
    part.all_reduce(np.ones(10), algorithm="mpi")


def plans(part):
    plan = part.plan("all_reduce", part.empty(100))
    plan()
    part.plan("all_reduce", np.ones(100), algorithm="ring")()


def started_calls(part):
    for _ in range(2):
        part.all_reduce(np.ones(10), blocking=False).wait()


def messages(part):
    sent = part.send(np.ones(3), part.rank, blocking=False)
    part.recv(None, part.rank)
    sent.wait()


def own_memory(part):
    x = part.empty(1000)
    x[:] = 1
    part.all_reduce(x)
    part.all_reduce(part.fuse([np.ones(2), np.ones((1, 1))]))


def parts_of_parts(part):
    with part.split(part.rank % 2) as smaller:
        smaller.all_reduce(np.ones(10))


def refusals(part):
    with pytest.raises(InputError, match="'sum of'"):
        part.all_reduce(np.ones(3), op="sum of" if part.rank == 0 else "sum")


def nothing(part):
    pass


USES = [nothing, calls, calls_by_messages, plans, started_calls, messages, own_memory, parts_of_parts, refusals]


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("use", USES)
def test_parts_leave_nothing_behind(comm, use):
    check_parts(comm, use)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("use", USES)
def test_parts_over_nodes_leave_nothing_behind(mpi_comm, use, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm)
    check_parts(comm, use)
    comm.free()


def check_parts(comm, use):
    after = []
    with without_collection():
        for _ in range(TURNS):
            with comm.split(0) as part:
                use(part)
            after.append((*resources(comm), next_handle(comm)))
    assert after[2:] == [after[1]] * (TURNS - 2)


@pytest.mark.sizes(2)
def test_communicators_leave_no_thread_behind(mpi_comm):
    with Communicator(mpi_comm) as comm:
        comm.context.progress.background.attend()
        threads = [comm.context.watchdog.thread, comm.context.progress.background.thread]
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_an_array_outlives_its_communicator(comm):
    """Its memory is released when it is dropped, on each rank for itself."""
    x = comm.all_reduce(np.ones(4))  # binds what the checks below use
    part, before = comm.split(0), resources(comm)
    x = part.empty(1 << 18)
    x[:] = comm.rank
    part.free()
    assert (x == comm.rank).all()
    assert resources(comm)[1] == before[1] + 1
    for y in (x, x if comm.rank else x.copy()):
        y[:] = comm.rank
        same(comm.all_reduce(y), filled(len(x), sum(range(comm.size))))
    with pytest.raises(ValueError, match="not in these ranks' symmetric memory"):
        comm.peers(x)
    if comm.rank:
        del x, y
        assert resources(comm) == before
    comm.barrier()
    if not comm.rank:
        same(x, filled(len(x), sum(range(comm.size))))


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("way", ["run", "start"])
def test_a_plan_on_an_array_outlives_its_communicator(comm, way):
    """Other ranks keep access, though they have arrays elsewhere and none in that memory."""
    part = comm.split(0)
    x = part.empty(1 << 16)
    mine = x if comm.rank == 0 else np.empty_like(x)
    plan = comm.plan("all_reduce", mine)
    del x
    part.free()
    others = [np.empty(1 << 16) for _ in range(4)]  # where the window was, if it is gone
    for _ in range(2):
        mine[:] = comm.rank + 1
        same(plan() if way == "run" else plan.start().wait(), filled(len(mine), sum(range(comm.size + 1))))
    del others


@pytest.mark.sizes(2, 3)
def test_a_started_call_on_an_array_of_a_freed_communicator(comm):
    for _ in range(3):
        part = comm.split(0)
        x = part.empty(1 << 16)
        x[:] = comm.rank
        work = comm.all_reduce(x, blocking=False)
        part.free()
        same(work.wait(), filled(len(x), sum(range(comm.size))))


def fail(comm, started):
    """Have a started run fail as by a rank's death."""
    comm.context.progress.failure = "rank 1 has died"
    with pytest.raises(CommunicationError, match="rank 1 has died"):
        started.wait()
    comm.context.progress.failure = ""


@pytest.mark.sizes(2)
def test_memory_of_a_failed_run_that_a_message_reaches(mpi_comm):
    comm = Communicator(mpi_comm)
    length = 100_000
    out = np.zeros(2 * length)
    plan = comm.plan("all_gather", np.full(length, comm.rank + 1.0), out=out, algorithm="ring")
    memory = weakref.ref(out)
    del out
    if comm.rank == 0:
        fail(comm, plan.start())
        del plan
    mpi_comm.Barrier()
    if comm.rank == 1:
        plan()
    mpi_comm.Barrier()
    gc.collect()
    assert (memory()[length:] == 2).all()


@pytest.mark.sizes(2)
def test_a_message_that_comes_after_its_receive_has_failed(mpi_comm):
    comm = Communicator(mpi_comm)
    if comm.rank == 0:
        fail(comm, comm.recv(np.zeros(10), 1, blocking=False))
        gc.collect()
    mpi_comm.Barrier()
    if comm.rank == 1:
        comm.send(np.ones(10), 0)
    mpi_comm.Barrier()
    assert comm.rank == 1 or IN_FLIGHT[-1].Wait()


@pytest.mark.sizes(1)
def test_a_plan_that_is_freed_while_it_is_freed_frees_its_requests_once(new_comm):
    """As where one thread drops the last reference, and another frees the communicator."""
    plan, freed = new_comm.plan("all_reduce", np.ones(3)), []

    class Request:
        def Free(self):  # noqa: N802  as MPI calls it
            freed.append(self)
            plan.free()

    plan.rounds = [SimpleNamespace(requests=lambda: [Request()])]
    plan.free()
    assert len(freed) == 1
