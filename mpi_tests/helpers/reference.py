"""Inputs of all ranks and expected results of collectives, computed in NumPy with exact arithmetic."""

import functools

import numpy as np

from collectives import algorithms
from collectives.arrays.views import dtype_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
COMPLEX = ("complex64", "complex128")
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX, "bool")
HALVES = ("float16", "bfloat16")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
SCANS = ("scan", "exscan")
MOVES = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")
COLLECTIVES = (*REDUCTIONS, *SCANS, *MOVES)
IN_PLACE = ("all_reduce", "broadcast", "reduce", *SCANS)
ROOTED = ("broadcast", "gather", "reduce", "scatter")
BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
TRUTHS = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}
UFUNCS = BITS | TRUTHS | {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add}


def algorithms_of(collective: str, size: int, equal: bool = True) -> list[str]:
    return [*algorithms.names(collective, size, equal), "auto", "mpi"]


def mpi_reduces(dtype: str, op: str) -> bool:
    """Return whether algorithm="mpi" takes a reduction: libraries lack 16-bit floats, and saturate short integers."""
    return dtype not in HALVES and not (op in ("sum", "avg") and dtype in INTEGERS and np.dtype(dtype).itemsize < 4)


def ops_of(dtype: str) -> tuple[str, ...]:
    if dtype == "bool":
        return ("min", "max", *BITS, *TRUTHS)
    if dtype in COMPLEX:
        return ("sum", "prod", "avg")
    return ("sum", "prod", "min", "max", "avg", *(() if dtype in FLOATS else BITS | TRUTHS))


def inputs(size: int, count: int, dtype: str = "float32", op: str = "sum") -> list[np.ndarray]:
    """Return every rank's input: integers small enough that no dtype rounds their sum or product over 8 ranks."""
    largest = 2 if op == "prod" else 15
    return [draw(np.random.default_rng([rank, count]), count, dtype, largest) for rank in range(size)]


def draw(rng: np.random.Generator, count: int, dtype: str, largest: int) -> np.ndarray:
    values = rng.integers(-largest, largest, count, endpoint=True)
    if dtype == "bool":
        return values > 0
    if dtype in COMPLEX:
        return (values + 1j * rng.permutation(values)).astype(dtype)
    return (abs(values) if dtype.startswith("u") else values).astype(dtype_of(dtype))


def widened(x: np.ndarray) -> np.ndarray:
    wide = {"i": "int64", "u": "int64", "b": "bool", "c": "complex128"}
    return x.astype(wide.get(x.dtype.kind, "float64"))


def reduced(xs: list[np.ndarray], op: str) -> np.ndarray:
    total = functools.reduce(UFUNCS[op], map(widened, xs))
    if op == "avg":
        total = np.trunc(total / len(xs)) if xs[0].dtype.kind in "iu" else total / len(xs)
    return total.astype(xs[0].dtype)


def expected(collective: str, xs: list[np.ndarray], rank: int, op: str = "sum", root: int = 0) -> np.ndarray | None:
    """Return the expected result of a collective on `rank`, for flat inputs of one length."""
    match collective:
        case "all_reduce":
            return reduced(xs, op)
        case "reduce_scatter":
            return np.array_split(reduced(xs, op), len(xs))[rank]
        case "reduce":
            return reduced(xs, op) if rank == root else xs[rank]
        case "scan":
            return reduced(xs[: rank + 1], op)
        case "exscan":
            return reduced(xs[:rank], op) if rank else xs[rank]
        case "all_gather":
            return np.concatenate(xs)
        case "all_to_all":
            return np.concatenate([np.split(x, len(xs))[rank] for x in xs])
        case "broadcast":
            return xs[root]
        case "gather":
            return np.concatenate(xs) if rank == root else None
        case "scatter":
            return np.array_split(xs[root], len(xs))[rank]
    raise AssertionError(collective)


def same(actual: np.ndarray | None, want: np.ndarray | None, where: object = "") -> None:
    np.testing.assert_array_equal(actual, want, err_msg=str(where), strict=True)
