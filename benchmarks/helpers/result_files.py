"""Result files of benchmarks: command, machine, versions, and results."""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from collectives.job import system
from collectives.job.launch import library_name, start_mpi

PACKAGES = ("numpy", "torch", "deepspeed")


def output(text: str) -> Path:
    """Return the path of a flag's file after checking that its folder exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}, so make it first")
    return path


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "processor": system.processor(), "os": platform.platform()}


def versions() -> dict[str, str]:
    installed = {dist.name for dist in metadata.distributions()}
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES if p in installed}


def write(path: Path, results: Any, **settings: Any) -> None:
    """Write one JSON document."""
    mpi = start_mpi()
    header = {"command": shlex.join(["python", *sys.argv]), "ranks": mpi.COMM_WORLD.size, "machine": machine()}
    header |= {"mpi": library_name(mpi), "versions": versions(), "settings": settings}
    path.write_text(json.dumps(header | {"results": results}, indent=1, default=str) + "\n")


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format aligned columns: names to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)
