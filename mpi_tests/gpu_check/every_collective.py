"""Every collective, algorithm and dtype in each kind of memory, compared with NumPy on one rank.

python -m mpi_tests.gpu_check.every_collective cuda 30
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives.job import cuda_aware
from mpi_tests.gpu_check.memories import Put, fetched, kinds
from mpi_tests.gpu_check.rows import SKIPPED, Row, Setting, verdict
from mpi_tests.gpu_check.started import program
from mpi_tests.helpers.reference import COLLECTIVES, DTYPES, algorithms_of, expected, inputs, ops_of

NAME, EQUAL = "every collective", "equal to the host's"
PER_RANK = (1, 777)  # elements
STARTING_S = 8.0  # start-up of a job
LARGE = 1 << 16  # elements of float32, in addition
SMALL_DTYPES = ("float32", "bfloat16")


class Case(NamedTuple):
    collective: str
    algorithm: str
    dtype: str
    per_rank: int


def check(setting: Setting) -> Iterator[Row]:
    ways = [(3, "0")] if setting.is_small else [*((size, "0") for size in (1, 2, 3, 4, 8)), (2, "1")]
    for nth, (size, way) in enumerate(ways):
        name = f"{NAME}, {size} ranks" + ", device memory given to MPI" * int(way)
        if int(way) and not cuda_aware.supports_cuda(cuda_aware.loaded_library()):
            yield Row(name, EQUAL, str(cuda_aware.decide(cuda_aware.library(), False, None)), SKIPPED)
            continue
        limit_s = max(1.0, setting.left_s / (len(ways) - nth) - STARTING_S)
        summary = program(setting, size, "every_collective", limit_s, env={"COLLECTIVES_CUDA_AWARE": way})
        text = f"{summary['cases']} of {summary['all']} cases in {summary['memories']}, {len(summary['wrong'])} wrong"
        text += "".join(f"; {case}" for case in summary["wrong"][:3])
        if summary["refused"]:
            text += f"; no memory for {', '.join(summary['refused'])}"
        yield Row(name, EQUAL, text, verdict(not summary["wrong"]))


def cases(size: int, is_small: bool) -> Iterator[Case]:
    for collective in COLLECTIVES:
        for algorithm in algorithms_of(collective, size):
            for dtype in SMALL_DTYPES if is_small else DTYPES:
                for per_rank in PER_RANK[:1] if is_small else PER_RANK:
                    yield Case(collective, algorithm, dtype, per_rank)
            if not is_small:
                yield Case(collective, algorithm, "float32", LARGE)


def wrong(comm: collectives.Communicator, case: Case, put: Put) -> bool:
    """Return whether any rank's result of any op is wrong.  Collective.

    Raises: InputError if the algorithm does not support this memory.
    """
    xs = inputs(comm.size, case.per_rank * comm.size, case.dtype)
    reduces = case.collective in ("all_reduce", "reduce", "reduce_scatter")
    differs = False
    ops = ops_of(case.dtype)
    for op in (ops[0], ops[-1]) if reduces else ("",):
        arguments: dict[str, Any] = {"op": op} if reduces else {}
        actual = getattr(comm, case.collective)(put(xs[comm.rank]), algorithm=case.algorithm, **arguments)
        want = expected(case.collective, xs, comm.rank, op or "sum")
        differs |= not np.array_equal(fetched(actual), want) if want is not None else actual is not None
    return bool(comm.all_reduce(np.array([differs]), op="max")[0])


def main() -> None:
    """Run the cases in random order until rank 0's time is up, or the requested number of cases."""
    comm, device, end = collectives.world(), sys.argv[1], time.monotonic() + float(sys.argv[2])
    memories = kinds(comm, device)
    trials = [(case, memory) for case in cases(comm.size, device == "cpu") for memory in memories]
    random.Random(int(comm.broadcast(np.array([random.getrandbits(32)]))[0])).shuffle(trials)
    summary: dict[str, Any] = {"cases": 0, "all": len(trials), "wrong": [], "memories": ", ".join(memories)}
    did: dict[str, bool] = {}
    for case, memory in trials[: int(sys.argv[3]) if len(sys.argv) > 3 else None]:
        if comm.broadcast(np.array([time.monotonic() > end]))[0]:
            break
        algorithm = f"{case.collective} {case.algorithm}"
        did.setdefault(algorithm, False)
        summary["cases"] += 1
        try:
            if wrong(comm, case, memories[memory]):
                summary["wrong"].append(f"{memory}: {' '.join(map(str, case))}")
            did[algorithm] = True
        except collectives.InputError:
            pass  # not supported in this memory
    is_all = summary["cases"] == summary["all"]
    summary["refused"] = [algorithm for algorithm, count in did.items() if is_all and not count]
    if comm.rank == 0:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
