"""Alternating contestants, each with the computation alone of the same step."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from peers import MPI


class Contestant:
    """A step, and the same step without communication."""

    def __init__(self, talking: Any, silent: Any, silence: Callable[[], AbstractContextManager] = nullcontext):
        self.talking, self.silent, self.silence = talking, silent, silence
        self.steps_s: list[float] = []
        self.computing_s: list[float] = []

    def round(self) -> None:
        self.steps_s.append(step_s(self.talking))
        with self.silence():
            self.computing_s.append(step_s(self.silent))

    def figures(self, num_tokens: int) -> dict[str, float]:
        """Return the medians over all rounds but the first."""
        steps_s, computing_s = np.array(self.steps_s[1:]), np.array(self.computing_s[1:])
        seconds = {"step_ms": steps_s, "computing_ms": computing_s, "exposed_ms": steps_s - computing_s}
        milliseconds = {name: 1e3 * float(np.median(values)) for name, values in seconds.items()}
        return {"tokens_per_s": 1e3 * num_tokens / milliseconds["step_ms"]} | milliseconds


def step_s(way: Any) -> float:
    """Return the slowest rank's seconds."""
    way.model.zero_grad()
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    way.step()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
