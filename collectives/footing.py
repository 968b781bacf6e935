"""What all ranks know of a call before they choose an algorithm: how large it is, and what they reach of each other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives.arguments import Arguments, Operands
from collectives.arrays import host
from collectives.memory import Windows

NEUTRAL = -(1 << 62)  # a claim that leaves the others' as they are


class Footing(NamedTuple):
    """The same on all ranks."""

    nbytes: int  # its vector, or, where chunks are uneven, the most that any rank gives
    chunk_bytes: int  # its longest chunk
    symmetric: bool  # what ranks would read of each other lies in symmetric memory
    on_host: bool
    once: bool  # no plan: bound for a single run


def claims(a: Arguments, o: Operands | None, windows: Windows, once: bool) -> list[int]:
    """What this rank knows, as integers whose maximum over the ranks makes the footing."""
    counts = a.send_counts or (o.counts if o else [])
    itemsize = 0 if a.flat is None else a.flat.dtype.itemsize
    keys = [windows.place(view).key for view in read_by_others(a, o) if len(view)]
    highest, negated = (max(keys), -min(keys)) if keys else (NEUTRAL, NEUTRAL)
    return [sum(counts) * itemsize, max(counts, default=0) * itemsize, highest, negated, a.device is not host(), once]


def read_by_others(a: Arguments, o: Operands | None) -> list[Any]:
    """The arrays of this rank that a direct algorithm would have the others read."""
    if a.flat is None or (a.collective == "scatter" and a.rank != a.root):
        return []
    return [a.flat, o.out] if o is not None and a.collective == "all_reduce" else [a.flat]


def footing(claims: Sequence[int]) -> Footing:
    nbytes, chunk_bytes, highest, negated, not_on_host, once = claims
    return Footing(nbytes, chunk_bytes, highest == -negated and highest > 0, not not_on_host, bool(once))
