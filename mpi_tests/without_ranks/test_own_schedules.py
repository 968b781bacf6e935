"""Schedules from outside the package: their rows, proofs, prices and refusals."""

import re
from functools import partial

import numpy as np
import pytest

from collectives import algorithms
from collectives.algorithms import variants
from collectives.algorithms.own_proof import MOST_MOVES, prove
from collectives.graphs import packed
from collectives.graphs.shapes import ring
from collectives.runtime.choose import auto
from collectives.schedule.cost import predict
from collectives.schedule.moves import MESSAGES, Barrier, Copy, Get, GetReduce, RecvReduce, Send
from collectives.schedule.simulate import main as simulate
from mpi_tests.helpers import own_schedules
from mpi_tests.helpers.algorithm_costs import nodes_of
from mpi_tests.helpers.own_schedules import WRONG, exchange, in_node, line, parked, rotated, spread

NAME = "mpi_tests.helpers.own_schedules:exchange"


def proved(collective, function, size, root=0, nodes=None, cut=1):
    row = algorithms.find(collective, function)
    return prove(row.cut_into(cut) if variants.is_open(row) else row, size, root, nodes or nodes_of(size))


@pytest.fixture
def registered():
    """Undo what a test registers."""
    before = list(algorithms.REGISTERED)
    yield
    algorithms.REGISTERED[:] = before


def test_a_function_is_found_by_itself_and_by_its_name():
    row = algorithms.find("all_reduce", exchange)
    assert row == algorithms.find("all_reduce", NAME)
    assert row.name == NAME == algorithms.name_of(exchange) == algorithms.name_of(partial(exchange))
    assert row.rounds(1, 2, 0, ()) == list(exchange(1, 2))


def test_an_object_keeps_the_name_by_which_it_was_found(monkeypatch):
    monkeypatch.setattr(own_schedules, "trees", packed(ring(3), "all_gather", chunks_per_rank=2), raising=False)
    row = algorithms.find("all_gather", "mpi_tests.helpers.own_schedules:trees")
    assert (row.name, row.num_chunks(3, ())) == ("mpi_tests.helpers.own_schedules:trees", 6)
    assert prove(row, 3, 0, nodes_of(3)).aligned
    with pytest.raises(ValueError, match="6 chunks are not divisible by 4 ranks, which own as many each"):
        prove(row, 4, 0, nodes_of(4))


def test_it_is_priced_as_the_same_algorithm_of_the_package():
    own, ours = (algorithms.find("all_reduce", name) for name in (exchange, "recursive_doubling"))
    for nbytes in (8, 1 << 20):
        assert predict(own, nbytes, 16, nodes_of(8, 8)) == predict(ours, nbytes, 16, nodes_of(8, 8))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_proofs(size):
    assert proved("all_reduce", exchange, size).aligned
    assert proved("all_to_all", rotated, size).access == algorithms.Access.MESSAGES
    assert proved("all_reduce", in_node, size).access == algorithms.Access.INTRA_NODE
    for cut in (1, 3):
        assert proved("all_gather", spread, size, cut=cut).aligned
        for root in range(size):
            assert proved("broadcast", line, size, root, cut=cut).aligned


def test_a_proof_tells_rounds_apart():
    digests = {proved("all_reduce", each, 4).digest for each in (exchange, parked)}
    assert len(digests) == 2
    assert proved("all_reduce", partial(exchange), 4).digest in digests


def test_a_schedule_that_needs_chunks_of_one_length_is_known_by_it():
    assert not proved("all_reduce", parked, 2).aligned


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_wrong_schedules(function):
    with pytest.raises(ValueError, match=f"{re.escape(WRONG[function])}$"):
        proved("all_reduce", function, 4)


def two_nodes(rank, size):
    yield (Barrier(tuple(range(size))),)


def far(rank, size):
    yield (Barrier((0, 1) if rank < 2 else (2, 3)),)
    yield (Get((rank + 2) % 4, range(1), range(1)),)


def mixed(rank, size):
    yield Send(rank ^ 1, range(1)), Get(rank ^ 1, range(1), range(1))


def straddling(rank, size):
    yield Send(rank ^ 1, range(3, 5)), own_schedules.Recv(rank ^ 1, range(3, 5))


def many(rank, size):
    yield tuple(Send(rank ^ 1, range(1)) for _ in range(MESSAGES + 1))


def scattered(rank, size):
    yield Send(rank ^ 1, range(1)), own_schedules.Recv(rank ^ 1, range(64, 65))


def no_sources(rank, size):
    yield (GetReduce((), range(1), range(1)),)


def uneven_copy(rank, size):
    yield (Copy(range(2), range(2, 3)),)


def by_numpy(rank, size):
    yield (Send(np.int64(rank ^ 1), range(1)),)


def too_often(rank, size):
    for _ in range(20):
        yield Send(rank ^ 1, range(1)), RecvReduce(rank ^ 1, range(1))


def endless(rank, size):
    while True:
        yield ()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two_nodes, "would wait at a barrier of ranks 0-3: a barrier is of all ranks of a node, [0, 1]"),
        (far, "rank 0 in round 1 would get [0] of rank 2 into [0]: rank 2 is on another node: send messages"),
        (mixed, "rank 0 in round 0 has messages and accesses to memory: put them into rounds of their own"),
        (straddling, "rank 0 in round 0 would send [3-4] to rank 1, across the vector's end: use two moves"),
        (many, "rank 0 in round 0 sends a rank 9 messages: use at most 8"),
        (scattered, "rank 0 in round 0 would receive [64] from rank 1: use at most 64 chunks"),
        (no_sources, "rank 0 of 4 in round 0: sources () is not a tuple of ranks, each an int: convert it"),
        (uneven_copy, "rank 0 of 4 in round 0 would copy [0-1] to [2]: use runs of one length"),
        (by_numpy, "to np.int64(1) is not a rank, an int: convert it"),
        (too_often, "round 15 adds a rank 32768 times or more to chunk 0"),
        (endless, f"rank 0 of 4 in round {MOST_MOVES // 4} has had {MOST_MOVES // 4 + 1} moves: a rank may have "
         f"{MOST_MOVES // 4}"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_what_cannot_be_run(function, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        proved("all_reduce", function, 4, nodes=nodes_of(2, 2))


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (5, "algorithm 5 is unknown: use one of auto, ring, "),
        (
            lambda rank: (),
            "can't be called (too many positional arguments): pass a name, or a function of rank, size that",
        ),
        (
            "nomodule:f",
            "algorithm 'nomodule:f': can't import 'nomodule' (No module named 'nomodule'): run in its folder, ",
        ),
        ("mpi_tests.helpers.own_schedules:f", "module 'mpi_tests.helpers.own_schedules' has no 'f': check the name"),
        ("os:sep", "algorithm '/' is unknown"),
        ("double_tree/0", "algorithm 'double_tree/0': 0 is out of range: use 1 to 65536 chunks"),
        ("ring/4", "algorithm 'ring/4': 'ring' has one chunk for each rank: omit '/4'"),
        ("multi_ring/4", "algorithm 'multi_ring/4': 'multi_ring' has a fixed number of chunks: omit '/4'"),
        (partial(line, root=0, num_chunks=0), "num_chunks 0 is out of range: use an integer from 1 on"),
    ],
    ids=range(9),
)
def test_what_is_no_schedule(algorithm, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        algorithms.find("all_reduce", algorithm)


def test_a_function_with_a_fixed_number_of_chunks():
    row = algorithms.find("broadcast", partial(line, num_chunks=5))
    assert row.num_chunks(4, ()) == 5
    assert not variants.is_open(row)
    assert prove(row, 4, 1, nodes_of(4)).aligned
    with pytest.raises(ValueError, match="1 to 65536 chunks"):
        algorithms.find("broadcast", line).cut_into(1 << 17)


def test_auto_considers_registered_schedules(registered):
    rows, question = algorithms.rows, auto.Question("all_reduce", 8, (), nodes_of(4))
    assert algorithms.register("all_reduce", lambda size: size & size - 1 == 0, "a power of two of ranks")(exchange)
    assert NAME in algorithms.names("all_reduce")
    assert NAME in [row.name for row in rows("all_reduce", 4)]
    assert NAME not in [row.name for row in rows("all_reduce", 6)]
    with pytest.raises(
        ValueError, match=f"algorithm '{NAME}' needs a power of two of ranks: on 6 ranks, use auto, ring"
    ):
        algorithms.check(algorithms.find("all_reduce", NAME), 6)
    candidates = (algorithms.find("all_reduce", "ring"), algorithms.find("all_reduce", NAME))
    assert auto.choose(question._replace(candidates=candidates)) == NAME
    algorithms.register("all_reduce")(exchange)  # once more, for any number of ranks
    assert algorithms.names("all_reduce", 6).count(NAME) == 1
    with pytest.raises(ValueError, match="collective 'foo' is unknown"):
        algorithms.register("foo")


def test_simulate_takes_a_function(capsys):
    assert simulate(["all_reduce", "--topology", "2x8", "--algorithms", NAME, "ring", "-e", "8"]) == 0
    assert NAME in capsys.readouterr().out


def test_the_proof_of_many_ranks_says_how_long_it_took(capsys, monkeypatch):
    monkeypatch.setattr("collectives.algorithms.own_proof.SLOW_S", 0.0)
    proved("all_reduce", partial(exchange), 16)
    assert re.search(r"the proof of \S+:exchange on 16 ranks took 0\.\d s, once", capsys.readouterr().err)


def test_the_search_for_a_number_of_chunks_ends_where_they_get_dearer():
    row, prices = algorithms.find("all_reduce", "double_tree"), {1: 5.0, 2: 3.0, 4: 2.0, 8: 4.0, 16: 1.0}
    priced = []

    def price(variant):
        priced.append(variant.cut)
        return prices[variant.cut]

    best, seconds = variants.best(row, 1 << 30, nodes_of(8), price)
    assert (best.name, seconds, priced) == ("double_tree/4", 2.0, [1, 2, 4, 8])


def test_a_registered_condition_holds_for_the_function_too(registered):
    algorithms.register("all_reduce", lambda size: size == 4, "four ranks")(exchange)
    with pytest.raises(ValueError, match="needs four ranks: on 2 ranks, use auto"):
        algorithms.check(algorithms.find("all_reduce", exchange), 2)
    algorithms.register("all_reduce", lambda size: 1 / 0)(in_node)
    with pytest.raises(ValueError, match="the condition of a registered all_reduce: ZeroDivisionError"):
        algorithms.rows("all_reduce", 2)


def test_a_module_that_fails_at_its_import(tmp_path, monkeypatch):
    (tmp_path / "module_that_fails.py").write_text("raise ZeroDivisionError('on purpose')")
    monkeypatch.syspath_prepend(tmp_path)
    words = "can't import 'module_that_fails' (ZeroDivisionError: on purpose): run in its folder, or set PYTHONPATH"
    with pytest.raises(ValueError, match=re.escape(words)):
        algorithms.find("all_reduce", "module_that_fails:f")
