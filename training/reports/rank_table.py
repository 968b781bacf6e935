"""Table of numbers of all ranks, for the log: their means, and the largest of each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple


class Row(NamedTuple):
    """A number of each rank."""

    name: str
    of_ranks: Sequence[float]


def rank_table(title: str, rows: Sequence[Row], whole: Row | None = None) -> list[str]:
    """Return the lines of a table; with a `whole`, the last row, also each row's part of that.

    >>> print(*rank_table("time: ms", [Row("forward", [20.0, 30.0])], Row("step", [50.0, 50.0])), sep="\\n")
    time: ms, mean of 2 ranks; part of the step; most on a rank
      forward                25.0   50.0%     30.0 on rank 1
      step                   50.0  100.0%     50.0 on rank 0
    """
    num_ranks = len(rows[0].of_ranks)
    heading = (
        title + f", mean of {num_ranks} ranks" * (num_ranks > 1) + (f"; part of the {whole.name}" if whole else "")
    )
    heading += "; most on a rank" * (num_ranks > 1)
    return [heading, *(line(row, whole) for row in [*rows, *([whole] if whole else [])])]


def line(row: Row, whole: Row | None) -> str:
    mean, most = fmean(row.of_ranks), max(row.of_ranks)
    text = f"  {row.name:<18} {mean:8.1f}"
    if whole:
        total = fmean(whole.of_ranks)
        text += f" {mean / total if total else 0:7.1%}"
    return text + f" {most:8.1f} on rank {row.of_ranks.index(most)}" * (len(row.of_ranks) > 1)
