"""Refuses sizes that the hosts' memory can't hold, before any of it is allocated."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from collectives.bench.measure import names_of
from collectives.bench.trial import places
from collectives.communicator import Communicator
from collectives.memory import shared_folder
from collectives.sizes import size_in_words

CHECKING = 3  # vectors' worth of memory, to fill arrays and compare results
CGROUP = Path("/sys/fs/cgroup")


def refuse_too_large(comm: Communicator, flags: Namespace) -> None:
    """Raise InputError on every rank, with what would fit, if a node can't hold the largest vectors.  Collective.

    Every rank has arrays in place and out of place, and an algorithm may work on a copy of its own.
    """
    with comm.agreed():
        ranks = len(comm.topology.nodes[comm.topology.node_of[comm.rank]])
        for where, there, vectors in needs(comm.size, flags):
            fits = there // (vectors * ranks)
            if flags.end > fits:
                raise ValueError(
                    f"--end {size_in_words(flags.end)}: {vectors} vectors for each of a node's {ranks} ranks don't fit "
                    f"into the {there >> 20} MiB of {where}: use --end {size_in_words(rounded(fits))} at most"
                )


def needs(size: int, flags: Namespace) -> Iterator[tuple[str, int, int]]:
    """Of each kind of memory: its name, how much there is, and how many vectors a rank keeps in it at a time."""
    for setting in flags.settings if flags.device == "cpu" else ():
        arrays = sum(1 if in_place else 2 for in_place in places(setting.collective))
        if setting.memory == "symmetric":
            there = os.statvfs(shared_folder())
            yield shared_folder(), there.f_bavail * there.f_frsize, arrays
        contestants = len(names_of(setting.collective, size, flags)) * len(places(setting.collective))
        yield "memory that is available", available(), arrays + contestants + CHECKING


def available() -> int:
    """Bytes that this machine, or the group of processes that this one is in, has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # no such group, or one without a limit
        left.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return max(0, min(left))


def rounded(nbytes: int) -> int:
    """A number below that reads well.

    >>> rounded(123456789) >> 20, rounded(100)
    (117, 100)
    """
    shift = next((shift for shift in (30, 20, 10) if nbytes >> shift >= 8), 0)
    return nbytes >> shift << shift
