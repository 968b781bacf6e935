"""The vector in which a schedule of messages works: the callers' arrays where they suffice, else memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from collectives.arrays.addresses import same_memory
from collectives.arrays.ops import sum_dtype
from collectives.runtime.call.call import Call
from collectives.runtime.call.operands import even
from collectives.runtime.plan import CopyPair
from collectives.schedule.moves import Barrier, Schedule
from collectives.schedule.spec import Chunks

Allocate = Callable[[str, int, Any], Any]  # of a use, a length and a dtype


class Vector:
    """A working vector: flat arrays, each divided into chunks, which are numbered consecutively."""

    def __init__(self, *pieces: tuple[Any, Sequence[int]]):
        self.chunks = []  # for each chunk: its array, and its begin and end there
        for array, counts in pieces:
            ends = np.cumsum([0, *counts]).tolist()
            self.chunks += [(array, a, b) for a, b in pairwise(ends)]

    def view(self, run: range) -> Any:
        """Return the memory of a run, all of whose chunks lie in one array."""
        array, begin, _ = self.chunks[run.start]
        return array[begin : self.chunks[run.stop - 1][2]]

    def add_scratch(self, schedule: Schedule, empty: Callable[[int, Any], Any]) -> None:
        """Add working space for a schedule's chunks beyond the collective's own, each of the length of one of those."""
        num_chunks = max((m.run.stop for moves in schedule for m in moves if not isinstance(m, Barrier)), default=0)
        num_chunks -= len(self.chunks)
        if num_chunks > 0:
            lengths = [end - begin for _, begin, end in islice(cycle(self.chunks), num_chunks)]
            scratch = empty(sum(lengths), self.chunks[0][0].dtype)
            self.chunks += Vector((scratch, lengths)).chunks


@dataclass
class WorkingVector:
    """A vector in which a schedule of messages works, and the copies before and after the rounds.

    `reduced` is the part of the vector that holds a reduction's result after the rounds.
    """

    vector: Vector
    before: list[CopyPair] = field(default_factory=list)
    after: list[CopyPair] = field(default_factory=list)
    reduced: Any = None


def chunk_lengths(call: Call, num_chunks: int) -> list[int]:
    """Return the lengths of a schedule's chunks: those of the call's own, each cut into as many, or of the whole."""
    counts = call.operands.counts
    if num_chunks == len(counts):
        return counts
    if Chunks.OWN in (call.spec.gives, call.spec.gets):
        return [length for count in counts for length in even(count, num_chunks // call.size)]
    return even(sum(counts), num_chunks)


def working_vector(
    call: Call, num_chunks: int, allocate: Allocate, in_caller_arrays: bool, is_shared: bool
) -> WorkingVector:
    """Choose the vector in which a schedule of messages works, of `num_chunks`.

    Whether it may be `in_caller_arrays` is the same on all ranks.  Where memory `is_shared`, all ranks allocate it, or
    none does.
    """
    o = call.operands
    if call.flat is None:
        return WorkingVector(Vector())
    work = caller_array(call, is_shared) if in_caller_arrays else None
    if work is None:
        dtype = sum_dtype(call.flat.dtype, call.op) if call.spec.reduces else call.flat.dtype
        work = allocate("vector", sum(o.counts), dtype)
    if call.spec.exchanges:
        out = allocate("out", len(o.out), o.out.dtype) if is_shared else o.out  # others may write there
        vector = Vector((work, o.counts), (out, [len(view) for view in o.outputs]))
        return WorkingVector(vector, copies(work, o.source), copies(o.out, out))
    vector = Vector((work, chunk_lengths(call, num_chunks)))
    working = WorkingVector(vector)
    gives, gets = (
        chunks.on(call.rank, call.size, call.root, num_chunks) for chunks in (call.spec.gives, call.spec.gets)
    )
    if gives:
        working.before = copies(vector.view(gives), o.source)
    if gets:
        working.reduced = vector.view(gets) if call.spec.reduces else None
    if call.spec.writes(call.rank, call.root):
        working.after = copies(o.out, vector.view(gets))
    return working


def caller_array(call: Call, is_shared: bool) -> Any:
    """Return the caller's array in which a schedule of messages can work, None if there is none.

    It holds the whole vector, and sums of its dtype.  A reduction does not change `x`, unless it is in place, as a
    reduce-scatter may be on some ranks only.
    """
    spec, o = call.spec, call.operands
    if spec.reduces and sum_dtype(call.flat.dtype, call.op) != call.flat.dtype:
        return None
    if o.out is not None and spec.gets is not Chunks.OWN and not spec.exchanges:
        return o.out
    if o.source is None or spec.gives is Chunks.OWN:
        return None
    if spec.reduces and not (o.in_place and len(o.out) and not is_shared):
        return None
    return o.source


def copies(target: Any, source: Any) -> list[CopyPair]:
    return [] if same_memory(target, source) else [(target, source)]
