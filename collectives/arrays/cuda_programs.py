"""Direct schedules as single kernels (cuda_programs.cu), in which the devices of a node wait for each other.

Each rank must have a device of its own, or one whose ranks' kernels run at once (MPS): a kernel that waits holds it.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.cuda_kernels import BLOCK_THREADS, MAX_SOURCES, TASK, KernelChoice
from collectives.arrays.device import DeviceStep
from collectives.job import environment

SOURCE = Path(__file__).with_suffix(".cu")
MOST_BLOCKS = 32  # unless a setting says otherwise
MOST_RANKS = MAX_SOURCES
BARRIER, COPY, FOLD = range(3)

STEP = np.dtype([("task", TASK), ("kind", "u8")])
FIELDS = ("steps", "num_steps", "num_turns", "num_barriers", "counters", "num_ranks", "arrivals")
PROGRAM = np.dtype([*((name, "u8") for name in FIELDS), ("signals", "u8", MOST_RANKS)])


class CudaProgram:
    """A rank's steps of one turn or two, launched as one kernel.

    `arrivals` is where the ranks write that they have arrived: a number for each, 0 to begin with; `signals` is where
    this rank writes it, for each of the ranks.
    """

    def __init__(
        self,
        device: Any,
        turns: Sequence[Sequence[DeviceStep]],
        fold: tuple[str, np.dtype, int],
        arrivals: int,
        signals: Sequence[int],
    ):
        self.device, self.runtime, xp = device, device.runtime, device.xp
        choices = [[choice_of(step, *fold) for step in steps] for steps in turns]
        steps, work = steps_of(turns, choices, fold[2])
        with device.on_device():
            self.steps = xp.asarray(steps.view(np.uint8))
            self.counters = xp.zeros(2, np.uint32)
            self.event = xp.cuda.Event(disable_timing=True)
            xp.cuda.get_current_stream().synchronize()
            self.kernel = kernel(name_of(choices), device.index)
        num_barriers = sum(not step.outs for step in turns[0])
        values = (
            *(self.steps.data.ptr, len(turns[0]), len(turns), num_barriers),
            *(self.counters.data.ptr, len(signals), arrivals),
        )
        self.program = np.zeros((), PROGRAM)
        for field, value in zip(FIELDS, values, strict=True):
            self.program[field] = value
        self.program["signals"][: len(signals)] = signals
        at_once = cuda_kernels.num_multiprocessors(device.index)  # those that wait for each other
        most = min(environment.device_blocks() or MOST_BLOCKS, at_once)
        self.num_blocks = max(1, min(-(-work // BLOCK_THREADS), most))
        self.last: int | None = None  # the stream of the run before

    def launch(self, stream: int) -> None:
        """Run after what is on a stream by now, and after the run before."""
        with self.device.on_device():
            captured = self.runtime.streamIsCapturing(stream)
            if self.last not in (None, stream) and not captured:
                self.runtime.streamWaitEvent(stream, self.event.ptr)
            self.kernel((self.num_blocks,), (BLOCK_THREADS,), (self.program,), stream=SimpleNamespace(ptr=stream))
            if not captured:  # a graph's runs are ordered by who launches it
                self.runtime.eventRecord(self.event.ptr, stream)
                self.runtime.streamWaitEvent(self.device.stream.ptr, self.event.ptr)
                self.last = stream


def choice_of(step: DeviceStep, op: str, dtype: np.dtype, divisor: int) -> KernelChoice:
    if len(step.sources) < 2:
        return cuda_kernels.plan("sum", np.dtype(np.uint8), np.dtype(np.uint8), step.nbytes, 1, 1)
    return cuda_kernels.plan(op, dtype, dtype, step.nbytes // dtype.itemsize, len(step.sources), divisor)


def steps_of(
    turns: Sequence[Sequence[DeviceStep]], choices: Sequence[Sequence[KernelChoice]], divisor: int
) -> tuple[np.ndarray, int]:
    """The steps of all turns as the kernel reads them, and the most threads that one has work for."""
    written = np.zeros(sum(map(len, turns)), STEP)
    pairs = [pair for turn in zip(turns, choices, strict=True) for pair in zip(*turn, strict=True)]
    most = 0
    for place, (step, choice) in enumerate(pairs):
        if not step.outs:
            written[place]["kind"] = BARRIER
            continue
        task, work = cuda_kernels.task_of(choice, step.outs, step.sources, divisor)
        written[place] = task, COPY if len(step.sources) == 1 else FOLD
        most = max(most, work)
    return written, most


def name_of(choices: Sequence[Sequence[KernelChoice]]) -> str:
    """The instance that all steps of a program can be run by: all fold as many sources, or none."""
    folds = {(c.op, c.into, c.at_once) for steps in choices for c in steps if len(c.sizes) > 2}
    assert len(folds) < 2, f"a program that folds in different ways: {folds}"
    op, number, at_once = next(iter(folds), ("Sum", "unsigned char", 1))
    return f"run<{op}, {number}, {at_once}>"


@cache
def kernel(name: str, device: int) -> Any:
    """An instance of the template `run`, for the device, which is current."""
    import cupy

    code = cuda_kernels.SOURCE.read_text() + SOURCE.read_text()
    module = cupy.RawModule(code=code, options=cuda_kernels.OPTIONS, name_expressions=(name,))
    return module.get_function(name)
