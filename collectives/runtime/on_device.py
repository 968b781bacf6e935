"""Direct rounds as work on a device's stream: copies from and to other ranks' memory, fused folds, and meetings.

Ranks meet in two ways at once.  On the host, each waits until the others have come so far in their programs: then
their events are recorded.  On the devices, each stream waits for those events: then their work is done.  The host waits
for no device, and other streams go on.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.device import TURNS, Device, SharingDevice
from collectives.arrays.device_memory import DeviceMemory
from collectives.arrays.memory import Lease
from collectives.arrays.views import address_of
from collectives.runtime import kernels
from collectives.runtime.channel import Channel
from collectives.runtime.phases import (
    NUM_REGISTERS,
    SCRATCH,
    STAGING,
    Chunk,
    Cut,
    Reduction,
    Space,
    Spot,
    Walk,
    peers_of,
)
from collectives.runtime.plan import Waitable
from collectives.runtime.shared_memory import ExportedMemory, Program, ProgramBinder, compile_for
from collectives.schedule.moves import Parts, Round

Operation = Callable[[], None]
Part = list[list[Operation]]  # what is done before the first meeting, between two, and after the last
BYTE = np.dtype(np.uint8)


class DeviceCompiler(Walk):
    """Writes phases as operations, whose arrays are made once."""

    def __init__(self, device: SharingDevice, registers: Sequence[int], *arguments: Any):
        super().__init__(*arguments)
        self.device, self.registers = device, registers
        self.parts: list[Part] = []

    def compile(self, parts: Parts) -> list[Part]:
        self.parts = [[[]]]
        self.walk(parts)
        return self.parts

    def barrier(self) -> None:
        self.parts[-1].append([])

    def pause(self) -> None:
        self.parts.append([[]])

    def do(self, operation: Operation) -> None:
        self.parts[-1][-1].append(operation)

    def copy(self, target: Spot, source: Spot, nbytes: int) -> None:
        if target != source:
            self.do(partial(self.device.copy, *(self.array(spot, nbytes, BYTE) for spot in (target, source))))

    def reduce(self, target: Spot, sources: list[Spot], nbytes: int) -> None:
        op, dtype, divisor = self.fold
        out, *given = (self.array(spot, nbytes, dtype) for spot in (target, *sources))
        if len(sources) > 1:
            self.do(self.device.folding(op, out, given, divisor))
        else:
            self.copy(target, sources[0], nbytes)

    def array(self, spot: Spot, nbytes: int, dtype: np.dtype) -> Any:
        assert not spot.pid, "another rank's array is not in memory that this one has opened"
        address = self.registers[spot.register] + spot.offset
        return self.device.at(address, nbytes // dtype.itemsize, dtype, None)


class Meeting:
    """A barrier of a node's ranks, used again and again."""

    def __init__(self, device: SharingDevice, memory: DeviceMemory, arrival: Program, peers: Sequence[int]):
        self.device, self.arrival, self.signals = device, arrival, memory.signals
        self.peers = peers  # world ranks
        self.turn = 0

    def meet(self) -> Iterator[Waitable]:
        """Order what follows on this stream after what the peers have put on theirs before they came."""
        if self.signals is None:
            self.device.synchronize()
        else:
            self.device.mark(self.signals.own[self.turn])
        yield from self.arrive()
        if self.signals is not None:
            for peer in self.peers:
                self.device.wait_for(self.signals.of[peer][self.turn])
            self.turn = (self.turn + 1) % TURNS  # who is slow waits for no later work than that of this meeting

    def arrive(self) -> Iterator[Waitable]:
        """Wait at a barrier on the host."""
        yield from self.arrival.run(self.device)


class DeviceProgram:
    """A rank's parts, run one after another, again and again, in the turns of the stages."""

    number, moves = 0, ()

    def __init__(self, turns: list[list[Part]], meeting: Meeting, keep: Any):
        self.parts = [part for parts in turns for part in parts]
        self.meeting, self.keep = meeting, keep
        self.next = 0

    def run(self, device: Device) -> Iterator[Waitable]:
        """Run a part."""
        part = self.parts[self.next]
        self.next = (self.next + 1) % len(self.parts)
        for nth, operations in enumerate(part):
            if nth:
                yield from self.meeting.meet()
            for operation in operations:
                operation()

    def requests(self) -> list:
        return []

    def awaits(self) -> str:
        return self.meeting.arrival.awaits()


class DeviceProgramBinder(ProgramBinder):
    """Turns a rank's direct rounds into work on its device."""

    def __init__(self, device_memory: DeviceMemory, *arguments: Any):
        super().__init__(*arguments)
        self.device_memory, self.device = device_memory, device_memory.device

    def bind(  # type: ignore[override]  # a program of another kind
        self,
        parts: Parts,
        arrays: Sequence[Any],
        chunks: Sequence[Chunk],
        fold: Reduction,
        rank: int,
        cut: Cut,
        channel: Channel | None = None,
        binding: int = 0,
    ) -> DeviceProgram:
        """Bind as on the host, but for these arrays and no others."""
        rounds = [moves for part in parts for moves in part]
        space = Space.of(rounds, [chunk.length for chunk in chunks], len(self.world_ranks), cut, fold.dtype)
        lease = self.device_memory.allocate(TURNS * space.turn_bytes)
        meeting = self.meeting(rounds, rank)
        rows = self.exchange(arrays, chunks, space, space.turn_bytes)
        compile_for(BYTE)
        ranks = meeting.arrival.channel.ranks
        layouts = self.layouts(ranks, rows, chunks)
        programs = []
        for turn in range(TURNS) if cut.num_segments % 2 else range(1):
            registers = self.registers(ranks, rows, lease, turn)
            registers[SCRATCH] = address_of(arrays[SCRATCH])
            programs.append(DeviceCompiler(self.device, registers, rank, layouts, space, cut, fold).compile(parts))
        return DeviceProgram(programs, meeting, [lease, *arrays])

    def registers(
        self, ranks: Sequence[int], rows: Sequence[tuple[ExportedMemory, list[int]]], lease: Lease, turn: int
    ) -> list[int]:
        """Return the addresses in all registers of these ranks, for a run that begins with a staging buffer."""
        registers = [0] * NUM_REGISTERS * len(ranks)
        block = lease.block
        for nth, rank in enumerate(ranks):
            known = rows[rank][0]
            places = (known.window, known.address), (known.out_window, known.out_address)
            for index, (base, (window, address)) in enumerate(zip(self.mapped(rank, known), places, strict=True)):
                registers[nth * NUM_REGISTERS + index] = address if base is None else base + address - window
            first = nth * NUM_REGISTERS + STAGING
            stage = block.window.bases[self.world_ranks[rank]] + block.offset
            pair = stage + turn * known.turn_bytes, stage + (1 - turn) * known.turn_bytes
            registers[first : first + TURNS] = pair
        return registers

    def meeting(self, rounds: Sequence[Round], rank: int) -> Meeting:
        channel = Channel(self.memory, self.world_ranks, [rank, *peers_of(rounds, rank)])
        if self.memory.node_comm.rank == 0:
            compile_for(BYTE)  # the others find it on disk then
        code = np.array([kernels.BARRIER, 2], np.int64)
        arrival = Program(code, channel, BYTE, self.oversubscribed, self.meanwhile, binding=1)
        arrival.keep.append(channel.lease)
        return Meeting(self.device, self.device_memory, arrival, [self.world_ranks[peer] for peer in channel.ranks[1:]])
