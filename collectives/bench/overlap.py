"""Overlap of a non-blocking call with computation, as the OSU micro-benchmarks define it."""

import time
from collections.abc import Callable

import numpy as np

LENGTH = 64  # of a matrix and a vector, which lie in the cache
TRIES = 100  # products timed to choose their number

Action = Callable[[], object]


def computation(seconds: float) -> Action:
    """Return a function of about that length: so many products of a matrix and a vector, and no messages."""
    matrix, vector, result = np.ones((LENGTH, LENGTH)), np.ones(LENGTH), np.zeros(LENGTH)

    def products(number: int) -> None:
        for _ in range(number):
            np.matmul(matrix, vector, out=result)

    products(TRIES)
    begin = time.perf_counter()
    products(TRIES)
    number = max(1, round(TRIES * seconds / (time.perf_counter() - begin)))
    return lambda: products(number)


def waited(start: Callable[[], Action]) -> Action:
    """Return a function that starts a call and waits for it."""
    return lambda: start()()


def during(start: Callable[[], Action], work: Action) -> Action:
    """Return a function that computes while a call runs."""

    def run() -> None:
        wait = start()
        work()
        wait()

    return run


def numbers(call_s: float, compute_s: float, overall_s: float) -> dict[str, float]:
    """Compute the overlap: 100% where the call adds nothing to the computation, 0% where it adds all of its time.

    >>> [numbers(10e-6, 10e-6, overall_s)["overlap_percent"] for overall_s in (9e-6, 12e-6, 21e-6)]
    [100.0, 80.0, 0.0]
    """
    percent = min(max(0.0, 100 - 100 * (overall_s - compute_s) / call_s), 100.0)
    times = {"compute_us": compute_s * 1e6, "overall_us": overall_s * 1e6}
    return {name: round(float(number), 6) for name, number in (times | {"overlap_percent": percent}).items()}
