"""What all ranks know of a call before they choose an algorithm: how large it is, and what they reach of each other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives.arrays.device import host
from collectives.arrays.memory import Windows
from collectives.arrays.views import pointer
from collectives.runtime.arguments import Arguments, Operands

NEUTRAL = -(1 << 62)  # a claim that leaves the others' as they are


class Footing(NamedTuple):
    """The same on all ranks."""

    nbytes: int  # its vector, or, where chunks are uneven, the most that any rank gives
    chunk_bytes: int  # its longest chunk
    symmetric: bool  # what ranks would read of each other lies in symmetric memory
    on_host: bool
    shared: bool  # the array in which messages work lies in symmetric memory


def claims(a: Arguments, o: Operands | None, windows: Windows) -> list[int]:
    """What this rank knows, as integers whose maximum over the ranks makes the footing."""
    counts = a.send_counts or (o.counts if o else [])
    itemsize = 0 if a.flat is None else a.flat.dtype.itemsize
    read, worked_in = (keys(views, windows) for views in (read_by_others(a), working_array(a, o)))
    return [sum(counts) * itemsize, max(counts, default=0) * itemsize, *read, a.device is not host(), *worked_in]


def keys(views: list[Any], windows: Windows) -> tuple[int, int]:
    """Of the windows in which arrays lie: the highest, and the negated lowest."""
    found = [windows.key_at(pointer(view)) for view in views if len(view)]
    return (max(found), -min(found)) if found else (NEUTRAL, NEUTRAL)


def read_by_others(a: Arguments) -> list[Any]:
    """The array of this rank that a direct algorithm would have the others read; of an all-reduce, `out`, too."""
    if a.flat is None or (a.collective == "scatter" and a.rank != a.root):
        return []
    return [a.flat]


def working_array(a: Arguments, o: Operands | None) -> list[Any]:
    """The array of this rank in which a schedule of messages works, where it needs no other."""
    if a.flat is None or o is None:
        return []
    return [o.out] if a.collective in ("all_reduce", "all_gather") else [a.flat]


def footing(collective: str, claims: Sequence[int]) -> Footing:
    nbytes, chunk_bytes, *read, not_on_host, highest, negated = claims
    shared = in_one(highest, negated)
    symmetric = in_one(*read) and (shared or collective != "all_reduce")
    return Footing(nbytes, chunk_bytes, symmetric, not not_on_host, shared)


def in_one(highest: int, negated: int) -> bool:
    """Whether the arrays of all ranks lie in one window."""
    return highest == -negated and highest > 0
