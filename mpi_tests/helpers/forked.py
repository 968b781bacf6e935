"""Run a program in a process that has imported torch and the library: a fork of `training.forked`'s server.

mpirun -n 4 python -m mpi_tests.helpers.forked train.py --max_iters 2
mpirun -n 4 python -m mpi_tests.helpers.forked -c "import collectives; collectives.world()"

Most tests that start ranks do so: short programs take a fifth of their CPU time, most of which is that of imports.
With `PLAIN_RANKS=1` all ranks start as users' do.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from training.forked import start

ROOT = Path(__file__).resolve().parents[2]
FORKED = "-m", "mpi_tests.helpers.forked"
MODULES = ("training", "collectives.bench", "collectives.torch", "mpi_tests.helpers.faults")
# Words of programs that do themselves what a fork finds done: they start MPI, or change what Numba reads.
TOO_LATE = ("mpi4py", "NUMBA_")


def forked(arguments: Sequence[str]) -> list[str]:
    """Return the command line of an mpirun with forked ranks, if its program may run so.

    >>> forked(["mpirun", "-n", "4", "python", "-m", "training", "--tp", "2"])
    ['mpirun', '-n', '4', 'python', '-m', 'mpi_tests.helpers.forked', 'training', '--tp', '2']
    >>> forked(["mpirun", "-n", "4", "python", "-m", "collectives.mpi4py", "program.py"])
    ['mpirun', '-n', '4', 'python', '-m', 'collectives.mpi4py', 'program.py']
    """
    arguments = list(arguments)
    end = 1 + next((index for index, word in enumerate(arguments) if word in ("python", sys.executable)), -1)
    if end < 2 or not Path(arguments[0]).name.startswith("mpirun") or not can_fork(*arguments[end : end + 2]):
        return arguments
    return [*arguments[:end], *FORKED, *arguments[end + (arguments[end] == "-m") :]]


def are_wanted() -> bool:
    return not os.environ.get("PLAIN_RANKS")


def can_fork(first: str = "", second: str = "") -> bool:
    """Return whether a program may run in a fork, from the two words after `python`."""
    if first == "-c":
        return not any(word in second for word in TOO_LATE)
    if first.endswith(".py"):
        return can_fork("-c", (ROOT / first).read_text())
    return first == "-m" and second in MODULES


if __name__ == "__main__":
    del sys.argv[0]
    start("mpi_tests.helpers.code" if sys.argv[0] == "-c" else sys.argv[0])
