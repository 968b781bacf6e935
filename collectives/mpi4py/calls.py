"""Translation of mpi4py's collectives to ours: for each a function of its arguments, with mpi4py's names.

Each describes the call on one rank, and the fact that all ranks know: `nbytes`, by which they choose the library or us.
Numbers are reduced as they are; other data are moved as bytes, since ranks may name the same data differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.mpi4py.buffers import Area, BufferSpec, NotOurs, blocks_of, numbers_in, vector_of
from collectives.schedule.spec import OPS, spec_of

OP_NAMES = {getattr(MPI, op.mpi).handle: op.name for op in reversed(OPS.values())}  # a sum is "sum", not "avg"


class CollectiveCall(NamedTuple):
    """A call of ours: its arrays and options as `Resolver.run` takes them."""

    collective: str
    x: Any
    out: Any
    options: tuple
    nbytes: int  # of its vector: the same on all ranks
    to_load: Sequence[Area] = ()  # to be loaded before
    to_store: Sequence[Area] = ()  # to be stored after
    before: tuple[Any, Any] | None = None  # a copy's target and source
    after: tuple[Any, Any] | None = None

    def begin(self) -> None:
        for area in self.to_load:
            area.load()
        if self.before is not None:
            self.before[0][:] = self.before[1]

    def end(self) -> None:
        if self.after is not None:
            self.after[0][:] = self.after[1]
        for area in self.to_store:
            area.store()


class Ranks(NamedTuple):
    """A communicator's rank and size."""

    rank: int
    size: int


def is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


def op_name(op: MPI.Op, dtype: np.dtype) -> str:
    """Return our name of a predefined op, of numbers for which it is defined."""
    name = OP_NAMES.get(op.handle)
    kind = {"f": "float", "c": "complex"}.get(dtype.kind, "integer")
    if name is None or kind in OPS[name].refused:
        raise NotOurs
    return name


def checked_root(root: int, ranks: Ranks) -> int:
    if not 0 <= index(root) < ranks.size:
        raise NotOurs
    return index(root)


def vector_to_reduce(sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
    """Return a rank's numbers, and the memory of the result: None if that is in place."""
    out = numbers_in(recvbuf, writable=True)
    if is_in_place(sendbuf):
        return out, None
    x = numbers_in(sendbuf, writable=False)
    if x.dtype != out.dtype or x.size != out.size or address(x) == address(out):
        raise NotOurs
    return x, out


def address(array: Any) -> int:
    return MPI.Get_address(array) if isinstance(array, np.ndarray) else array.data.ptr


def barrier(ranks: Ranks) -> CollectiveCall:
    return CollectiveCall("barrier", None, None, ("auto",), 0)


def bcast(ranks: Ranks, buf: Any, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    area = blocks_of(buf, 1, writable=ranks.rank != root)
    areas = ((), [area]) if ranks.rank != root else ([area], ())
    return CollectiveCall("broadcast", area.bytes, None, (root, "auto"), len(area.bytes), *areas)


def allreduce(ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> CollectiveCall:
    return reduction("all_reduce", sendbuf, recvbuf, op)


def scan(ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> CollectiveCall:
    return reduction("scan", sendbuf, recvbuf, op)


def exscan(ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> CollectiveCall:
    return reduction("exscan", sendbuf, recvbuf, op)


def reduction(collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> CollectiveCall:
    x, out = vector_to_reduce(sendbuf, recvbuf)
    return CollectiveCall(collective, x, out, (op_name(op, x.dtype), None, False, "auto"), x.nbytes)


def reduce(ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    if ranks.rank == root:
        x, out = vector_to_reduce(sendbuf, recvbuf)
    else:
        x, out = numbers_in(sendbuf, writable=False), None
    return CollectiveCall("reduce", x, out, (root, op_name(op, x.dtype), None, False, "auto"), x.nbytes)


def reduce_scatter_block(ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> CollectiveCall:
    out = numbers_in(recvbuf, writable=True)
    count, rest = divmod(len(out), ranks.size) if is_in_place(sendbuf) else (len(out), 0)
    if rest:
        raise NotOurs
    return scattered(sendbuf, out, (count,) * ranks.size, count, op)


def reduce_scatter(
    ranks: Ranks, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM
) -> CollectiveCall:
    if recvcounts is None:  # then the library has the ranks exchange counts
        raise NotOurs
    counts = tuple(map(index, recvcounts))
    if len(counts) != ranks.size or min(counts) < 0:
        raise NotOurs
    window = BufferSpec(recvbuf)
    if not is_in_place(sendbuf) and not counts[ranks.rank] and not window.num_elements():
        x = numbers_in(sendbuf, writable=False)  # this rank gets no part of the result
        out = np.empty(0, x.dtype) if isinstance(x, np.ndarray) else x[:0].copy()
    else:
        out = window.elements(writable=True)
    return scattered(sendbuf, out, counts, counts[ranks.rank], op)


def scattered(sendbuf: Any, recv: Any, counts: tuple[int, ...], own: int, op: MPI.Op) -> CollectiveCall:
    """Describe a reduce-scatter; in place the result goes to the beginning of the input."""
    in_place = is_in_place(sendbuf)
    x = recv if in_place else numbers_in(sendbuf, writable=False)
    out = recv[:own].copy() if in_place else recv
    if len(x) != sum(counts) or len(out) != own or x.dtype != out.dtype:
        raise NotOurs
    after = (recv[:own], out) if in_place else None
    uneven = None if len(set(counts)) == 1 else counts
    options = (op_name(op, x.dtype), uneven, None, False, "auto")
    return CollectiveCall("reduce_scatter", x, out, options, x.nbytes, after=after)


def allgather(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    recv = blocks_of(recvbuf, ranks.size, writable=True)
    length = len(recv.bytes) // ranks.size
    return gathered("all_gather", ranks, sendbuf, recv, (length,) * ranks.size, (None, "auto"))


def allgatherv(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    recv, lengths = vector_of(recvbuf, ranks.size)
    counts = None if len(set(lengths)) == 1 else lengths
    return gathered("all_gather", ranks, sendbuf, recv, lengths, (counts, "auto"))


def gather(ranks: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    if ranks.rank == root:
        recv = blocks_of(recvbuf, ranks.size, writable=True)
        length = len(recv.bytes) // ranks.size
        return gathered("gather", ranks, sendbuf, recv, (length,) * ranks.size, (root, None, "auto"))
    send = blocks_of(sendbuf, 1)
    return CollectiveCall("gather", send.bytes, None, (root, None, "auto"), len(send.bytes) * ranks.size, [send])


def gathered(
    collective: str, ranks: Ranks, sendbuf: Any, recv: Area, lengths: Sequence[int], options: tuple[Any, ...]
) -> CollectiveCall:
    """Describe a gather on a rank that gets it; in place its own block is in its place already."""
    begin, length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
    own = recv.bytes[begin : begin + length]
    to_load = recv if is_in_place(sendbuf) else blocks_of(sendbuf, 1)
    x = own if is_in_place(sendbuf) else to_load.bytes
    if len(x) != length:
        raise NotOurs
    return CollectiveCall(collective, x, recv.bytes, options, len(recv.bytes), [to_load], [recv])


def scatter(ranks: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    options = (root, None, "auto")
    if ranks.rank != root:
        recv = blocks_of(recvbuf, 1, writable=True)
        return CollectiveCall("scatter", None, recv.bytes, options, len(recv.bytes) * ranks.size, to_store=[recv])
    send = blocks_of(sendbuf, ranks.size)
    length = len(send.bytes) // ranks.size
    own = send.bytes[root * length : (root + 1) * length]
    if is_in_place(recvbuf):
        return CollectiveCall("scatter", send.bytes, own, options, len(send.bytes), [send])
    recv = blocks_of(recvbuf, 1, writable=True)
    if len(recv.bytes) != length:
        raise NotOurs
    return CollectiveCall("scatter", send.bytes, recv.bytes, options, len(send.bytes), [send], [recv])


def alltoall(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    recv = blocks_of(recvbuf, ranks.size, writable=True)
    if is_in_place(sendbuf):
        x = recv.bytes.copy()
        to_load, before = recv, (x, recv.bytes)
    else:
        to_load, before = blocks_of(sendbuf, ranks.size), None
        x = to_load.bytes
    if len(x) != len(recv.bytes):
        raise NotOurs
    return CollectiveCall("all_to_all", x, recv.bytes, (None, None, "auto"), len(x), [to_load], [recv], before)


DESCRIBE: dict[str, Callable[..., CollectiveCall]] = {
    "Barrier": barrier,
    "Bcast": bcast,
    "Allreduce": allreduce,
    "Reduce": reduce,
    "Reduce_scatter_block": reduce_scatter_block,
    "Reduce_scatter": reduce_scatter,
    "Allgather": allgather,
    "Allgatherv": allgatherv,
    "Gather": gather,
    "Scatter": scatter,
    "Alltoall": alltoall,
    "Scan": scan,
    "Exscan": exscan,
}


def arguments(call: CollectiveCall) -> dict[str, Any]:
    """Return a call's arguments as a plan takes them."""
    spec = spec_of(call.collective)
    out = {} if call.out is None else {"out": call.out}
    return out | dict(zip(spec.options, call.options, strict=True))
