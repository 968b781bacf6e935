"""The copy that compiled programs make, beside NumPy's."""

import numpy as np
import pytest

from collectives.runtime.backends import kernels

PAGE = kernels.PAGE_BYTES
GUARD = 64  # bytes around a target, which stay as they are


@pytest.mark.parametrize("behind", [0, 1, 16, 31, 32, 2048])
@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 1025, 3 * PAGE + 5])
def test_a_copy_is_whole_wherever_source_and_target_lie(behind, nbytes):
    source = np.random.default_rng(nbytes).integers(1, 256, nbytes + PAGE, dtype=np.uint8)[:nbytes]
    memory = np.zeros(nbytes + 2 * PAGE + 2 * GUARD, np.uint8)
    begin = GUARD + (source.ctypes.data + behind - memory.ctypes.data - GUARD) % PAGE
    assert (memory.ctypes.data + begin - source.ctypes.data) % PAGE == behind
    kernels.copy(memory.ctypes.data + begin, source.ctypes.data, nbytes)
    expected = np.zeros_like(memory)
    expected[begin : begin + nbytes] = source
    np.testing.assert_array_equal(memory, expected)
