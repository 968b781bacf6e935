"""Run third-party mpi4py programs with and without our collectives, and compare the results.

python -m mpi_tests.mpi4py_programs --ranks 2 3
python -m mpi_tests.mpi4py_programs --ranks 2 --times 7

The programs come from mpi4py's source distribution and from pylops-mpi, which are downloaded from the package index
into build/: pi by quadrature, a Mandelbrot set with cyclic distribution of lines, and a least-squares solver (CGLS) on
distributed arrays.  In the run with our collectives, they replace every supported call, of any length.  With `--times`
the programs run in turn without them and with them, as `python -m collectives.mpi4py` has them: those that are faster.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpi_tests.helpers.launch import ROOT, environment, find_mpirun, watched
from mpi_tests.mpi4py_suite import suite

LIMIT_S = 600
ALL_OURS = "report,ours"  # of COLLECTIVES_MPI4PY: every supported call is ours, and a table at the end says so
PACKAGES = ROOT / "build" / "programs"
# Keep pylops from looking for GPUs and optional libraries.
SETTINGS = {"MPLBACKEND": "Agg", "CUPY_PYLOPS": "0", "TORCH_PYLOPS": "0", "JAX_PYLOPS": "0"}
OURS = re.compile(r"^[A-Z]\w+ +(\d+) +\d+$", re.MULTILINE)  # the report's count of calls that were ours
DRIVER = r"""
import io, json, runpy, sys, time, warnings
path, typed, result = sys.argv[1:]
sys.stdin, sys.argv = io.StringIO(typed), [path]
warnings.simplefilter("ignore")
from mpi4py import MPI
begin_s = time.perf_counter()
names = runpy.run_path(path, run_name="__main__")
elapsed_s = time.perf_counter() - begin_s
if MPI.COMM_WORLD.rank == 0:
    print("\nresult", json.dumps([eval(result, names), elapsed_s]), flush=True)
"""


class Program(NamedTuple):
    """A program: its file, its standard input, and the expression of its variables that yields rank 0's result."""

    path: str
    typed: str
    result: str


PROGRAMS = {
    "compute-pi": Program("{mpi4py}/demo/compute-pi/cpi-cco.py", "3\n100000\n0\n", "float(pi)"),
    "mandelbrot": Program("{mpi4py}/demo/mandelbrot/mandelbrot.py", "", "M.tolist()"),
    "pylops-mpi": Program("{packages}/examples/plot_cgls.py", "", "[float(each) for each in xinv_array]"),
}


def fetch() -> None:
    """Install pylops-mpi and its dependencies other than NumPy and mpi4py, unless they are installed."""
    if not (PACKAGES / "pylops_mpi").exists():
        packages = ["pylops-mpi", "pylops", "pyproximal", "scipy", "typing_extensions"]
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", PACKAGES, *packages]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)


class Outcome(NamedTuple):
    result: Any
    seconds: float  # of rank 0, from the program's first line to its last


def run(program: Program, num_ranks: int, mode: str | None) -> Outcome:
    """Run a program, with our collectives unless `mode`, the value of COLLECTIVES_MPI4PY, is None."""
    path = program.path.format(mpi4py=suite().parent, packages=PACKAGES)
    words = ["-c", DRIVER, path, program.typed, program.result]
    ours = [] if mode is None else ["-m", "collectives.mpi4py"]
    env = environment() | SETTINGS | {"COLLECTIVES_MPI4PY": mode or ""}
    env["PYTHONPATH"] = f"{ROOT}:{PACKAGES}"
    result = watched([find_mpirun(), "-n", num_ranks, sys.executable, *ours, *words], env, LIMIT_S)
    results = [line for line in result.stdout.splitlines() if line.startswith("result ")]
    if result.returncode or len(results) != 1:
        raise RuntimeError(f"{Path(path).name} ended with {result.returncode}: {result.stderr[-2000:]}")
    if mode == ALL_OURS and not any(map(int, OURS.findall(result.stderr))):
        raise RuntimeError(f"{Path(path).name}: no call was ours: {result.stderr[-2000:]}")
    return Outcome(*json.loads(results[0].removeprefix("result ")))


def compare(name: str, num_ranks: int) -> bool:
    """Run a program with and without our collectives; return whether the results agree, floats to 12 digits."""
    plain, ours = (run(PROGRAMS[name], num_ranks, mode).result for mode in (None, ALL_OURS))
    same = np.shape(plain) == np.shape(ours) and np.allclose(plain, ours, rtol=1e-12, atol=0)
    outcome = "the same result" if same else f"other results: {plain} without ours, {ours} with them"
    print(f"{name} on {num_ranks} ranks: {outcome}", flush=True)
    return same


def time_runs(name: str, num_ranks: int, num_runs: int) -> None:
    """Print the median seconds of a program's runs without and with our collectives, in turn."""
    runs = [[run(PROGRAMS[name], num_ranks, mode).seconds for mode in (None, "")] for _ in range(num_runs)]
    plain_s, ours_s = (median(times) for times in zip(*runs, strict=True))
    print(f"{name} on {num_ranks} ranks: {plain_s:.3f} s without our collectives, {ours_s:.3f} s with them", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.mpi4py_programs", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--only", choices=list(PROGRAMS), nargs="+", default=list(PROGRAMS))
    parser.add_argument("--times", type=int, metavar="N", help="time N runs instead of comparing the results")
    args = parser.parse_args()
    fetch()
    if args.times:
        for num_ranks in args.ranks:
            for name in args.only:
                time_runs(name, num_ranks, args.times)
        return 0
    outcomes = [compare(name, num_ranks) for num_ranks in args.ranks for name in args.only]
    print(f"{sum(outcomes)} of {len(outcomes)} runs of third-party programs give the same results with our collectives")
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
