"""Drawings of invalid schedules: ranks by time, with the failing cells marked."""

from collections.abc import Sequence
from typing import NamedTuple

from parallelism.pipeline.schedule.actions import Action, Schedule, needs, result

BEFORE, AFTER = 9, 4  # columns shown around the first marked cell


class ActionPosition(NamedTuple):
    """Position of an action in its rank's order; after the last one, if an action is missing."""

    rank: int
    position: int


class ProofError(ValueError):
    """Invalid schedule; gives the reason, `why`, and the positions, `places`."""

    def __init__(self, schedule: Schedule, why: str, *places: ActionPosition) -> None:
        super().__init__(f"schedule {schedule.name!r}: {why}\n{drawn(schedule, places)}".rstrip())
        self.why, self.places = why, places


def drawn(schedule: Schedule, places: Sequence[ActionPosition]) -> str:
    """Draw the steps around the places, up to where ranks stop; actions that cannot begin follow without a gap.

    >>> from parallelism.pipeline.schedule.basic import one_f_one_b
    >>> print(drawn(one_f_one_b(3, 2), [ActionPosition(1, 2)]))
    step     0     1     2     3     4     5     6     7
    rank 0  0F0   0F1    .     .     .    0B0    .    0B1
    rank 1   .    1F0   1F1    .   >1B0<   .    1B1    .
    rank 2   .     .    2F0   2B0   2F1   2B1    .     .
    """
    steps = in_steps(schedule)
    lanes = [dict(zip(row, map(str, order), strict=False)) for row, order in zip(steps, schedule.orders, strict=True)]
    marked = [(rank, steps[rank][position]) for rank, position in places]
    for rank, step in marked:
        lanes[rank][step] = f">{lanes[rank].get(step, '?')}<"
    first = min((step for _, step in marked), default=0)
    end = max((1 + step for lane in lanes for step in lane), default=0)
    columns = range(max(0, first - BEFORE), min(end, first + AFTER + 1))
    rows = {"step": list(map(str, columns))}
    rows |= {f"rank {rank}": [lane.get(step, ".") for step in columns] for rank, lane in enumerate(lanes)}
    width = max((len(cell) for row in rows.values() for cell in row), default=0)
    margin = max(map(len, rows)) + 1
    return "\n".join(
        f"{name:{margin}}{' '.join(f'{cell:^{width}}' for cell in row)}".rstrip() for name, row in rows.items()
    )


def in_steps(schedule: Schedule) -> list[list[int]]:
    """Return each action's step, in which every rank that can proceed does one action, and the step after the last."""
    steps: list[list[int]] = [[] for _ in schedule.orders]
    results: set[Action] = set()
    step = 0
    while active := [rank for rank, order in enumerate(schedule.orders) if len(steps[rank]) < len(order)]:
        following = {rank: schedule.orders[rank][len(steps[rank])] for rank in active}
        able = [rank for rank in active if results.issuperset(needs(following[rank], schedule.num_stages))]
        for rank in able or active:
            steps[rank].append(step)
            results.add(result(following[rank]))
        step += 1
    for row in steps:
        row.append(row[-1] + 1 if row else 0)
    return steps
