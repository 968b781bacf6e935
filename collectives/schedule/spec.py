"""The collectives and the ops, a row each: arguments, chunks on ranks before and after; names of ops.

A collective is about a vector in chunks, of which a rank's arrays hold all, its own, or none: p chunks, or as many as
a schedule cuts it into, a multiple of p where ranks own chunks.  All else follows from a collective's row: which
arguments are checked, the length of a new result, the places of a call's chunks, the contract of a schedule, and the
equivalent call of MPI.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple


class Chunks(Enum):
    """The chunks of the vector that an array holds on each rank."""

    NONE = "none"
    OWN = "the r-th of p equal parts on rank r"
    ALL = "all"
    ALL_ON_ROOT = "all on the root, none elsewhere"
    ALL_BUT_ON_FIRST = "none on rank 0, all elsewhere"

    def on(self, rank: int, size: int, root: int = 0, num_chunks: int = 0) -> range:
        """Return the chunks on a rank, of `num_chunks`, by default one for each rank.

        >>> Chunks.OWN.on(1, size=4), Chunks.OWN.on(1, size=4, num_chunks=8), Chunks.ALL_ON_ROOT.on(1, size=4, root=1)
        (range(1, 2), range(2, 4), range(0, 4))
        """
        num_chunks = num_chunks or size
        if self is Chunks.OWN:
            each, rest = divmod(num_chunks, size)
            assert not rest, f"{num_chunks} chunks are no multiple of {size} ranks"
            return range(rank * each, (rank + 1) * each)
        has_all = {Chunks.ALL: True, Chunks.ALL_ON_ROOT: rank == root, Chunks.ALL_BUT_ON_FIRST: rank > 0}
        return range(num_chunks if has_all.get(self) else 0)


class At(NamedTuple):
    """A chunk of the result, on a rank; its owner, where ranks own chunks."""

    rank: int
    owner: int
    size: int
    root: int


# The ranks that a chunk of the result comes from.
SOURCES: dict[str, Callable[[At], Sequence[int]]] = {
    "everyone": lambda at: range(at.size),
    "owner": lambda at: (at.owner,),
    "root": lambda at: (at.root,),
    "up to own": lambda at: range(at.rank + 1),
    "below": lambda at: range(at.rank),
    "nobody": lambda at: (),
}


class Collective(NamedTuple):
    """A row: `x` holds the chunks `gives`, the result `gets`, each of which comes from the ranks `sources`."""

    name: str
    gives: Chunks
    gets: Chunks
    sources: Callable[[At], Sequence[int]]
    takes: tuple[str, ...]  # the arguments besides `x` and `algorithm`
    mpi: str  # MPI's function, and the one for chunks of several lengths, where there are two
    in_place: bool  # without an `out` the result is `x`; else it is a new array

    @property
    def reduces(self) -> bool:
        return "op" in self.takes

    @property
    def rooted(self) -> bool:
        return "root" in self.takes

    @property
    def exchanges(self) -> bool:
        """Whether chunk d of rank s becomes chunk s of rank d; the result has chunks of its own, p to 2p-1."""
        return "send_counts" in self.takes

    @property
    def options(self) -> tuple[str, ...]:
        """The options that calls take besides arrays, in their order."""
        return (*(name for name in self.takes if name != "out"), "algorithm")

    def reads(self, rank: int, root: int) -> bool:
        """Return whether a rank's `x` is read."""
        return bool(self.gives.on(rank, rank + 1, root))

    def writes(self, rank: int, root: int) -> bool:
        """Return whether a rank gets a result that is not its own `x`, as that of a broadcast is on the root."""
        is_its_own = self.in_place and self.gives is Chunks.ALL_ON_ROOT and rank == root
        return bool(self.gets.on(rank, rank + 1, root)) and not is_its_own


NONE, OWN, ALL, ALL_ON_ROOT, ALL_BUT_ON_FIRST = Chunks
IN_PLACE, APART = True, False
SUMS = "wire_dtype reproducible"
ROWS = (
    # name, chunks of `x`, chunks of the result, their source ranks, arguments, MPI's functions, whether in place
    ("all_reduce", ALL, ALL, "everyone", f"op out {SUMS}", "Allreduce", IN_PLACE),
    ("reduce_scatter", ALL, OWN, "everyone", f"out op counts {SUMS}", "Reduce_scatter_block Reduce_scatter", APART),
    ("all_gather", OWN, ALL, "owner", "out counts", "Allgather Allgatherv", APART),
    ("all_to_all", ALL, ALL, "owner", "out send_counts recv_counts", "Alltoall Alltoallv", APART),
    ("broadcast", ALL_ON_ROOT, ALL, "root", "root", "Bcast", IN_PLACE),
    ("reduce", ALL, ALL_ON_ROOT, "everyone", f"root op out {SUMS}", "Reduce", IN_PLACE),
    ("gather", OWN, ALL_ON_ROOT, "owner", "root out counts", "Gather Gatherv", APART),
    ("scatter", ALL_ON_ROOT, OWN, "root", "root out counts", "Scatter Scatterv", APART),
    ("scan", ALL, ALL, "up to own", f"op out {SUMS}", "Scan", IN_PLACE),
    ("exscan", ALL, ALL_BUT_ON_FIRST, "below", f"op out {SUMS}", "Exscan", IN_PLACE),
    ("barrier", NONE, NONE, "nobody", "", "Barrier", APART),
)
COLLECTIVES = {
    name: Collective(name, gives, gets, SOURCES[sources], tuple(takes.split()), mpi, in_place)
    for name, gives, gets, sources, takes, mpi, in_place in ROWS
}


def spec_of(collective: str) -> Collective:
    """Return the row of a name.

    Raises: ValueError for an unknown name, with the valid ones.
    """
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        raise ValueError(f"collective {collective!r} is unknown: use one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES[collective]


def bus_factor(collective: str, size: int) -> float:
    """Compute nccl-tests' factor from a vector's bytes per second to those of a rank's link.

    >>> [bus_factor(collective, 4) for collective in ("all_reduce", "all_gather", "broadcast")]
    [1.5, 0.75, 1.0]
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (size - 1) / size


DEFAULTS = {"op": "sum", "root": 0, "reproducible": False, "algorithm": "auto"}  # of options; None of the others


@lru_cache(1024)
def options_of(collective: str, **values: Any) -> tuple:
    """Return the values of all options of a collective in their order: defaults for those that are not named.

    >>> options_of("reduce", op="max")
    (0, 'max', None, False, 'auto')
    """
    return tuple(values.get(name, DEFAULTS.get(name)) for name in COLLECTIVES[collective].options)


# Why an op refuses a kind of numbers, and what to use there.
TO_COUNT = "use 'max' for any, 'min' for all, or cast to int32 to count"
UNORDERED = "complex numbers have no order; use 'sum', 'prod' or 'avg'"
BITWISE = "it is defined for integers and bool; use another op, or pass a view of integers"
LOGICAL = "it is defined for integers and bool; use another op, or pass x != 0"
PAIRED = "pairs of a value and an index support only 'minloc' and 'maxloc'; use one of these"
LOCATING = "it is defined for pairs; use arrays of dtype [('value', 'f4'), ('index', 'i4')] or alike, or another op"
OF_NUMBERS = {"bool": TO_COUNT, "pair": PAIRED}
OF_ORDERED = {"complex": UNORDERED, "pair": PAIRED}
OF_BITS = {"float": BITWISE, "complex": BITWISE, "pair": PAIRED}
OF_TRUTHS = {"float": LOGICAL, "complex": LOGICAL, "pair": PAIRED}
OF_PAIRS = dict.fromkeys(("bool", "float", "complex", "integer"), LOCATING)


class NamedOp(NamedTuple):
    """An op, by the names that NumPy and CuPy, the interpreter, mpi4py, and torch's `ReduceOp` have for it.

    The interpreter and torch may have none; then messages are reduced in NumPy.
    """

    name: str
    ufunc: str
    kernel: str
    mpi: str
    torch: str
    refused: Mapping[str, str]  # by kind of numbers: the reason, and what to use there


OPS = {
    op.name: op
    for op in (
        NamedOp("sum", "add", "SUM", "SUM", "SUM", OF_NUMBERS),
        NamedOp("prod", "multiply", "PROD", "PROD", "PRODUCT", OF_NUMBERS),
        NamedOp("min", "minimum", "MIN", "MIN", "MIN", OF_ORDERED),
        NamedOp("max", "maximum", "MAX", "MAX", "MAX", OF_ORDERED),
        NamedOp("avg", "add", "SUM", "SUM", "AVG", OF_NUMBERS),  # a sum, divided by the number of ranks
        NamedOp("band", "bitwise_and", "BAND", "BAND", "BAND", OF_BITS),
        NamedOp("bor", "bitwise_or", "BOR", "BOR", "BOR", OF_BITS),
        NamedOp("bxor", "bitwise_xor", "BXOR", "BXOR", "BXOR", OF_BITS),
        NamedOp("land", "logical_and", "LAND", "LAND", "", OF_TRUTHS),
        NamedOp("lor", "logical_or", "LOR", "LOR", "", OF_TRUTHS),
        NamedOp("lxor", "logical_xor", "LXOR", "LXOR", "", OF_TRUTHS),
        NamedOp("minloc", "", "", "MINLOC", "", OF_PAIRS),
        NamedOp("maxloc", "", "", "MAXLOC", "", OF_PAIRS),
    )
}
