"""Ranks of torch_suite.py: run PyTorch's tests one after another, and agree on the outcome of each.

On import, the tests select features by the backend's name.  They are therefore imported under the name of gloo, and of
MPI for tests that are not for gloo; the groups use the requested backend.  Two tests that use the name later get its
own.  `dist.monitored_barrier`, which torch reserves for gloo, is the group's own method here.
"""

import argparse
import faulthandler
import functools
import importlib.util
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
import unittest
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch_suite import add, read

from collectives.job.launch import start_mpi
from collectives.torch_backend import create_store

SUITE = "torch.testing._internal.distributed.distributed_test"
NAMES = ("gloo", "mpi")
OF_THE_NAME = ("test_get_backend", "test_barrier_timeout_global")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("lines", type=Path)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    world = start_mpi().COMM_WORLD
    torch.set_num_threads(1)
    if args.backend == "fake":  # moves no data, so that tests fail
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    if args.backend != "gloo":
        dist.monitored_barrier = monitored_barrier
    try:
        run_all(args, world)
    except BaseException:
        traceback.print_exc()
        world.Abort(1)  # others may wait for this rank


def run_all(args: argparse.Namespace, world) -> None:
    """Run all selected tests that have no outcome yet."""
    outcomes = create_store(world)
    earlier = read(args.lines)
    tests = unittest.TestLoader().getTestCaseNames(load(NAMES[0]).DistributedTest._DistTestBase)
    tests = [test for test in tests if args.backend not in earlier.get(test, {})]
    tests = [test for test in tests if any(part in test for part in args.only)]
    for num_left, test in zip(reversed(range(len(tests))), tests, strict=True):
        go_through(test, num_left, args, world, outcomes)


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False) -> None:
    """Call torch's monitored_barrier without its check that the group is gloo's."""
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        (group or dist.group.WORLD).monitored_barrier(limit, wait_all_ranks)


@functools.cache
def load(name: str) -> ModuleType:
    """Load the tests as for a backend of that name."""
    os.environ["BACKEND"] = name
    spec = importlib.util.find_spec(SUITE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def go_through(test: str, num_left: int, args: argparse.Namespace, world, outcomes: dist.Store) -> None:
    """Run a test, and store its outcome.  A rank that does not end aborts the job."""
    suite, why = choose(test)
    row = {"test": test, "backend": args.backend, "outcome": "skipped", "why": why}
    if why:
        if world.rank == 0:
            add(args.lines, row)
        return
    if world.rank == 0:
        args.lines.with_suffix(".now").write_text(f"{test} {num_left}")
    world.Barrier()  # a time limit begins when all know the test
    outcomes.set(f"{test}/{world.rank}", json.dumps(run(test, suite, args, world)))
    if world.rank == 0:
        row |= verdict(outcomes, test, world.size, args.limit)
        add(args.lines, row)
        print(f"{row['outcome']:8} {test} {row['why']}", flush=True)
        if row["outcome"] == "hung":
            world.Abort(1)
        outcomes.set(f"{test}/go on", "")
    outcomes.wait([f"{test}/go on"], timedelta(seconds=10 * args.limit))


def choose(test: str) -> tuple[ModuleType, str]:
    """Return the tests of a backend that runs this one, or the reason why there is none."""
    whys = []
    for suite in map(load, NAMES):
        function = getattr(suite.DistributedTest._DistTestBase, test)
        if not getattr(function, "__unittest_skip__", False):
            return suite, ""
        whys.append(function.__unittest_skip_why__)
    return suite, whys[0]


def run(test: str, suite: ModuleType, args: argparse.Namespace, world) -> tuple[str, str]:
    """Run one test on one rank, in a new default group; return its outcome and the reason."""
    from torch.testing._internal.common_utils import TestCase  # reads the command line at import

    faulthandler.dump_traceback_later(2 * args.limit, exit=True)  # in case rank 0 itself is stuck
    turns, store = itertools.count(), create_store(world)

    def barrier(_=None, wait_for=None, timeout=args.limit) -> None:
        """Wait for all ranks, through the store rather than the backend."""
        over = f"meeting {next(turns)}"
        if store.add(f"at {over}", 1) == world.size:
            store.set(over, "")
        store.wait([over], timedelta(seconds=timeout))

    case = type("Case", (TestCase, suite.DistributedTest._DistTestBase), {"_barrier": barrier})(test)
    case.rank, case.world_size, case.file_name = world.rank, world.size, tempfile.mktemp()
    suite.BACKEND = args.backend if test in OF_THE_NAME else "gloo"
    sys.modules[SUITE] = suite  # where pickle looks for classes
    limit = timedelta(seconds=args.limit / 2)
    try:
        dist.init_process_group(args.backend, store=store, rank=case.rank, world_size=case.world_size, timeout=limit)
        barrier()
        outcome = result_of(case)
        with suppress(dist.DistStoreError):  # a group that ends early would interrupt other ranks' tests
            barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        outcome = "failed", f"{type(error).__name__}: {error}"
    faulthandler.cancel_dump_traceback_later()
    return outcome


def result_of(case: unittest.TestCase) -> tuple[str, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    result = unittest.TestResult()
    case.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if not result.failures and not result.errors:
        return "passed", ""
    skips = {f"SystemExit: {skip.exit_code}": skip.message for skip in TEST_SKIPS.values()}
    trace = (result.failures + result.errors)[0][1].splitlines()
    why = next(line for line in reversed(trace) if re.match(r"[\w.]+(Error|Exit|Exception|Warning)\b", line))
    return ("skipped", skips[why]) if why in skips else ("failed", why)


def verdict(outcomes: dist.Store, test: str, num_ranks: int, limit_s: float) -> dict[str, str]:
    """Combine the ranks' outcomes; the worst counts."""
    results = []
    for rank in range(num_ranks):
        try:
            outcomes.wait([f"{test}/{rank}"], timedelta(seconds=limit_s))
        except dist.DistStoreError:
            return {"outcome": "hung", "why": f"rank {rank} has not ended after {limit_s:g} s; others: {results}"}
        results.append(json.loads(outcomes.get(f"{test}/{rank}")))
    for outcome in ("failed", "skipped"):
        if whys := [why for kind, why in results if kind == outcome]:
            return {"outcome": outcome, "why": whys[0]}
    return {"outcome": "passed", "why": ""}


if __name__ == "__main__":
    main()
