"""Translation of mpi4py's collectives to ours: for each a function of its arguments, with mpi4py's names.

Each describes the call on one rank, and the fact that all ranks know: `nbytes`, by which they choose the library or us.
Numbers are reduced as they are; other data are moved as bytes, since ranks may name the same data differently.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import pointer
from collectives.arrays.packing import Packing
from collectives.mpi4py.buffers import BufferSpec, NotOurs, blocks_of, numbers_in, vector_of
from collectives.schedule.spec import COLLECTIVES, OPS, options_of

OP_NAMES = {getattr(MPI, op.mpi).handle: op.name for op in reversed(OPS.values())}  # a sum is "sum", not "avg"


class CollectiveCall(NamedTuple):
    """A call of ours: its arrays and options as `Dispatcher.run` takes them."""

    collective: str
    x: Any
    out: Any
    options: tuple
    nbytes: int  # of its vector: the same on all ranks
    inputs: Sequence[Packing] = ()  # to be loaded before it
    results: Sequence[Packing] = ()  # to be stored after it

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a plan beside the input."""
        options = dict(zip(COLLECTIVES[self.collective].options, self.options, strict=True))
        return options if self.out is None else options | {"out": self.out}

    def load(self) -> None:
        for each in self.inputs:
            each.load()

    def store(self) -> None:
        for each in self.results:
            each.store()


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


def bcast(ranks: Ranks, buf: Any, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    data = blocks_of(buf, 1, writable=ranks.rank != root)
    copied = ((), [data]) if ranks.rank != root else ([data], ())
    return CollectiveCall("broadcast", data.array, None, options_of("broadcast", root=root), len(data.array), *copied)


def reduction(collective: str, ranks: Ranks, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> CollectiveCall:
    x = result = numbers_in(recvbuf, writable=True)
    out = None
    if not is_in_place(sendbuf):
        x, out = numbers_in(sendbuf, writable=False), result
        if x.dtype != out.dtype or x.size != out.size or pointer(x) == pointer(out):
            raise NotOurs
    return CollectiveCall(collective, x, out, options_of(collective, op=op_name(op, x.dtype)), x.nbytes)


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
    results = [Packing(out, [(recv[:own], out)])] if in_place else ()
    uneven = None if len(set(counts)) == 1 else counts
    options = options_of("reduce_scatter", op=op_name(op, x.dtype), counts=uneven)
    return CollectiveCall("reduce_scatter", x, out, options, x.nbytes, results=results)


def allgather(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    recv = blocks_of(recvbuf, ranks.size, writable=True)
    return gathered(ranks, sendbuf, recv, (len(recv.array) // ranks.size,) * ranks.size)


def allgatherv(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    return gathered(ranks, sendbuf, *vector_of(recvbuf, ranks.size))


def gathered(ranks: Ranks, sendbuf: Any, recv: Packing, lengths: tuple[int, ...]) -> CollectiveCall:
    """Describe an all-gather; in place this rank's block is in its place already."""
    begin, length = sum(lengths[: ranks.rank]), lengths[ranks.rank]
    own = recv.array[begin : begin + length]
    send = recv if is_in_place(sendbuf) else blocks_of(sendbuf, 1)
    x = own if is_in_place(sendbuf) else send.array
    if len(x) != length:
        raise NotOurs
    options = options_of("all_gather", counts=None if len(set(lengths)) == 1 else lengths)
    return CollectiveCall("all_gather", x, recv.array, options, len(recv.array), [send], [recv])


def scatter(ranks: Ranks, sendbuf: Any, recvbuf: Any, root: int = 0) -> CollectiveCall:
    root = checked_root(root, ranks)
    options = options_of("scatter", root=root)
    if ranks.rank != root:
        recv = blocks_of(recvbuf, 1, writable=True)
        return CollectiveCall("scatter", None, recv.array, options, len(recv.array) * ranks.size, (), [recv])
    send = blocks_of(sendbuf, ranks.size)
    length = len(send.array) // ranks.size
    own = send.array[root * length : (root + 1) * length]
    if is_in_place(recvbuf):
        return CollectiveCall("scatter", send.array, own, options, len(send.array), [send])
    recv = blocks_of(recvbuf, 1, writable=True)
    if len(recv.array) != length:
        raise NotOurs
    return CollectiveCall("scatter", send.array, recv.array, options, len(send.array), [send], [recv])


def alltoall(ranks: Ranks, sendbuf: Any, recvbuf: Any) -> CollectiveCall:
    recv = blocks_of(recvbuf, ranks.size, writable=True)
    in_place = is_in_place(sendbuf)
    send = recv if in_place else blocks_of(sendbuf, ranks.size)
    x = recv.array.copy() if in_place else send.array
    if len(x) != len(recv.array):
        raise NotOurs
    inputs = [send, Packing(x, [(recv.array, x)])] if in_place else [send]
    return CollectiveCall("all_to_all", x, recv.array, options_of("all_to_all"), len(x), inputs, [recv])


CALLS = bcast, reduce_scatter_block, reduce_scatter, allgather, allgatherv, scatter, alltoall
DESCRIBE: dict[str, Callable[..., CollectiveCall]] = {each.__name__.capitalize(): each for each in CALLS}
DESCRIBE |= {COLLECTIVES[name].mpi: partial(reduction, name) for name in ("all_reduce", "scan")}
