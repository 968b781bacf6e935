"""The input of a collective in a benchmark, and its exact result.

Reductions are exact in any order, for every dtype and op, on any number of ranks: in each element a few ranks give a
small integer, or for a product 1 or 2, and the others one that changes nothing, so that no partial result exceeds 64,
which int8 holds, and bfloat16 exactly.  For bitwise ops, a rank has one of 6 bits, or lacks it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collectives.arrays import views
from collectives.arrays.ops import COMPLEX
from collectives.bench.benchmarks import BENCHMARKS
from collectives.schedule.moves import even_runs
from collectives.schedule.spec import OF_BITS, OF_TRUTHS, OPS, At, Chunks

if TYPE_CHECKING:
    from collectives.communicator import Communicator

PEERS = ("mpi", "gloo", "nccl")  # names used like an algorithm's: other libraries' collectives
# The reduction of times over ranks, in the order of nccl-tests' --average: an op, or rank 0's own time.
RANK_TIMES = {"rank 0": None, "mean of ranks": "avg", "fastest rank": "min", "slowest rank": "max"}
# How runs are timed, in the numbering of nccl-tests' --blocking; each run's own time does not count the barrier before.
BLOCKING = ("in a row", "in a row with a barrier after each", "in a row, waiting for each", "each after a barrier")
EACH = 3
GIVERS, PERIOD = 6, 7  # a product's 2^6, and unlike the lengths of chunks, so that one in another's place shows
MOVED = 113  # different numbers for collectives that do not reduce
NUM_BITS, EVERY_BIT = 6, 2**6 - 1
NEVER = 120  # does not occur in results


class Workload(NamedTuple):
    """The name of a benchmark, which is a collective's as a rule, and the arrays that it is measured on."""

    collective: str
    memory: str = "symmetric"
    device: str = "cpu"
    dtype: np.dtype = np.dtype("float32")
    op: str = "sum"
    root: int = 0


def in_place_choices(name: str) -> tuple[bool, ...]:
    """List whether a benchmark works in place: out of place first, if it does both."""
    spec = BENCHMARKS[name].spec
    both = "out" in spec.takes and not spec.exchanges and (spec.in_place or not spec.rooted)
    return (False, True) if both else (spec.in_place,)


def element_counts(workload: Workload, size: int, sizes: Sequence[int]) -> list[int]:
    """Convert sizes in bytes to elements: whole ones and, where chunks must be equal, as many in each.

    >>> element_counts(Workload("all_reduce"), 8, sizes=[4, 16, 64])
    [1, 4, 16]
    >>> element_counts(Workload("all_gather"), 8, sizes=[4, 16, 64])
    [8, 16]
    >>> element_counts(Workload("all_to_all_v"), 4, sizes=[4, 64])  # 0, 1, 2 and 3 units
    [6, 18]
    """
    _, spec, is_uneven, _, messages = BENCHMARKS[workload.collective]
    if spec.gives is Chunks.NONE:
        return [0]
    unit = 1 if spec.in_place or messages else sum(uneven(1, 0, size)) if is_uneven else size
    itemsize = workload.dtype.itemsize
    return list(dict.fromkeys(unit * math.ceil(max(1, nbytes) / (unit * itemsize)) for nbytes in sizes))


def uneven(unit: int, rank: int, size: int) -> list[int]:
    """List the lengths of the chunks that a rank sends, as many units as a rank is further on.

    As in nccl-tests' alltoallv, every rank sends and receives as much as any other.

    >>> uneven(10, 1, 4), uneven(10, 0, 1)
    ([30, 0, 10, 20], [10])
    """
    return [unit * ((other - rank) % size) for other in range(size)] if size > 1 else [unit]


class Trial:
    """A collective's arguments on this rank, for a vector of `count` elements, and its exact result.

    Its arrays begin `unalign` elements into their memory.  Collective: arrays are allocated.
    """

    def __init__(
        self, comm: "Communicator", workload: Workload, count: int, in_place: bool | None = None, unalign: int = 0
    ):
        self.workload, self.count, self.unalign = workload, count, unalign
        self.rank, self.size, self.root = comm.rank, comm.size, workload.root
        self.benchmark = BENCHMARKS[workload.collective]
        self.spec = self.benchmark.spec
        self.collective = self.spec.name
        self.gives, self.gets = (side.on(self.rank, self.size, self.root) for side in (self.spec.gives, self.spec.gets))
        self.in_place = self.spec.in_place if in_place is None else in_place
        self.dtype, self.nbytes = workload.dtype, count * workload.dtype.itemsize
        self.device = views.device(workload.device)
        self.x, self.out = self.allocate(comm)
        self.arguments: dict[str, Any] = {"out": self.out} if self.out is not None and self.out is not self.x else {}
        if self.spec.reduces:
            self.arguments["op"] = workload.op
        if self.spec.rooted:
            self.arguments["root"] = self.root
        if self.benchmark.is_uneven:
            self.arguments["send_counts"] = self.lengths(self.rank)
            self.arguments["recv_counts"] = [self.lengths(source)[self.rank] for source in range(self.size)]

    def allocate(self, comm: "Communicator") -> tuple[Any, Any]:
        """Return `x` and the array of the result: the same, or a part of one in the other, or None for none."""

        def empty(count: int) -> Any:
            length = count + self.unalign
            if self.workload.memory == "symmetric":
                return comm.empty(length, self.dtype, self.workload.device)[self.unalign :]
            return self.device.empty(length, self.dtype)[self.unalign :]

        if self.spec.gives is Chunks.NONE:
            return None, None
        if self.spec.in_place:
            x, out = empty(self.count), None if self.in_place else empty(self.count)  # on all ranks
            return x, x if out is None or not self.gets else out
        if self.in_place:
            whole = empty(self.count)
            own = whole[self.slice_of(range(self.rank, self.rank + 1))]
            return (whole, own) if self.spec.gets is Chunks.OWN else (own, whole)
        x, out = (empty(len(chunks) * self.count // self.size) for chunks in (self.gives, self.gets))  # on all ranks
        return x if self.gives else None, out if self.gets else None

    def lengths(self, rank: int) -> list[int]:
        """List the lengths of the chunks of a rank's vector."""
        if self.benchmark.is_uneven:
            return uneven(self.count // sum(uneven(1, 0, self.size)), rank, self.size)
        return [len(run) for run in even_runs(self.count, self.size)]

    def slice_of(self, chunks: range, rank: int = 0) -> slice:
        """Return the slice of consecutive chunks in a rank's vector."""
        ends = [0, *accumulate(self.lengths(rank))]
        return slice(ends[chunks.start], ends[chunks.stop])

    def input(self) -> Any:
        """Compute this rank's input; None for no array."""
        if self.x is None:
            return None
        if not self.gives:
            return np.full(len(self.x), NEVER).astype(self.dtype)
        return self.input_of(self.rank)

    def input_of(self, rank: int) -> np.ndarray:
        if self.spec.reduces:
            return operand(self.count, self.dtype, rank, self.size, self.workload.op)
        count = self.count // self.size if self.spec.gives is Chunks.OWN else self.count
        return payload(count, self.dtype, rank)

    def expected(self) -> Any:
        """Compute this rank's exact result; None for no array."""
        if not self.gets:
            return self.input() if self.spec.in_place else None
        sources = [self.spec.sources(At(self.rank, chunk, self.size, self.root)) for chunk in self.gets]
        if self.spec.reduces:
            total = reduction(self.count, self.dtype, self.size, self.workload.op, sources[0])
            return total[self.slice_of(self.gets)]
        chunks = []
        for chunk, (source,) in zip(self.gets, sources, strict=True):
            sent = self.rank if self.spec.exchanges else chunk
            vector = self.input_of(source)
            sent_chunk = self.slice_of(range(sent, sent + 1), source)
            chunks.append(vector if self.spec.gives is Chunks.OWN else vector[sent_chunk])
        return np.concatenate(chunks)

    def fill(self) -> None:
        """Write this rank's input, and impossible values in the place of the result."""
        values = [] if self.x is None else [(self.x, self.input())]
        if self.out is not None and self.out is not self.x:
            values.insert(0, (self.out, np.full(len(self.out), NEVER).astype(self.dtype)))
        self.device.begin()
        for target, source in values:
            self.device.copy(target, source)
        self.device.end(self.device.record())
        self.device.synchronize()

    def num_wrong(self) -> int:
        if self.out is None:
            return 0
        result = np.empty(len(self.out), self.dtype)
        self.device.begin()
        self.device.copy(result, self.out)
        self.device.synchronize()
        return int(np.count_nonzero(result != self.expected()))


class MessageTrial(Trial):
    """The vectors that a rank sends and receives; the element of a reply has an array of its own."""

    def __init__(self, comm: "Communicator", workload: Workload, *arguments: Any, **more: Any):
        messages = BENCHMARKS[workload.collective].messages
        assert messages is not None
        self.messages, self.partners = messages, messages.partners(comm.rank, comm.size)
        self.is_first = self.partners is not None and comm.rank < self.partners[0]  # of a pair
        super().__init__(comm, workload, *arguments, **more)
        self.element = self.device.empty(1, self.dtype)

    def allocate(self, comm: "Communicator") -> tuple[Any, Any]:
        x, out = super().allocate(comm)
        is_target = self.messages.both_ways or not self.is_first or self.messages.reply == "vector"
        return x, out if self.partners and is_target else None

    def expected(self) -> Any:
        return None if self.partners is None else self.input_of(self.partners[1])


def trial_of(
    comm: "Communicator", workload: Workload, count: int, in_place: bool | None = None, unalign: int = 0
) -> Trial:
    """Make the trial of a benchmark.  Collective."""
    kind = MessageTrial if BENCHMARKS[workload.collective].messages else Trial
    return kind(comm, workload, count, in_place, unalign)


def operand(count: int, dtype: np.dtype, rank: int, size: int, op: str) -> np.ndarray:
    """Compute a rank's operand of a reduction.

    >>> operand(9, np.dtype("int8"), rank=1, size=2, op="sum")
    array([1, 2, 3, 4, 5, 6, 0, 1, 2], dtype=int8)
    """
    return repeat_to(operand_period(dtype, rank, size, op), count, dtype, op)


def reduction(count: int, dtype: np.dtype, size: int, op: str, ranks: Sequence[int] = ()) -> np.ndarray:
    """Compute the reduction of some ranks' operands, or of all.

    >>> reduction(4, np.dtype("float32"), size=2, op="sum"), reduction(4, np.dtype("float32"), size=2, op="avg")
    (array([1., 3., 5., 7.], dtype=float32), array([0.5, 1.5, 2.5, 3.5], dtype=float32))
    """
    total = functools.reduce(
        getattr(np, OPS[op].ufunc), (operand_period(dtype, rank, size, op) for rank in ranks or range(size))
    )
    result = repeat_to(total, count, dtype, op)
    if op == "avg":
        views.host().divide(result, size)
    return result


def payload(count: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """Compute a rank's input for collectives that do not reduce.

    >>> payload(4, np.dtype("float32"), rank=0), payload(4, np.dtype("float32"), rank=1)
    (array([0., 1., 2., 3.], dtype=float32), array([31., 32., 33., 34.], dtype=float32))
    """
    numbers = (np.arange(MOVED) + 31 * rank) % MOVED
    return repeat_to(numbers % 2 if dtype == np.dtype(bool) else numbers, count, dtype)


TRUTHS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "land": lambda numbers: numbers > 0,
    "lor": lambda numbers: numbers == 0,
    "lxor": lambda numbers: numbers % 2,
}


def operand_period(dtype: np.dtype, rank: int, size: int, op: str) -> np.ndarray:
    """Compute a rank's numbers, until they repeat."""
    elements = np.arange(PERIOD * size)
    numbers = (elements + rank) % PERIOD
    if op == "prod":
        numbers = 1 + numbers % 2
    elif dtype == np.dtype(bool):
        numbers %= 2
    elif op in TRUTHS:  # any number but 0 is true
        numbers = 3 * TRUTHS[op](numbers)
    elif OPS[op].refused is OF_BITS:
        numbers = 1 << numbers % NUM_BITS
        numbers = EVERY_BIT - numbers if op == "band" else numbers
    elif OPS[op].refused is OF_TRUTHS:
        numbers = (numbers == GIVERS) ^ (op == "land")
    neutral = {"prod": 1, "min": PERIOD, "band": EVERY_BIT, "land": 1}.get(op, 0)
    return np.where((elements - rank) % size < GIVERS, numbers, neutral)


def repeat_to(numbers: np.ndarray, count: int, dtype: np.dtype, op: str = "sum") -> np.ndarray:
    """Repeat numbers to a length; complex ones have two different parts, but for a product."""
    values = numbers * (1 + 2j) if dtype in COMPLEX and op != "prod" else numbers
    return np.resize(values.astype(dtype), count)
