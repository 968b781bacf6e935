"""Run mpi4py's own tests with and without our collectives: tests that pass without them must pass with them.

python -m mpi_tests.mpi4py_suite --ranks 1 2 3 5
python -m mpi_tests.mpi4py_suite --ranks 3 --only collectives

The tests come from mpi4py's source distribution, downloaded from the package index into build/.  The tests of
collectives, whose arrays are tiny, run twice: with the default settings, and with our collectives at every length.
"""

import argparse
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, watched

FILES = {
    "collectives": "cco_(buf|vec|nb_buf|nb_vec)",
    "persistent": "cco_pr_(buf|vec)",
    "rest": "(cco_(obj|ngh_buf|ngh_obj|pr_ngh_buf|buf_inter|vec_inter)|comm|comm_topo|comm_inter|request|grequest|"
    "msgspec|msgzero|op|pickle|p2p_(buf|obj)|objmodel|subclass|attributes|threads|status|group|handle)",
}
MODES = {"collectives": ("", "ours"), "persistent": ("", "ours"), "rest": ("",)}
MANY_S = 1800


def suite() -> Path:
    """Return the folder with the tests of the installed version of mpi4py; download them if necessary."""
    folder = ROOT / "build" / f"mpi4py-{version('mpi4py')}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        what = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", f"mpi4py=={version('mpi4py')}"]
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder.parent, *what]
        subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["tar", "xzf", f"{folder}.tar.gz", "-C", folder.parent], check=True)
    return folder / "test"


def run(num_ranks: int, files: str, mode: str | None) -> tuple[str, set[str]]:
    """Run tests, with our collectives unless `mode` is None; return the reported number of tests and the failures."""
    with_ours = [] if mode is None else ["-m", "collectives.mpi4py"]
    words = [
        find_mpirun(),
        "-n",
        num_ranks,
        sys.executable,
        *with_ours,
        suite() / "main.py",
        "-i",
        rf"test_{files}\.py",
    ]
    result = watched(words, environment() | {"COLLECTIVES_MPI4PY": mode or ""}, MANY_S)
    failed = set(re.findall(r"^(?:FAIL|ERROR): \w+ \((.*)\)$", result.stderr, re.MULTILINE))
    numbers = sorted(set(re.findall(r"^Ran (\d+) tests", result.stderr, re.MULTILINE)))
    if not numbers or numbers == ["0"] or (result.returncode and not failed):
        failed.add(f"the job, which ended with {result.returncode}: {result.stderr[-2000:]}")
    return " or ".join(numbers), failed


def compare(num_ranks: int, part: str) -> list[str]:
    """Return the tests that fail only with our collectives."""
    number, without = run(num_ranks, FILES[part], None)
    worse = []
    for mode in MODES[part]:
        number_with, failed = run(num_ranks, FILES[part], mode)
        own = sorted(failed - without)
        own += [f"{number_with} tests ran, not {number}"] * (number_with != number)
        what = f"{part} on {num_ranks} ranks{f', COLLECTIVES_MPI4PY={mode}' * bool(mode)}"
        print(f"{what}: {number_with} tests, {len(own)} fail only with ours, {len(without)} fail without", flush=True)
        worse += [f"{what}: {test}" for test in own]
    return worse


def main() -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.mpi4py_suite", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--only", choices=list(FILES), nargs="+", default=list(FILES))
    args = parser.parse_args()
    worse = [line for num_ranks in args.ranks for part in args.only for line in compare(num_ranks, part)]
    print("\n".join(worse) or "all that pass without pass with our collectives")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
