"""A rank's GPU in a benchmark: which one, who else has it, and how fast its memory is."""

import socket
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import arrays
from collectives.communicator import Communicator

COPIED_BYTES = 256 << 20
REPEATS, WARMUPS = 10, 3


def take_device(comm: Communicator, device: str) -> None:
    """The ranks of a node have its GPUs in turn."""
    if device == "cuda":
        runtime = arrays.device(device).xp.cuda.runtime
        local = comm.topology.nodes[comm.topology.node_of[comm.rank]].index(comm.rank)
        runtime.setDevice(local % runtime.getDeviceCount())


def homes(comm: Communicator, device: str) -> list[str]:
    """Each rank's GPU, by the name of its host and its place on the bus; the host alone without one.  Collective."""
    gpu = "" if device == "cpu" else f" {arrays.device(device).xp.cuda.Device().pci_bus_id}"
    return comm.mpi.allgather(f"{socket.gethostname()}{gpu}")


def sharing(places: Sequence[str]) -> str:
    """Which ranks, if any, have one GPU together.

    >>> sharing(["a 0", "a 1", "a 0"]), sharing(["a 0", "b 0"])
    ('ranks 0 and 2 share a 0', '')
    """
    for rank, place in enumerate(places):
        if (first := places.index(place)) < rank:
            return f"ranks {first} and {rank} share {place}"
    return ""


def measure_copies(comm: Communicator, flags: Namespace) -> float | None:
    """Seconds a byte of copies in a device's memory by one rank, if all ranks share it; else None.  Collective."""
    if flags.device == "cpu" or len(set(homes(comm, flags.device))) > 1:
        return None
    memory, times = arrays.device(flags.device), np.zeros(WARMUPS + REPEATS)
    if comm.rank == 0:
        times[:] = copies_s(memory, COPIED_BYTES, len(times))
    return float(np.median(comm.broadcast(times)[WARMUPS:])) / COPIED_BYTES


def copies_s(memory: Any, nbytes: int, number: int) -> list[float]:
    """How long each of some copies takes from one array to another."""
    source, target = (memory.empty(nbytes, np.dtype(np.uint8)) for _ in range(2))
    times = []
    for _ in range(number):
        begin = time.perf_counter()
        memory.begin()
        memory.copy(target, source)
        memory.synchronize()
        times.append(time.perf_counter() - begin)
    return times
