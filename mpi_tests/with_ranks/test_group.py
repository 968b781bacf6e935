"""Groups of calls: they start together and are complete at the group's end."""

import numpy as np
import pytest

from collectives import CommunicationError, InputError

pytestmark = pytest.mark.sizes(2, 3, proof=(1, 5, 8))


@pytest.mark.parametrize("length", [3, 100_000])
def test_messages_in_any_order(comm, length):
    """Each rank sends to all and receives from all in an order of its own; blocking calls would deadlock."""
    for turn in range(3):
        outs = [np.zeros(length) for _ in range(comm.size)]
        order = np.random.default_rng([turn, comm.rank]).permutation(2 * comm.size)
        with comm.group():
            for peer, receives in (divmod(int(each), 2) for each in order):
                if receives:
                    comm.recv(outs[peer], peer)
                else:
                    comm.send(np.full(length, 10.0 * comm.rank + peer), peer)
        assert [set(out) for out in outs] == [{10.0 * peer + comm.rank} for peer in range(comm.size)]


def test_requests_have_what_comes_in_new_arrays(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = np.full(2, comm.rank)
    with comm.group():
        shifted = comm.sendrecv(x, right, None, left, tag=1)
        gathered = comm.all_gather(x)
        comm.send(x, right, tag=2)
        received = comm.recv(source=left, tag=2)
        barrier = comm.barrier()
    assert shifted.wait().tolist() == received.wait().tolist() == [left] * 2
    assert gathered.wait().tolist() == np.repeat(range(comm.size), 2).tolist()
    assert barrier.done()


def test_collectives_among_messages(comm):
    """Rank 0's receive comes before the collectives, the last rank's matching send after them."""
    last = comm.size - 1
    for _ in range(3):
        total, root, out = np.full(50, comm.rank), np.full(50, comm.rank), np.empty(50, int)
        with comm.group():
            if comm.rank == 0:
                comm.recv(out, last)
            comm.all_reduce(total)
            comm.broadcast(root, last, blocking=False)
            if comm.rank == last:
                comm.send(np.full(50, 7), 0)
        assert set(total) == {sum(range(comm.size))}
        assert set(root) == {last}
        assert comm.rank or set(out) == {7}


def test_a_group_in_a_group_is_part_of_it(comm):
    x = np.ones(2)
    with comm.group():
        with comm.group():
            comm.all_reduce(x)
        request = comm.all_reduce(x)
    assert request.done()
    assert x.tolist() == [comm.size**2] * 2
    assert comm.all_reduce(x) is x  # calls are blocking again


def begin_and_raise(comm, x, works):
    with comm.group():
        works.append(comm.all_reduce(x))
        raise KeyError


def test_what_a_block_raises_is_raised_and_nothing_waited_for(comm):
    x, works = np.ones(2), []
    with pytest.raises(KeyError):
        begin_and_raise(comm, x, works)
    works[0].wait()
    assert x.tolist() == [comm.size] * 2
    assert comm.all_reduce(np.ones(1)) == comm.size  # calls are blocking again


@pytest.mark.parametrize("name", ["broadcast_object", "gather_object", "all_gather_object"])
def test_what_has_to_wait_is_refused(comm, name):
    with pytest.raises(RuntimeError, match=f"^{name} waits for the other ranks: call it outside"), comm.group():
        getattr(comm, name)(1)
    with pytest.raises(InputError, match="op 'land' of float64"), comm.group():
        comm.all_reduce(np.ones(2), op="land")
    assert comm.all_gather_object(comm.rank) == [*range(comm.size)]


def receive_too_little(comm, x, works):
    with comm.group():
        comm.send(x, comm.rank)
        comm.recv(np.zeros(5), comm.rank)
        works.append(comm.all_reduce(x.copy()))


def test_every_call_is_waited_for_where_one_fails(comm):
    works = []
    with pytest.raises(CommunicationError, match=r"x has 5 elements .* sent 2 of float64"):
        receive_too_little(comm, np.ones(2), works)
    assert works[0].done()
