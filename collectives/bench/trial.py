"""What a collective is given and must get in a benchmark."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives import arrays
from collectives.algorithms import ROOTED
from collectives.arguments import REDUCTIONS
from collectives.bench import exact
from collectives.communicator import Communicator

FLOAT32 = np.dtype("float32")
IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})  # what these do by default
BOTH_PLACES = frozenset({"all_reduce", "reduce", "reduce_scatter", "all_gather"})


def places(collective: str) -> tuple[bool, ...]:
    """Whether a collective works in place: out of place first, where it does both."""
    return (False, True) if collective in BOTH_PLACES else (collective in IN_PLACE,)


def element_counts(collective: str, size: int, sizes: Sequence[int], dtype: np.dtype = FLOAT32) -> list[int]:
    """The vectors' elements for sizes in bytes: whole ones and, where chunks must be equal, as many in each.

    >>> element_counts("all_reduce", 8, sizes=[4, 16, 64]), element_counts("all_gather", 8, sizes=[4, 16, 64])
    ([1, 4, 16], [8, 16])
    """
    if collective == "barrier":
        return [0]
    unit = 1 if collective in IN_PLACE else size
    return list(dict.fromkeys(unit * math.ceil(max(1, nbytes) / (unit * dtype.itemsize)) for nbytes in sizes))


class Setting(NamedTuple):
    """What a collective is measured on."""

    collective: str
    memory: str = "symmetric"
    device: str = "cpu"
    dtype: np.dtype = FLOAT32
    op: str = "sum"
    root: int = 0


class Trial:
    """A collective's arguments on this rank, for a vector of `count` elements, and its exact result.

    Collective: arrays are allocated.
    """

    def __init__(
        self,
        comm: Communicator,
        collective: str,
        count: int,
        memory: str,
        in_place: bool | None = None,
        setting: Setting | None = None,
    ):
        self.setting = setting or Setting(collective, memory)
        self.collective, self.count = collective, count
        self.rank, self.size, self.root = comm.rank, comm.size, self.setting.root
        self.in_place = collective in IN_PLACE if in_place is None else in_place
        self.dtype, self.nbytes = self.setting.dtype, count * self.setting.dtype.itemsize
        self.device = arrays.device(self.setting.device)
        self.x, self.out = self.allocated(comm)
        self.arguments: dict[str, Any] = {"out": self.out} if self.out is not None and self.out is not self.x else {}
        if collective in REDUCTIONS:
            self.arguments["op"] = self.setting.op
        if collective in ROOTED:
            self.arguments["root"] = self.root

    def allocated(self, comm: Communicator) -> tuple[Any, Any]:
        """`x`, and where the result is to be: the same array, or a part of one in the other, or None for none."""

        def empty(count: int) -> Any:
            if self.setting.memory == "symmetric":
                return comm.empty(count, self.dtype, self.setting.device)
            return self.device.empty(count, self.dtype)

        count, share, is_root = self.count, self.count // self.size, self.rank == self.root
        own = slice(self.rank * share, (self.rank + 1) * share)
        match self.collective:
            case "all_reduce" | "broadcast" | "reduce":
                x, out = empty(count), None if self.in_place else empty(count)
                return x, x if out is None or (self.collective == "reduce" and not is_root) else out
            case "reduce_scatter":
                x = empty(count)
                return x, x[own] if self.in_place else empty(share)
            case "all_gather":
                out = empty(count)
                return out[own] if self.in_place else empty(share), out
            case "gather":
                x, out = empty(share), empty(count if is_root else 0)
                return x, out if is_root else None
            case "scatter":
                x, out = empty(count if is_root else 0), empty(share)
                return x if is_root else None, out
            case "all_to_all":
                return empty(count), empty(count)
        return None, None

    def given(self) -> Any:
        """What this rank gives; None for no array."""
        if self.x is None:
            return None
        if self.collective in REDUCTIONS:
            return exact.vector(self.count, self.dtype, self.rank, self.size, self.setting.op)
        if self.collective == "broadcast" and self.rank != self.root:
            return np.full(self.count, exact.NEVER).astype(self.dtype)
        return self.moved(len(self.x), self.rank)

    def wanted(self) -> Any:
        """What this rank must get; None for no array."""
        share = self.count // self.size
        own = slice(self.rank * share, (self.rank + 1) * share)
        match self.collective:
            case "all_reduce" | "reduce" | "reduce_scatter":
                if self.collective == "reduce" and self.rank != self.root:
                    return self.given()
                total = exact.reduced(self.count, self.dtype, self.size, self.setting.op)
                return total[own] if self.collective == "reduce_scatter" else total
            case "broadcast":
                return self.moved(self.count, self.root)
            case "scatter":
                return self.moved(self.count, self.root)[own]
            case "all_gather" | "gather":
                everyone = [self.moved(share, rank) for rank in range(self.size)]
                return None if self.out is None else np.concatenate(everyone)
            case "all_to_all":
                return np.concatenate([self.moved(self.count, rank)[own] for rank in range(self.size)])
        return None

    def moved(self, count: int, rank: int) -> np.ndarray:
        return exact.moved(count, self.dtype, rank)

    def fill(self) -> None:
        """Put what is given in its place, and what can't be the result where that will be."""
        if self.out is not None and self.out is not self.x:
            self.put(self.out, np.full(len(self.out), exact.NEVER).astype(self.dtype))
        if self.x is not None:
            self.put(self.x, self.given())

    def put(self, target: Any, values: np.ndarray) -> None:
        self.device.begin()
        self.device.copy(target, values)
        self.device.end(self.device.record())
        self.device.synchronize()

    def num_wrong(self) -> int:
        """Elements of the result that are not what they must be."""
        if self.out is None:
            return 0
        got = np.empty(len(self.out), self.dtype)
        self.device.begin()
        self.device.copy(got, self.out)
        self.device.synchronize()
        return int(np.count_nonzero(got != self.wanted()))
