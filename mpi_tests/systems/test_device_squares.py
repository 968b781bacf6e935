"""The kernel of the norm, on a device that mpi_tests.helpers.cuda_on_host emulates."""

from fractions import Fraction

import numpy as np
import pytest

from parallelism.numerics.device_squares import add_squares, table_of

pytestmark = pytest.mark.shares_cores


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_squares_are_those_of_rounded_fractions(cuda, dtype):
    """Arrays have no elements, fewer than a block has threads, and more than all blocks have."""
    cupy, scale, limb, rng = cuda.cupy, 2.0**12, 24, np.random.default_rng(0)
    values = [(rng.standard_normal(count) * 10 ** rng.standard_normal(count)).astype(dtype) for count in (3, 0, 70_000)]
    arrays = [cupy.asarray(x) for x in values]
    counts = [x.size for x in arrays]
    table = cupy.asarray(table_of([x.data.ptr for x in arrays], counts))
    sums, factor = cupy.asarray(np.array([5, 7])), cupy.asarray(np.array(scale))
    stream = cupy.cuda.get_current_stream().ptr
    add_squares(table.data.ptr, counts, dtype, factor.data.ptr, limb, sums.data.ptr, stream)
    high, low = (sums.get() - [5, 7]).tolist()
    want = sum(round(Fraction((float(x) * scale) ** 2)) for each in values for x in each)
    assert (high << limb) + low == want


def test_subnormal_elements_count(cuda):
    """CuPy compiles for a GPU so that subnormal numbers of 32 bits are flushed: the conversion keeps them."""
    cupy, tiny = cuda.cupy, np.full(10, 2.0**-140, np.float32)
    x, sums, factor = cupy.asarray(tiny), cupy.zeros(2, np.int64), cupy.asarray(np.array(2.0**150))
    table = cupy.asarray(table_of([x.data.ptr], [10]))
    add_squares(table.data.ptr, [10], "float32", factor.data.ptr, 24, sums.data.ptr, cupy.cuda.get_current_stream().ptr)
    assert sums.get().tolist() == [0, 10 << 20]


def test_nothing_to_add(cuda):
    cupy = cuda.cupy
    sums = cupy.zeros(2, np.int64)
    add_squares(0, [0], "float32", 0, 24, sums.data.ptr, cupy.cuda.get_current_stream().ptr)
    assert sums.get().tolist() == [0, 0]
