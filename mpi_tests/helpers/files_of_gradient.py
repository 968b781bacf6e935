"""Count the files that a gradient crosses in plain data parallelism, from its hook to the optimizer's step.

    mpirun -n 2 python -m mpi_tests.helpers.files_of_gradient

The files are those of parallelism/, training/ and collectives/ whose functions handle gradients and are called by a
function of another file, in the second step of a small GPT, on the thread that trains; without the passes' computation
between the hooks.  Prints them in the order in which they are entered, and how often.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import collectives
from mpi_tests.helpers.trained import config
from training.run import TrainingRun

ROOT = Path(collectives.__file__).parent.parent
PACKAGES = ("parallelism", "training", "collectives")
WAY = {"gradient_accumulated", "gradient_ready", "step_done", "update"}  # what handles gradients, from the hook on
STEP = "optimizer.py", "step"


def crossed(run: TrainingRun, inputs: Any) -> Counter[str]:
    """Run a step; return how often gradients enter each file: in their hooks, at the end, and before the update."""
    times: Counter[str] = Counter()
    on_way: list[FrameType] = []  # outermost call of those in WAY
    is_updated = False

    def record(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_updated
        path, caller, function = Path(frame.f_code.co_filename), frame.f_back, frame.f_code.co_name
        if event == "return" and on_way and frame is on_way[0]:
            on_way.clear()
        if event != "call" or is_updated:
            return
        is_updated = bool(on_way) and (path.name, function) == STEP
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        if is_ours and not on_way and function in WAY:
            on_way.append(frame)
        if is_ours and on_way and not is_updated and caller and caller.f_code.co_filename != str(path):
            times[str(path.relative_to(ROOT))] += 1

    sys.setprofile(record)
    try:
        run.step(2, inputs)
    finally:
        sys.setprofile(None)
    return times


def main() -> None:
    comm = collectives.world()
    with TrainingRun(config(comm.size), comm) as run, closing(run.inputs()) as inputs:
        run.step(1, next(inputs)).metrics()
        times = crossed(run, next(inputs))
    if comm.rank == 0:
        print(f"a gradient crosses {len(times)} files:")
        for path, number in times.items():
            print(f"  {path} {number}")


if __name__ == "__main__":
    main()
