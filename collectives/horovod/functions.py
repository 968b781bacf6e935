"""Horovod's calls on tensors.

Calls of the same name are matched, in any order on the ranks; calls without a name are numbered, separately for each
kind.  An asynchronous call begins once every rank waits for a call, or polls one: while this process computes, only
gradients of an optimizer are reduced.

A call whose name ends with an underscore works in place.  The others, unless asynchronous, are differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from collectives.horovod import tensor_calls
from collectives.horovod.compression import Compression
from collectives.horovod.handles import Differentiable, alone, submit, synchronize
from collectives.horovod.matching import NamedCall
from collectives.horovod.process_sets import ProcessSet, global_process_set, rank
from collectives.horovod.tensor_calls import Tensors

Average, Sum, Adasum, Min, Max, Product = OPS = "avg", "sum", "adasum", "min", "max", "prod"


# --- calls that reduce ---


def refusal_of(op: str, tensors: Tensors, size: int) -> str:
    """Return why an op is refused, or nothing."""
    if op not in OPS:
        return f"op={op!r} is unknown: use hvd.Average, Sum, Adasum, Min, Max or Product"
    if op == Adasum and size & (size - 1):
        return f"Adasum among {size} ranks: their number must be a power of two"
    if op == Adasum and any(isinstance(x, Tensor) and not x.is_floating_point() for x in tensors):
        return "Adasum of integers: pass floats"
    return ""


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
) -> NamedCall:
    """Begin to reduce tensors, or copies of them, by default to the average; factors multiply them before and after."""
    failure = "" if op is None or average is None else f"op={op!r} and average={average}: pass op alone"
    op = op or (Sum if average is False else Average)
    failure = failure or refusal_of(op, tensors, process_set.matched.comm.size)
    agree = {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    run = tensor_calls.allreduce
    return submit(process_set, run, tensors, name, failure, agree=agree, in_place=in_place)


def grouped_allreduce_async_(tensors: Tensors, *arguments: Any, **named: Any) -> NamedCall:
    return grouped_allreduce_async(tensors, *arguments, **named, in_place=True)


def grouped_allreduce_(tensors: Tensors, *arguments: Any, **named: Any) -> list[Tensor]:
    return synchronize(grouped_allreduce_async_(tensors, *arguments, **named))


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce copies of tensors.  Gradients are reduced in the same way."""
    how = op, prescale_factor, postscale_factor, process_set

    def do(xs: Tensors) -> list[Tensor]:
        return synchronize(grouped_allreduce_async(xs, average, name, *how))

    def undo(gradients: Tensors) -> list[Tensor]:
        return grouped_allreduce(gradients, average, None, Compression.none, *how)

    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    return [*map(compression.decompress, Differentiable.apply(do, undo, *sent), contexts)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedCall:
    """Begin to reduce tensors, of whose results each rank gets some rows; the first ranks one more, if necessary."""
    failure = "Adasum: use hvd.Average or Sum" if op == Adasum else refusal_of(op, (), 1)
    agree = {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit(process_set, tensor_calls.reducescatter, tensors, name, failure, agree=agree)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of reduced tensors.  Gradients are gathered, times the number of ranks for a sum."""

    def do(xs: Tensors) -> list[Tensor]:
        return synchronize(grouped_reducescatter_async(xs, name, op, process_set, prescale_factor, postscale_factor))

    def undo(gradients: Tensors) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (process_set.matched.comm.size if op == Sum else 1)
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    return [*map(compression.decompress, Differentiable.apply(do, undo, *sent), contexts)]


allreduce_async, allreduce_async_ = alone(grouped_allreduce_async), alone(grouped_allreduce_async_)
allreduce, allreduce_ = alone(grouped_allreduce), alone(grouped_allreduce_)
reducescatter_async, reducescatter = alone(grouped_reducescatter_async), alone(grouped_reducescatter)


# --- calls that move data ---


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedCall:
    """Begin to gather the rows of tensors; ranks may have different numbers of rows."""
    return submit(process_set, tensor_calls.allgather, tensors, name, num_free=1)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return all ranks' rows, in rank order.  The gradient is the mean over the ranks."""

    def do(xs: Tensors) -> list[Tensor]:
        return synchronize(grouped_allgather_async(xs, name, process_set))

    def undo(gradients: Tensors) -> list[Tensor]:
        comm = process_set.matched.comm
        rows = allgather(torch.tensor([[len(x) for x in tensors]]), process_set=process_set).T.tolist()
        means = grouped_allreduce(gradients, process_set=process_set)
        return [mean.split(each)[comm.rank] for mean, each in zip(means, rows, strict=True)]

    return [*Differentiable.apply(do, undo, *tensors)]


allgather_async, allgather = alone(grouped_allgather_async), alone(grouped_allgather)


def grouped_broadcast_async(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
) -> NamedCall:
    """Begin to copy the root's tensors into every rank's, or into copies of these."""
    ranks = process_set.ranks or []
    failure = "" if root_rank in ranks else f"root_rank={root_rank} is out of range: use one of {ranks}"
    agree = {"root": root_rank if failure else ranks.index(root_rank)}
    return submit(process_set, tensor_calls.broadcast, tensors, name, failure, agree=agree, in_place=in_place)


def grouped_broadcast_async_(tensors: Tensors, *arguments: Any, **named: Any) -> NamedCall:
    return grouped_broadcast_async(tensors, *arguments, **named, in_place=True)


broadcast_async, broadcast_async_ = alone(grouped_broadcast_async), alone(grouped_broadcast_async_)


def broadcast_(tensor: Tensor, *arguments: Any, **named: Any) -> Tensor:
    return synchronize(broadcast_async_(tensor, *arguments, **named))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a copy of the root's tensor.  The gradient is the mean over the ranks on the root, 0 on the others."""

    def do(xs: Tensors) -> list[Tensor]:
        return [synchronize(broadcast_async(xs[0], root_rank, name, process_set))]

    def undo(gradients: Tensors) -> list[Tensor]:
        mean = allreduce(gradients[0], process_set=process_set)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return Differentiable.apply(do, undo, tensor)[0]


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedCall:
    """Begin to give rank r the r-th rows of `tensor`: `splits[r]` of them, or equally many.

    The result is a pair: the received rows, and their number from each rank.
    """
    size = process_set.matched.comm.size
    num_rows = len(tensor) if isinstance(tensor, Tensor) and tensor.dim() else 0
    rows = [num_rows // size] * size if splits is None else torch.as_tensor(splits).tolist()
    failure = ""
    if len(rows) != size or sum(rows) != num_rows or not all(isinstance(n, int) and n >= 0 for n in rows):
        failure = f"{num_rows} rows in splits of {rows}: pass splits with {size} numbers of rows, of {num_rows} in all"
    run = tensor_calls.alltoall
    return submit(process_set, run, [tensor], name, failure, num_free=1, rows=rows, splits=splits)


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the received rows; with `splits`, also their number from each rank.  Gradients go back the same way."""
    received: list[Tensor] = []

    def do(xs: Tensors) -> list[Tensor]:
        rows, counts = synchronize(alltoall_async(xs[0], splits, name, process_set))
        received.append(counts)
        return [rows]

    def undo(gradients: Tensors) -> list[Tensor]:
        return [alltoall(gradients[0], received[0], process_set=process_set)[0]]

    rows = Differentiable.apply(do, undo, tensor)[0]
    return rows if splits is None else (rows, received[0])


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    synchronize(submit(process_set, tensor_calls.barrier, (), None))


def join(device: int = -1) -> int:
    """Take part in the other ranks' sums and averages with zeros, until all have joined; return the last that did.

    `device` is not read: zeros are on the device of the others' tensors.
    """
    return global_process_set.matched.join()
