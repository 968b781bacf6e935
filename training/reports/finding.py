"""What is wrong with some ranks of a run, and when that begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class HealthFinding(NamedTuple):
    """What is wrong with some ranks.

    `kind` is "slow" or "load" for ranks that compute slowly or do not get their cores, "input", "link", or "all"; for
    wrong numbers "memory", "replica", "sum", "message" or "gradient".
    """

    kind: str
    ranks: tuple[int, ...]
    words: str
    ended: str  # words for its end

    @property
    def key(self) -> tuple[bool, str, tuple[int, ...]]:
        """What stays the same while it lasts: why a rank is slow may change."""
        is_slow = self.kind in ("slow", "load")
        return is_slow, "" if is_slow else self.kind, self.ranks


class HealthChange(NamedTuple):
    """The begin or the end of a finding, as seen after a step."""

    step: int
    finding: HealthFinding
    begins: bool

    def __str__(self) -> str:
        return f"step {self.step}: {self.finding.words if self.begins else self.finding.ended}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> named_ranks([0, 1, 4])
    'ranks 0, 1 and 4'
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def wrong_numbers(kind: str, ranks: Sequence[int], words: str) -> HealthFinding:
    """Return a finding that ends once the step is computed again."""
    return HealthFinding(kind, tuple(ranks), words, "the step has been computed again")
