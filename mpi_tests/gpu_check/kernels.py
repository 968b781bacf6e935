"""Correctness of the reduction kernels, and their speed relative to a copy."""

from __future__ import annotations

from collections.abc import Iterator

from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.rows import PASSED, Row, Setting

GOAL = 0.85
CHECK_FRACTION, LONGEST_S = 0.7, 60.0  # fraction of the time that the correctness check takes, and the most


def check(setting: Setting) -> Iterator[Row]:
    if setting.is_small:
        raise CannotRunError("the kernels need a GPU")
    from mpi_tests.helpers import gpu_kernels

    yield Row(
        "reduction kernels",
        "equal to the host's",
        gpu_kernels.check(limit_s=min(LONGEST_S, CHECK_FRACTION * setting.left_s)),
        PASSED,
    )
    copy, *reductions = gpu_kernels.speed()
    for name, rate, fraction in reductions:
        text = f"{fraction:.1%}: {rate:.0f} of {copy[1]:.0f} GB/s"
        yield Row(f"reduction kernel, {name}", f"at least {GOAL:.0%} of a copy", text, setting.speed(fraction >= GOAL))
