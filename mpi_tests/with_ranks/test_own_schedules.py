"""Schedules of a program's own, and variants of the package's: results, refusals, and what `auto` chooses."""

import re

import numpy as np
import pytest

from collectives import Communicator, InputError, Op, algorithms
from collectives.algorithms.chain import all_reduce as ring_in_chunks
from collectives.graphs import packed
from collectives.graphs.shapes import ring
from collectives.schedule.moves import Recv, Send
from mpi_tests.helpers.own_schedules import WRONG, exchange, in_node, line, parked, rotated, spread
from mpi_tests.helpers.reference import expected, inputs, same

NAME = "mpi_tests.helpers.own_schedules:exchange"
OWN = {"all_reduce": [exchange, in_node, NAME], "all_to_all": [rotated], "all_gather": [spread]}
CUT = [row.name for row in algorithms.REGISTRY if row.unit]


@pytest.fixture
def registered():
    before = list(algorithms.REGISTERED)
    yield
    algorithms.REGISTERED[:] = before


@pytest.mark.sizes(1, 2, 4, 8)
@pytest.mark.parametrize("collective", OWN)
def test_results(comm, collective):
    for algorithm in OWN[collective]:
        for count in (0, 5, 60):
            xs = inputs(comm.size, count * comm.size + (3 if collective == "all_reduce" else 0))
            x = xs[comm.rank].copy()
            same(getattr(comm, collective)(x, algorithm=algorithm), expected(collective, xs, comm.rank), algorithm)
            plan = comm.plan(collective, xs[comm.rank].copy(), algorithm=algorithm)
            same(plan(), expected(collective, xs, comm.rank), algorithm)
            assert plan.name.startswith(f"{collective} {algorithms.name_of(algorithm)}")
            plan.free()


@pytest.mark.sizes(1, 2, 3, 5)
def test_every_root_and_length(comm):
    for root in range(comm.size):
        for count in (0, 1, 1 << 15):  # the longest in several chunks
            x = np.arange(count, dtype="float32") + comm.rank
            same(comm.broadcast(x, root=root, algorithm=line), np.arange(count, dtype="float32") + root, (root, count))


@pytest.mark.sizes(3)
def test_uneven_counts(comm):
    counts = [4, 0, 1]
    x = np.full(counts[comm.rank], comm.rank)
    same(comm.all_gather(x, counts=counts, algorithm=spread), np.repeat(range(3), counts), "")


@pytest.mark.sizes(4, proof=(3, 8))
def test_schedules_packed_for_a_graph(comm):
    graph = ring(comm.size)
    for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        schedule = packed(graph, collective, chunks_per_rank=2)
        for count in (0, 1, 7 * comm.size):
            xs = inputs(comm.size, count)
            same(
                getattr(comm, collective)(xs[comm.rank].copy(), algorithm=schedule),
                expected(collective, xs, comm.rank),
                "",
            )
    with pytest.raises(InputError, match=r"this schedule is for \d ranks, not \d: pack one for their graph"):
        comm.all_reduce(np.ones(4), algorithm=packed(ring(comm.size + 1), "all_reduce", chunks_per_rank=1))


@pytest.mark.sizes(4)
@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_one_is_refused_on_all_ranks(comm, function):
    x = np.ones(8)
    for _ in range(2):  # also the next time
        with pytest.raises(InputError, match=f"^all_reduce: algorithm .*{re.escape(WRONG[function])}"):
            comm.all_reduce(x, algorithm=function)
    assert (x == 1).all()
    assert comm.all_reduce(x)[0] == 4


@pytest.mark.sizes(4)
def test_one_rank_passes_another_function(comm):
    with pytest.raises(
        InputError, match=r"rank 0 calls .*algorithm=\S+:exchange\).*, rank 2 calls .*algorithm=\S+:in_node\)"
    ):
        comm.all_reduce(np.ones(4), algorithm=in_node if comm.rank == 2 else exchange)


@pytest.mark.sizes(4)
def test_one_rank_s_function_of_the_same_name_has_other_rounds(comm):
    def reduce_in_turn(rank, size, reverse=comm.rank == 3):
        """Exchange along the bits of the rank, in one or the other order."""
        rounds = list(exchange(rank, size))
        yield from reversed(rounds) if reverse else rounds

    words = r"rank 0 calls all_reduce with algorithm \S+reduce_in_turn of rounds (\w+), rank 3 calls .* of rounds (\w+)"
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            comm.all_reduce(np.ones(4), algorithm=reduce_in_turn)


@pytest.mark.sizes(2)
def test_a_function_that_fails_on_one_rank(comm):
    def fails(rank, size):
        yield from exchange(rank, size)
        if comm.rank:
            raise KeyError("there")

    for _ in range(2):
        with pytest.raises(InputError, match=r"fails for rank 0 of 2: KeyError: 'there'"):
            comm.all_reduce(np.ones(4), algorithm=fails)


@pytest.mark.sizes(2)
def test_a_function_that_is_new_on_one_rank_each_time(comm):
    def first(rank, size):
        return exchange(rank, size)

    for _ in range(3):

        def second(rank, size):
            return exchange(rank, size)

        second.__qualname__ = first.__qualname__
        assert comm.all_reduce(np.ones(4), algorithm=second if comm.rank else first)[0] == 2


@pytest.mark.sizes(2, 4)
def test_what_was_proved_is_what_runs(comm):
    """A function that yields other rounds the next time is not asked again."""
    calls = []

    def changes(rank, size):
        calls.append(rank)
        return exchange(rank, size) if len(calls) <= size else iter([()])

    for count in (4, 7, 9):
        assert (comm.all_reduce(np.ones(count), algorithm=changes) == comm.size).all()


@pytest.mark.sizes(2)
def test_a_function_that_fails_for_some_numbers_of_chunks(new_comm):
    def fails(rank, size, num_chunks):
        if num_chunks > 1 and new_comm.rank:
            raise KeyError("too many")
        return ring_in_chunks(rank, size, num_chunks)

    assert new_comm.all_reduce(np.ones(4), algorithm=fails)[0] == 2
    with pytest.raises(InputError, match=r"fails for rank 0 of 2: KeyError: 'too many'"):
        new_comm.all_reduce(np.ones(1 << 16), algorithm=fails)


@pytest.mark.sizes(2)
def test_registered_schedules_that_auto_cannot_take(new_comm, registered):
    """One that needs its number of chunks, one that needs chunks of one length, and one that accesses memory."""
    algorithms.register("broadcast")(line)
    for function in (parked, in_node):
        algorithms.register("all_reduce")(function)
    for count in (1, 1 << 17):
        same(new_comm.broadcast(np.full(count, new_comm.rank)), np.zeros(count, int), "")
    assert (new_comm.all_reduce(np.ones(5)) == 2).all()
    assert (new_comm.all_reduce(np.ones(5), op=Op(np.maximum)) == 1).all()
    with pytest.raises(InputError, match=r"algorithm '\S+:in_node' cannot do op=Op"):
        new_comm.all_reduce(np.ones(5), op=Op(np.maximum), algorithm=in_node)


@pytest.mark.sizes(2, 4)
def test_chunks_of_one_length_where_a_schedule_needs_them(comm):
    assert comm.all_reduce(np.ones(2 * comm.size), algorithm=parked)[0] == comm.size
    with pytest.raises(InputError, match=f"so needs chunks of one length: pass a multiple of {comm.size} elements"):
        comm.all_reduce(np.ones(2 * comm.size + 1), algorithm=parked)
    with pytest.raises(InputError, match=r"rotated' needs equal chunks: on \d ranks with uneven chunks, use"):
        comm.all_to_all(np.ones(comm.size), send_counts=[1] * comm.size, algorithm=rotated)


@pytest.mark.sizes(2)
def test_demands_that_it_does_not_meet(comm):
    with pytest.raises(InputError, match=r"algorithm '\S+:exchange' cannot do reproducible=True: use auto, "):
        comm.all_reduce(np.ones(4), algorithm=exchange, reproducible=True)


@pytest.mark.sizes(2, 4)
def test_auto_takes_a_registered_one_that_is_the_cheapest(mpi_comm, registered, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", f"{mpi_comm.size}x1")  # where there are messages only

    @algorithms.register("all_gather")
    def at_once(rank, size):
        for step in range(1, size):
            source = (rank - step) % size
            yield (
                Send((rank + step) % size, range(rank, rank + 1)),
                Recv(source, range(source, source + 1)),
            )

    monkeypatch.setattr("collectives.runtime.choose.auto.predicted_s", lambda row, *_: float(":" not in row.name))
    comm = Communicator(mpi_comm)
    plan = comm.plan("all_gather", np.array([comm.rank]))
    assert plan.name == f"all_gather {algorithms.name_of(at_once)}"
    assert plan().tolist() == list(range(comm.size))
    comm.free()


@pytest.mark.sizes(2)
def test_ranks_that_register_others_are_named(new_comm, registered):
    if new_comm.rank:
        algorithms.register("all_reduce")(exchange)
    with pytest.raises(InputError, match=r"rank 1 calls all_reduce\(.*algorithm=auto or \S+:exchange\)"):
        new_comm.all_reduce(np.ones(3, "int16"))


@pytest.mark.sizes(5, 8, proof=(4, 7))
@pytest.mark.parametrize(
    "row",
    [
        *algorithms.VARIANTS,
        *(
            algorithms.find("all_reduce", name)
            for name in ("hierarchical_direct/recursive@2/rabenseifner", "multi_ring")
        ),
    ],
    ids=lambda row: f"{row.collective}-{row.name}",
)
def test_variants_over_nodes(mpi_comm, row, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", {4: "2x2", 5: "2x3", 7: "3x3", 8: "4x2"}[mpi_comm.size])
    comm = Communicator(mpi_comm)
    for name in (row.name, *([f"{row.name}/3"] if row.unit and not row.cut else [])):
        for count in (0, 7, 100):
            xs = inputs(comm.size, count)
            same(
                getattr(comm, row.collective)(xs[comm.rank].copy(), algorithm=name),
                expected(row.collective, xs, comm.rank),
                name,
            )
    comm.free()


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_other_numbers_of_chunks(comm, cut):
    for row in algorithms.REGISTRY:
        if row.unit and not row.cut:
            for count in (0, 3, 50):
                xs = inputs(comm.size, count)
                x, name = xs[comm.rank].copy(), f"{row.name}/{cut}"
                same(getattr(comm, row.collective)(x, algorithm=name), expected(row.collective, xs, comm.rank), name)
