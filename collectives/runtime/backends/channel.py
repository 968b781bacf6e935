"""Barriers of a node's ranks: a slot of shared memory for each, and their staging buffers."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from collectives.arrays.device import TURNS
from collectives.arrays.memory import SymmetricMemory, array
from collectives.runtime.backends import kernels
from collectives.runtime.backends.phases import LINE_BYTES

SLOT_BYTES = TURNS * LINE_BYTES  # a cache line for even barriers, one for odd ones


class Channel:
    """The slots of some of a communicator's ranks, and the number of barriers that this rank has reached there.

    `ranks` are these, this rank first.  Programs on one channel must run one after the other, in the same order on all
    ranks; so they can share staging buffers.  Creating a channel is collective, and another collective call must follow
    before a program runs on it.
    """

    def __init__(self, memory: SymmetricMemory, world_ranks: Sequence[int], ranks: Sequence[int], turn_bytes: int = 0):
        self.memory, self.world_ranks, self.ranks = memory, world_ranks, list(ranks)
        self.turn_bytes = turn_bytes  # of a staging buffer
        self.lease = self.staging = memory.allocate(SLOT_BYTES + TURNS * turn_bytes)
        self.begin = SLOT_BYTES  # of the staging buffers in their memory
        array(self.lease, SLOT_BYTES // 8, np.dtype(np.int64))[:] = 0  # what an earlier user has left there
        self.slots = np.array([self.lease.at(world_ranks[rank]) for rank in self.ranks], np.int64)
        self.waits = memory.waits.ctypes.data + memory.waits.strides[0] * np.array(self.ranks, np.int64)
        self.state = np.zeros(kernels.STATE_LENGTH, np.int64)

    def reserve(self, turn_bytes: int, agree_max: Callable[[list[int]], list[int]]) -> None:
        """Make staging buffers of at least that length, the same on all ranks.  Collective.

        Programs that use shorter ones keep these.
        """
        (need,) = agree_max([turn_bytes])
        if need > self.turn_bytes:
            self.turn_bytes = 1 << (need - 1).bit_length()
            self.staging = self.memory.allocate(TURNS * self.turn_bytes)
            self.begin = 0

    def base(self, nth: int, key: int) -> int:
        """Return the address, in this process, of the `nth` rank's part of a window."""
        return self.memory.windows.by_key[key].bases[self.world_ranks[self.ranks[nth]]]

    @property
    def num_barriers(self) -> int:
        return int(self.state[kernels.NUM_BARRIERS])

    def late(self) -> list[int]:
        """Return the ranks that have not reached this rank's latest barrier yet."""
        numbers = [
            max(ctypes.c_int64.from_address(slot + turn * LINE_BYTES).value for turn in range(TURNS))
            for slot in self.slots.tolist()
        ]
        return [rank for rank, number in zip(self.ranks, numbers, strict=True) if number < self.num_barriers]
