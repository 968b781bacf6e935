"""What ranks do, and when."""

from typing import NamedTuple


class Span(NamedTuple):
    rank: int
    what: str
    begin_s: float
    end_s: float
