"""All queries of the operating system in one place.

Linux has all features.  Elsewhere, as on macOS, the library does without: ranks are not bound to cores, and arrays
outside of symmetric memory go through staging buffers.
"""

import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# Give the core to another process; a sleep of zero seconds does so, too, at a higher cost.
yield_core = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))
# Linux counts the memory of a process in KiB, macOS in bytes.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def affinity() -> list[int]:
    """List the cores on which this process may run: all of them where the system binds no process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Return the available memory, or all memory where the system does not tell."""
    try:
        return int(Path("/proc/meminfo").read_text(encoding="utf-8").partition("MemAvailable:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return total_memory_bytes()


def processor() -> str:
    """Return the processor's model, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def peak_memory_bytes() -> int:
    """Return the most physical memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


@cache
def function(name: str) -> Any:
    """Return a function of the C library, or None where it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None)


def python(program: str, *arguments: str) -> list[str]:
    """Return the command of a child that imports from where this process does, and from no other folder.

    Without -P, Python runs files of the working directory that are named like modules that the child imports.
    """
    return [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}\n{program}", *arguments]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` on success, so that it is never incomplete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: str | Path, text: str) -> None:
    """Write a file in one go."""
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")
