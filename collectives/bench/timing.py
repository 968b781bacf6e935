"""How long something takes on many ranks at once."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.communicator import Communicator


def nothing(*_: Any) -> None:
    pass


def medians(
    comm: Communicator,
    actions: Sequence[Callable[[], Any]],
    repeats: int,
    warmups: int,
    before: Callable[[], None] = nothing,
    after: Callable[[Any], None] = nothing,
) -> list[float]:
    """The median over the repeats of the slowest rank's seconds, for each action.  Collective.

    Actions take turns, so that a change of the machine's speed hits all alike.  Ahead of each, every rank does what
    is to be done `before`, and all meet; `after` gets what the action returned.  Neither is timed.
    """
    barrier = comm.plan("barrier")
    times = np.zeros((warmups + repeats, len(actions)))
    for turn in times:
        for place, action in enumerate(actions):
            before()
            barrier()
            begin = time.perf_counter()
            returned = action()
            turn[place] = time.perf_counter() - begin
            after(returned)
    barrier.free()
    comm.all_reduce(times, op="max")
    return np.median(times[warmups:], axis=0).tolist()
