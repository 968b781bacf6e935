"""The arrays of a call: the positions of chunks in `x` and in the result, and access to them by other ranks.

All of these follow from the collective's row in `collectives.schedule.spec`.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.addresses import address_of, overlap, pointer, same_memory
from collectives.arrays.device import Device, host
from collectives.arrays.memory import Windows
from collectives.arrays.views import flat, is_a, split
from collectives.runtime.call.call import Call, CallFacts, Operands
from collectives.runtime.call.checks import check_writable
from collectives.schedule.moves import even_runs
from collectives.schedule.spec import Chunks, Collective

NEUTRAL = -(1 << 62)  # a fact that leaves the others' as they are


def call_on(collective: str, rank: int, size: int, x: Any, **arguments: Any) -> Call:
    """Return a call that has been checked, with its operands.

    Raises: one of `REFUSALS`.
    """
    call = Call(collective, x, arguments)
    call.check(rank, size)
    call.operands = operands_of(call)
    return call


def lent(call: Call) -> Call:
    """Return the same call on the same memory, without the caller's arrays."""
    o = call.operands
    views = call.flat if call.x is not None else None, None if o.out is o.source else o.out
    return moved(call, tuple(map(address_of, views)), views)


def moved(call: Call, addresses: tuple[int, ...], like: tuple[Any, Any] | None = None) -> Call:
    """Return the same call on memory at two other addresses, like its own flat arrays or these.

    It follows the same library's stream.
    """
    there = copy(call)
    there.x, there.out = arrays_at(call, addresses, like)
    there.arguments, there.after, there.owners, there.signed = {}, (), (), None  # which have the caller's arrays
    there.flat = None if call.flat is None else there.exemplar
    there.operands = operands_of(there)
    return there


def arrays_at(call: Call, addresses: tuple[int, ...], like: tuple[Any, Any] | None = None) -> list[Any]:
    """Return flat arrays at two addresses, like `x` and `out` of a call or these."""
    return [
        None if view is None else call.device.borrow(address, len(view), view.dtype)
        for address, view in zip(addresses, like or (call.x, call.out), strict=True)
    ]


def operands_of(call: Call) -> Operands:
    """Find or allocate the arrays of a call.

    Raises: ValueError for arrays and counts that do not fit each other.
    """
    spec = call.spec
    if spec.gives is Chunks.NONE:
        return Operands(None, None, None, [], [], [])
    counts, incoming = chunk_lengths(call)
    gets = spec.gets.on(call.rank, call.size, call.root)
    source = call.flat if call.holds_x else None
    new = None
    if spec.in_place and (call.out is None or not gets):
        if spec.writes(call.rank, call.root):
            check_writable(call.flat, "x")
        result, out = call.x, call.flat if gets else None
    else:
        count = sum(incoming[chunk] for chunk in gets)
        rows_of = partial(result_rows, spec, call.rank, call.size)
        new = partial(like, call.device, count, math.gcd(*incoming), rows_of, call.flat.dtype)
        result, out = output(call, count, new) if gets else (None, None)
    o = Operands(result, source, out, counts, chunks_in(source, spec.gives, call, counts), [], new=new)
    o.outputs = chunks_in(out, spec.gets, call, incoming)
    if source is not None and out is not None:
        check_overlap(call, o)
    return o


def chunk_lengths(call: Call) -> tuple[list[int], list[int]]:
    """Return the lengths of the chunks of the input, and of the result: the same, unless chunks are exchanged.

    Raises: ValueError for counts that do not fit `x`.
    """
    if call.spec.gives is Chunks.OWN:
        counts = list(call.counts or [len(call.flat)] * call.size)
        if counts[call.rank] != len(call.flat):
            has = f"x has {len(call.flat)} elements"
            raise ValueError(f"counts={counts} say {counts[call.rank]} for rank {call.rank}, but {has}")
        return counts, counts
    name, counts = "counts", list(call.counts or even(call.total, call.size))
    if call.spec.exchanges:
        if call.send_counts is None and call.total % call.size:
            raise ValueError(f"x has {call.total} elements, not divisible by {call.size} ranks: pass send_counts")
        name, counts = "send_counts", list(call.send_counts or counts)
    if sum(counts) != call.total:
        raise ValueError(f"{name}={counts} add up to {sum(counts)}, but x has {call.total} elements")
    return counts, list(call.recv_counts or counts)


def even(count: int, size: int) -> list[int]:
    """Return the lengths of `size` chunks of `count` elements, the first ones one longer where it must be."""
    return [len(run) for run in even_runs(count, size)]


def result_rows(spec: Collective, rank: int, size: int, rows: int) -> int:
    """Return how many rows a new result has for an `x` of `rows`: its chunks are equal numbers of rows."""
    if spec.gives is Chunks.OWN:
        return rows * size
    return even(rows, size)[rank] if spec.gets is Chunks.OWN else rows


def chunks_in(array: Any, chunks: Chunks, call: Call, counts: Sequence[int]) -> list[Any]:
    """Return the part of an array for each chunk, None for chunks that it lacks."""
    if array is None:
        return [None] * call.size
    if chunks is Chunks.OWN:
        return [array if rank == call.rank else None for rank in range(call.size)]
    return split(array, counts)


def check_overlap(call: Call, o: Operands) -> None:
    """Determine whether a call is in place, and refuse an `out` that overlaps `x` otherwise."""
    gives_own, gets_own = call.spec.gives is Chunks.OWN, call.spec.gets is Chunks.OWN
    x_part = o.inputs[call.rank] if gets_own else o.source
    out_part = o.outputs[call.rank] if gives_own else o.out
    o.in_place = same_memory(x_part, out_part) and not call.spec.exchanges
    if o.in_place or not overlap(o.source, o.out):
        return
    remedy = "an out with memory of its own, or none"
    if call.spec.exchanges:
        raise ValueError(f"out overlaps x: {call.collective} does not work in place; pass {remedy}")
    same = (
        f"an out whose chunk {call.rank} is x" if gives_own else f"chunk {call.rank} of x" if gets_own else "x itself"
    )
    raise ValueError(f"out overlaps x: pass {same}, {remedy}")


def output(call: Call, count: int, new: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the caller's `out`, or a new array: as the caller sees it, and flat.

    Raises: ValueError for an `out` that does not fit.
    """
    if call.out is None:
        result = new(call.exemplar)
        return result, flat(result)[1]
    device, out = flat(call.out)
    if device.device_name != call.device.device_name or out.dtype != call.flat.dtype or len(out) != count:
        raise ValueError(
            f"out has {len(out)} elements of {out.dtype} on {device.device_name}: pass one of {count} of "
            f"{call.flat.dtype} on {call.device.device_name}, or none"
        )
    check_writable(out, "out")
    return call.out, out


def like(device: Device, count: int, unit: int, rows_of: Callable[[int], int], dtype: np.dtype, x: Any) -> Any:
    """Return a new array of `count` elements, of the library that `x` is of, whose rows are like those of `x`.

    It is flat where chunks, whose lengths `unit` divides, are not of whole rows.  Rows without elements cannot be
    counted by them: `rows` of `x` give `rows_of(rows)`, unless other ranks have rows with elements.
    """
    rows, *row = getattr(x, "shape", ()) or (0,)
    length = math.prod(row)
    shape: tuple[int, ...] = (count,)
    if row and not length and not count:
        shape = (rows_of(rows), *row)
    elif row and length and unit % length == 0:
        shape = (count // length, *row)
    if type(x) is np.ndarray:
        return np.empty(shape, x.dtype)
    if is_a(x, "torch", "Tensor"):
        return x.new_empty(shape)
    return device.empty(shape, dtype)


def local_facts(call: Call, o: Operands | None, windows: Windows) -> list[int]:
    """Return this rank's facts, as integers whose maximum over the ranks makes the CallFacts.

    `o` is None where ranks have to exchange counts first.
    """
    counts = call.send_counts or (o.counts if o else [])
    itemsize = 0 if call.flat is None else call.flat.dtype.itemsize
    read = call.flat if call.holds_x else None  # by others, in a direct algorithm
    worked_in = None if o is None else o.out if reads_results(call.spec) or call.spec.gives is Chunks.OWN else call.flat
    lengths = sum(counts) * itemsize, max(counts, default=0) * itemsize
    return [*lengths, *window_keys(read, windows), call.device is not host(), *window_keys(worked_in, windows)]


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
