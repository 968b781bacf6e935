"""Run collectives drawn at random against NumPy, for as long as asked.

mpirun -n 3 python -m mpi_tests.fuzz --seconds 60
mpirun -n 3 python -m mpi_tests.fuzz --seed 7 --only 1234    # one case again

Every rank draws the same cases.  The first wrong result ends the job, naming the case.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from typing import NamedTuple

import numpy as np

import collectives
from mpi_tests.helpers.reference import (
    COLLECTIVES,
    DTYPES,
    HALVES,
    REDUCTIONS,
    ROOTED,
    algorithms_of,
    expected,
    inputs,
    ops_of,
)


class Case(NamedTuple):
    """One collective and everything that it is called with."""

    collective: str
    algorithm: str
    dtype: str
    op: str
    count: int
    root: int
    is_symmetric: bool
    is_plan: bool


def draw_case(seed: int, number: int, size: int) -> Case:
    """Draw the case of this number: small and long arrays, as many of each magnitude.

    >>> draw_case(1, 2, 4) == draw_case(1, 2, 4)
    True
    """
    draws = random.Random(f"{seed}-{number}")
    collective, dtype = draws.choice(COLLECTIVES), draws.choice(DTYPES)
    op = draws.choice(ops_of(dtype)) if collective in REDUCTIONS else "sum"
    names = algorithms_of(collective, size)
    if dtype in HALVES and collective in REDUCTIONS:
        names.remove("mpi")
    count = int(2 ** draws.uniform(0, 17)) - 1
    if collective == "all_to_all":
        count -= count % size
    root = draws.randrange(size) if collective in ROOTED else 0
    return Case(collective, draws.choice(names), dtype, op, count, root, draws.random() < 0.5, draws.random() < 0.3)


def result(comm: collectives.Communicator, case: Case, x: np.ndarray) -> np.ndarray | None:
    """Return what the collective returns, of a plan's second run."""
    arguments: dict[str, object] = {"algorithm": case.algorithm}
    if case.collective in REDUCTIONS:
        arguments["op"] = case.op
    if case.collective in ROOTED:
        arguments["root"] = case.root
    array = comm.empty(len(x), case.dtype) if case.is_symmetric else x.copy()
    array[:] = x
    if not case.is_plan:
        return getattr(comm, case.collective)(array, **arguments)
    plan = comm.plan(case.collective, array, **arguments)
    plan()
    array[:] = x
    got = plan()
    plan.free()
    return got


def difference(comm: collectives.Communicator, case: Case) -> str:
    """Run a case; return what is wrong with its result on this rank, or nothing."""
    xs = inputs(comm.size, case.count, case.dtype, case.op)
    wanted = {"root": case.root} if case.collective in ROOTED else {}
    want = expected(case.collective, xs, comm.rank, case.op, **wanted)
    got = result(comm, case, xs[comm.rank])
    if got is None or want is None:
        return "" if got is want else f"got {got}, not {want}"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"got {got.dtype} {got.shape}, not {want.dtype} {want.shape}"
    exact = case.op != "avg"  # whose quotient NumPy rounds differently for complex numbers
    wrong = np.flatnonzero(got != want if exact else abs(got.astype(complex) - want) > 1e-2 * abs(want.astype(complex)))
    return f"wrong in {len(wrong)} of {len(want)} elements, the first at {wrong[0]}" if len(wrong) else ""


def main() -> None:
    parser = argparse.ArgumentParser("python -m mpi_tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the one case to run")
    args = parser.parse_args()
    comm = collectives.world()
    deadline, first, more = time.monotonic() + args.seconds, args.only or 0, np.ones(1, np.int8)
    for number in itertools.count(first):
        case = draw_case(args.seed, number, comm.size)
        if wrong := difference(comm, case):
            sys.exit(f"case {number} of --seed {args.seed}, rank {comm.rank}: {wrong}: {case}")
        more[0] = time.monotonic() < deadline and args.only is None
        comm.broadcast(more, root=0)
        if not more[0]:
            break
    if comm.rank == 0:
        print(f"{number + 1 - first} collectives on {comm.size} ranks as NumPy's, --seed {args.seed}")


if __name__ == "__main__":
    main()
