import doctest
import pkgutil
import random
import re
import subprocess
import sys
from functools import partial

import pytest

from collectives import algorithms
from collectives.algorithms import (
    REGISTRY,
    bruck,
    direct,
    hierarchical,
    pairwise,
    recursive,
    ring,
    tree,
)
from collectives.schedule import proof
from collectives.schedule.moves import Copy, Get, GetReduce, Recv, RecvReduce, Send, embed, even_runs, render, show
from collectives.schedule.proof import ContractError
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.algorithm_costs import (
    COSTS,
    LARGEST,
    cost,
    each_algorithm,
    sizes,
)

PURE = [f"schedule.{name}" for name in ("moves", "spec", "proof", "cost", "draw", "events")]
PURE += ["runtime.choose.links", "runtime.choose.auto", "algorithms"]
PURE += [f"algorithms.{module.name}" for module in pkgutil.iter_modules(algorithms.__path__)]
ALL_ROOTS_UP_TO = 9


def roots(row, size):
    """Return the keyword arguments for trials of an algorithm: every root, or some."""
    if not COLLECTIVES[row.collective].rooted:
        return [{}]
    some = range(size) if size <= ALL_ROOTS_UP_TO else {0, 1, size // 2, size - 1} if size <= 33 else {size // 2}
    return [{"root": root} for root in some]


def test_names_of_no_collective():
    with pytest.raises(ValueError, match=r"^collective 'foo' is unknown: use one of all_reduce, "):
        algorithms.names("foo")


@each_algorithm
def test_the_contract_holds(row):
    for size in sizes(row):
        for root in roots(row, size):
            proof.check(row.collective, row.schedule, size, **root)


@pytest.mark.parametrize("row", [row for row in REGISTRY if row.apart], ids=lambda row: f"{row.collective}-{row.name}")
def test_the_contract_holds_with_results_apart(row):
    for size in sizes(row, among=range(1, min(LARGEST, 33) + 1)):
        for root in roots(row, size):
            proof.check(row.collective, partial(row.schedule, apart=True), size, apart=True, **root)


@each_algorithm
def test_the_contract_holds_at_a_large_size(row):
    """Sizes are random with a fixed seed: up to 256 ranks, in `make proof` 1024; fewer with many rounds."""
    draws = random.Random(f"{row.collective} {row.name}")
    is_long = row.collective in ("all_reduce", "scan", "exscan")
    is_quick = not row.access and len(list(row.schedule(0, 512))) < 12 and not is_long
    least, most = (33, 512 if is_quick else 40) if LARGEST >= 64 else (17, 128 if is_quick else 24)
    proof.check(row.collective, row.schedule, 2 * draws.randint(least, most))


@pytest.mark.parametrize("row", [row for row in REGISTRY if row.in_order], ids=lambda r: f"{r.collective}-{r.name}")
def test_sums_in_the_order_of_the_ranks(row):
    for size in sizes(row):
        for root in roots(row, size):
            proof.check(row.collective, row.schedule, size, in_order=True, **root)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (tree.all_reduce, "rank 2 in round 0 adds chunk 0 of r3 to chunk 0 of r2: not in the order of the ranks"),
        (ring.all_reduce, "rank 2 in round 0 adds chunk 0 of r2 to chunk 0 of r1: not in the order of the ranks"),
    ],
    ids=["binomial", "ring"],
)
def test_the_check_catches_another_order(algorithm, message):
    proof.check("all_reduce", algorithm, 4)
    with pytest.raises(ContractError, match=re.escape(message)):
        proof.check("all_reduce", algorithm, 4, in_order=True)


@each_algorithm
def test_all_ranks_have_the_same_number_of_rounds(row):
    for size in sizes(row):
        assert len({len(list(row.schedule(rank, size))) for rank in range(size)}) == 1


def run(first, last=None):
    return range(first, (first if last is None else last) + 1)


def mutant(algorithm, ranks, edit):
    """Return `algorithm` with the rounds of `ranks` edited."""

    def edited(rank, size, **root):
        rounds = [list(moves) for moves in algorithm(rank, size, **root)]
        if rank in ranks:
            edit(rounds)
        return [tuple(moves) for moves in rounds]

    return edited


def put(index, at, move):
    return lambda rounds: rounds[index].__setitem__(at, move)


def add(index, move):
    return lambda rounds: rounds[index].append(move)


def add_round(*moves):
    return lambda rounds: rounds.append(moves)


def drop(index, at):
    return lambda rounds: rounds[index].pop(at)


def drop_round(index):
    return lambda rounds: rounds.pop(index)


def repeat_round(index):
    return lambda rounds: rounds.insert(index, rounds[index])


def swap_moves(index, a, b):
    def edit(rounds):
        rounds[index][a], rounds[index][b] = rounds[index][b], rounds[index][a]

    return edit


def swap_rounds(a, b):
    return lambda rounds: rounds.__setitem__(slice(a, b + 1), [rounds[b], *rounds[a + 1 : b], rounds[a]])


ALL = range(4)
PAIRS = ((0, 1), (2, 3))
MUTANTS = {
    "nobody waits before reading": (
        ("all_reduce", direct.two_shot, ALL, drop_round(0)),
        "race: rank 3 in round 4 writes [1] of rank 3, which rank 1 may still read",
    ),
    "results are read before they are there": (
        ("all_reduce", direct.two_shot, ALL, drop_round(2)),
        "race: rank 1 in round 1 would get and reduce [1] of ranks 0-3 into [1], which rank 2 may still write",
    ),
    "nobody waits after reading": (
        ("all_reduce", direct.two_shot, ALL, drop_round(4)),
        "race: rank 2 in round 3 would get [3] of rank 3 into [3], which rank 3 may still write",
    ),
    "one rank leaves without meeting": (
        ("all_reduce", direct.two_shot, [1], drop_round(4)),
        "race: rank 1 in round 4 writes [1] of rank 1, which rank 3 may still read",
    ),
    "a stage is read before it is full": (
        ("all_gather", partial(direct.all_gather, staged=True), ALL, drop_round(1)),
        "rank 3 in round 1 would get [4] of rank 0 into [0], where rank 0 holds nothing in [4]",
    ),
    "a pull from the wrong rank": (
        ("all_gather", direct.all_gather, [2], put(1, 0, Get(1, run(3), run(3)))),
        "rank 2 in round 1 would get [3] of rank 1 into [3], where rank 1 holds nothing in [3]",
    ),
    "a rank is missing from a sum": (
        ("reduce_scatter", direct.reduce_scatter, [1], put(1, 0, GetReduce((0, 1, 2), run(1), run(1)))),
        "rank 1 ends with chunk 1 of r0 + r1 + r2 in [1], must be chunk 1 of r0 + r1 + r2 + r3",
    ),
    "send to the wrong peer": (
        ("all_reduce", ring.all_reduce, [0], put(0, 0, Send(2, run(3)))),
        "deadlock: rank 0 in round 0 waits to send [3] to rank 2; "
        "rank 1 in round 0 waits to receive and reduce [3] from rank 0",
    ),
    "reduce from the wrong peer": (
        ("reduce", tree.reduce, [2], put(0, 0, RecvReduce(1, run(0, 3)))),
        "rank 2 in round 0 waits to receive and reduce [0-3] from rank 1; "
        "rank 3 in round 0 waits to send [0-3] to rank 2",
    ),
    "chunks reduced twice": (
        ("all_reduce", recursive.all_reduce, ALL, repeat_round(0)),
        "rank 0 ends with chunk 0 of 2*r0 + 2*r1 + 2*r2 + 2*r3 in [0], must be chunk 0 of r0 + r1 + r2 + r3",
    ),
    "a receive is missing": (
        ("all_gather", ring.all_gather, [2], drop(2, 1)),
        "deadlock: rank 1 in round 2 waits to send [3] to rank 2",
    ),
    "a send is missing": (
        ("broadcast", tree.broadcast, [2], drop(1, 0)),
        "deadlock: rank 3 in round 1 waits to receive [0-3] from rank 2",
    ),
    "rounds swapped on one rank": (
        ("all_gather", ring.all_gather, [1], swap_rounds(0, 2)),
        "rank 1 in round 0 would send [3] to rank 2, but holds nothing in [3]",
    ),
    "rounds swapped on all ranks": (
        ("reduce_scatter", ring.reduce_scatter, ALL, swap_rounds(0, 2)),
        "rank 0 ends with chunk 0 of r0 + r3 in [0], must be chunk 0 of r0 + r1 + r2 + r3",
    ),
    "receive instead of reduction": (
        ("reduce_scatter", ring.reduce_scatter, [0], put(2, 1, Recv(3, run(0)))),
        "rank 0 ends with chunk 0 of r1 + r2 + r3 in [0], must be chunk 0 of r0 + r1 + r2 + r3",
    ),
    "reduce instead of receive": (
        ("all_gather", ring.all_gather, [3], put(0, 1, RecvReduce(2, run(2)))),
        "rank 3 in round 0 reduces chunk 2 of r2 into nothing in [2]",
    ),
    "reduce of another chunk": (
        ("reduce_scatter", ring.reduce_scatter, [0], put(0, 1, RecvReduce(3, run(1)))),
        "rank 0 in round 0 reduces chunk 2 of r3 into chunk 1 of r0 in [1]",
    ),
    "send of a chunk that is not held": (
        ("all_gather", ring.all_gather, [0], put(0, 0, Send(1, run(2)))),
        "rank 0 in round 0 would send [2] to rank 1, but holds nothing in [2]",
    ),
    "a round dropped on one rank": (
        ("all_reduce", ring.all_reduce, [3], drop_round(5)),
        "deadlock: rank 0 in round 5 waits to receive [1] from rank 3; rank 2 in round 5 waits to send [0] to rank 3",
    ),
    "a chunk written twice in a round": (
        ("broadcast", tree.broadcast, [3], add(1, Recv(2, run(2)))),
        "rank 3 in round 1 writes [2] twice: receive [2] from rank 2",
    ),
    "receive into what is being sent": (
        ("all_gather", ring.all_gather, [1], put(0, 1, Recv(0, run(1)))),
        "rank 1 in round 0 writes [1] while it would send [1] to rank 2",
    ),
    "reduce into what is being copied": (
        ("all_reduce", ring.all_reduce, [1], add(0, Copy(run(3), run(9)))),
        "rank 1 in round 0 writes [3] while it would copy [3] to [9]",
    ),
    "runs of different lengths": (
        ("reduce", tree.reduce, [1], put(0, 0, Send(0, run(0, 2)))),
        "rank 0 in round 0 would receive and reduce [0-3] from rank 1, which sends [0-2]",
    ),
    "the wrong inbox": (
        ("all_to_all", pairwise.all_to_all, [2], put(3, 1, Recv(3, run(5)))),
        "rank 2 ends with chunk 2 of r3 in [5], must be chunk 2 of r1",
    ),
    "an outbox written": (
        ("all_to_all", pairwise.all_to_all, [2], add_round(Copy(run(0), run(1)))),
        "rank 2 ends with chunk 0 of r2 in [1], must be chunk 1 of r2",
    ),
    "two messages between two ranks swapped": (
        ("all_gather", bruck.all_gather, [3], swap_moves(1, 0, 1)),
        "rank 1 ends with chunk 3 of r3 in [0], must be chunk 0 of r0",
    ),
    "messages for two counterparts swapped": (
        ("reduce_scatter", partial(hierarchical.reduce_scatter, groups=PAIRS), [0], swap_moves(0, 0, 2)),
        "rank 1 in round 0 reduces chunk 3 of r0 into chunk 1 of r1 in [1]",
    ),
    "chunks for the own group sent across": (
        ("all_to_all", partial(hierarchical.all_to_all, groups=PAIRS), [0], put(5, 0, Send(2, run(8, 9)))),
        "rank 2 ends with chunk 0 of r0 in [4], must be chunk 2 of r0",
    ),
    "a counterpart left out": (
        ("broadcast", partial(hierarchical.broadcast, groups=PAIRS), [0], drop_round(0)),
        "deadlock: rank 2 in round 0 waits to receive [0-3] from rank 0; rank 3 in round 1 waits",
    ),
    "a round of a barrier dropped": (
        ("barrier", bruck.barrier, ALL, drop_round(0)),
        "barrier on 4 ranks: rank 0 ends without word of ranks [1, 3]",
    ),
}


@pytest.mark.parametrize(("mutation", "message"), MUTANTS.values(), ids=MUTANTS)
def test_the_check_catches(mutation, message):
    collective, algorithm, ranks, edit = mutation
    proof.check(collective, algorithm, 4)
    with pytest.raises(ContractError, match=re.escape(message)):
        proof.check(collective, mutant(algorithm, ranks, edit), 4)


def test_the_check_catches_the_wrong_root():
    with pytest.raises(ContractError, match=re.escape("rank 0 in round 0 would send [0-2] to rank 2")):
        proof.check("broadcast", lambda rank, size, root: tree.broadcast(rank, size), 3, root=1)


@each_algorithm
def test_the_cost_line_is_what_the_schedule_does(row):
    assert "Cost:" in source_function(row).__doc__
    for size in sizes(row):
        totals, (alpha, beta, gamma) = cost(row.schedule, size), COSTS[row.collective, row.name](size)
        if row.name == "double_tree":  # its cost line is an upper bound
            assert totals[0] == alpha
            assert totals[1] <= beta
            assert totals[2] <= gamma
        else:
            assert totals == (alpha, beta, gamma), size


def source_function(row):
    """Return the function that defines a schedule, also if it is a partial application."""
    return getattr(row.schedule, "func", row.schedule)


@each_algorithm
def test_every_algorithm_has_a_picture_that_is_run(row):
    (test,) = doctest.DocTestFinder().find(source_function(row))
    pictures = [e for e in test.examples if "print(render(" in e.source and source_function(row).__name__ in e.source]
    assert "round 0:" in pictures[0].want
    assert doctest.DocTestRunner().run(test).failed == 0


def test_embedded_groups_make_an_all_reduce():
    """A reduce-scatter within nodes, an all-reduce across nodes, and an all-gather within nodes are embedded."""

    def two_levels(rank, size, local_size=3):
        num_nodes, (node, local) = size // local_size, divmod(rank, local_size)
        in_node, across = range(node * local_size, (node + 1) * local_size), range(local, size, local_size)
        parts = even_runs(size, local_size)
        yield from embed(ring.reduce_scatter(local, local_size), in_node, parts)
        yield from embed(recursive.all_reduce(node, num_nodes), across, [run(c) for c in parts[local]])
        yield from embed(ring.all_gather(local, local_size), in_node, parts)

    for size in (3, 6, 9, 12, 15, 24):
        proof.check("all_reduce", two_levels, size)


def test_embedding_places_copies_and_signals():
    moves = (Copy(run(1), run(0)), Send(1, range(0)), RecvReduce(0, run(0, 1)))
    embedded = embed([moves], ranks=[4, 6], runs=[run(2, 3), run(4)])
    assert list(embedded) == [(Copy(run(4), run(2, 3)), Send(6, range(0)), RecvReduce(4, run(2, 4)))]


def test_what_would_move_nothing_is_not_embedded():
    embedded = embed(ring.reduce_scatter(0, 3), ranks=range(3), runs=[run(0), range(1, 1), run(1)])
    assert list(embedded) == [(Send(1, run(1)),), (RecvReduce(2, run(0)),)]


def test_shares_are_as_equal_as_can_be():
    for num_chunks in range(12):
        for parts in range(1, 6):
            lengths = [len(run) for run in even_runs(num_chunks, parts)]
            assert sum(lengths) == num_chunks
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] - lengths[-1] <= 1


def test_moves_in_words():
    assert show(Send(3, run(2))) == "send [2] to rank 3"
    assert show(Recv(3, run(0, 4))) == "receive [0-4] from rank 3"
    assert show(RecvReduce(0, run(1))) == "receive and reduce [1] from rank 0"
    assert show(Copy(run(1), run(5))) == "copy [1] to [5]"
    assert show(Send(1, range(0))) == "send [] to rank 1"


def test_a_picture_shows_reductions_copies_and_empty_rounds():
    rounds = {
        0: [(Send(1, run(0)), Copy(run(1), run(2))), (), (Recv(1, run(0)),)],
        1: [(RecvReduce(0, run(0)),), (), (Send(0, run(0)),)],
    }
    assert render(lambda rank, size: rounds[rank], 2).splitlines() == [
        "round 0:  0->1 [0]+   0: [1]>[2]",
        "round 1:  ",
        "round 2:  1->0 [0]",
    ]
    assert render(ring.all_reduce, 1) == ""


@pytest.mark.parametrize(
    ("collective", "before", "after"),
    [  # for 3 ranks and root 1: chunks, and the ranks that had them before
        ("all_reduce", ["abc", "abc", "abc"], [{"a": "012", "b": "012", "c": "012"}] * 3),
        ("reduce_scatter", ["abc", "abc", "abc"], [{"a": "012"}, {"b": "012"}, {"c": "012"}]),
        ("all_gather", ["a", "b", "c"], [{"a": "0", "b": "1", "c": "2"}] * 3),
        ("broadcast", ["", "abc", ""], [{"a": "1", "b": "1", "c": "1"}] * 3),
        ("reduce", ["abc", "abc", "abc"], [{}, {"a": "012", "b": "012", "c": "012"}, {}]),
        ("gather", ["a", "b", "c"], [{}, {"a": "0", "b": "1", "c": "2"}, {}]),
        ("scatter", ["", "abc", ""], [{"a": "1"}, {"b": "1"}, {"c": "1"}]),
        ("barrier", ["", "", ""], [{}, {}, {}]),
    ],
)
def test_what_a_collective_promises(collective, before, after):
    def vector(chunks):
        counts = {"abc".index(c): sum(1 << proof.BITS * int(rank) for rank in ranks) for c, ranks in chunks.items()}
        return {c: proof.Value(c, count) for c, count in counts.items()}

    spec = COLLECTIVES[collective]
    for rank, chunks in enumerate(before):
        assert proof.before(spec, rank, 3, 1) == vector(dict.fromkeys(chunks, str(rank)))
        assert proof.after(spec, rank, 3, 1) == vector(after[rank])


def test_what_an_all_to_all_promises():
    spec = COLLECTIVES["all_to_all"]
    own = {c: proof.Value(c, 1 << proof.BITS) for c in (0, 1)}
    assert proof.before(spec, 1, 2, 0) == own
    assert proof.after(spec, 1, 2, 0) == own | {2: proof.Value(1, 1), 3: proof.Value(1, 1 << proof.BITS)}


def test_a_picture_needs_as_many_rounds_on_every_rank():
    with pytest.raises(ValueError, match="longer"):
        render(lambda rank, size: [()] * (rank + 1), 2)


def test_names_and_rows():
    assert {row.collective for row in REGISTRY} == set(COLLECTIVES)
    assert algorithms.find("broadcast", "binomial").schedule is tree.broadcast
    with pytest.raises(ValueError, match=r"algorithm 'rign' is unknown: use one of auto, ring, .*, mpi"):
        algorithms.find("all_reduce", "rign")


def test_the_pure_half_imports_neither_mpi_nor_arrays():
    heavy = {"mpi4py", "numpy", "cupy", "torch", "ml_dtypes"}
    modules = ", ".join(["collectives", *(f"collectives.{name}" for name in PURE)])
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_joined_chunks_do_not_hide_that_some_change_their_places():
    """Rank 1 receives the two halves of a vector of rank 0 the wrong way round; they come back as they were."""

    def turned(rank, size):
        halves = [range(size // 2), range(size // 2, size)]
        if rank == 0:
            yield tuple(Send(1, half) for half in halves)
        else:
            yield tuple(Recv(0, half) for half in reversed(halves))

    with pytest.raises(ContractError, match=r"rank 1 ends with chunk 2 of r0 in \[0\], must be chunk 0 of r0"):
        proof.check("broadcast", lambda rank, size, root: list(turned(rank, size)) if rank < 2 else [()], 4, root=0)


def test_a_vector_that_is_parked_elsewhere_is_still_right():
    def parked(rank, size, root):
        there = range(size, 2 * size)
        yield (Send(1, range(size)),) if rank == 0 else (Recv(0, there),)
        yield (Send(0, there),) if rank else (Recv(1, there),)
        yield (Send(1, there),) if rank == 0 else (Recv(0, range(size)),)

    proof.check("broadcast", parked, 2, root=0)


def test_joined_chunks_do_not_hide_messages_of_other_lengths():
    def truncated(rank, size, root):
        yield (Send(1, range(1)),) if rank == 0 else (Recv(0, range(1, 4)),)
        yield (Send(1, range(4)),) if rank == 0 else (Recv(0, range(4)),)

    with pytest.raises(ContractError, match=r"rank 1 in round 0 would receive \[1-3\] from rank 0, which sends \[0\]"):
        proof.check("broadcast", truncated, 2, num_chunks=4, root=0)
