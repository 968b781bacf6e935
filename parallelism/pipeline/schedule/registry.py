"""Registry of pipeline schedules, with the numbers of stages per rank that each supports."""

from collections.abc import Callable
from typing import NamedTuple

from parallelism.pipeline.schedule import basic, zero_bubble
from parallelism.pipeline.schedule.actions import Schedule


class RegisteredSchedule(NamedTuple):
    """A schedule, and the stages per rank that it supports: `virtual_stages`, or also `more`."""

    schedule: Callable[..., Schedule]
    virtual_stages: int = 1
    more: bool = False

    def fits(self, virtual_stages: int) -> bool:
        return virtual_stages == self.virtual_stages or (self.more and virtual_stages > self.virtual_stages)


REGISTRY = {
    "naive": RegisteredSchedule(basic.naive),
    "gpipe": RegisteredSchedule(basic.gpipe),
    "1f1b": RegisteredSchedule(basic.one_f_one_b),
    "interleaved": RegisteredSchedule(basic.interleaved, 2, more=True),
    "breadth_first": RegisteredSchedule(basic.breadth_first, 2, more=True),
    "zb_h1": RegisteredSchedule(zero_bubble.zb_h1),
    "zb_v": RegisteredSchedule(zero_bubble.zb_v, 2),
}


def names() -> list[str]:
    return list(REGISTRY)


def make_schedule(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """Return the schedule of a name; `virtual_stages` defaults to the fewest stages per rank that it supports.

    Raises: ValueError for unsupported values, with the supported ones.
    """
    if name not in REGISTRY:
        raise ValueError(f"no pipeline schedule is called {name!r}: use {', '.join(names())}")
    row = REGISTRY[name]
    each = row.virtual_stages if virtual_stages is None else virtual_stages
    counts = {"ranks": num_ranks, "micro-batches": num_micro_batches, "stages a rank": each}
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"a pipeline of {count} {what}: use 1 or more")
    if not row.fits(each):
        takes = f"{row.virtual_stages} or more" if row.more else f"{row.virtual_stages}"
        others = ", ".join(other for other in names() if REGISTRY[other].fits(each))
        raise ValueError(f"schedule {name!r} takes {takes} stages a rank, not {each}: for {each}, use {others}")
    return row.schedule(num_ranks, num_micro_batches, *([each] if row.more else []))
