"""What a collective is given and must get in a benchmark: numbers so small and whole that sums are exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.communicator import Communicator

DTYPE = np.dtype("float32")
IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
PERIOD = 7  # of the numbers: unlike the lengths of chunks, so that one in another's place shows


def element_counts(collective: str, size: int, sizes: Sequence[int]) -> list[int]:
    """The vectors' elements for sizes in bytes: whole ones and, where chunks must be equal, as many in each.

    >>> element_counts("all_reduce", 8, sizes=[4, 16, 64]), element_counts("all_gather", 8, sizes=[4, 16, 64])
    ([1, 4, 16], [8, 16])
    """
    if collective == "barrier":
        return [0]
    unit = 1 if collective in IN_PLACE else size
    return list(dict.fromkeys(unit * math.ceil(max(1, nbytes) / (unit * DTYPE.itemsize)) for nbytes in sizes))


class Trial:
    """A collective's arguments on this rank, for a vector of `count` elements, and its exact result."""

    def __init__(self, comm: Communicator, collective: str, count: int, memory: str):
        self.collective, self.rank, self.size, self.count = collective, comm.rank, comm.size, count
        self.nbytes = count * DTYPE.itemsize
        self.given, self.wanted = self.numbers()
        empty: Callable[..., Any] = comm.empty if memory == "symmetric" else np.empty
        x, out = (empty(0 if numbers is None else len(numbers), DTYPE) for numbers in (self.given, self.wanted))
        self.x = None if self.given is None else x
        self.arguments: dict[str, Any] = {}
        if collective not in IN_PLACE and self.wanted is not None:
            self.arguments["out"] = out

    def numbers(self) -> tuple[Any, Any]:
        """What this rank gives, and what it must get; None for no array."""
        rank, everyone, count = self.rank, range(self.size), self.count
        share = count // self.size
        mine = slice(rank * share, (rank + 1) * share)
        match self.collective:
            case "all_reduce":
                return vector(count, rank), vector(count, *everyone)
            case "reduce":
                return vector(count, rank), vector(count, *everyone) if rank == 0 else vector(count, rank)
            case "reduce_scatter":
                return vector(count, rank), vector(count, *everyone)[mine]
            case "broadcast":
                return vector(count, 0) if rank == 0 else np.zeros(count, DTYPE), vector(count, 0)
            case "scatter":
                return vector(count, 0) if rank == 0 else None, vector(count, 0)[mine]
            case "all_gather":
                return vector(share, rank), np.concatenate([vector(share, other) for other in everyone])
            case "gather":
                whole = np.concatenate([vector(share, other) for other in everyone])
                return vector(share, rank), whole if rank == 0 else None
            case "all_to_all":
                return vector(count, rank), np.concatenate([vector(count, other)[mine] for other in everyone])
        return None, None

    def fill(self) -> None:
        """Put what is given in its place, and what can't be the result where that will be."""
        if self.x is not None:
            self.x[:] = self.given
        if "out" in self.arguments:
            self.arguments["out"].fill(-1)

    def check(self, result: Any) -> None:
        assert np.array_equal(result, self.wanted), (
            f"{self.collective} of {self.nbytes} bytes has a wrong result on rank {self.rank} of {self.size}"
        )


def vector(count: int, *ranks: int) -> np.ndarray:
    """The sum of some ranks' vectors.

    >>> vector(9, 1), vector(3, 0, 1)
    (array([1., 2., 3., 4., 5., 6., 0., 1., 2.], dtype=float32), array([1., 3., 5.], dtype=float32))
    """
    period = np.sum([(np.arange(PERIOD) + rank) % PERIOD for rank in ranks], axis=0)
    return np.resize(period.astype(DTYPE), count)
