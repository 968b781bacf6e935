from collections import Counter
from functools import partial

import pytest

from collectives import algorithms
from collectives.algorithms import (
    bruck,
    hierarchical,
    pairwise,
    recursive,
    ring,
    tree,
)
from collectives.algorithms.groups import Topology, innermost, whole
from collectives.schedule import proof
from collectives.schedule.cost import Link, Network, count, predict, tally
from collectives.schedule.moves import MESSAGES, Barrier, Get, GetReduce, Put, Recv, RecvReduce, Send
from collectives.schedule.spec import COLLECTIVES
from mpi_tests.helpers.algorithm_costs import LARGEST, ceil_log2, cost, floor_log2, is_power, nodes_of

ROWS = {row.collective: row for row in algorithms.REGISTRY if row.name == "hierarchical"}
EVERY = [row for row in algorithms.REGISTRY if row.over_nodes]
ALL_ROOTS_UP_TO = 8

each_collective = pytest.mark.parametrize("collective", ROWS)
each_row = pytest.mark.parametrize("row", EVERY, ids=lambda row: f"{row.collective}-{row.name}")


def by_levels(size, *levels):
    return Topology.from_ids([0] * size, levels).groups


def holds(collective, algorithm, size):
    """Check the contract, with every root of a few ranks, the rounds and the messages in them."""
    roots = range(size) if size <= ALL_ROOTS_UP_TO else (0, size - 1)
    for root in [{"root": root} for root in roots] if COLLECTIVES[collective].rooted else [{}]:
        schedules = [list(algorithm(rank, size, **root)) for rank in range(size)]
        proof.check(collective, lambda rank, size, schedules=schedules, **root: schedules[rank], size, **root)
        assert len({len(rounds) for rounds in schedules}) == 1
        assert most_messages(schedules) <= MESSAGES


def most_messages(schedules):
    """From one rank to another in a round."""
    sends = [Counter(m.to for m in moves if isinstance(m, Send)) for rounds in schedules for moves in rounds]
    return max((max(to.values()) for to in sends if to), default=0)


GROUPS = {
    "one rank": nodes_of(1),
    "one node": nodes_of(5),
    "one node of one node": (nodes_of(5),),
    "a rank a node": nodes_of(1, 1, 1),
    "even": nodes_of(4, 4, 4),
    "interleaved": ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    "uneven": nodes_of(3, 5, 4, 4),
    "uneven and shuffled": ((7, 2), (0, 5, 9, 1), (8,), (3, 6, 4)),
    "a large one among small ones": nodes_of(1, 2, 11, 1),
    "more nodes than messages in a round": nodes_of(*[2] * 10),
    "three levels": (nodes_of(2, 3), ((5, 6), (7, 8), (9,)), ((10, 11),)),
    "three levels, shuffled": (((11, 3), (5, 0)), ((9, 2), (1, 7)), ((4, 10), (8, 6))),
    "as deep as can be": (0, (1, (2, (3, (4, 5))))),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@each_row
def test_any_groups(row, groups):
    ranks = hierarchical.order(groups)
    holds(row.collective, partial(row.schedule, groups=groups), len(ranks))


@pytest.mark.parametrize("levels", [(4,), (8, 4), (8, 4, 2), (6, 4, 1)], ids=str)
@each_row
def test_levels_on_any_number_of_ranks(row, levels):
    for size in (*range(1, 20), 23, 32, 33, 64) if LARGEST >= 64 else (*range(1, 11), 16, 17, 24):
        holds(row.collective, partial(row.schedule, groups=by_levels(size, *levels)), size)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("row", [row for row in EVERY if row.reach], ids=lambda row: row.collective)
def test_ranks_reach_into_their_innermost_group_only_and_send_beyond_it_only(row, groups):
    size = len(hierarchical.order(groups))
    mine = {rank: set(ranks) for ranks in innermost(whole(groups, size)) for rank in ranks}
    for rank in range(size):
        own = mine.get(rank, {rank})
        for moves in row.rounds(rank, size, 0, groups):
            for move in moves:
                match move:
                    case Barrier(ranks) | GetReduce(ranks, _, _):
                        assert set(ranks) == own
                    case Get(peer, _, _) | Put(peer, _, _):
                        assert peer in own
                    case Send(peer, _) | Recv(peer, _) | RecvReduce(peer, _):
                        assert peer not in own


rec, two = recursive, (recursive.reduce_scatter, ring.reduce_scatter)
COMPOSITIONS = {
    "all_reduce, recursive": (
        hierarchical.all_reduce,
        {"scatter": [rec.reduce_scatter], "across": rec.all_reduce, "gather": [rec.all_gather]},
    ),
    "all_reduce, others": (
        hierarchical.all_reduce,
        {"scatter": [pairwise.reduce_scatter], "across": tree.double_all_reduce, "gather": [bruck.all_gather]},
    ),
    "reduce_scatter, recursive": (hierarchical.reduce_scatter, {"algorithms": [rec.reduce_scatter]}),
    "reduce_scatter, one for each level": (hierarchical.reduce_scatter, {"algorithms": two}),
    "all_gather, recursive": (hierarchical.all_gather, {"algorithms": [rec.all_gather]}),
    "all_gather, bruck": (hierarchical.all_gather, {"algorithms": [ring.all_gather, bruck.all_gather]}),
    "broadcast, scattered": (hierarchical.broadcast, {"algorithms": [tree.scatter_all_gather, tree.broadcast]}),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("algorithm", "composed"), COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_of_any_algorithms(algorithm, composed, groups):
    holds(algorithm.__name__, partial(algorithm, groups=groups, **composed), len(hierarchical.order(groups)))


@pytest.mark.parametrize("groups", [by_levels(12, 4), by_levels(24, 12, 4), GROUPS["interleaved"]], ids=str)
def test_an_all_to_all_of_brucks(groups):
    algorithm = partial(hierarchical.all_to_all, groups=groups, algorithms=[bruck.all_to_all])
    holds("all_to_all", algorithm, len(hierarchical.order(groups)))


# Factors of alpha, of n/p beta and of n/p gamma of k groups of l ranks.
COSTS = {
    "all_reduce": lambda k, p, w: (2 * (w + k - 2), 2 * (p - 1), p - 1),
    "reduce_scatter": lambda k, p, w: (-(-k // 8) * (w - 1) + k - 1, p - 1, p - 1),
    "all_gather": lambda k, p, w: (-(-k // 8) * (w - 1) + k - 1, p - 1, 0),
    "all_to_all": lambda k, p, w: (w + k - 2, p * (w - 1) // w + p * (k - 1) // k, 0),
    "broadcast": lambda k, p, w: (ceil_log2(k) + ceil_log2(w), p * (ceil_log2(k) + ceil_log2(w)), 0),
}


@pytest.mark.parametrize(("num_groups", "width"), [(2, 2), (3, 3), (2, 8), (5, 2), (9, 3), (1, 6), (6, 1)])
@each_collective
def test_the_cost_line_is_what_the_schedule_does(collective, num_groups, width):
    algorithm = partial(ROWS[collective].schedule, groups=nodes_of(*[width] * num_groups))
    size = num_groups * width
    assert cost(algorithm, size) == COSTS[collective](num_groups, size, width)


# Factors of meetings, of alpha, of n/p beta, copied and sent, and of n/p gamma, of k groups of w ranks.
DIRECT_COSTS = {
    ("all_reduce", "leaders"): lambda k, p, w: (
        2,
        floor_log2(k) + 2 * (not is_power(k)),
        p * (w - 1),
        p * (floor_log2(k) + 2 * (not is_power(k))),
        p * (w + floor_log2(k) + (not is_power(k))),
    ),
    ("all_to_all", "leaders"): lambda k, p, w: (
        2,
        floor_log2(k) if is_power(k) else 1,
        2 * w * p,
        w * w * (k * floor_log2(k) // 2 if is_power(k) else k - 1),
        0,
    ),
    ("all_reduce", "hierarchical_direct"): lambda k, p, w: (4, 2 * (k - 1), p * (w - 1) // w, 2 * (k - 1), p + k - 1),
    ("reduce_scatter", "hierarchical_direct"): lambda k, p, w: (2, k - 1, 0, k - 1, p + k - 1),
    ("all_gather", "hierarchical_direct"): lambda k, p, w: (2, k - 1, p * (w - 1) // w, k - 1, 0),
    ("all_to_all", "hierarchical_direct"): lambda k, p, w: (2, k - 1, 2 * p + w, p * (k - 1) // k, 0),
    ("broadcast", "hierarchical_direct"): lambda k, p, w: (2, ceil_log2(k), p * (w - 1) // w, p * ceil_log2(k), 0),
}


@pytest.mark.parametrize(("num_groups", "width"), [(2, 2), (3, 3), (2, 8), (4, 2), (5, 2), (9, 3)])
@pytest.mark.parametrize(("collective", "name"), DIRECT_COSTS)
def test_the_cost_line_of_what_is_direct_inside(collective, name, num_groups, width):
    row, groups = algorithms.find(collective, name), nodes_of(*[width] * num_groups)
    size = num_groups * width
    counted = count(tally({rank: row.rounds(rank, size, 0, groups) for rank in range(size)}, groups))
    wanted = DIRECT_COSTS[collective, name](num_groups, size, width)
    assert (counted.meets, counted.messages, counted.copied, counted.sent, counted.folded) == wanted


@each_collective
def test_levels_are_priced_as_they_run(collective):
    """On nodes of two, where only what leaves a node takes time: a second for each round in which something does."""
    row, nodes = ROWS[collective], nodes_of(*[2] * 8)
    network = Network(within=Link(0, 0), between=Link(1, 0), gamma_s_per_byte=0, copy_s_per_byte=0)
    for levels in ((2,), (4, 2), (8, 4, 2), (4,)):
        groups = by_levels(16, *levels)
        schedules = [row.rounds(rank, 16, 0, groups) for rank in range(16)]
        leaving = {
            number
            for rank, rounds in enumerate(schedules)
            for number, moves in enumerate(rounds)
            if any(isinstance(m, Send) and m.to // 2 != rank // 2 for m in moves)
        }
        assert predict(row, 1 << 20, 16, nodes, network=network, groups=groups) == len(leaving)


def test_three_levels_cost_the_sum_of_all_lengths():
    rounds, sent, folded = cost(partial(hierarchical.all_reduce, groups=by_levels(24, 12, 4)), 24)
    assert (rounds, sent, folded) == (2 * (1 + 2 + 3), 2 * 23, 23)


@each_collective
def test_a_rank_talks_to_neighbours_and_counterparts_only(collective):
    """Two racks of three nodes of four: to others of the node, its place in the other nodes, and in the other rack."""
    for rank in range(24):
        rack, node, local = rank // 12, rank // 4 % 3, rank % 4
        known = {12 * rack + 4 * node + other for other in range(4)}
        known |= {12 * rack + 4 * other + local for other in range(3)} | {12 * (1 - rack) + rank % 12}
        rounds = list(ROWS[collective].schedule(rank, 24, groups=by_levels(24, 12, 4)))
        assert {m.to for moves in rounds for m in moves if isinstance(m, Send)} <= known


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_hierarchy_of_rings_has_two_neighbours_a_level(collective):
    for rank in range(24):
        rounds = ROWS[collective].schedule(rank, 24, groups=by_levels(24, 12, 4))
        assert len({m.to for moves in rounds for m in moves if isinstance(m, Send)}) == 3  # to the right on each


def test_what_crosses_is_one_message_for_a_pair_of_counterparts():
    algorithm = partial(hierarchical.all_to_all, groups=by_levels(32, 8))
    for rank in range(32):
        across = [m for moves in algorithm(rank, 32) for m in moves if isinstance(m, Send) and m.to // 8 != rank // 8]
        assert sorted(m.to for m in across) == [r for r in range(rank % 8, 32, 8) if r != rank]
        assert {len(m.run) for m in across} == {8}


def test_each_rank_is_in_one_group():
    with pytest.raises(AssertionError, match="are not ranks 0 to 3, each once"):
        list(hierarchical.all_reduce(0, 4, groups=((0, 1), (1, 2))))
