"""Execution of each kind of call on tensors, once all ranks of a communicator have made it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from collectives.arrays.packing import Packing, pack_tensors

if TYPE_CHECKING:
    from collectives.communicator import Communicator


Tensors = Sequence[Tensor]


def pack(tensors: Tensors, in_place: bool) -> list[Packing]:
    """Return tensors to work on: copies; in place the tensors themselves, and copies only of those that have gaps."""
    if not in_place:
        return [Packing(torch.clone(x.detach(), memory_format=torch.contiguous_format)) for x in tensors]
    packings = [pack_tensors([x.detach()]) for x in tensors]
    for each in packings:
        each.load()
    return packings


def store(packings: Sequence[Packing], tensors: Tensors, in_place: bool) -> Tensors:
    """Return the results, written back to the tensors if they work in place."""
    for each in packings:
        each.store()
    return tensors if in_place else [each.array for each in packings]


def scale_(x: Tensor, factor: float) -> None:
    if factor != 1:
        x.copy_(x * factor if x.is_floating_point() or x.is_complex() else x.double() * factor)


@torch.no_grad()
def allreduce(
    comm: Communicator, tensors: Tensors, op: str, prescale: float, postscale: float, in_place: bool
) -> Tensors:
    """Reduce tensors, those of one dtype together."""
    packings = pack(tensors, in_place)
    results = [each.array for each in packings]
    for x in results:
        scale_(x, prescale)
    ordered = sorted((x for x in results if x.numel()), key=lambda x: str(x.dtype))
    for _, group in groupby(ordered, key=lambda x: x.dtype):
        several = [*group]
        comm.all_reduce(several[0] if len(several) == 1 else comm.fuse(several), op=op)
    for x in results:
        scale_(x, postscale)
    return store(packings, tensors, in_place)


@torch.no_grad()
def broadcast(comm: Communicator, tensors: Tensors, root: int, in_place: bool) -> Tensors:
    packings = pack(tensors, in_place)
    for each in packings:
        comm.broadcast(each.array, root)
    return store(packings, tensors, in_place)


def counts_of(x: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    """Return the number of elements in so many rows each."""
    return tuple(n * x.shape[1:].numel() for n in rows)


def allgather(comm: Communicator, tensors: Tensors) -> list[Tensor]:
    """Gather rows, of which ranks may have different numbers."""
    rows = comm.all_gather(np.array([len(x) for x in tensors])).reshape(comm.size, -1)
    results = [x.new_empty(int(column.sum()), *x.shape[1:]) for x, column in zip(tensors, rows.T, strict=True)]
    for x, column, out in zip(tensors, rows.T, results, strict=True):
        if out.numel():
            comm.all_gather(x.detach().contiguous(), out=out, counts=counts_of(x, column.tolist()))
    return results


def alltoall(comm: Communicator, tensors: Tensors, rows: Sequence[int], splits: Any) -> tuple[Tensor, Tensor]:
    """Exchange the rows of a tensor; return the received rows, and their number from each rank."""
    (x,) = tensors
    received = comm.all_to_all(np.array(rows, np.int64))
    out = x.new_empty(int(received.sum()), *x.shape[1:])
    sends, receives = counts_of(x, rows), counts_of(x, received.tolist())
    comm.all_to_all(x.detach().contiguous(), out=out, send_counts=sends, recv_counts=receives)
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    return out, torch.from_numpy(received).to(like)


def reducescatter(comm: Communicator, tensors: Tensors, op: str, prescale: float, postscale: float) -> list[Tensor]:
    """Reduce tensors, and return this rank's rows of each: equally many, or one more on the first ranks."""
    results = []
    for packing in pack(tensors, in_place=prescale == 1):
        x = packing.array
        scale_(x, prescale)
        each, more = divmod(len(x), comm.size)
        rows = [each + (rank < more) for rank in range(comm.size)]
        out = x.new_empty(rows[comm.rank], *x.shape[1:])
        if x.numel():
            comm.reduce_scatter(x, out=out, op=op, counts=counts_of(x, rows))
        scale_(out, postscale)
        results.append(out)
    return results


def broadcast_object(comm: Communicator, tensors: Tensors, root: int, obj: Any) -> Any:
    return comm.broadcast_object(obj, root)


def allgather_object(comm: Communicator, tensors: Tensors, obj: Any) -> list[Any]:
    return comm.all_gather_object(obj)


def barrier(comm: Communicator, tensors: Tensors) -> None:
    """Do nothing: all ranks have arrived."""
