"""The ops of reductions, a row each: what each library calls them, and of which numbers they make no sense."""

from collections.abc import Mapping
from typing import NamedTuple

TO_COUNT = "use 'max' for any, 'min' for all, or cast to int32 to count"
UNORDERED = "complex numbers have no order; use 'sum', 'prod' or 'avg'"
BITWISE = "it is of integers and bool; use another, or pass a view of integers"
OF_NUMBERS = {"bool": TO_COUNT}
OF_ORDERED = {"complex": UNORDERED}
OF_BITS = {"float": BITWISE, "complex": BITWISE}


class Op(NamedTuple):
    """An op, by the names that NumPy and CuPy, the interpreter, mpi4py, and torch's `ReduceOp` have for it."""

    name: str
    ufunc: str
    kernel: str
    mpi: str
    torch: str
    refused: Mapping[str, str]  # of which kinds of numbers, and what to use there


OPS = {
    op.name: op
    for op in (
        Op("sum", "add", "SUM", "SUM", "SUM", OF_NUMBERS),
        Op("prod", "multiply", "PROD", "PROD", "PRODUCT", OF_NUMBERS),
        Op("min", "minimum", "MIN", "MIN", "MIN", OF_ORDERED),
        Op("max", "maximum", "MAX", "MAX", "MAX", OF_ORDERED),
        Op("avg", "add", "SUM", "SUM", "AVG", OF_NUMBERS),  # a sum, which is divided
        Op("band", "bitwise_and", "BAND", "BAND", "BAND", OF_BITS),
        Op("bor", "bitwise_or", "BOR", "BOR", "BOR", OF_BITS),
        Op("bxor", "bitwise_xor", "BXOR", "BXOR", "BXOR", OF_BITS),
    )
}
