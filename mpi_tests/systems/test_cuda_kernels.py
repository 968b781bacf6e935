import itertools

import numpy as np
import pytest

from collectives.arrays import cuda_kernels, views
from collectives.arrays.ops import FLOATS, HALVES
from collectives.arrays.views import dtype_of
from mpi_tests.helpers import gpu_kernels
from mpi_tests.helpers.gpu_kernels import CASTS, names
from mpi_tests.helpers.reductions import (
    ALIGNED,
    CASES,
    COUNTS,
    REAL,
    Guarded,
    check_reduction,
    draw,
    reduce,
    reduced,
    same,
)
from mpi_tests.helpers.reference import DTYPES, INTEGERS, ops_of

pytestmark = pytest.mark.shares_cores

THREADS = 4  # per block, and at most 4 blocks: so few that each processes several pieces


@pytest.fixture
def launches(cuda, monkeypatch):
    """Record the names, grids and streams of the launches of kernels that are compiled together."""
    cupy, launches = cuda.cupy, []
    expressions = tuple(dict.fromkeys(names(range(1, 9))))
    code = cuda_kernels.SOURCE.read_text()
    module = cupy.RawModule(code=code, options=cuda_kernels.OPTIONS, name_expressions=expressions)

    def kernel(name, device):
        def launch(grid, block, arguments, stream):
            launches.append((name, grid[0], stream))
            module.get_function(name)(grid, block, arguments, stream=stream)

        return launch

    monkeypatch.setattr(cuda_kernels, "kernel", kernel)
    monkeypatch.setattr(cuda_kernels, "BLOCK_THREADS", THREADS)
    monkeypatch.setattr(cuda_kernels, "BLOCKS_PER_MULTIPROCESSOR", 1)
    return launches


@pytest.fixture
def cupy(cuda, launches):
    return cuda.cupy


@pytest.mark.parametrize("name", DTYPES)
def test_reductions_are_those_of_the_host(cupy, name):
    dtype, rng, cases = dtype_of(name), np.random.default_rng(0), itertools.cycle(CASES)
    for op, num, count in itertools.product(ops_of(name), range(1, 9), COUNTS):
        case = next(cases)
        check_reduction(cupy, op, [draw(rng, count, dtype) for _ in range(num)], case)


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "complex64"])
def test_more_sources_than_are_loaded_at_once(cupy, launches, dtype):
    rng = np.random.default_rng(1)
    for num in (9, 11, 16, 64):
        check_reduction(cupy, "sum", [draw(rng, 200, dtype_of(dtype)) for _ in range(num)], ALIGNED)
    assert {name[-2] for name, *_ in launches} == {"3", "1", "8"}


def test_two_halves_are_reduced_as_the_device_does(cupy):
    for dtype in sorted(HALVES, key=str):
        low, high = (draw(np.random.default_rng(seed), 1000, dtype) for seed in range(2))
        for op in ops_of(str(dtype)):
            actual, want = cupy.asarray(low), np.empty_like(low)
            reduce(op, actual, [actual, cupy.asarray(high)])
            views.host().reduce(op, low, high, want)
            same(actual.get(), want, op)


@np.errstate(all="ignore")
def near_ties(into, source):
    """Return values to round to `into`: representable numbers, midpoints of neighbours, and values next to them."""
    of_16_bits = np.arange(1 << 16, dtype=np.uint16).view(into if into in HALVES else np.float16).astype(into)
    numbers = np.concatenate([of_16_bits, draw(np.random.default_rng(2), 1000, into)])
    ties = numbers.astype(np.float64) / 2 + np.nextafter(numbers, into.type(np.inf)).astype(np.float64) / 2
    beside = [np.nextafter(ties.astype(source), source.type(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([numbers.astype(source), ties.astype(source), *beside])


@pytest.mark.parametrize(("into", "source"), CASTS)
def test_casts_round_as_numpy(cupy, into, source):
    into, source = dtype_of(into), dtype_of(source)
    x = near_ties(into, source)
    out = Guarded(cupy, np.zeros(len(x), into), 1)
    cuda_kernels.cast(out.array, Guarded(cupy, x, 1).array)
    with np.errstate(all="ignore"):
        same(out.get(), x.astype(into))


def test_cast_to_the_same_is_a_copy(cupy):
    for dtype in map(dtype_of, DTYPES):
        x = draw(np.random.default_rng(3), 100, dtype)
        out = cupy.asarray(np.zeros_like(x))
        cuda_kernels.cast(out, cupy.asarray(x))
        same(out.get(), x)


def test_sums_of_16_bits_may_stay_in_32(cupy):
    sources = [draw(np.random.default_rng(seed), 100, dtype_of("bfloat16")) for seed in range(3)]
    out = cupy.asarray(np.zeros(100, np.float32))
    reduce("sum", out, list(map(cupy.asarray, sources)))
    with np.errstate(all="ignore"):
        same(out.get(), reduced("sum", [source.astype(np.float32) for source in sources]))


@pytest.mark.parametrize("dtype", [*sorted(map(str, FLOATS)), *REAL, *INTEGERS])
def test_divide(cupy, dtype):
    for divisor in (1, 3, 7):
        x = draw(np.random.default_rng(divisor), 500, dtype_of(dtype))
        want = x.copy()
        views.host().divide(want, divisor)
        actual = cupy.asarray(x)
        cuda_kernels.divide(actual, divisor)
        same(actual.get(), want)


def test_launches(cuda, cupy, launches):
    """A reduction launches the right kernel with the right grid and stream; a launch can be repeated."""
    x, y = (cupy.asarray(np.ones(40, np.float32)) for _ in range(2))
    launch = cuda_kernels.bind_reduction("sum", x, [x, y])
    launch()
    other = cupy.cuda.Stream(non_blocking=True)
    other.wait_event(cuda.stream.record())
    launch(other)
    cuda.stream.wait_event(other.record())
    assert (x.get() == 3).all()
    many = cupy.asarray(np.ones(10_000, np.float32))
    reduce("max", many, [many, many])
    cuda_kernels.divide(cupy.empty(0), 2)
    name = "reduce<Sum, float, float, 2>"
    expected = [(name, 3, None), (name, 3, other), ("reduce<Max, float, float, 2>", 4, None)]
    assert launches == expected


@pytest.mark.parametrize("num", [0, 65])
def test_a_launch_takes_so_many_sources(launches, num):
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=f"{num} sources: reduce 1 to 64 at a time"):
        reduce("sum", x, [x] * num)
    assert launches == []


def test_the_speeds_of_a_gpu(launches, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "NBYTES", 1 << 12)
    copy, *reductions = gpu_kernels.speed()
    assert copy[0] == "copy"
    assert [name for name, *_ in reductions] == [f"sum of 4 sources of {name}" for name in ("bfloat16", "float32")]
    assert all(rate > 0 and fraction > 0 for _, rate, fraction in reductions)


def test_the_check_of_a_gpu(launches):
    assert gpu_kernels.check(counts=(9,)) == f"{len(launches)} of {len(launches)} reductions, as on the host"
    assert gpu_kernels.check(counts=(9,), limit_s=0).startswith("0 of ")
