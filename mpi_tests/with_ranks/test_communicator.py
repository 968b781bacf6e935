import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives.arrays.views import dtype_of
from collectives.runtime.backends.kernels import ALIASING_BYTES, PAGE_BYTES
from mpi_tests.helpers.reference import COLLECTIVES, algorithms_of, expected, inputs, reduced, same

LATE_S = 0.05


def test_many_at_once_waited_for_in_any_order(comm):
    for turn in range(comm.size):
        xs = [inputs(comm.size, n * comm.size) for n in (1, 2, 3, 50)]
        works = [comm.all_reduce(x[comm.rank].copy(), blocking=False, algorithm="ring") for x in xs]
        works += [comm.all_to_all(xs[3][comm.rank], blocking=False)]
        works += [comm.broadcast(xs[2][comm.rank].copy(), blocking=False)]
        same(comm.all_reduce(xs[0][comm.rank].copy()), reduced(xs[0], "sum"))
        works += [comm.barrier(blocking=False)]
        wants = [reduced(x, "sum") for x in xs] + [expected("all_to_all", xs[3], comm.rank), xs[2][0]]
        for i in np.random.default_rng([turn, comm.rank]).permutation(len(works)):
            actual = works[i].wait()
            assert works[i].done()
            if i < len(wants):
                same(actual, wants[i], i)


def test_a_started_plan_moves_on_while_another_communicator_waits(comm):
    part = comm.split(0)
    x = np.full(5, comm.rank, np.int64)
    work = comm.all_reduce(x, algorithm="ring", blocking=False)
    if comm.rank % 2:
        work.wait()
        part.barrier()
    else:
        part.barrier()
        work.wait()
    assert x.tolist() == [sum(range(comm.size))] * 5
    part.free()


def test_communicators_do_not_mix_up_their_messages(mpi_comm):
    from collectives import Communicator

    comms = [Communicator(mpi_comm) for _ in range(3)]
    xs = [np.full(4, 10.0**i * (mpi_comm.rank + 1)) for i in range(3)]
    works = [comm.all_reduce(x, blocking=False) for comm, x in zip(comms, xs, strict=True)]
    for work in works[:: -1 if mpi_comm.rank % 2 else 1]:
        while not work.done():
            for other in works:
                other.done()
    total = mpi_comm.size * (mpi_comm.size + 1) / 2
    assert [x.tolist() for x in xs] == [[10.0**i * total] * 4 for i in range(3)]
    for comm in comms:
        comm.free()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_plan_works_on_what_the_arrays_hold_when_it_runs(comm, collective):
    for algorithm in algorithms_of(collective, comm.size):
        x = np.zeros(2 * comm.size, np.float32)
        plan = comm.plan(collective, x, algorithm=algorithm)
        for run in range(5):
            xs = [a + run for a in inputs(comm.size, 2 * comm.size)]
            x[:] = xs[comm.rank]
            actual = plan() if run % 2 else plan.start().wait()
            same(actual, expected(collective, xs, comm.rank), (algorithm, run))
        plan.free()


def test_done_says_when(comm):
    x = np.ones(3)
    plan = comm.plan("all_reduce", x)
    for _ in range(3):
        x[:] = 1
        if comm.rank == 0:
            plan.start()
            assert plan.done() == (comm.size == 1)
        comm.mpi.Barrier()
        if comm.rank != 0:
            plan.start()
        while not plan.done():
            pass
        assert x.tolist() == [comm.size] * 3


def test_a_plan_runs_once_at_a_time(comm):
    plan = comm.plan("barrier")
    if comm.rank == 0:
        plan.start()
        if comm.size > 1:
            for action in (plan.start, plan, plan.free):
                with pytest.raises(RuntimeError, match=r"barrier \w+ (has been started|is running): wait\(\) before"):
                    action()
    comm.mpi.Barrier()
    if comm.rank != 0:
        plan.start()
    plan.wait()
    plan()
    plan.free()
    with pytest.raises(RuntimeError, match=r"barrier \w+ has been freed: make a new plan"):
        plan.start()


def test_communicators_and_plans_show_what_they_are(new_comm):
    nodes = f"{len(new_comm.topology.nodes)} node{'s' * (len(new_comm.topology.nodes) > 1)}"
    assert repr(new_comm) == f"Communicator(rank {new_comm.rank} of {new_comm.size}, {nodes})"
    plan = new_comm.plan("barrier", algorithm="dissemination")
    assert repr(plan) == "Plan(barrier dissemination)"
    if new_comm.size > 1 and new_comm.rank == 0:
        plan.start()
        assert repr(plan) == "Plan(barrier dissemination, running)"
    new_comm.mpi.Barrier()
    if new_comm.size == 1 or new_comm.rank > 0:
        plan.start()
    plan.wait()
    plan.free()
    assert repr(plan) == "Plan(barrier dissemination, freed)"


@pytest.mark.sizes(2)
def test_a_folder_of_calls_that_one_rank_cannot_write_is_refused_on_all(mpi_comm, monkeypatch):
    from collectives import Communicator, InputError

    if mpi_comm.rank == 1:
        monkeypatch.setenv("COLLECTIVES_CALLS", "/dev/null/x")
    with pytest.raises(InputError, match=r"rank 1: .*COLLECTIVES_CALLS='/dev/null/x' cannot be written: name a folder"):
        Communicator(mpi_comm)


def test_other_objects_than_intracommunicators_are_refused():
    from mpi4py import MPI

    from collectives import Communicator

    for other in ("x", None, MPI.COMM_NULL):
        with pytest.raises(TypeError, match=f"mpi_comm {re.escape(repr(other))} is not an intracommunicator of mpi4py"):
            Communicator(other)


@pytest.mark.sizes(2, 3)
def test_only_the_callers_arrays_travel_in_the_segments_that_they_ask_for(mpi_comm):
    from collectives import Communicator

    comm = Communicator(mpi_comm, segment_bytes=8)
    x = np.arange(4 * comm.size, dtype=np.float64)
    plan = comm.plan("all_reduce", x, algorithm="ring")
    agreement = comm.context.agreement
    facts = list(range(comm.rank, comm.rank + 100))
    num_starts = 0
    bind = agreement.bind_plan

    def counted(*arguments, **options):
        nonlocal num_starts
        bound = bind(*arguments, **options)
        num_starts += sum(1 for each in bound.rounds for _ in each.requests())
        return bound

    agreement.bind_plan = counted
    assert agreement.highest(facts) == list(range(comm.size - 1, comm.size + 99))
    assert 0 < num_starts < 100  # in segments, each fact would be a message
    assert max(sum(1 for _ in each.requests()) for each in plan.rounds) == 2 * 4
    plan.free()
    comm.free()


@pytest.mark.sizes(1, 2)
def test_a_freed_communicator_refuses_all_use(comm):
    part, x = comm.split(0), np.ones(3)
    part.all_reduce(x)
    names = algorithms_of("all_reduce", comm.size)
    plans = [part.plan("all_reduce", x, algorithm=name) for name in names] + [part.plan("barrier")]
    part.free()
    assert repr(part) == f"Communicator(rank {comm.rank} of {comm.size}, freed)"
    uses = [partial(part.all_reduce, x), partial(part.all_reduce, x, blocking=False), partial(part.send, x, 0)]
    uses += [partial(part.plan, "all_reduce", x), partial(part.split, 0), partial(part.empty, 3), part.free]
    uses += [part.barrier, part.probe, part.host_names, partial(part.broadcast_object, 1), part.group().__enter__]
    uses += [use for plan in plans for use in (plan, plan.start)]
    for use in [*uses, partial(part.explain, "barrier")]:
        with pytest.raises(RuntimeError, match="this communicator has been freed: make another one, or free it later"):
            use()


def test_started_calls_and_plans_end_before_their_communicator(comm):
    for algorithm in ("ring", "auto"):
        part, x, y, z = comm.split(0), np.ones(1 << 16), np.ones(1 << 16), np.ones(1 << 16)
        part.all_reduce(z.copy(), algorithm=algorithm)
        plan = part.plan("all_reduce", x, algorithm=algorithm).start()
        part.plan("all_reduce", y, algorithm=algorithm).start()
        work = part.all_reduce(z, algorithm=algorithm, blocking=False)
        part.free()
        for array in (plan.wait(), y, work.wait()):
            same(array, np.full(1 << 16, float(comm.size)))


def test_auto_says_what_it_chose(comm):
    for count in (1, 1 << 10, 1 << 16):
        name = comm.plan("all_reduce", comm.empty(count, "float64")).name.removeprefix("all_reduce ")
        assert comm.explain("all_reduce", 8 * count).startswith(
            f"all_reduce of {8 * count} bytes on {comm.size} rank{'s' * (comm.size > 1)} of 1 node: {name}\n"
        )
    assert comm.plan("barrier", algorithm="mpi").name == "barrier mpi"


def test_peers_of_arrays_of_other_lengths(comm):
    x = comm.empty(5 + comm.rank)
    x[:] = comm.rank
    comm.barrier()
    peers = comm.peers(x)
    assert [len(peer) for peer in peers] == [len(x)] * comm.size
    assert [peer[:5].tolist() for peer in peers] == [[rank] * 5 for rank in range(comm.size)]
    comm.barrier()


def test_explanations_of_no_such_call(comm):
    with pytest.raises(ValueError, match="collective 'foo' is unknown: use one of all_reduce, "):
        comm.explain("foo", 3)
    for nbytes in (-1, "1M", 0.5):
        with pytest.raises(ValueError, match=f"^nbytes {nbytes!r} is out of range: use an integer from 0 to "):
            comm.explain("all_reduce", nbytes)


def test_a_barrier_waits_for_the_last(comm):
    for algorithm in algorithms_of("barrier", comm.size):
        for late in {0, comm.size - 1}:
            if comm.rank == late:
                time.sleep(LATE_S)
            entered = time.monotonic()  # all processes of a machine share the clock
            comm.barrier(algorithm=algorithm)
            exit_s = time.monotonic()
            assert exit_s >= max(comm.mpi.allgather(entered)), (algorithm, late)


def test_split(comm):
    rank, size = comm.rank, comm.size
    halves = comm.split(rank % 2, key=-rank)
    members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    assert (halves.rank, halves.size) == (members.index(rank), len(members))
    assert halves.all_gather(np.array([rank])).tolist() == members
    rest = comm.split(None if rank == 0 else 7)
    if rank == 0:
        assert rest is None
    else:
        assert rest.all_gather(np.array([rank])).tolist() == list(range(1, size))
        rest.free()
    same(comm.all_reduce(np.ones(2)), np.full(2, float(size)))
    halves.free()


def test_parts_work_side_by_side(comm):
    part = comm.split(comm.rank // 2)
    first = comm.rank // 2 * 2
    mine = sum(r + 1 for r in range(first, min(first + 2, comm.size)))
    every = comm.size * (comm.size + 1) / 2
    for _ in range(5):
        x, y = np.full(9, comm.rank + 1.0), np.full(9, comm.rank + 1.0)
        works = [comm.all_reduce(x, blocking=False), part.all_reduce(y, blocking=False)]
        for work in works[:: 1 if comm.rank % 3 else -1]:
            work.wait()
        assert (x == every).all()
        assert (y == mine).all()
    part.free()


@pytest.mark.sizes(2, 3, proof=(8,))
def test_send_and_recv(comm):
    """Messages travel around the ring; odd ranks receive first."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 100_000):
        for dtype in ("bfloat16", "int64"):
            xs = inputs(comm.size, count, dtype)
            actual = np.zeros(count, dtype_of(dtype))
            steps = [
                lambda x=xs[comm.rank]: comm.send(x, right, tag=3),
                lambda actual=actual: comm.recv(actual, left, tag=3),
            ]
            for step in steps[:: -1 if comm.rank % 2 else 1]:
                step()
            same(actual, xs[left])


@pytest.mark.sizes(1, 2, 3)
def test_messages_under_way(comm):
    """All are sent before the first receive, and received in another order; torch's memory is used in place."""
    import torch

    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = [torch.full((100, 1000), 10.0 * tag + comm.rank) for tag in range(3)]
    actual = [torch.zeros(100, 1000) for _ in range(3)]
    sends = [comm.send(x, right, tag=tag, blocking=False) for tag, x in enumerate(sent)]
    recvs = [comm.recv(x, left, tag=tag, blocking=False) for tag, x in enumerate(actual)]
    for tag in (2, 0, 1):
        assert recvs[tag].wait() is actual[tag]
        assert (actual[tag] == 10 * tag + left).all()
    for x, send in zip(sent, sends, strict=True):
        assert send.wait() is x
        assert send.done()


@pytest.mark.sizes(1, 2)
def test_tags_keep_messages_apart(comm):
    """In a communicator of size 1, the rank sends to itself."""
    dest = comm.size - 1
    with ThreadPoolExecutor(2) as pool:
        if comm.rank == 0:
            sends = [pool.submit(comm.send, np.full(50_000, float(tag)), dest, tag=tag) for tag in (1, 2)]
        if comm.rank == dest:
            for tag in (2, 1):
                x = np.zeros((5, 10_000))
                assert comm.recv(x, 0, tag=tag) is x
                assert (x == tag).all()
        if comm.rank == 0:
            for send in sends:
                send.result()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("length", [4, 100_000])
def test_recv_of_another_length_or_dtype_is_refused(comm, length):
    """The message is discarded, x is unchanged, and the next message arrives."""
    from collectives import CommunicationError

    for count, dtype in ((length + 1, "float32"), (length - 1, "float32"), (length, "int32"), (length // 2, "float64")):
        if comm.rank == 0:
            comm.send(np.ones(length, np.float32), 1, tag=5)
            comm.send(np.full(length, 2.0, np.float32), 1, tag=5)
        else:
            x, sent = np.zeros(count, dtype), np.zeros(length, np.float32)
            with pytest.raises(CommunicationError) as caught:
                comm.recv(x, 0, tag=5)
            assert str(caught.value) == (
                f"recv from rank 0 with tag 5: x has {count} elements of {dtype}, but rank 0 sent {length} of float32: "
                "receive into an array of that length and dtype"
            )
            assert not x.any()
            assert (comm.recv(sent, 0, tag=5) == 2).all()
    comm.barrier()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("length", [4, 100_000])
def test_messages_of_one_tag_are_taken_in_the_order_of_the_receives(comm, length):
    """The receives are from any rank or from one, with several in progress."""
    xs = [np.full(length, float(i)) for i in range(6)]
    if comm.rank == 0:
        works = [comm.send(x, 1, blocking=False) for x in xs]
    else:
        actual = [np.zeros(length) for _ in xs]
        works = [comm.recv(x, None if i % 2 else 0, blocking=False) for i, x in enumerate(actual)]
    for work in works[::-1]:
        work.wait()
    assert comm.rank == 0 or [x[-1] for x in actual] == [0, 1, 2, 3, 4, 5]


@pytest.mark.sizes(2)
def test_messages_that_cannot_be(comm):
    """The calling rank raises an error, and the communicator still works."""
    unwritable = np.zeros(4)
    unwritable.flags.writeable = False
    largest = comm.context.num_tags // 2 - 1
    for call, words in (
        (lambda: comm.recv(unwritable, 0), "x is read-only: pass an array that may be written"),
        (lambda: comm.send(np.zeros(4), 2), "dest 2 is out of range: use a rank from 0 to 1"),
        (lambda: comm.recv(np.zeros(4), -1), "source -1 is out of range: use a rank from 0 to 1"),
        (lambda: comm.send(np.zeros(4), 0.5), "dest 0.5 is out of range: use a rank from 0 to 1"),
        (
            lambda: comm.send(np.zeros(4), 1, 1 << 40),
            f"tag {1 << 40} is out of range: use an integer from 0 to {largest}",
        ),
        (lambda: comm.recv(np.zeros(4), 1, -1), f"tag -1 is out of range: use an integer from 0 to {largest}"),
        (lambda: comm.recv(np.zeros(4), 1, "a"), f"tag 'a' is out of range: use an integer from 0 to {largest}"),
        (
            lambda: comm.send(np.ma.zeros(4), 1),
            "masked arrays are not supported: pass x.filled(...), or x.data to include the masked elements",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            call()
    assert comm.all_reduce(np.ones(1)) == 2
    if comm.rank == 0:
        comm.send(np.ones(4), 1, largest)
    else:
        assert comm.recv(np.zeros(4), 0, largest).all()


@pytest.mark.sizes(2)
def test_long_messages_go_in_parts(comm, monkeypatch):
    """A part has as many bytes as MPI can count: 1 GiB, here 1 KiB."""
    from collectives.runtime.backends import point_to_point

    monkeypatch.setattr(point_to_point, "LARGEST_MESSAGE_BYTES", 1024)
    x = np.arange(10_001, dtype=np.int16)
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        assert (comm.recv(np.zeros_like(x), 0) == x).all()


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("nodes", "expected"), [("2x1", [1, 2, 64, 64]), ("1x2", [1, 1, 1, 1])])
def test_long_messages_between_nodes_go_in_short_parts(mpi_comm, monkeypatch, nodes, expected):
    from collectives import Communicator
    from collectives.runtime.backends.point_to_point import Mailbox

    num_parts, cut = [], Mailbox.parts
    monkeypatch.setattr(Mailbox, "parts", lambda *call: (parts := cut(*call), num_parts.append(len(parts)))[0])
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", nodes)
    comm = Communicator(mpi_comm)
    for length in (60_000, 60_001, 3_840_000, 10_000_003):
        x = np.arange(length).astype(np.uint8)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            assert (comm.recv(np.zeros_like(x)) == x).all()
    assert num_parts == expected
    comm.free()


def test_a_plan_that_fails_on_its_way_leaves_the_communicator_as_it_was(comm):
    from collectives import CommunicationError

    plan = comm.plan("barrier")
    plan.enclose([(np.zeros(3), np.zeros(2))], [], None)  # an impossible copy
    with pytest.raises(CommunicationError, match=r"^barrier .*could not broadcast"):
        plan()
    assert comm.all_reduce(np.ones(1)) == comm.size


@pytest.mark.parametrize("subclass", [np.matrix, np.recarray])
def test_of_a_subclass_the_memory_is_taken(comm, subclass):
    x = np.arange(6.0).reshape(2, 3).view(subclass)
    assert comm.all_reduce(x) is x
    assert x.tolist() == [[0, comm.size, 2 * comm.size], [3 * comm.size, 4 * comm.size, 5 * comm.size]]
    gathered = comm.all_gather(x, algorithm="ring")
    assert type(gathered) is np.ndarray
    assert gathered.tolist() == [np.asarray(x).tolist()] * comm.size
    scattered = comm.reduce_scatter(np.arange(2.0 * comm.size).reshape(-1, 2).view(subclass), algorithm="ring")
    assert scattered.tolist() == [[2 * comm.rank * comm.size, (2 * comm.rank + 1) * comm.size]]


@pytest.mark.sizes(2)
def test_an_error_of_mpi_says_where(mpi_comm):
    from collectives import CommunicationError, Communicator

    comm = Communicator(mpi_comm, check=False)
    plan = comm.plan("broadcast", np.zeros(8 if comm.rank == 0 else 4), algorithm="binomial")
    if comm.rank == 0:
        plan()
    else:
        with pytest.raises(CommunicationError, match=r"^broadcast binomial, round 0: receive \[0-1\] from rank 0: "):
            plan()
    assert comm.all_reduce(np.ones(1)) == 2
    comm.free()


def test_nodes(comm, monkeypatch):
    from collectives import Communicator, InputError

    assert comm.topology.nodes == (tuple(range(comm.size)),)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{comm.size}x1")
    each = Communicator(comm.mpi)
    assert each.topology.nodes == tuple((rank,) for rank in range(comm.size))
    each.free()
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "9x9")
    with pytest.raises(InputError, match=f"=9x9 does not make the {comm.size} ranks"):
        Communicator(comm.mpi)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "two")
    with pytest.raises(InputError, match="write <nodes>x<ranks per node>, as in 2x4"):
        Communicator(comm.mpi)


@pytest.mark.sizes(2, 3, 4)
def test_a_communicator_of_some_ranks_has_the_nodes_of_the_job(mpi_comm, monkeypatch):
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{-(-MPI.COMM_WORLD.size // 2)}x2")
    comm = Communicator(mpi_comm)
    node_of = [rank // 2 for rank in mpi_comm.allgather(MPI.COMM_WORLD.rank)]
    assert [set(ranks) for ranks in comm.topology.nodes] == [
        {rank for rank, node in enumerate(node_of) if node == number} for number in dict.fromkeys(node_of)
    ]
    comm.free()


@pytest.mark.sizes(4, 8)
def test_parts_know_their_nodes(comm, monkeypatch):
    from collectives import Communicator

    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"2x{comm.size // 2}")
    nodes = Communicator(comm.mpi)
    assert nodes.topology.node_of == tuple(rank * 2 // comm.size for rank in range(comm.size))
    across = nodes.split(comm.rank % (comm.size // 2))
    within = nodes.split(comm.rank * 2 // comm.size)
    assert across.topology.nodes == ((0,), (1,))
    assert within.topology.nodes == (tuple(range(comm.size // 2)),)
    for part in (across, within, nodes):
        part.free()


def test_empty(comm):
    for shape, dtype in ((3, "float32"), ((2, 5), "bfloat16"), ((), "int64"), ((0, 4), "bool")):
        x = comm.empty(shape, dtype)
        assert x.shape == np.empty(shape).shape
        assert x.dtype == dtype_of(dtype)
        x[...] = 1
        assert comm.broadcast(x) is x
    with pytest.raises(ValueError, match="device 'tpu' is unknown: use 'cpu', 'cuda'"):
        comm.empty(3, device="tpu")


@pytest.mark.sizes(1, 2)
def test_memory_is_not_aligned_with_long_arrays_as_copies_are_slow(comm):
    """See `kernels.copy`."""
    long = np.empty(1 << 22, np.uint8).ctypes.data
    addresses = [comm.empty(nbytes, "uint8").ctypes.data for nbytes in (8, 1 << 12, 1 << 16, 1 << 22)]
    assert not any(0 < (long - address) % PAGE_BYTES < ALIASING_BYTES for address in addresses)
    assert not any(address % 64 for address in addresses)


def test_memory_that_is_refused_leaves_no_file(new_comm, monkeypatch, tmp_path):
    from collectives import InputError
    from collectives.arrays import memory

    def refuse(*_):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "shared_folder", lambda: tmp_path)
        patch.setattr(memory.os, "truncate", refuse)
        with pytest.raises(InputError, match=r"^no 1 MiB that ranks share: rank 0: no room$"):
            new_comm.empty(1 << 18)
    assert not list(tmp_path.iterdir())
    x = new_comm.empty(1 << 18)
    x[:] = 1
    assert (new_comm.all_reduce(x) == new_comm.size).all()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_memory_has_no_name_that_a_dead_job_would_leave(comm):
    x = comm.empty(1 << 20)
    comm.barrier()
    ours = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/collectives-" in line]
    assert ours
    assert all(line.endswith("(deleted)") for line in ours)
    del x


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "one_shot", "two_shot"])
def test_a_started_plan_moves_on_by_itself(comm, algorithm):
    x = comm.empty(1 << 16)
    plan = comm.plan("all_reduce", x, algorithm=algorithm)
    for _ in range(3):
        for _ in range(2):
            plan.start().wait()  # wakes the thread in vain
        x[:] = comm.rank
        plan.start()
        patience = time.monotonic() + 60
        while plan.in_background and time.monotonic() < patience:
            time.sleep(1e-3)  # like computation: this thread makes no calls on the plan
        assert not plan.in_background
        assert (x == comm.size * (comm.size - 1) // 2).all()
        assert plan.done()
        plan.wait()


def test_only_started_plans_have_a_thread(new_comm):
    x = np.zeros(1 << 14)
    new_comm.all_reduce(x)
    new_comm.plan("all_reduce", x, algorithm="ring")()
    assert new_comm.context.progress.background.thread is None
    new_comm.all_reduce(x, algorithm="ring", blocking=False).wait()
    assert (new_comm.context.progress.background.thread is None) == (new_comm.size == 1)


@pytest.mark.sizes(2)
def test_a_thread_that_still_knows_a_plan_from_its_last_run(comm):
    """A background thread drives a plan at any time, also while this thread starts it again."""
    plan = comm.plan("all_reduce", np.ones(50_000), algorithm="ring")
    result = threading.Event()

    def move_on():
        while not result.is_set():
            plan.advance()

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move_on)
        for _ in range(50):
            plan()
        result.set()
        moving.result()


@pytest.mark.sizes(1, 2)
def test_threads_that_allocate_memory_at_once(comm, monkeypatch):
    parts = [comm.split(0) for _ in range(2)]
    side_by_side = threading.Barrier(len(parts), timeout=20)
    for part in parts:
        memory = part.context.memory.of_host

        def agree_side_by_side(values, agree=memory.agree_max):
            side_by_side.wait()
            return agree(values)

        monkeypatch.setattr(memory, "agree_max", agree_side_by_side)
    with ThreadPoolExecutor(len(parts)) as pool:
        arrays = list(pool.map(lambda part: part.empty(1 << 19), parts))
    for number, (part, x) in enumerate(zip(parts, arrays, strict=True)):
        x[:] = 10 * number + comm.rank
        part.barrier()
        assert [peer[-1] for peer in part.peers(x)] == [10 * number + rank for rank in range(comm.size)]
    monkeypatch.undo()
    for part in parts:
        part.free()


@pytest.mark.sizes(3)
def test_threads_with_a_communicator_each(comm):
    """Each thread makes calls of its own, of kinds that are new again and again, at its own pace."""
    parts = [comm.split(0) for _ in range(3)]
    begin = threading.Barrier(len(parts))

    def work(number):
        part, rng = parts[number], np.random.default_rng(number)
        begin.wait()
        for turn in range(40):
            collective, count = str(rng.choice(COLLECTIVES)), 3 * int(rng.integers(1, 400))
            xs = inputs(comm.size, count)
            x = part.empty(count) if turn % 3 == 0 else np.empty(count, np.float32)
            x[:] = xs[comm.rank]
            actual = getattr(part, collective)(x, blocking=bool(turn % 2))
            want = expected(collective, xs, comm.rank)
            same(actual if turn % 2 else actual.wait(), want, (number, turn, collective))

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, range(len(parts))))
    for part in parts:
        part.free()
