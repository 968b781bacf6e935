"""The arrays of a call: the positions of chunks in `x` and in the result, working memory, and access by other ranks.

All of these follow from the collective's row in `collectives.schedule.spec`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from collectives.arrays.addresses import overlap, pointer, same_memory
from collectives.arrays.device import host
from collectives.arrays.memory import Windows
from collectives.arrays.ops import sum_dtype
from collectives.runtime.backends.messages import Vector
from collectives.runtime.call.arguments import Arguments, check_writable, like
from collectives.schedule.moves import shares
from collectives.schedule.spec import Chunks, Collective

NEUTRAL = -(1 << 62)  # a fact that leaves the others' as they are


@dataclass
class Operands:
    """Flat arrays of a call on one rank: `source`, and `out` for the result; and the position of each chunk in them.

    `counts` are the chunks' lengths.  On a rank that gives or gets only one chunk, the others are None.
    """

    result: Any  # as the caller sees it
    source: Any
    out: Any
    counts: list[int]
    inputs: list[Any]
    outputs: list[Any]
    in_place: bool = False  # `out` is all of `x`, or one of them is this rank's chunk of the other
    new: Callable[[Any], Any] | None = None  # makes the result for an `x`, where it may be a new array


def operands_of(a: Arguments) -> Operands:
    """Find or allocate the arrays of a call.

    Raises: ValueError for arrays and counts that do not fit each other.
    """
    spec = a.spec
    if spec.gives is Chunks.NONE:
        return Operands(None, None, None, [], [], [])
    counts, incoming = chunk_lengths(a)
    gets = spec.gets.on(a.rank, a.size, a.root)
    source = a.flat if a.holds_x else None
    new = None
    if spec.in_place and (a.out is None or not gets):
        if spec.writes(a.rank, a.root):
            check_writable(a.flat, "x")
        result, out = a.x, a.flat if gets else None
    else:
        count = sum(incoming[chunk] for chunk in gets)
        rows_of = partial(result_rows, spec, a.rank, a.size)
        new = partial(like, a.device, count, math.gcd(*incoming), rows_of, a.flat.dtype)
        result, out = a.output(count, new) if gets else (None, None)
    o = Operands(result, source, out, counts, chunks_in(source, spec.gives, a, counts), [], new=new)
    o.outputs = chunks_in(out, spec.gets, a, incoming)
    if source is not None and out is not None:
        check_overlap(a, o)
    return o


def chunk_lengths(a: Arguments) -> tuple[list[int], list[int]]:
    """Return the lengths of the chunks of the input, and of the result: the same, unless chunks are exchanged.

    Raises: ValueError for counts that do not fit `x`.
    """
    if a.spec.gives is Chunks.OWN:
        counts = list(a.counts or [len(a.flat)] * a.size)
        if counts[a.rank] != len(a.flat):
            has = f"x has {len(a.flat)} elements"
            raise ValueError(f"counts={counts} say {counts[a.rank]} for rank {a.rank}, but {has}")
        return counts, counts
    name, counts = "counts", list(a.counts or even(a.total, a.size))
    if a.spec.exchanges:
        if a.send_counts is None and a.total % a.size:
            raise ValueError(f"x has {a.total} elements, not divisible by {a.size} ranks: pass send_counts")
        name, counts = "send_counts", list(a.send_counts or counts)
    if sum(counts) != a.total:
        raise ValueError(f"{name}={counts} add up to {sum(counts)}, but x has {a.total} elements")
    return counts, list(a.recv_counts or counts)


def even(count: int, size: int) -> list[int]:
    """Return the lengths of `size` chunks of `count` elements, the first ones one longer where it must be."""
    return [len(share) for share in shares(count, size)]


def result_rows(spec: Collective, rank: int, size: int, rows: int) -> int:
    """Return how many rows a new result has for an `x` of `rows`: its chunks are equal numbers of rows."""
    if spec.gives is Chunks.OWN:
        return rows * size
    return even(rows, size)[rank] if spec.gets is Chunks.OWN else rows


def split(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return an array's chunks of those lengths."""
    return [array[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


def chunks_in(array: Any, chunks: Chunks, a: Arguments, counts: Sequence[int]) -> list[Any]:
    """Return the part of an array for each chunk, None for chunks that it lacks."""
    if array is None:
        return [None] * a.size
    if chunks is Chunks.OWN:
        return [array if rank == a.rank else None for rank in range(a.size)]
    return split(array, counts)


def check_overlap(a: Arguments, o: Operands) -> None:
    """Determine whether a call is in place, and refuse an `out` that overlaps `x` otherwise."""
    gives_own, gets_own = a.spec.gives is Chunks.OWN, a.spec.gets is Chunks.OWN
    x_part = o.inputs[a.rank] if gets_own else o.source
    out_part = o.outputs[a.rank] if gives_own else o.out
    o.in_place = same_memory(x_part, out_part) and not a.spec.exchanges
    if o.in_place or not overlap(o.source, o.out):
        return
    remedy = "an out with memory of its own, or none"
    if a.spec.exchanges:
        raise ValueError(f"out overlaps x: {a.collective} does not work in place; pass {remedy}")
    same = f"an out whose chunk {a.rank} is x" if gives_own else f"chunk {a.rank} of x" if gets_own else "x itself"
    raise ValueError(f"out overlaps x: pass {same}, {remedy}")


class Workspace(NamedTuple):
    """The memory in which a schedule of messages may work.

    Its use of the callers' arrays is the same on all ranks.  Where `is_shared`, all ranks allocate, or none.
    """

    use_caller_arrays: bool
    allocate: Callable[[str, int, Any], Any]  # by its use
    is_shared: bool


@dataclass
class Binding:
    """A working vector, the copies before and after the rounds, and the result.

    `reduced` is the part of the vector that holds a reduction's result after the rounds.
    """

    vector: Vector
    result: Any
    before: list[tuple[Any, Any]] = field(default_factory=list)
    after: list[tuple[Any, Any]] = field(default_factory=list)
    reduced: Any = None


def bind(a: Arguments, o: Operands, space: Workspace) -> Binding:
    """Choose the working vector of a schedule of messages."""
    if a.flat is None:
        return Binding(Vector(), None)
    work = caller_array(a, o, space)
    if work is None:
        dtype = sum_dtype(a.flat.dtype, a.op) if a.spec.reduces else a.flat.dtype
        work = space.allocate("vector", sum(o.counts), dtype)
    if a.spec.exchanges:
        out = space.allocate("out", len(o.out), o.out.dtype) if space.is_shared else o.out  # others may write there
        vector = Vector((work, o.counts), (out, [len(view) for view in o.outputs]))
        return Binding(vector, o.result, copies(work, o.source), copies(o.out, out))
    vector = Vector((work, o.counts))
    binding = Binding(vector, o.result)
    gives, gets = (chunks.on(a.rank, a.size, a.root) for chunks in (a.spec.gives, a.spec.gets))
    if gives:
        binding.before = copies(vector.view(gives), o.source)
    if gets:
        binding.reduced = vector.view(gets) if a.spec.reduces else None
    if a.spec.writes(a.rank, a.root):
        binding.after = copies(o.out, vector.view(gets))
    return binding


def caller_array(a: Arguments, o: Operands, space: Workspace) -> Any:
    """Return the caller's array in which a schedule of messages can work, None if there is none.

    It holds the whole vector, and sums of its dtype.  A reduction does not change `x`, unless it is in place, as a
    reduce-scatter may be on some ranks only.
    """
    spec = a.spec
    if not space.use_caller_arrays or (spec.reduces and sum_dtype(a.flat.dtype, a.op) != a.flat.dtype):
        return None
    if o.out is not None and spec.gets is not Chunks.OWN and not spec.exchanges:
        return o.out
    if o.source is None or spec.gives is Chunks.OWN:
        return None
    if spec.reduces and not (o.in_place and len(o.out) and not space.is_shared):
        return None
    return o.source


def copies(target: Any, source: Any) -> list[tuple[Any, Any]]:
    return [] if same_memory(target, source) else [(target, source)]


class CallFacts(NamedTuple):
    """Facts of a call on which all ranks agree before they choose an algorithm."""

    nbytes: int  # its vector, or, where chunks are uneven, the most that any rank gives
    chunk_bytes: int  # its longest chunk
    symmetric: bool  # whether the arrays that ranks would read of each other are in symmetric memory
    on_host: bool
    shared: bool  # whether the working array of messages is in symmetric memory


def local_facts(a: Arguments, o: Operands | None, windows: Windows) -> list[int]:
    """Return this rank's facts, as integers whose maximum over the ranks makes the CallFacts.

    `o` is None where ranks have to exchange counts first.
    """
    counts = a.send_counts or (o.counts if o else [])
    itemsize = 0 if a.flat is None else a.flat.dtype.itemsize
    read = a.flat if a.holds_x else None  # by others, in a direct algorithm
    worked_in = None if o is None else o.out if reads_results(a.spec) or a.spec.gives is Chunks.OWN else a.flat
    lengths = sum(counts) * itemsize, max(counts, default=0) * itemsize
    return [*lengths, *window_keys(read, windows), a.device is not host(), *window_keys(worked_in, windows)]


def window_keys(view: Any, windows: Windows) -> tuple[int, int]:
    """Return the key of the window in which an array lies, and the negated one: their maxima show if all agree."""
    if view is None or not len(view):
        return NEUTRAL, NEUTRAL
    key = windows.key_at(pointer(view))
    return key, -key


def call_facts(spec: Collective, facts: Sequence[int], on_buffers: bool = False) -> CallFacts:
    """Return the agreed facts; buffers count as symmetric memory, where ranks can have that."""
    nbytes, chunk_bytes, *read, not_on_host, highest, negated = facts
    shared = on_buffers or in_one_window(highest, negated)
    symmetric = on_buffers or (in_one_window(*read) and (shared or not reads_results(spec)))
    return CallFacts(nbytes, chunk_bytes, symmetric, not not_on_host, shared)


def reads_results(spec: Collective) -> bool:
    """Return whether ranks read others' sums in a direct algorithm: then they must have access to results, too."""
    return spec.reduces and spec.gets is Chunks.ALL


def in_one_window(highest: int, negated: int) -> bool:
    """Return whether the arrays of all ranks lie in one window."""
    return highest == -negated and highest > 0
