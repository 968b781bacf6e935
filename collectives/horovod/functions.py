"""Horovod's calls on tensors and objects.

Calls of the same name are matched, in any order on the ranks; calls without a name are numbered, separately for each
kind.  An asynchronous call begins once every rank waits for a call, or polls one: while this process computes, only
gradients of an optimizer are reduced.

A call whose name ends with an underscore works in place.  The others, unless asynchronous, are differentiable.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from collectives.horovod import tensor_calls
from collectives.horovod.matching import Description, NamedCall, TensorFacts
from collectives.horovod.process_sets import ProcessSet, global_process_set, rank
from collectives.horovod.tensor_calls import Tensors

Average, Sum, Min, Max, Product = OPS = "avg", "sum", "min", "max", "prod"


class NoneCompressor:
    """Compression to what is sent: none.  A user-defined compressor has the same two methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class FP16Compressor:
    """Compression of floats to 16 bits; they are summed in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class Compression:
    none, fp16 = NoneCompressor, FP16Compressor


def submit(
    process_set: ProcessSet,
    run: Callable[..., Any],
    tensors: Tensors,
    name: str | None,
    failure: str = "",
    num_free: int = 0,
    agree: dict[str, Any] | None = None,
    **local: Any,
) -> NamedCall:
    """Submit a call that runs `run(comm, tensors, **agree, **local)`.

    Ranks must agree in `agree`, and in the tensors' dtypes and shapes, except for the first `num_free` dims.
    """
    calls, kind = process_set.matched, run.__name__
    wrong = next((x for x in tensors if not isinstance(x, Tensor) or x.layout is not torch.strided), None)
    if wrong is not None:
        what = f"tensor of layout {wrong.layout}" if isinstance(wrong, Tensor) else type(wrong).__name__
        failure, tensors = f"{what}: pass dense tensors", ()
    elif kind in ("allgather", "alltoall", "reducescatter") and any(x.dim() == 0 for x in tensors):
        failure = "tensor of shape () has no rows: pass x.reshape(1)"
    agree = agree or {}
    facts = tuple(TensorFacts.of(x, num_free) for x in tensors)
    description = Description(kind, name or calls.name(kind), facts, tuple(agree.items()), failure)
    return calls.add(description, partial(run, calls.comm, tensors, **agree, **local))


def synchronize(handle: NamedCall) -> Any:
    """Return the result of an asynchronous call.

    Raises: HorovodInternalError on every rank if the call is invalid on one, or the ranks' calls differ.
    """
    return checked(handle).calls.wait(handle)


def poll(handle: NamedCall) -> bool:
    """Return whether an asynchronous call is complete; run it, if the other ranks wait or poll, too."""
    return checked(handle).calls.poll(handle)


def checked(handle: Any) -> NamedCall:
    if not isinstance(handle, NamedCall):
        raise ValueError(f"handle {handle!r} is not of a call: pass what an asynchronous function has returned")
    return handle


class Differentiable(torch.autograd.Function):
    """A call that `begin` submits, on tensors forwards, and `undo` on gradients backwards."""

    @staticmethod
    def forward(ctx: Any, begin: Callable, undo: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.undo = undo
        return tuple(synchronize(begin(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.undo(gradients)


def alone(grouped: Callable, **preset: Any) -> Callable[..., Any]:
    """Convert a call on a list of tensors to one on a tensor, with some arguments preset."""

    @wraps(grouped)
    def single(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        result = grouped([tensor], *arguments, **named, **preset)
        if not isinstance(result, NamedCall):
            return result[0]
        run = result.run
        result.run = lambda: run()[0]
        return result

    single.__name__ = single.__qualname__ = grouped.__name__.removeprefix("grouped_")
    return single


def waiting(begin: Callable) -> Callable[..., Any]:
    """Convert an asynchronous call to one that returns the result."""
    return lambda *arguments, **named: synchronize(begin(*arguments, **named))


def refusal_of(op: str) -> str:
    return "" if op in OPS else f"op={op!r} is unknown: use hvd.Average, Sum, Min, Max or Product"


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
    failure = failure or refusal_of(op)
    agree = {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    run = tensor_calls.allreduce
    return submit(process_set, run, tensors, name, failure, agree=agree, in_place=in_place)


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
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = Differentiable.apply(
        lambda xs: grouped_allreduce_async(xs, average, name, *how),
        lambda gradients: grouped_allreduce(gradients, average, None, Compression.none, *how),
        *sent,
    )
    return [*map(compression.decompress, reduced, contexts)]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedCall:
    """Begin to reduce tensors, of whose results each rank gets some rows; the first ranks one more, if necessary."""
    agree = {"op": op, "prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return submit(process_set, tensor_calls.reducescatter, tensors, name, refusal_of(op), agree=agree)


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

    def undo(gradients: Tensors) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (process_set.matched.comm.size if op == Sum else 1)
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    how = name, op, process_set, prescale_factor, postscale_factor
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    rows = Differentiable.apply(lambda xs: grouped_reducescatter_async(xs, *how), undo, *sent)
    return [*map(compression.decompress, rows, contexts)]


grouped_allreduce_async_ = partial(grouped_allreduce_async, in_place=True)
grouped_allreduce_ = waiting(grouped_allreduce_async_)
allreduce, allreduce_async = alone(grouped_allreduce), alone(grouped_allreduce_async)
allreduce_async_ = alone(grouped_allreduce_async, in_place=True)
allreduce_ = waiting(allreduce_async_)
reducescatter, reducescatter_async = alone(grouped_reducescatter), alone(grouped_reducescatter_async)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> NamedCall:
    """Begin to gather the rows of tensors; ranks may have different numbers of rows."""
    return submit(process_set, tensor_calls.allgather, tensors, name, num_free=1)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return all ranks' rows, in rank order.  The gradient is the mean over the ranks."""

    def undo(gradients: Tensors) -> list[Tensor]:
        comm = process_set.matched.comm
        rows = allgather(torch.tensor([[len(x) for x in tensors]]), process_set=process_set).T.tolist()
        means = grouped_allreduce(gradients, process_set=process_set)
        return [mean.split(each)[comm.rank] for mean, each in zip(means, rows, strict=True)]

    return [*Differentiable.apply(lambda xs: grouped_allgather_async(xs, name, process_set), undo, *tensors)]


allgather_async, allgather = alone(grouped_allgather_async), alone(grouped_allgather)


def root_of(root_rank: int, process_set: ProcessSet) -> tuple[str, dict[str, int]]:
    """Return why a root is refused, or nothing, and its rank within the process set."""
    ranks = process_set.ranks or []
    if root_rank in ranks:
        return "", {"root": ranks.index(root_rank)}
    return f"root_rank={root_rank} is out of range: use one of {ranks}", {"root": root_rank}


def grouped_broadcast_async(
    tensors: Tensors,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    in_place: bool = False,
) -> NamedCall:
    """Begin to copy the root's tensors into every rank's, or into copies of these."""
    failure, agree = root_of(root_rank, process_set)
    return submit(process_set, tensor_calls.broadcast, tensors, name, failure, agree=agree, in_place=in_place)


broadcast_async, broadcast_async_ = alone(grouped_broadcast_async), alone(grouped_broadcast_async, in_place=True)
broadcast_ = waiting(broadcast_async_)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a copy of the root's tensor.  The gradient is the mean over the ranks on the root, 0 on the others."""

    def undo(gradients: Tensors) -> list[Tensor]:
        mean = allreduce(gradients[0], process_set=process_set)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    return Differentiable.apply(lambda xs: grouped_broadcast_async(xs, root_rank, name, process_set), undo, tensor)[0]


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

    def undo(gradients: Tensors) -> list[Tensor]:
        return [alltoall(gradients[0], counts, process_set=process_set)[0]]

    rows, counts = Differentiable.apply(lambda xs: alltoall_async(xs[0], splits, name, process_set), undo, tensor)
    return rows if splits is None else (rows, counts)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank has called it."""
    synchronize(submit(process_set, tensor_calls.barrier, (), None))


def join(device: int = -1) -> int:
    """Take part in the other ranks' sums and averages with zeros, until all have joined; return the last that did.

    `device` is not read: zeros are on the device of the others' tensors.
    """
    return global_process_set.matched.join()


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object, pickled on its way, on every rank."""
    run, failure, agree = tensor_calls.broadcast_object, *root_of(root_rank, process_set)
    return synchronize(submit(process_set, run, (), name, failure, agree=agree, obj=obj))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return every rank's object, by rank."""
    return synchronize(submit(process_set, tensor_calls.allgather_object, (), name, obj=obj))


def broadcast_parameters(params: Mapping[str, Tensor] | Iterable, root_rank: int) -> None:
    """Copy the root's tensors into every rank's: of a state_dict, of named parameters or of parameters."""
    named = sorted(params.items()) if isinstance(params, Mapping) else [*params]
    pairs = [each if isinstance(each, tuple) else (None, each) for each in named]
    for call in [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs if isinstance(tensor, Tensor)]:
        synchronize(call)
