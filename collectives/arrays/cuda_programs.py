"""Direct schedules as single kernels (cuda_programs.cu), in which the devices of a node wait for each other.

Each rank must have a device of its own, or one whose ranks' kernels run at once (MPS): a kernel that waits holds it.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from collectives.arrays import cuda_kernels
from collectives.arrays.cuda_kernels import BLOCK_THREADS, MAX_SOURCES, TASK, KernelChoice
from collectives.arrays.device import DeviceStep
from collectives.job import environment

SOURCE = Path(__file__).with_suffix(".cu")
MOST_BLOCKS = 32  # of a rank with a device of its own, unless a setting says otherwise: links are slower than memory
MOST_RANKS = MAX_SOURCES
BARRIER, COPY, REDUCE = range(3)

STEP = np.dtype([("task", TASK), ("kind", "u8")])
FLAG_BYTES = 8  # per rank, for even barriers and again for odd ones
KEY_BITS = 48  # of a run, in a flag beside the barrier's number
POINTERS, SIZES = ("state", "failure", "num_ranks", "arrivals"), ("num_steps", "num_turns", "num_barriers")
CHANNEL = np.dtype([*((name, "u8") for name in POINTERS), ("signals", "u8", MOST_RANKS)])
PROGRAM = np.dtype([*((name, "u8") for name in ("steps", *SIZES, "runs", "key", "number")), ("channel", CHANNEL)])
STATE_LENGTH, DIFFERED = 3, 2


class CudaChannel:
    """Flags by which devices wait for each other, in one program after another.

    `arrivals` is the address of this rank's flags, initially 0, in which all ranks signal their arrival; `signals` are
    the addresses at which this rank signals its own, one for each rank.
    """

    def __init__(self, device: Any, arrivals: int, signals: Sequence[int]):
        self.device = device
        with device.on_device():
            self.state = device.xp.zeros(STATE_LENGTH, np.uint32)
            device.xp.cuda.get_current_stream().synchronize()
        self.failure = device.host(8).view(np.uint64)  # number of the run that detected a mismatch, if any
        self.failure[0] = 0
        where = [*signals, *[0] * (MOST_RANKS - len(signals))]
        self.record = np.array((self.state.data.ptr, self.failure.ctypes.data, len(signals), arrivals, where), CHANNEL)
        self.last: tuple[int, Any] | None = None  # stream of the previous run, and the event after it

    def recover(self) -> None:
        """Let programs run again after a mismatch, once all have ended."""
        flag = self.state.data.ptr + DIFFERED * self.state.itemsize
        with self.device.on_device():
            self.device.runtime.memsetAsync(flag, 0, self.state.itemsize, self.device.stream.ptr)
        self.device.synchronize()
        self.failure[0] = 0


class CudaProgram:
    """A rank's steps of one turn or two, launched as one kernel.

    Its runs wait for other ranks' on `channel`; runs captured by a graph have one of their own, as a graph may be
    launched at any time.  `num_sharing` ranks share a device, and divide it.
    """

    def __init__(
        self,
        device: Any,
        turns: Sequence[Sequence[DeviceStep]],
        reduction: tuple[str, np.dtype, int],
        channel: CudaChannel,
        captured: CudaChannel,
        num_sharing: int = 1,
    ):
        self.device, self.runtime, xp = device, device.runtime, device.xp
        self.channel, self.captured = channel, captured
        pairs = [(step, choice_of(step, *reduction)) for steps in turns for step in steps]
        steps, work = steps_of(pairs, divisor=reduction[2])
        with device.on_device():
            self.steps = xp.asarray(steps.view(np.uint8))
            self.runs = xp.zeros(1, np.uint32)
            self.event = xp.cuda.Event(disable_timing=True)
            xp.cuda.get_current_stream().synchronize()
            self.kernel = cuda_kernels.kernel(name_of([choice for _, choice in pairs]), device.index, SOURCE)
        num_barriers = sum(not step.outs for step in turns[0])
        sizes = len(turns[0]), len(turns), num_barriers
        self.program = np.array((self.steps.data.ptr, *sizes, self.runs.data.ptr, 0, 0, channel.record), PROGRAM)
        at_once = cuda_kernels.num_multiprocessors(device.index)  # blocks that can wait for each other
        chosen = MOST_BLOCKS if num_sharing == 1 else max(1, at_once // num_sharing)
        most = min(environment.device_blocks() or chosen, at_once)
        self.num_blocks = max(1, min(-(-work // BLOCK_THREADS), most))

    def launch(self, stream: int, key: int, number: int) -> None:
        """Launch after the work on a stream by now and the channel's previous run; ranks must have the same key.

        The key has KEY_BITS.
        """
        program = self.program
        with self.device.on_device():
            captured = self.runtime.streamIsCapturing(stream)
            channel = self.captured if captured else self.channel
            if channel.last and channel.last[0] != stream and not captured:
                self.runtime.streamWaitEvent(stream, channel.last[1].ptr)
            program["key"], program["number"], program["channel"] = key, number, channel.record
            self.kernel((self.num_blocks,), (BLOCK_THREADS,), (program,), stream=SimpleNamespace(ptr=stream))
            if not captured:  # the launches of a graph order its runs
                self.runtime.eventRecord(self.event.ptr, stream)
                self.runtime.streamWaitEvent(self.device.stream.ptr, self.event.ptr)
                channel.last = stream, self.event


def choice_of(step: DeviceStep, op: str, dtype: np.dtype, divisor: int) -> KernelChoice:
    if len(step.sources) < 2:
        return cuda_kernels.plan("sum", np.dtype(np.uint8), np.dtype(np.uint8), step.nbytes, 1, 1)
    return cuda_kernels.plan(op, dtype, dtype, step.nbytes // dtype.itemsize, len(step.sources), divisor)


def steps_of(pairs: Sequence[tuple[DeviceStep, KernelChoice]], divisor: int) -> tuple[np.ndarray, int]:
    """Return the steps of all turns as the kernel reads them, and the most threads that one step occupies."""
    steps = np.zeros(len(pairs), STEP)
    most = 0
    for nth, (step, choice) in enumerate(pairs):
        if not step.outs:
            steps[nth]["kind"] = BARRIER
            continue
        task, work = cuda_kernels.task_of(choice, step.outs, step.sources, divisor)
        steps[nth] = task, COPY if len(step.sources) == 1 else REDUCE
        most = max(most, work)
    return steps, most


def name_of(choices: Sequence[KernelChoice]) -> str:
    """Name the instance that can run all steps of a program: all reduce as many sources, or none."""
    reductions = {(c.op, c.into, c.at_once) for c in choices if len(c.sizes) > 2}
    assert len(reductions) < 2, f"a program that reduces in different ways: {reductions}"
    op, number, at_once = next(iter(reductions), ("Sum", "unsigned char", 1))
    return f"run<{op}, {number}, {at_once}>"
