"""A page with every program's `--help`, as it prints it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "train.py",
    "sample.py",
    "-m collectives.bench",
    "-m collectives.bench.html",
    "-m collectives.doctor",
    "-m collectives.schedule.simulate",
    "-m teaching.exercise",
    "-m teaching.page",
    "-m collectives.mpi4py",
    "-m parallelism.planner",
    "-m parallelism.pipeline.schedule draw",
    "-m parallelism.pipeline.schedule search",
    "-m parallelism.pipeline.schedule check",
    "-m training.prepare",
    "-m training.report",
    "-m mpi_tests.rig run",
    "-m mpi_tests.gpu_check",
)
HEAD = """# Command lines

Each program's own `--help`. Flags take dashes and underscores alike. What works on several ranks is started by
`mpirun -n N`.
"""


def pages() -> dict[str, str]:
    """Return the page by its path below docs/."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {"reference/commands.md": "\n".join([HEAD, *pool.map(section, PROGRAMS)])}


def section(program: str) -> str:
    return f"## python {program}\n\n```text\n{help_of(program)}\n```\n"


def help_of(program: str) -> str:
    """Run a program with --help, on 100 columns.

    Raises: RuntimeError if it fails, with what it printed.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": path}
    command = [sys.executable, *program.split(), "--help"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    if ended.returncode:
        raise RuntimeError(f"python {program} --help ends with {ended.returncode}: {ended.stderr}")
    return ended.stdout.strip()
