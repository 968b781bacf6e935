"""Rounding of sums of 16-bit floats, and of float32 sent as bfloat16."""

from functools import partial

import pytest

from collectives import algorithms
from collectives.algorithms import hierarchical
from collectives.schedule import proof


class Term(tuple):
    """A chunk's expression: its addends, and the places where it was rounded."""

    def __add__(self, other):
        return Term((self, other))

    def __and__(self, counts):
        return 0  # it counts no rank too often

    def rounded(self):
        return self if self[0] == "rounded" else Term(("rounded", self))


class RoundingWorld(proof.World):
    """A symbolic run in which ranks round the chunks that they send."""

    def deliver(self, send, receive):
        self.vectors[send.rank] |= {c: rounded(self.vectors[send.rank][c]) for c in send.move.run}
        super().deliver(send, receive)


def rounded(value):
    return value._replace(ranks=value.ranks.rounded())


def results(algorithm, size):
    """Return the final vector of each rank."""
    before = [{c: proof.Value(c, Term((rank,))) for c in range(size)} for rank in range(size)]
    world = RoundingWorld("", [list(algorithm(rank, size)) for rank in range(size)], before, before, in_order=False)
    world.run()
    return world.vectors


GROUPS = ((0, 1, 2), (3, 4, 5, 6, 7), (8, 9, 10, 11))
ALL_REDUCES = {r.name: r.schedule for r in algorithms.rows("all_reduce") if not r.access}
ALL_REDUCES |= {"uneven groups": partial(hierarchical.all_reduce, groups=GROUPS)}


@pytest.mark.parametrize("algorithm", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_all_ranks_round_alike(algorithm):
    for size in [12] if isinstance(algorithm, partial) else range(1, 18):
        first, *others = [{c: rounded(v) for c, v in vector.items()} for vector in results(algorithm, size)]
        assert all(vector == first for vector in others), size


def test_without_the_last_rounding_they_would_not():
    first, *others = results(ALL_REDUCES["recursive_doubling"], 3)
    assert any(vector != first for vector in others)
