"""Shared memory, and leave to read another rank's."""

import os
from collections.abc import Iterator
from pathlib import Path

from collectives.doctor.finding import Finding, Setting, note, ok, problem

# Seen with 16 ranks: MPICH takes 5.3 MiB of shared memory a rank, Open MPI 0.1; the library's small arrays up to 1.
RANK_BYTES = 8 << 20
PLENTY_BYTES = 64 << 20  # a rank, for arrays


def shared_memory(setting: Setting) -> Iterator[Finding]:
    """How much there is, and what this host's ranks need."""
    folder, ranks = setting.root / "dev/shm", setting.local_ranks
    need, plenty = ranks * RANK_BYTES, ranks * PLENTY_BYTES
    needed = f"{ranks} rank{'s' * (ranks > 1)} need{'s' * (ranks == 1)} {show_bytes(need)} to begin with"
    if not folder.is_dir():
        yield problem(f"there is no {folder}, {needed}", f"mount -t tmpfs -o size={twice(need)} tmpfs {folder} as root")
    elif not os.access(folder, os.W_OK):
        yield problem(f"{folder} cannot be written", f"chmod 1777 {folder} as root")
    else:
        size, free = space(folder)
        words = f"{folder} has {show_bytes(free)} free of {show_bytes(size)}, {needed}"
        arrays = f"{words}, and arrays from comm.empty may have {show_bytes((free - need) // ranks)} a rank"
        if free < need:
            yield problem(words, f"remove what killed jobs left there, or {enlarge(folder, need)}")
        elif free < plenty:
            yield note(arrays, f"for more, {enlarge(folder, plenty)}")
        else:
            yield ok(arrays)


def enlarge(folder: Path, nbytes: int) -> str:
    size = twice(nbytes)
    return f"mount -o remount,size={size} {folder} as root, or docker run --shm-size={size}"


def space(folder: Path) -> tuple[int, int]:
    """Size and free bytes of a file system."""
    there = os.statvfs(folder)
    return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize


def twice(nbytes: int) -> str:
    """In the words of mount and docker.

    >>> twice(64 << 20)
    '128m'
    """
    return f"{2 * nbytes >> 20}m"


def show_bytes(nbytes: float) -> str:
    """To three digits.

    >>> show_bytes(64 << 20), show_bytes(24684096 << 10), show_bytes(100)
    ('64 MiB', '23.5 GiB', '100 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def tracing(setting: Setting) -> str:
    """What stands in the way of a process that reads another's memory, as far as the system tells, and the remedy."""
    scope = setting.read("proc/sys/kernel/yama/ptrace_scope")
    if scope in ("1", "2", "3"):
        return f"kernel.yama.ptrace_scope is {scope}: sysctl kernel.yama.ptrace_scope=0 as root"
    return "in a container, start it with --cap-add=SYS_PTRACE; otherwise run all ranks as one user"
