"""How long something takes on many ranks at once."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.communicator import Communicator


def nothing(*_: Any) -> None:
    pass


def samples(comm: Communicator, actions: Sequence[Callable[[], Any]], repeats: int, warmups: int) -> np.ndarray:
    """The slowest rank's seconds, by repeat and action.  Collective.

    Actions take turns, so that a change of the machine's speed hits all alike.  Ahead of each, all ranks meet.
    """
    barrier = comm.plan("barrier")
    times = np.zeros((warmups + repeats, len(actions)))
    for turn in times:
        for place, action in enumerate(actions):
            barrier()
            begin = time.perf_counter()
            action()
            turn[place] = time.perf_counter() - begin
    barrier.free()
    comm.all_reduce(times, op="max")
    return times[warmups:]


def medians(comm: Communicator, actions: Sequence[Callable[[], Any]], repeats: int, warmups: int) -> list[float]:
    """The median over the repeats of the slowest rank's seconds, for each action.  Collective."""
    return np.median(samples(comm, actions, repeats, warmups), axis=0).tolist()


def stretched(action: Callable[[], Any], factor: float) -> Callable[[], None]:
    """An action that keeps its rank busy for `factor` times as long."""

    def run() -> None:
        begin = time.perf_counter()
        action()
        end = begin + factor * (time.perf_counter() - begin)
        while time.perf_counter() < end:
            pass

    return run
