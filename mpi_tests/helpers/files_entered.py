"""Count the files of collectives/ that a first all-reduce in a node enters, and those that a later one enters.

    mpirun -n 2 python -m mpi_tests.helpers.files_entered

A file is entered where one of its functions is called by a function of another file.  Prints the files in the order in
which they are entered, and how often.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import collectives

HERE = Path(collectives.__file__).parent


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
    x = np.ones(1000)
    first, later = (entered(lambda: comm.all_reduce(x)) for _ in range(2))
    if comm.rank == 0:
        for name, times in (("first", first), ("later", later)):
            print(f"a {name} all-reduce enters {len(times)} files:")
            for path, number in times.items():
                print(f"  {path} {number}")


if __name__ == "__main__":
    main()
