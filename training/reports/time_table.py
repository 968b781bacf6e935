"""Table of some steps' time by kind of work, for the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from training.reports.profile import ALL_RANKS, AXES, BUBBLE, KINDS, ProfiledStep
from training.reports.rank_table import Row, rank_table

NAMES = {
    **{kind: kind for kind in KINDS},
    **{axis: f"{axis}, exposed" for axis in AXES},
    ALL_RANKS: "all ranks, exposed",
    BUBBLE: "pipeline bubble",
}


def time_table(steps: Sequence[ProfiledStep]) -> list[str]:
    """Return the lines of a table of the ranks' mean milliseconds of each kind; none for no steps.

    Kinds without any time are omitted; the others add up to the step.
    """
    if not steps:
        return []
    ranks = sorted({step.rank for step in steps})
    by_rank = [[step for step in steps if step.rank == rank] for rank in ranks]
    rows = [Row(NAMES[kind], [mean_ms(step.seconds[kind] for step in own) for own in by_rank]) for kind in KINDS]
    whole = Row("step", [mean_ms(step.step_s for step in own) for own in by_rank])
    first, last = (pick(step.iteration for step in steps) for pick in (min, max))
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return rank_table(f"time of {which}: ms", [row for row in rows if any(row.of_ranks)], whole)


def mean_ms(seconds: Iterable[float]) -> float:
    return 1e3 * fmean(seconds)
