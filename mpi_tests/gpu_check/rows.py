"""Rows of the table: a check, its goal, the measurement and the verdict."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

PASSED, FAILED, SKIPPED, NO_GOAL = "passed", "failed", "skipped", "no goal here"
BAD = (FAILED, "crashed", "too long")


class Row(NamedTuple):
    check: str
    goal: str
    measured: str
    verdict: str


class Setting(NamedTuple):
    """Device and deadline of the checks; on the CPU they are small, and speeds have no goals.

    `mixes` names the training runs, if not all are to be done.
    """

    device: str
    deadline: float  # on the clock of time.monotonic()
    mixes: tuple[str, ...] = ()

    @property
    def left_s(self) -> float:
        return max(1.0, self.deadline - time.monotonic())

    @property
    def is_small(self) -> bool:
        return self.device == "cpu"

    def speed(self, reached: bool) -> str:
        """Return the verdict on a speed."""
        return NO_GOAL if self.is_small else verdict(reached)


def verdict(good: bool) -> str:
    return PASSED if good else FAILED


def table(rows: Sequence[Row]) -> str:
    """Format the rows as Markdown.

    >>> print(table([Row("sum", "equal", "5 cases", "passed")]))
    | check | goal | measured | verdict |
    |---|---|---|---|
    | sum | equal | 5 cases | passed |
    """
    cells = [[" ".join(cell.split()).replace("|", "/") for cell in row] for row in (Row._fields, *rows)]
    first, *others = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([first, "|---" * len(Row._fields) + "|", *others])
