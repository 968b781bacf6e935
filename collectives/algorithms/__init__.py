"""Registry of the algorithms of each collective.  Each family's file has its own rows; a program registers others."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collectives.algorithms import (
    bruck,
    chain,
    direct,
    hierarchical,
    leaders,
    multi_ring,
    pairwise,
    prefix,
    recursive,
    ring,
    tree,
)
from collectives.algorithms.algorithm import NOTHING, Access, Algorithm, Precondition
from collectives.algorithms.own import name_of, named, own_row
from collectives.schedule.spec import spec_of

__all__ = ["REGISTRY", "VARIANTS", "Access", "Algorithm", "Precondition"]
__all__ += ["check", "find", "name_of", "names", "register", "rows", "variants_of"]

FAMILIES = (
    *(ring, recursive, pairwise, bruck, tree, chain, prefix, hierarchical, multi_ring),
    *(direct, leaders),  # which access other ranks' memory
)
REGISTRY: tuple[Algorithm, ...] = tuple(row for family in FAMILIES for row in family.ALGORITHMS)
REGISTERED: list[Algorithm] = []  # by the program
VARIANTS: tuple[Algorithm, ...] = hierarchical.VARIANTS  # of rows, whose names are theirs up to the first slash


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
    every = [row for row in (*REGISTRY, *REGISTERED) if row.collective == collective]
    return [row for row in every if size is None or row.precondition.holds(size, equal)]


def find(collective: str, name: Any) -> Algorithm:
    """Return the registry's row of that name, or the variant of one, or the row of a function, or `module:function`.

    >>> find("all_reduce", "double_tree/4").cut
    4

    Raises: ValueError for an unknown name, with the valid ones.
    """
    if not isinstance(name, str):
        return row_of_function(collective, name)
    for row in (*REGISTRY, *VARIANTS, *REGISTERED):
        if (row.collective, row.name) == (collective, name):
            return row
    if match := re.fullmatch(r"(\w+)/.*@([1-9]\d{0,8})/\w+", name, re.ASCII):
        composed = hierarchical.three_levels(find(collective, match[1]), int(match[2]))
        if same := [row for row in composed if row.name == name]:
            return same[0]
    base, _, cut = name.rpartition("/")
    if base and cut.isdecimal():
        return find(collective, base).cut_into(int(cut))
    if ":" in name:
        return row_of_function(collective, named(name))._replace(name=name)
    raise unknown(collective, name)


def row_of_function(collective: str, function: Any) -> Algorithm:
    if not callable(function) or getattr(function, "__hash__", None) is None:
        raise unknown(collective, function)
    same = (
        row
        for row in REGISTERED
        if row.collective == collective and getattr(row.schedule, "function", None) is function
    )
    return next(same, None) or own_row(collective, function)


def unknown(collective: str, name: Any) -> ValueError:
    choices = ", ".join(["auto", *names(collective), "mpi"])
    return ValueError(f"algorithm {name!r} is unknown: use one of {choices}, or a function that yields rounds")


F = TypeVar("F", bound=Callable[..., Any])


def register(
    collective: str, holds: Callable[[int], bool] | None = None, words: str = "other numbers of ranks"
) -> Callable[[F], F]:
    """Make a decorator that lets `algorithm="auto"` consider a schedule of the program's own, on all ranks alike.

    `holds(size)` tells on how many ranks it works; `words` complete "it needs ..." where it does not.

    Raises: ValueError for an unknown collective, and a function that cannot be called as a schedule.
    """
    spec_of(collective)

    def condition(size: int, equal: bool) -> bool:
        try:
            return holds is None or bool(holds(size))
        except Exception as error:  # whatever the program's function raises
            raise ValueError(f"the condition of a registered {collective}: {type(error).__name__}: {error}") from error

    precondition = NOTHING if holds is None else Precondition(condition, words)

    def decorator(function: F) -> F:
        row = own_row(collective, function, precondition)
        REGISTERED[:] = [*(each for each in REGISTERED if each[:2] != row[:2]), row]
        return function

    return decorator


def variants_of(row: Algorithm, num_nodes: Sequence[int] = ()) -> tuple[Algorithm, ...]:
    """Return the variants of a row: itself, or those that compose other algorithms.

    `num_nodes` are those of the groups of nodes behind one switch, which compose one algorithm more.

    >>> [row.name for row in variants_of(find("all_reduce", "hierarchical_direct"))][:2]
    ['hierarchical_direct/ring', 'hierarchical_direct/recursive_doubling']
    >>> variants_of(find("all_reduce", "hierarchical_direct"), [16])[-1].name
    'hierarchical_direct/recursive@16/rabenseifner'
    """
    two = [each for each in VARIANTS if each.collective == row.collective and each.name.startswith(f"{row.name}/")]
    three = [each for number in num_nodes if two for each in hierarchical.three_levels(row, number)]
    return (*two, *three) or (row,)


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
