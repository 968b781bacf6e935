"""The names of the reduction kernels, a comparison of their results with the host's, and their speed on a GPU.

`mpi_tests.gpu_check` runs the comparison and the measurement.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.views import dtype_of
from mpi_tests.helpers.reductions import CASES, check_reduction, draw
from mpi_tests.helpers.reference import DTYPES, ops_of

CASTS = list(itertools.permutations(("float16", "bfloat16", "float32", "float64"), 2))
NUMS_SOURCES = (1, 2, 3, 4, 8, 11)
COUNTS = (0, 1, 9, 1000, 300_001)
NBYTES = 1 << 28
NUM_SOURCES = 4
ROUNDS = 20


def names(nums_sources: Iterable[int], divisor: int = 2) -> Iterator[str]:
    """Yield the names of the kernels of every dtype and op for these numbers of sources."""
    for dtype, num in itertools.product(map(dtype_of, DTYPES), nums_sources):
        for op in ops_of(str(dtype)):
            yield cuda_kernels.plan(op, dtype, dtype, 1, num, divisor if op == "avg" else 1).name
    for into, source, num in [*((*pair, 1) for pair in CASTS), ("float32", "bfloat16", 3)]:
        yield cuda_kernels.plan("sum", dtype_of(into), dtype_of(source), 1, num, 1).name


def check(counts: tuple[int, ...] = COUNTS, limit_s: float = math.inf) -> str:
    """Compare reductions of CuPy arrays with the host's: dtypes, ops, numbers of sources, lengths and alignments.

    The order is random, and the check ends when its time is up.
    """
    import cupy

    end = time.monotonic() + limit_s
    rng = np.random.default_rng()
    reductions = [
        (name, *reduce) for name in DTYPES for reduce in itertools.product(ops_of(name), NUMS_SOURCES, counts, CASES)
    ]
    random.shuffle(reductions)
    for index, (name, op, num, count, case) in enumerate(reductions):
        if time.monotonic() > end:
            return f"{index} of {len(reductions)} reductions, as on the host"
        check_reduction(cupy, op, [draw(rng, count, dtype_of(name)) for _ in range(num)], case)
    return f"{len(reductions)} of {len(reductions)} reductions, as on the host"


def speed() -> list[tuple[str, float, float]]:
    """Return rows of name, median GB/s read and written, and its ratio to that of a copy in device memory."""
    import cupy

    copied = [cupy.zeros(NBYTES, np.uint8) for _ in range(2)]
    rate = gb_per_s(lambda: cupy.copyto(*copied), 2 * NBYTES)
    rows = [("copy", rate, 1.0)]
    for name in ("bfloat16", "float32"):
        dtype = dtype_of(name)
        out, *sources = (cupy.zeros(NBYTES, np.uint8).view(dtype) for _ in range(NUM_SOURCES + 1))
        reduce = cuda_kernels.bind_reduction("sum", out, sources)
        reduced = gb_per_s(reduce, (NUM_SOURCES + 1) * NBYTES)
        rows.append((f"sum of {NUM_SOURCES} sources of {name}", reduced, reduced / rate))
    return rows


def gb_per_s(run: Callable[[], None], nbytes: int) -> float:
    from cupyx.profiler import benchmark

    times = benchmark(run, n_repeat=ROUNDS, n_warmup=3, name="run").gpu_times  # a name, as a launch has no __name__
    return nbytes / float(np.median(times)) / 1e9
