"""The ranges of sizes in which each contestant is the fastest."""

from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

from collectives.bench.report import Row
from collectives.bench.trial import PEERS

Times = dict[str, dict[int, float]]  # by contestant and size


class Crossover(NamedTuple):
    """The sizes from one to another for which a contestant is the fastest."""

    name: str
    begin: float
    end: float


def medians(rows: Sequence[Row]) -> Times:
    """Sort medians by contestant and size: without `auto`, which is one of the others, if these were measured."""
    ours = {row["name"] for row in rows if row["name"] not in ("auto", *PEERS)}
    contestants = [row for row in rows if not (ours and row["name"] == "auto")]
    names = dict.fromkeys(row["name"] for row in contestants)
    return {name: {row["bytes"]: row["median_us"] for row in contestants if row["name"] == name} for name in names}


def crossovers(times: Times) -> list[Crossover]:
    """List the fastest contestant by ranges of sizes; between two measured sizes, lines cross as in a log-log chart.

    >>> crossovers({"tree": {1: 1.0, 4: 2.0, 16: 8.0}, "ring": {1: 2.0, 4: 4.0, 16: 4.0}})
    [Crossover(name='tree', begin=1.0, end=8.0), Crossover(name='ring', begin=8.0, end=16.0)]
    """
    sizes = sorted({size for of_name in times.values() for size in of_name})
    best = [min((of_name[size], name) for name, of_name in times.items() if size in of_name)[1] for size in sizes]
    winners: list[Crossover] = []
    begin = float(min(sizes, default=0))
    for (size, name), (following, other) in pairwise(zip(sizes, best, strict=True)):
        if name != other:
            end = crossing(times[name], times[other], size, following)
            winners.append(Crossover(name, begin, end))
            begin = end
    return [*winners, Crossover(best[-1], begin, float(sizes[-1]))] if sizes else []


def crossing(before: dict[int, float], after: dict[int, float], size: int, following: int) -> float:
    """Compute where two lines cross between two sizes; half-way where one of them lacks a size."""
    if not {size, following} <= before.keys() & after.keys():
        return (size * following) ** 0.5
    first, second = (log(after[at] / before[at]) for at in (size, following))
    return size * (following / size) ** (first / (first - second)) if first > second else float(following)
