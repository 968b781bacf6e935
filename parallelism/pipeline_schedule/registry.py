"""The registry: which pipeline schedules there are, and what fits each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parallelism.pipeline_schedule import basic
from parallelism.pipeline_schedule.actions import Schedule


class Row(NamedTuple):
    """A schedule, and how many stages a rank it is made for."""

    make: Callable[..., Schedule]
    virtual_stages: int = 1
    any_virtual_stages: bool = False  # takes others too, as an argument


REGISTRY = {
    "naive": Row(basic.naive),
    "gpipe": Row(basic.gpipe),
    "1f1b": Row(basic.one_f_one_b),
}


def names() -> list[str]:
    return list(REGISTRY)


def make(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """The schedule of a name; without `virtual_stages`, with as many stages a rank as it is made for.

    Raises: ValueError for what does not fit, with what does.
    """
    if name not in REGISTRY:
        raise ValueError(f"no pipeline schedule is called {name!r}: use {', '.join(names())}")
    row = REGISTRY[name]
    each = row.virtual_stages if virtual_stages is None else virtual_stages
    counts = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches, "virtual_stages": each}
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{what} is {count}: a pipeline has at least 1")
    if row.any_virtual_stages:
        return row.make(num_ranks, num_micro_batches, each)
    if each != row.virtual_stages:
        others = ", ".join(other for other in names() if REGISTRY[other].any_virtual_stages)
        raise ValueError(
            f"schedule {name!r} has {row.virtual_stages} of the stages on each rank, not {each}: "
            f"use virtual_stages={row.virtual_stages}, or one of {others}"
        )
    return row.make(num_ranks, num_micro_batches)
