"""What binders of direct rounds have in common, for the host and for devices: where the ranks' memory is."""

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from collectives.arrays.memory import SymmetricMemory
from collectives.arrays.views import address_of
from collectives.runtime.phases import NUM_REGISTERS, NUM_SHARED, STAGING, Address, BufferPlan, Chunk


class ExportedMemory(NamedTuple):
    """What a rank tells the others of its memory, so that they find it: of its process, and of each shared array.

    An array lies in the window `key` of symmetric memory, which begins at an address of the process; or in none, 0.
    """

    pid: int
    turn_bytes: int
    key: int
    window: int
    address: int
    out_key: int
    out_window: int
    out_address: int


class DirectBinder:
    """Finds out where the other ranks' chunks are, and lays out staging buffers."""

    def __init__(
        self,
        world_ranks: Sequence[int],
        memory: SymmetricMemory,
        gather_rows: Callable,
        agree_max: Callable,
        oversubscribed: bool,
        meanwhile: Callable[[], Any] | None = None,
    ):
        self.world_ranks, self.memory, self.gather_rows, self.agree_max = world_ranks, memory, gather_rows, agree_max
        self.oversubscribed, self.meanwhile = oversubscribed, meanwhile

    def exchange(
        self, arrays: Sequence[Any], chunks: Sequence[Chunk], buffers: BufferPlan, turn_bytes: int
    ) -> list[tuple[ExportedMemory, list[int]]]:
        """Return what every rank says of its memory, and where its chunks and then its stages begin.  Collective."""
        places = []
        for array in arrays[:NUM_SHARED]:
            window = self.memory.windows.window_of(array)
            places += [window.key, window.address] if window else [0, 0]
            places.append(address_of(array))
        stages = list(accumulate(buffers.steps[:-1], initial=0))[: len(buffers.steps)]
        shared = [chunk.offset for chunk in chunks if chunk.register < NUM_SHARED]
        row = [*ExportedMemory(os.getpid(), turn_bytes, *places), *shared, *stages]
        width = len(ExportedMemory._fields)
        return [(ExportedMemory(*words[:width]), words[width:]) for words in self.gather_rows(row).tolist()]

    def layouts(
        self, ranks: Sequence[int], rows: Sequence[tuple[ExportedMemory, list[int]]], chunks: Sequence[Chunk]
    ) -> dict[int, list[Address]]:
        """Return where the chunks and stages of these ranks are, whose registers come one after the other."""
        layouts: dict[int, list[Address]] = {}
        for nth, rank in enumerate(ranks):
            known, offsets = rows[rank]
            num_shared = sum(chunk.register < NUM_SHARED for chunk in chunks)
            own = [chunk.offset for chunk in chunks[num_shared:]]  # which no other rank reads
            offsets = offsets[:num_shared] + own + offsets[num_shared:]
            pids = [0 if nth == 0 or base is not None else known.pid for base in self.mapped(rank, known)]
            addresses = []
            for place, offset in enumerate(offsets):
                register = chunks[place].register if place < len(chunks) else STAGING
                pid = pids[register] if register < NUM_SHARED else 0
                addresses.append(Address(pid, nth * NUM_REGISTERS + register, offset))
            layouts[rank] = addresses
        return layouts

    def mapped(self, rank: int, known: ExportedMemory) -> list[int | None]:
        """Return where this process has the windows of a rank's shared arrays; None where it has none."""
        windows = [self.memory.windows.by_key.get(key) for key in (known.key, known.out_key)]
        return [window.bases.get(self.world_ranks[rank]) if window else None for window in windows]
