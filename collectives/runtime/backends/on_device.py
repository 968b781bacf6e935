"""Direct rounds as work on a device's stream: copies from and to other ranks' memory, fused reductions, and barriers.

Where each rank has a device of its own, all rounds are one kernel, in which the devices wait for each other.  Where
ranks share one, a barrier has two parts.  On the host, each rank waits until the others have reached it in their
programs: then their events are recorded.  On the devices, each stream waits for those events: then their work is done.
The host does not wait for devices, and other streams continue.  Only this needs Numba, for the barriers on the host.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.addresses import address_of
from collectives.arrays.cuda import Cuda
from collectives.arrays.cuda_programs import FLAG_BYTES, KEY_BITS, CudaChannel, CudaProgram
from collectives.arrays.device import TURNS, Device, DeviceStep, Event
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import Lease
from collectives.job.launch import at_exit_with
from collectives.runtime.agreement import Side
from collectives.runtime.backends.phases import (
    NUM_REGISTERS,
    SCRATCH,
    STAGING,
    Address,
    BufferPlan,
    Chunk,
    DirectBinder,
    ExportedMemory,
    Phases,
    Reduction,
    Segmentation,
    peers_of,
)
from collectives.runtime.plan import NOWHERE, LateMismatchError, Runs, Step
from collectives.runtime.progress import Waitable
from collectives.runtime.reports.call_log import LogEntry, LoggedRun
from collectives.schedule.moves import Parts, Round

if TYPE_CHECKING:
    from collectives.runtime.backends.channel import Channel
    from collectives.runtime.backends.shared_memory import Program

Operation = Callable[[], None]
Part = list[DeviceStep]
BYTE = np.dtype(np.uint8)
BARRIER = DeviceStep([], [], 0)
MOST_LAUNCHED = 4096  # calls that devices may still have to run
HALF_KEY = KEY_BITS // 2  # bits of the number of a binding, and of a call


class DeviceCompiler(Phases):
    """Compiler of phases to steps of a device, with their addresses."""

    def __init__(self, registers: Sequence[int], *arguments: Any):
        super().__init__(*arguments)
        self.registers = registers

    def compile(self, rounds: Sequence[Round]) -> Part:
        steps: Part = []
        for target, sources, nbytes in self.pipeline(rounds):
            if target is None:
                steps.append(BARRIER)
                continue
            out, origins = self.pointer(target), [self.pointer(source) for source in sources]
            last = steps[-1] if steps else BARRIER
            if origins == [out]:
                continue
            if len(origins) == 1 and origins[0] in last.outs and nbytes == last.nbytes:
                last.outs.append(out)  # just written: the last step stores it here, too
            else:
                steps.append(DeviceStep([out], origins, nbytes))
        return steps

    def pointer(self, address: Address) -> int:
        assert not address.pid, "another rank's array is not in memory that this one has opened"
        return self.registers[address.register] + address.offset


class DeviceProgram(Step):
    """A rank's parts, run repeatedly one after another, in the turns of the staging buffers.

    At barriers the node's ranks compare their calls on the host, by the program `arrival`.
    """

    is_short = False

    def __init__(
        self, memory: DeviceMemory, turns: list[list[Part]], reduction: Reduction, arrival: Program, keep: Any
    ):
        self.device, self.signals, self.arrival, self.keep = memory.device, memory.signals, arrival, keep
        self.peers = [arrival.channel.world_ranks[peer] for peer in arrival.channel.ranks[1:]]
        operations = partial(operations_of, self.device, reduction)
        self.parts = [list(map(operations, part)) for parts in turns for part in parts]
        self.next = 0

    def use(self, entry: LogEntry, number: int, run: Runs) -> None:
        """Make ranks compare the numbers of their calls, 0 for none."""
        self.arrival.use(number, NOWHERE, NOWHERE)

    def run(self, device: Device) -> Iterator[Waitable]:
        """Run a part."""
        for operations in self.parts[self.next]:
            if not operations:
                yield from self.barrier()
            for operation in operations:
                operation()
        self.next = (self.next + 1) % len(self.parts)

    def barrier(self) -> Iterator[Waitable]:
        """Order later work on this stream after the peers' work on theirs before they arrived."""
        turn = self.arrival.num_barriers % TURNS  # a slow rank waits for no work later than this barrier's
        if self.signals is None:
            self.device.synchronize()
        else:
            self.device.mark(self.signals.own[turn])
        yield from self.arrival.run(self.device)
        if self.signals is not None:
            for peer in self.peers:
                self.device.wait_for(self.signals.of[peer][turn])

    def awaits(self) -> str:
        return self.arrival.awaits()


def operations_of(device: Cuda, reduction: Reduction, step: DeviceStep) -> list[Operation]:
    """Bind a step's operations to arrays that are made once; none for a barrier."""
    dtype = reduction.dtype if len(step.sources) > 1 else BYTE
    outs, sources = (
        [device.borrow(address, step.nbytes // dtype.itemsize, dtype) for address in addresses]
        for addresses in (step.outs, step.sources)
    )
    if len(sources) < 2:
        return [partial(device.copy, out, sources[0]) for out in outs]
    first, *others = outs
    return [
        device.bind_reduction(reduction.op, first, sources, reduction.divisor),
        *(partial(device.copy, out, first) for out in others),
    ]


class KernelProgram(Step):
    """A rank's rounds as one kernel, which waits for the other devices itself: the host only launches it."""

    is_short = True

    def __init__(self, device: Cuda, kernel: CudaProgram, keep: Any, calls: KernelCalls | None, binding: int):
        self.device, self.kernel, self.keep = device, kernel, keep
        self.calls, self.binding = calls, binding % (1 << HALF_KEY) << HALF_KEY
        self.run_as = self.binding, 0  # its key and number
        self.num_runs = 0

    def use(self, entry: LogEntry, number: int, run: Runs) -> None:
        """Make devices compare the ranks' bound calls and the numbers of these, 0 for none.

        Raises: LateMismatchError where an earlier run has found a mismatch.
        """
        assert self.calls is not None
        self.calls.enter(entry)
        self.run_as = self.binding | number & (1 << HALF_KEY) - 1, entry.number

    def spin(self) -> bool:
        """Launch it on the caller's stream, the only work of a run on the host."""
        self.kernel.launch(self.device.current_stream(), *self.run_as)
        self.num_runs += 1
        return True

    @property
    def device_run(self) -> tuple[int, Event | None]:
        """The number of launches, and the event after the latest."""
        return self.num_runs, self.kernel.event

    def run(self, device: Device) -> Iterator[Waitable]:
        """Launch it on the collectives' stream."""
        self.kernel.launch(self.device.stream.ptr, *self.run_as)
        self.num_runs += 1
        yield from ()


class KernelCalls:
    """The calls of a communicator that are kernels.  Devices compare them, and the host reads the result later."""

    def __init__(self, device: Cuda, channel: CudaChannel, keep: Any):
        self.device, self.channel, self.keep = device, channel, keep
        self.nothing = CudaProgram(device, [[BARRIER]], Reduction("sum", BYTE, 1), channel, channel)
        self.launched: deque[LoggedRun] = deque(maxlen=MOST_LAUNCHED)
        at_exit_with(self, leave)

    def enter(self, entry: LogEntry) -> None:
        """Record a call that will be launched."""
        if self.channel.failure[0]:
            raise LateMismatchError
        self.launched.append(entry.latest())

    def gate(self) -> None:
        """Tell devices that wait for this one that its rank runs no call."""
        self.nothing.launch(self.device.stream.ptr, 0, 0)

    def settle(self) -> LogEntry | None:
        """Wait for the launched kernels; return the call in which ranks have differed, if any."""
        self.nothing.event.synchronize()
        run = self.differed()
        self.launched.clear()
        if run is None:
            return None
        self.channel.recover()
        entry = run.entry.plan_entry(run.entry.name)
        entry.number, entry.call_site = run.number, run.call_site
        return entry

    def differed(self) -> LoggedRun | None:
        """Return the call in which ranks have differed, if one is over."""
        number = int(self.channel.failure[0])
        return next(run for run in self.launched if run.number == number) if number else None


def leave(calls: KernelCalls) -> None:
    """Abort the job, at the end of the process, if its last calls have differed: no rank has reported it yet."""
    calls.device.synchronize()
    if run := calls.differed():
        side = Side(run.entry.description, str(run.number), str(run.call_site))
        words = f"rank {MPI.COMM_WORLD.rank} calls {side}, other ranks call another collective; this ends the job"
        print(words, file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)


class DeviceProgramBinder(DirectBinder):
    """Binder of a rank's direct rounds to work on its device."""

    def __init__(self, device_memory: DeviceMemory, caller: Cuda, *arguments: Any):
        super().__init__(*arguments)
        self.device_memory, self.device = device_memory, caller

    def bind(
        self,
        parts: Parts,
        arrays: Sequence[Any],
        chunks: Sequence[Chunk],
        reduction: Reduction,
        segmentation: Segmentation,
        channel: Channel | KernelCalls | None = None,
        binding: int = 0,
    ) -> DeviceProgram | KernelProgram:
        """Bind as on the host, but for these arrays only."""
        rounds = [moves for part in parts for moves in part]
        buffers = BufferPlan.of(rounds, chunks, len(self.world_ranks), segmentation, reduction.dtype)
        ranks = [self.rank, *peers_of(rounds, self.rank)]
        lease = self.device_memory.allocate(TURNS * buffers.turn_bytes)
        by_themselves = self.device_memory.has_barriers and self.meanwhile is None  # with no messages in between
        arrival = None if by_themselves else self.arrival(ranks, channel, binding or 1)
        own, flags = self.channel() if by_themselves else (None, None)
        rows = self.exchange(arrays, chunks, buffers, buffers.turn_bytes)
        layouts = self.layouts(ranks, rows, chunks)
        compiled = []  # of each turn
        for turn in range(TURNS) if segmentation.num_segments % 2 else range(1):
            registers = self.registers(ranks, rows, lease, turn)
            registers[SCRATCH] = address_of(arrays[SCRATCH])
            compiler = DeviceCompiler(registers, self.rank, layouts, buffers, segmentation, reduction)
            compiled.append([compiler.compile(part) for part in parts])
        keep = [lease, flags, *arrays]
        if arrival is None:
            assert own is not None
            calls = channel if isinstance(channel, KernelCalls) else None
            shared = calls.channel if calls else own
            turns, num_sharing = [part for (part,) in compiled], self.device_memory.num_sharing
            kernel = CudaProgram(self.device, turns, reduction, shared, own, num_sharing)
            return KernelProgram(self.device, kernel, keep, calls, binding or 1)
        return DeviceProgram(self.device_memory, compiled, reduction, arrival, keep)

    def channel(self) -> tuple[CudaChannel, Lease]:
        """Make a channel on which all ranks' devices wait for each other, and its memory.  Collective."""
        nbytes = TURNS * FLAG_BYTES * len(self.world_ranks)
        lease = self.device_memory.allocate(nbytes)
        nothing = self.device.host(nbytes)
        nothing[:] = 0
        self.device.copy(self.device.borrow(lease.address, nbytes, BYTE), nothing)
        self.device.synchronize()
        signals = [lease.at(world) + self.rank * FLAG_BYTES for world in self.world_ranks]
        return CudaChannel(self.device, lease.address, signals), lease

    def kernel_calls(self) -> KernelCalls:
        """Make the record of calls that are kernels, and the channel on which these wait.  Collective."""
        return KernelCalls(self.device, *self.channel())

    def registers(self, ranks: Sequence[int], rows: Sequence[ExportedMemory], lease: Lease, turn: int) -> list[int]:
        """Return the addresses in all registers of these ranks, for a run that begins with a staging buffer."""
        registers = [0] * NUM_REGISTERS * len(ranks)
        for nth, rank in enumerate(ranks):
            memory = rows[rank]
            windows = zip(self.mapped(rank, memory), memory.windows, memory.addresses, strict=True)
            for index, (base, window, address) in enumerate(windows):
                registers[nth * NUM_REGISTERS + index] = address if base is None else base + address - window
            first = nth * NUM_REGISTERS + STAGING
            stage = lease.at(self.world_ranks[rank])
            pair = stage + turn * memory.turn_bytes, stage + (1 - turn) * memory.turn_bytes
            registers[first : first + TURNS] = pair
        return registers

    def arrival(self, ranks: Sequence[int], channel: Any, binding: int) -> Program:
        """Make a barrier of these ranks on the host, by the compiled interpreter.  Collective."""
        from collectives.runtime.backends.channel import Channel
        from collectives.runtime.backends.shared_memory import ProgramBinder

        if channel is None:
            channel = Channel(self.memory, self.world_ranks, ranks)
        arrival = ProgramBinder(self.context, self.meanwhile).gate(channel, binding)
        arrival.keep.append(channel.lease)
        return arrival
