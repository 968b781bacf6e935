"""Compare randomly drawn collectives with NumPy for a given time.

mpirun -n 4 python -m mpi_tests.fuzz --seconds 60
mpirun -n 4 python -m mpi_tests.fuzz --seed 7 --only 1234    # repeat one case

Every rank draws the same case: the collective, dtype, op, lengths, algorithm, participating ranks and nodes, the
memory, shape and overlap of the arrays, and the kind of call.  Invalid cases must be refused on all ranks.  The first
wrong result ends the job with the number of its case.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives.algorithms import Access, rows
from collectives.arrays.views import dtype_of
from mpi_tests.helpers.reference import (
    COLLECTIVES,
    DTYPES,
    REDUCTIONS,
    ROOTED,
    SCANS,
    draw,
    mpi_reduces,
    ops_of,
    reduced,
)

COUNTED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")  # collectives that take chunk lengths
REDUCING = (*REDUCTIONS, *SCANS)
FORMS = ("flat", "flat", "flat", "shaped", "matrix", "strided")  # forms of x, repeated by their weight
FAULTS = ("overlap", "masked")
CASES_A_BATCH = 20  # between two checks of the clock


class Case(NamedTuple):
    """One collective and all arguments of its call; `counts[r]` are the lengths that rank r sends or contributes."""

    collective: str
    algorithm: str
    dtype: str
    op: str
    counts: tuple[tuple[int, ...], ...]
    are_passed: bool  # whether the call passes `counts`; without, they are the default ones
    root: int
    layout: str
    size: int
    is_symmetric: bool
    form: str
    has_out: bool
    in_place: bool
    run: str  # call, plan or work
    reproducible: bool
    fault: str  # the defect of rank `root`'s arrays, or ""
    seed: str


def draw_case(seed: int, number: int, accesses: dict[tuple[str, int], Access]) -> Case:
    """Draw the case of this number; an upper bound of its lengths is log-uniform, up to 2^16 elements.

    `accesses` gives the access between ranks for each possible layout and number of ranks.

    >>> accesses = {("one node", 4): Access.DIRECT}
    >>> draw_case(1, 2, accesses) == draw_case(1, 2, accesses)
    True
    """
    draws = random.Random(f"{seed}-{number}")
    layout, size = draws.choice(sorted(accesses))
    collective, dtype = draws.choice(COLLECTIVES), draws.choice(DTYPES)
    ops = [op for op in ops_of(dtype) if op != "avg" or collective in REDUCTIONS]
    op = draws.choice(ops) if collective in REDUCING else "sum"
    are_passed = collective in COUNTED and draws.random() < 0.5
    reproducible = collective in REDUCING and draws.random() < 0.2
    able = rows(collective, size, equal=not (are_passed and collective == "all_to_all"))
    usable = [row for row in able if row.access <= accesses[layout, size]]
    names = [row.name for row in usable if row.in_order or not reproducible]
    if not reproducible and (mpi_reduces(dtype, op) or collective not in REDUCING):
        names.append("mpi")
    counts = draw_counts(draws, collective, size, are_passed)
    can_fail = collective not in ("broadcast", "scatter", "exscan") and min(min(row) for row in counts) > 2
    fault = draws.choice(FAULTS) if can_fail and draws.random() < 0.1 else ""
    has_out = collective != "broadcast" and (bool(fault) or draws.random() < 0.5)
    return Case(
        collective=collective,
        algorithm=draws.choice([*names, "auto"]),
        dtype=dtype,
        op=op,
        counts=counts,
        are_passed=are_passed,
        root=draws.randrange(size) if collective in ROOTED else 0,
        layout=layout,
        size=size,
        is_symmetric=draws.random() < 0.5,
        form=draws.choice(FORMS),
        has_out=has_out,
        in_place=has_out and collective != "all_to_all" and draws.random() < 0.4,
        run=draws.choice(("call", "call", "plan", "work")),
        reproducible=reproducible,
        fault=fault,
        seed=f"{seed}-{number}",
    )


def draw_counts(draws: random.Random, collective: str, size: int, are_passed: bool) -> tuple[tuple[int, ...], ...]:
    """Draw each rank's row of counts: the chunks of its input, or its only chunk for a gather."""
    longest = int(2 ** draws.uniform(0, 16))
    if collective in ("all_gather", "gather"):
        equal = draws.randrange(longest)
        return tuple((draws.randrange(longest) if are_passed else equal,) for _ in range(size))
    if collective == "all_to_all":
        equal = draws.randrange(longest) // size
        return tuple(tuple(draws.randrange(longest) if are_passed else equal for _ in range(size)) for _ in range(size))
    total = draws.randrange(longest)
    chunks = tuple(len(part) for part in np.array_split(np.empty(total), size))
    if are_passed:
        chunks = tuple(draws.randrange(longest) for _ in range(size))
    return (chunks,) * size


def inputs(case: Case) -> list[np.ndarray]:
    """Return every rank's x: integers small enough that no dtype rounds their sum or product over 8 ranks."""
    largest = 2 if case.op == "prod" else 15
    numbers = [int(part) for part in case.seed.split("-")]
    return [
        draw(np.random.default_rng([*numbers, rank]), sum(case.counts[rank]), case.dtype, largest)
        for rank in range(case.size)
    ]


def expected(case: Case, xs: list[np.ndarray], rank: int) -> np.ndarray | None:
    """Return the expected result of the collective on a rank, or None."""
    is_root = rank == case.root
    match case.collective:
        case "all_reduce":
            return reduced(xs, case.op)
        case "reduce":
            return reduced(xs, case.op) if is_root else xs[rank]
        case "scan":
            return reduced(xs[: rank + 1], case.op)
        case "exscan":
            return reduced(xs[:rank], case.op) if rank else xs[rank]
        case "reduce_scatter":
            return chunk(reduced(xs, case.op), case.counts[0], rank)
        case "all_gather":
            return np.concatenate(xs)
        case "gather":
            return np.concatenate(xs) if is_root else None
        case "all_to_all":
            return np.concatenate([chunk(x, row, rank) for x, row in zip(xs, case.counts, strict=True)])
        case "broadcast":
            return xs[case.root]
        case "scatter":
            return chunk(xs[case.root], case.counts[0], rank)
    raise AssertionError(case.collective)


def chunk(x: np.ndarray, counts: tuple[int, ...], rank: int) -> np.ndarray:
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def new(comm: collectives.Communicator, case: Case, count: int) -> np.ndarray:
    """Allocate memory of this case's kind, beginning some elements after the start of the allocation."""
    if case.is_symmetric:
        longest = max(map(sum, case.counts)) * (case.size if count > max(map(sum, case.counts)) else 1)
        return comm.empty(max(longest, count) + 3, case.dtype)[3 : 3 + count]
    return np.empty(count, dtype_of(case.dtype))


def arrays(comm: collectives.Communicator, case: Case, x: np.ndarray, want: np.ndarray | None) -> tuple[Any, Any]:
    """Return x and out, filled as the case specifies."""
    own, out = new(comm, case, len(x)), None
    if case.has_out:
        out = new(comm, case, len(want) if want is not None else 0)
    if case.in_place and want is not None and out is not None:
        match case.collective:
            case "all_reduce" | "reduce" | "scan" | "exscan":
                out = own
            case "reduce_scatter" | "scatter":
                out = chunk(own, case.counts[0], comm.rank)
            case "all_gather" | "gather":
                own = chunk(out, tuple(sum(row) for row in case.counts), comm.rank)
    if case.form == "strided" and case.run != "plan" and not case.in_place:
        own = new(comm, case, 2 * len(x))[::2]
    own[:] = x
    return shaped(own, case.form), out


def gets(comm: collectives.Communicator, case: Case) -> bool:
    """Return whether a rank receives a result, in `out` if it passes one."""
    on = {"broadcast": False, "reduce": is_root(comm, case), "exscan": comm.rank > 0}
    return on.get(case.collective, True)


def is_root(comm: collectives.Communicator, case: Case) -> bool:
    return comm.rank == case.root


def shaped(x: np.ndarray, form: str) -> np.ndarray:
    if form == "shaped" and len(x) % 2 == 0:
        return x.reshape(2, -1)
    return x.view(np.matrix) if form == "matrix" else x


def arguments(case: Case, rank: int, out: Any) -> dict[str, Any]:
    """Return the keyword arguments of the call."""
    keywords: dict[str, Any] = {"algorithm": case.algorithm}
    if case.collective in REDUCING:
        keywords |= {"op": case.op, "reproducible": case.reproducible}
    if case.collective in ROOTED:
        keywords["root"] = case.root
    if case.has_out:
        keywords["out"] = out
    if case.are_passed and case.collective == "all_to_all":
        keywords["send_counts"] = case.counts[rank]
    elif case.are_passed:
        gives_one = case.collective in ("all_gather", "gather")
        keywords["counts"] = [row[0] for row in case.counts] if gives_one else case.counts[0]
    return keywords


def run(comm: collectives.Communicator, case: Case, x: Any, out: Any, values: np.ndarray) -> Any:
    """Return the result of the collective; of a plan, that of its second run."""
    keywords = arguments(case, comm.rank, out)
    if case.run == "call":
        return getattr(comm, case.collective)(x, **keywords)
    if case.run == "work":
        return getattr(comm, case.collective)(x, blocking=False, **keywords).wait()
    plan = comm.plan(case.collective, x, **keywords)
    plan()
    np.asarray(x).reshape(-1)[:] = values
    actual = plan()
    plan.free()
    return actual


def difference(comm: collectives.Communicator, case: Case) -> str:
    """Run a case; return how its result on this rank differs from the expected one, or ""."""
    xs = inputs(case)
    want = expected(case, xs, comm.rank)
    x, out = arrays(comm, case, xs[comm.rank], want)
    if case.fault:
        if is_root(comm, case):
            x, out = faulty(case, xs[comm.rank], len(want))
        try:
            run(comm, case, x, out, xs[comm.rank])
        except collectives.InputError:
            return ""
        return f"{case.fault} is not refused"
    actual = run(comm, case, x, out, xs[comm.rank])
    if actual is None or want is None:
        return "" if actual is want else f"got {actual}, not {want}"
    if case.has_out and gets(comm, case):
        if actual is not out:
            return "what is returned is not out"
        if not case.in_place and not np.array_equal(np.asarray(x).reshape(-1), xs[comm.rank]):
            return "x has changed"
    return unlike(np.asarray(actual).reshape(-1), want, exact=case.op != "avg")


def unlike(actual: np.ndarray, want: np.ndarray, exact: bool) -> str:
    """Describe where two arrays differ; averages need a tolerance, as NumPy rounds complex quotients differently."""
    if (actual.shape, actual.dtype) != (want.shape, want.dtype):
        return f"got {actual.dtype} {actual.shape}, not {want.dtype} {want.shape}"
    wrong = np.flatnonzero(
        actual != want if exact else abs(actual.astype(complex) - want) > 1e-2 * abs(want.astype(complex))
    )
    return f"wrong in {len(wrong)} of {len(want)} elements, the first at {wrong[0]}" if len(wrong) else ""


def faulty(case: Case, values: np.ndarray, out_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an invalid pair of x and out."""
    memory = np.zeros(2 * len(values) + out_count, values.dtype)
    x, out = memory[: len(values)], memory[-out_count:]
    if case.fault == "overlap":
        out = memory[1 : 1 + out_count]
    x[:] = values
    return np.ma.array(x) if case.fault == "masked" else x, out


def communicators(comm: collectives.Communicator) -> dict[tuple[str, int], collectives.Communicator | None]:
    """Return a communicator of the first ranks for each layout and number of ranks; None on other ranks."""
    whole = {"one node": comm}
    for name, nodes in (("two nodes", 2), ("a rank a node", comm.size)):
        if comm.size % nodes == 0:
            os.environ["COLLECTIVES_FAKE_NODES"] = f"{nodes}x{comm.size // nodes}"
            whole[name] = collectives.Communicator(comm.mpi, segment_bytes=4096)
    os.environ.pop("COLLECTIVES_FAKE_NODES", None)
    sizes = range(1, comm.size + 1)
    return {(name, size): whole[name].split(0 if comm.rank < size else None) for name in whole for size in sizes}


def access(part: collectives.Communicator | None) -> Access:
    if part is None or len(part.topology.nodes) == 1:
        return Access.DIRECT
    return Access.INTRA_NODE if part.topology.has_groups_in_nodes else Access.MESSAGES


def main() -> None:
    parser = argparse.ArgumentParser("python -m mpi_tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run the case of this number only")
    args = parser.parse_args()
    comm = collectives.world()
    comms = communicators(comm)
    accesses = comm.mpi.bcast({which: access(part) for which, part in comms.items()})  # rank 0 is in every communicator
    deadline, first, more = time.monotonic() + args.seconds, args.only or 0, np.ones(1, np.int8)
    for number in itertools.count(first):
        case = draw_case(args.seed, number, accesses)
        part = comms[case.layout, case.size]
        if part and (wrong := difference(part, case)):
            print(
                f"case {number} of --seed {args.seed}, rank {comm.rank}: {wrong}: {case}", file=sys.stderr, flush=True
            )
            comm.mpi.Abort(1)
        if args.only is None and (number + 1) % CASES_A_BATCH:
            continue
        more[0] = time.monotonic() < deadline and args.only is None
        if not comm.broadcast(more, root=0)[0]:
            break
    if comm.rank == 0:
        print(f"{number + 1 - first} collectives on up to {comm.size} ranks as NumPy's, --seed {args.seed}")


if __name__ == "__main__":
    main()
