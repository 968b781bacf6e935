"""Python objects, MPI's ops, and messages of unknown length, for programs that come from mpi4py and torch."""

import re
import weakref

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import InputError


class Exported:
    """An array of another library, reduced to its DLPack interface."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_objects_of_any_size_reach_every_rank(comm):
    for root in {0, comm.size - 1}:
        value = {"rank": comm.rank, "text": "é" * 1000 * comm.rank, "nothing": None}
        assert comm.broadcast_object(value, root)["text"] == "é" * 1000 * root
        gathered = comm.gather_object(value, root)
        assert (gathered is None) == (comm.rank != root)
        for values in (gathered or [], comm.all_gather_object(value)):
            assert [each["rank"] for each in values] == [*range(comm.size)][: len(values)]
            assert all(each["text"] == "é" * 1000 * each["rank"] for each in values)


def test_objects_of_about_the_same_size_need_no_new_plan(comm, monkeypatch):
    comm.all_gather_object("x" * 5000)
    monkeypatch.setattr(comm.dispatcher, "run_first", None)
    assert comm.all_gather_object("y" * 5020) == ["y" * 5020] * comm.size
    with pytest.raises(TypeError):
        comm.all_gather_object("z" * 50000)


def test_an_object_that_cannot_be_pickled_is_refused_on_every_rank(comm):
    bad = comm.size - 1
    value = (lambda: 0) if comm.rank == bad else 0
    for call in (
        lambda: comm.broadcast_object(value, bad),
        lambda: comm.gather_object(value, 0),
        lambda: comm.all_gather_object(value),
    ):
        with pytest.raises(InputError, match=r"function cannot be pickled .*: pass what pickle takes"):
            call()
    with pytest.raises(InputError, match=f"root {comm.size} is out of range"):
        comm.broadcast_object(0, comm.size)
    assert comm.all_reduce(np.ones(1)) == comm.size


def test_ops_may_be_mpis(comm):
    x = np.arange(3, dtype=np.int64) + comm.rank
    assert (comm.all_reduce(x.copy(), MPI.MAX) == comm.all_reduce(x.copy(), "max")).all()
    assert (comm.all_reduce(x.copy(), op=MPI.SUM) == comm.size * (x - comm.rank) + sum(range(comm.size))).all()
    assert (comm.plan("reduce_scatter", x.copy(), op=MPI.MIN)() == comm.reduce_scatter(x, op="min")).all()
    assert comm.reduce(x.copy(), comm.size - 1, MPI.PROD) is not None
    with pytest.raises(InputError, match=r"op 'MPI.REPLACE' is unknown: use one of sum, prod"):
        comm.all_reduce(x, MPI.REPLACE)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("length", [0, 3, 100_000])
def test_ranks_send_and_receive_at_once(comm, length):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = np.full(length, comm.rank, np.int32)
    for out in (None, np.empty(length, np.int32)):
        actual = comm.sendrecv(x, right, out, left, tag=4)
        assert (actual is out) == (out is not None)
        assert actual.dtype == np.int32
        assert len(actual) == length
        assert (actual == left).all()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("length", [3, 100_000])
def test_messages_are_there_to_be_asked_for(comm, length):
    """A rank probes for a message, learns its source, and receives it into a new array."""
    if comm.rank == 0:
        assert comm.probe(1, 7, blocking=False) is None
        comm.barrier()
        assert comm.probe(tag=7) == 1
        assert comm.probe(1, 7, blocking=False) == 1
        assert comm.probe(1, 8, blocking=False) is None
        request = comm.recv(None, 1, 7, blocking=False)
        assert (request.wait() == np.arange(length, dtype=np.float32)).all()
        assert request.result.dtype == np.float32
    else:
        comm.barrier()
        comm.send(np.arange(length, dtype=np.float32), 0, 7)
    for call, words in (
        (lambda: comm.probe(2), "source 2 is out of range: use a rank from 0 to 1"),
        (lambda: comm.probe(0, -1), "tag -1 is out of range: use an integer"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            call()


@pytest.mark.sizes(1)
def test_a_new_array_goes_with_its_last_user(comm):
    request = comm.send(np.arange(5), 0, blocking=False)
    actual = comm.recv(None, 0)
    request.wait()
    last = weakref.ref(actual)
    del actual
    assert last() is None


@pytest.mark.sizes(2)
def test_a_part_is_freed_at_the_end_of_with(comm):
    with comm.split(comm.rank) as part:
        assert part.size == 1
        assert part.all_reduce(np.ones(1)) == 1
    assert part.mpi == MPI.COMM_NULL
    with pytest.raises(InputError, match="1 elements"), comm.split(0) as part:
        part.all_reduce(np.ones(1 + comm.rank))
    assert part.mpi == MPI.COMM_NULL


def test_arrays_of_other_libraries_come_by_dlpack(comm):
    x = np.arange(4.0) + comm.rank
    assert comm.all_reduce(Exported(x)).array is x
    assert (x == comm.size * np.arange(4) + sum(range(comm.size))).all()
    fixed = np.ones(2)
    fixed.flags.writeable = False
    gathered = comm.all_gather(Exported(fixed))
    assert gathered.tolist() == [1.0] * (2 * comm.size)
    tensor = torch.ones(2, requires_grad=True)
    for lone in (Exported(tensor), Exported(torch.ones(2).bfloat16())):
        with pytest.raises(InputError, match=r"Exported cannot be read by DLPack \(.*\): pass a NumPy array"):
            comm.all_reduce(lone)
    with pytest.raises(InputError, match="Exported is on a device of DLPack's kind 8: pass one on the CPU or on CUDA"):
        comm.all_reduce(Exported(x, (8, 0)))
