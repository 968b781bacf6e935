"""Count the files of collectives/ that all-reduces in a node enter: a job's first, a kind's first, and a later one.

    mpirun -n 2 python -m mpi_tests.helpers.files_entered

A file is entered where one of its functions is called by a function of another file.  Prints the files in the order in
which they are entered, and how often, by the call that enters least.  Those of algorithms and of schedules, whose
prices `auto` compares, are apart.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import collectives

HERE = Path(collectives.__file__).parent
NUM_CALLS = 6  # of a kind, and later ones: where the other rank is late, a call enters more, by which it waits
PURE = ("algorithms", "schedule", "runtime/choose/")


def entered(action: Callable[[], Any]) -> Counter[str]:
    """Run an action; return how often it enters each file of collectives/."""
    times: Counter[str] = Counter()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        caller = frame.f_back
        if event == "call" and path.startswith(str(HERE)) and caller and caller.f_code.co_filename != path:
            times[str(Path(path).relative_to(HERE))] += 1

    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
    return times


def main() -> None:
    comm = collectives.world()
    x, *others = [np.ones(1000 * length) for length in range(1, 1 + NUM_CALLS)]
    first = entered(partial(comm.all_reduce, x))
    of_a_kind = min((entered(partial(comm.all_reduce, array)) for array in others), key=len)
    repeated = min((entered(partial(comm.all_reduce, x)) for _ in range(NUM_CALLS)), key=len)
    if comm.rank == 0:
        for name, times in (("job's first", first), ("kind's first", of_a_kind), ("later", repeated)):
            pure = [path for path in times if path.startswith(PURE)]
            print(f"a {name} all-reduce enters {len(times) - len(pure)} files, and {len(pure)} that are pure:")
            for path in sorted(times, key=pure.__contains__):
                print(f"  {path} {times[path]}")


if __name__ == "__main__":
    main()
