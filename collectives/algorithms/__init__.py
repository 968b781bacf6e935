"""The registry: which algorithms there are for each collective."""

from collections.abc import Callable
from typing import NamedTuple

from collectives.algorithms import dissemination, pairwise, recursive, ring, tree
from collectives.schedule import Schedule

# Collectives with a root; their algorithms take it as a third argument.
ROOTED = frozenset({"broadcast", "reduce"})


class Algorithm(NamedTuple):
    """A row of the registry."""

    collective: str
    name: str
    schedule: Callable[..., Schedule]


REGISTRY = (
    Algorithm("all_reduce", "ring", ring.all_reduce),
    Algorithm("all_reduce", "recursive_doubling", recursive.all_reduce),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter),
    Algorithm("all_gather", "ring", ring.all_gather),
    Algorithm("all_to_all", "pairwise", pairwise.all_to_all),
    Algorithm("broadcast", "binomial", tree.broadcast),
    Algorithm("reduce", "binomial", tree.reduce),
    Algorithm("barrier", "dissemination", dissemination.barrier),
)


def names(collective: str) -> list[str]:
    """The names that `algorithm=` takes for a collective, besides "auto" and "mpi".

    >>> names("all_reduce")
    ['ring', 'recursive_doubling']
    """
    return [row.name for row in REGISTRY if row.collective == collective]


def find(collective: str, name: str) -> Algorithm:
    """The registry's row of that name.

    Raises: ValueError where there is none, with the names there are.
    """
    for row in REGISTRY:
        if (row.collective, row.name) == (collective, name):
            return row
    known = ", ".join(["auto", *names(collective), "mpi"])
    raise ValueError(f"{collective} has no algorithm {name!r}; it has {known}")
