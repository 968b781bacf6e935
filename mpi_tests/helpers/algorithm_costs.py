"""The cost of each algorithm, in rounds and chunks, as stated by its source."""

import os
from itertools import accumulate
from itertools import pairwise as neighbours
from typing import NamedTuple

import pytest

from collectives.algorithms import (
    REGISTRY,
)
from collectives.schedule.cost import tally as tally_works
from collectives.schedule.cost import works

LARGEST = int(os.environ.get("LARGEST", "17"))  # 64 in `make proof`


each_algorithm = pytest.mark.parametrize("row", REGISTRY, ids=lambda row: f"{row.collective}-{row.name}")


def sizes(row, among=range(1, LARGEST + 1)):
    return [size for size in among if row.precondition.holds(size, True)]


def floor_log2(p):
    return p.bit_length() - 1


def ceil_log2(p):
    return (p - 1).bit_length()


def is_power(p):
    return p & (p - 1) == 0


def halves(p):
    """Return the h of the cost lines: p-1 if p is a power of two."""
    extras = p - (1 << floor_log2(p))
    return sum(m + min(m, extras) for m in (1 << k for k in range(floor_log2(p))))


def double_tree_rounds(p):
    return 2 * (floor_log2(p - 1) + (p + 1) // 2) if p > 1 else 0


# (collective, name): p -> the cost line's factors of alpha, of n/p beta and of n/p gamma; direct algorithms count
# barriers in place of rounds and copies in place of messages
COSTS = {
    ("all_reduce", "ring"): lambda p: (2 * (p - 1), 2 * (p - 1), p - 1),
    ("all_reduce", "multi_ring"): lambda p: (2 * (p - 1), 2 * (p - 1), p - 1),
    ("all_reduce", "recursive_doubling"): lambda p: (
        floor_log2(p) + 2 * (not is_power(p)),
        p * (floor_log2(p) + 2 * (not is_power(p))),
        p * (floor_log2(p) + (not is_power(p))),
    ),
    ("all_reduce", "rabenseifner"): lambda p: (
        2 * floor_log2(p) + 2 * (not is_power(p)),
        2 * halves(p) + 2 * p * (not is_power(p)),
        halves(p) + p * (not is_power(p)),
    ),
    ("all_reduce", "binomial"): lambda p: (2 * ceil_log2(p), 2 * p * ceil_log2(p), p * ceil_log2(p)),
    ("all_reduce", "double_tree"): lambda p: (
        double_tree_rounds(p),
        2 * double_tree_rounds(p),
        double_tree_rounds(p),
    ),
    ("all_reduce", "hierarchical"): lambda p: (2 * (p - 1), 2 * (p - 1), p - 1),  # one group, here and below
    ("reduce_scatter", "hierarchical"): lambda p: (p - 1, p - 1, p - 1),
    ("all_gather", "hierarchical"): lambda p: (p - 1, p - 1, 0),
    ("all_to_all", "hierarchical"): lambda p: (p - 1, p - 1, 0),
    ("broadcast", "hierarchical"): lambda p: (ceil_log2(p), p * ceil_log2(p), 0),
    ("all_reduce", "chain"): lambda p: (3 * (p - 1), 4 * p - 5 if p > 1 else 0, 2 * (p - 1)),
    ("reduce_scatter", "ring"): lambda p: (p - 1, p - 1, p - 1),
    ("reduce_scatter", "recursive_halving"): lambda p: (
        floor_log2(p) + 2 * (not is_power(p)),
        halves(p) + (p + 1) * (not is_power(p)),
        halves(p) + p * (not is_power(p)),
    ),
    ("reduce_scatter", "pairwise"): lambda p: (p - 1, p - 1, p - 1),
    ("reduce_scatter", "chain"): lambda p: (2 * (p - 1), 2 * (p - 1), 2 * (p - 1)),
    ("all_gather", "ring"): lambda p: (p - 1, p - 1, 0),
    ("all_gather", "recursive_doubling"): lambda p: (
        floor_log2(p) + 2 * (not is_power(p)),
        halves(p) + (p + 1) * (not is_power(p)),
        0,
    ),
    ("all_gather", "bruck"): lambda p: (ceil_log2(p), p - 1, 0),
    ("all_gather", "neighbor"): lambda p: (p // 2, p - 1, 0),
    ("all_to_all", "pairwise"): lambda p: (p - 1, p - 1, 0),
    ("all_to_all", "bruck"): lambda p: (ceil_log2(p), sum(j.bit_count() for j in range(p)), 0),
    ("broadcast", "binomial"): lambda p: (ceil_log2(p), p * ceil_log2(p), 0),
    ("broadcast", "scatter_all_gather"): lambda p: (ceil_log2(p) + p - 1, 2 * (p - 1), 0),
    ("broadcast", "chain"): lambda p: (2 * (p - 1), 2 * (p - 1), 0),
    ("reduce", "binomial"): lambda p: (ceil_log2(p), p * ceil_log2(p), p * ceil_log2(p)),
    ("reduce", "chain"): lambda p: (2 * p - 1, 2 * p - 1, 2 * (p - 1)) if p > 1 else (0, 0, 0),
    ("scan", "linear"): lambda p: (2 * (p - 1), 2 * (p - 1), 2 * (p - 1)),
    ("scan", "recursive_doubling"): lambda p: (ceil_log2(p), p * ceil_log2(p), p * ceil_log2(p)),
    ("scan", "staged"): lambda p: (1, p, p * p),
    ("exscan", "linear"): lambda p: (2 * p - 3, 4 * p - 6, 3 * (p - 2)) if p > 1 else (0, 0, 0),
    ("exscan", "recursive_doubling"): lambda p: (
        (1 + ceil_log2(p - 1), p + p * ceil_log2(p - 1), p * ceil_log2(p - 1)) if p > 1 else (0, 0, 0)
    ),
    ("exscan", "staged"): lambda p: (1, p, p * (p - 1)),
    ("gather", "binomial"): lambda p: (ceil_log2(p), p - 1, 0),
    ("scatter", "binomial"): lambda p: (ceil_log2(p), p - 1, 0),
    ("barrier", "dissemination"): lambda p: (ceil_log2(p), 0, 0),
    ("all_reduce", "one_shot"): lambda p: (1, p, p * p),
    ("all_reduce", "two_shot"): lambda p: (3, p - 1, p),
    ("all_reduce", "staged_two_shot"): lambda p: (2, 2 * p, p),
    ("all_reduce", "two_shot_put"): lambda p: (2, p - 1, p),
    ("reduce_scatter", "direct"): lambda p: (2, 0, p),
    ("reduce_scatter", "staged"): lambda p: (1, p, p),
    ("all_gather", "direct"): lambda p: (2, p - 1, 0),
    ("all_gather", "staged"): lambda p: (1, p, 0),
    ("all_to_all", "direct"): lambda p: (2, p, 0),
    ("all_to_all", "staged"): lambda p: (1, 2 * p, 0),
    ("broadcast", "direct"): lambda p: (2, p - 1, 0),
    ("broadcast", "staged"): lambda p: (1, 2 * p if p > 1 else 1, 0),
    ("reduce", "direct"): lambda p: (2, p, p),
    ("gather", "direct"): lambda p: (2, p - 1, 0),
    ("scatter", "direct"): lambda p: (2, int(p > 1), 0),
    ("barrier", "direct"): lambda p: (1, 0, 0),
    ("all_reduce", "hierarchical_direct"): lambda p: (4, p - 1, p),  # one group, here and below
    ("reduce_scatter", "hierarchical_direct"): lambda p: (2, 0, p),
    ("all_gather", "hierarchical_direct"): lambda p: (2, p - 1, 0),
    ("all_to_all", "hierarchical_direct"): lambda p: (2, p, 0),
    ("broadcast", "hierarchical_direct"): lambda p: (2, p - 1, 0),
    ("all_reduce", "leaders"): lambda p: (2, p * (p - 1), p * p) if p > 1 else (0, 0, 0),
    ("reduce_scatter", "leaders"): lambda p: (2, p - 1, p * p) if p > 1 else (0, 0, 0),
    ("all_gather", "leaders"): lambda p: (2, (p - 1) * (p + 1), 0) if p > 1 else (0, 0, 0),
    ("all_to_all", "leaders"): lambda p: (2, 2 * p * p, 0) if p > 1 else (0, 0, 0),
}


class Count(NamedTuple):
    """Rounds with messages; chunks that the busiest rank of each round sends, reduces and copies; barriers."""

    messages: int
    sent: int
    reduced: int
    copied: int
    barriers: int


def tally(schedules, nodes):
    """Tally the rounds of some ranks by the cost model."""
    return tally_works({rank: works(rounds, rank, nodes) for rank, rounds in schedules.items()}, nodes)


def count(rounds):
    """Count the quantities of an algorithm's cost line."""

    def busiest(chunks):
        return sum(times * int(max(chunks(load.work) for load in loads)) for loads, times in rounds)

    return Count(
        messages=busiest(lambda w: any(way.peers for way in (w.near_out, w.far_out))),
        sent=busiest(lambda w: w.near_out.chunks + w.far_out.chunks),
        reduced=busiest(lambda w: w.reduced),
        copied=busiest(lambda w: w.copied),
        barriers=busiest(lambda w: w.barriers),
    )


def cost(algorithm, size):
    """Return rounds with messages, or barriers, and the chunks that each round's busiest rank moves and reduces."""
    schedules = {rank: list(algorithm(rank, size)) for rank in range(size)}
    counts = count(tally(schedules, nodes_of(size)))
    if counts.barriers:
        return counts.barriers, counts.copied, counts.reduced
    return counts.messages, counts.sent, counts.reduced


def nodes_of(*lengths):
    """Return nodes of consecutive ranks."""
    ends = list(accumulate(lengths, initial=0))
    return tuple(tuple(range(a, b)) for a, b in neighbours(ends))
