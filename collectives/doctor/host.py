"""The host: cores, and which of them a rank may use; threads; the clock."""

import os
import platform
import time
from collections.abc import Iterator, Sequence

from collectives import environment
from collectives.doctor.finding import Finding, Setting, note, ok, show_numbers

STEADY = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")  # read without a system call
CLOCKS = "sys/devices/system/clocksource/clocksource0/current_clocksource"


def usable_cores() -> list[int]:
    """The cores that this process is bound to; all of them where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def show_cores(cores: Sequence[int]) -> str:
    """As in "cores 0-3,8"."""
    return f"core{'s' * (len(cores) > 1)} {show_numbers(cores)}"


def system(setting: Setting) -> Iterator[Finding]:
    yield ok(platform.platform())


def cores(setting: Setting) -> Iterator[Finding]:
    """How many there are, and how much of them a container may use."""
    number = environment.cores()
    quota = allowed_cores(setting.read("sys/fs/cgroup/cpu.max") or "")
    if quota is not None and quota < number:
        remedy = "start no more ranks than that, or raise the container's limit"
        yield note(f"{number}, of which this container may use the time of {quota:g}", remedy)
    else:
        yield ok(str(number))


def allowed_cores(quota: str) -> float | None:
    """What a control group's cpu.max grants, in cores; None where it sets no limit.

    >>> allowed_cores("150000 100000"), allowed_cores("max 100000"), allowed_cores("")
    (1.5, None, None)
    """
    words = quota.split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]) / int(words[1])


def binding(setting: Setting) -> Iterator[Finding]:
    """Which cores this rank may use."""
    mine = usable_cores()
    free = len(mine) >= (os.cpu_count() or 1)
    yield ok("not bound, moves between all cores" if free else f"bound to {show_cores(mine)}")


def clock(setting: Setting) -> Iterator[Finding]:
    resolution_s = time.get_clock_info("perf_counter").resolution
    source = setting.read(CLOCKS)
    words = f"{source or 'of an unknown source'}, resolution {resolution_s * 1e9:g} ns"
    if source is None or source in STEADY:
        yield ok(words)
    else:
        yield note(f"{words}, which is slow to read", "choose tsc, if available_clocksource has it")
