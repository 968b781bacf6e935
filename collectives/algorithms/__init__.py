"""Registry of the algorithms of each collective.  Each family's file has its own rows."""

from collectives.algorithms import bruck, chain, direct, hierarchical, leaders, pairwise, prefix, recursive, ring, tree
from collectives.algorithms.algorithm import Access, Algorithm, Precondition
from collectives.schedule.spec import spec_of

__all__ = ["REGISTRY", "Access", "Algorithm", "Precondition", "check", "find", "names", "rows"]

FAMILIES = (
    *(ring, recursive, pairwise, bruck, tree, chain, prefix, hierarchical),
    *(direct, leaders),  # which access other ranks' memory
)
REGISTRY: tuple[Algorithm, ...] = tuple(row for family in FAMILIES for row in family.ALGORITHMS)


def names(collective: str, size: int | None = None, equal: bool = True) -> list[str]:
    """Return the names that `algorithm=` takes, besides "auto" and "mpi": of all sizes, or those for `size` ranks.

    >>> names("broadcast")
    ['binomial', 'scatter_all_gather', 'chain', 'hierarchical', 'hierarchical_direct', 'direct', 'staged']
    >>> names("all_to_all", size=3, equal=False)
    ['pairwise', 'direct', 'staged']
    """
    return [row.name for row in rows(collective, size, equal)]


def rows(collective: str, size: int | None = None, equal: bool = True) -> list[Algorithm]:
    """Return the registry's rows of a collective: all, or those for `size` ranks.

    Raises: ValueError for an unknown collective, with the valid ones.
    """
    spec_of(collective)
    every = [row for row in REGISTRY if row.collective == collective]
    return [row for row in every if size is None or row.precondition.holds(size, equal)]


def find(collective: str, name: str) -> Algorithm:
    """Return the registry's row of that name.

    Raises: ValueError for an unknown name, with the valid ones.
    """
    for row in REGISTRY:
        if (row.collective, row.name) == (collective, name):
            return row
    choices = ", ".join(["auto", *names(collective), "mpi"])
    raise ValueError(f"algorithm {name!r} is unknown: use one of {choices}")


def check(row: Algorithm, size: int, equal: bool = True) -> None:
    """Refuse a call that an algorithm cannot do.

    Raises: ValueError with the names of those that can.
    """
    if not row.precondition.holds(size, equal):
        others = ", ".join(["auto", *names(row.collective, size, equal), "mpi"])
        with_chunks = "" if equal else " with uneven chunks"
        raise ValueError(
            f"algorithm {row.name!r} needs {row.precondition.words}: on {size} ranks{with_chunks}, use {others}"
        )
