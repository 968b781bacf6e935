"""Scaling of a job: its best layout on 1, 2, 4, ... ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from collectives.schedule.fabrics import in_nodes
from parallelism.planner.layout import TrainingJob
from parallelism.planner.memory import in_bytes
from parallelism.planner.place import Machine
from parallelism.planner.report import HEADING, row, utilization
from parallelism.planner.search import PlannedLayout, SearchResult, search


class ScalePoint(NamedTuple):
    """A job on nodes with so many ranks in all: its best layout and MFU, or `why` there is no layout."""

    ranks: int
    planned: PlannedLayout | None
    mfu: float = 0.0
    why: str = ""


def numbers_of_ranks(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`.

    >>> numbers_of_ranks(24)
    [1, 2, 4, 8, 16, 24]
    """
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def scale_point(job: TrainingJob, machine: Machine, fixed: Mapping[str, Any], ranks: int) -> ScalePoint:
    """Plan for another number of ranks, on nodes like the machine's first one."""
    nodes = in_nodes(ranks, len(machine.nodes[0]))
    own = machine._replace(nodes=nodes)
    result = search(job, own, fixed)
    if not result.best:
        return ScalePoint(ranks, None, why=reason(result))
    planned = result.best[0]
    return ScalePoint(ranks, planned, utilization(job, own, planned.time.total))


def reason(result: SearchResult) -> str:
    """Describe in a few words why there is no layout."""
    if result.nearest:
        return f"none of {result.too_large} layouts fits: the nearest takes {in_bytes(result.nearest[0][1].total)}"
    why = result.undivided.most_common(1)
    return why[0][0] if why else "no layout has the axes that are set"


def scaling_report(points: list[ScalePoint], tokens: int) -> Iterator[str]:
    """Yield a line for each number of ranks; a step has so many `tokens`."""
    yield ""
    yield f"{'ranks':>7} {HEADING}"
    for ranks, planned, mfu, why in points:
        yield f"{ranks:>7} {row(planned, tokens, mfu) if planned else why}"
