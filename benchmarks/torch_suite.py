"""PyTorch's own tests of backends, run on this one: a table of what passed, failed and was skipped.

    python benchmarks/torch_suite.py --ranks 3 --out suite.md

The tests are in the wheel: torch.testing._internal.distributed.distributed_test, which needs `pip install expecttest`.
They ask a backend's name for what it can do, so each is run under the name of gloo, and where it is not for gloo under
that of MPI; the groups are of this backend.  All tests run in one job, in a new default group each.  One that has not
ended after `--limit` seconds ends the job, and another goes on after it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from datetime import timedelta
from pathlib import Path

NAMES = ("gloo", "mpi")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60, help="seconds that a test may take")
    parser.add_argument("--only", default="", help="a part of the tests' names")
    parser.add_argument("--backend", default="collectives", help="or gloo, to compare")
    parser.add_argument("--out", type=Path, default=Path("torch_suite.md"))
    parser.add_argument("--goon", action="store_true", help="keep the outcomes of an earlier run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
    else:
        drive(args)


def drive(args: argparse.Namespace) -> None:
    """Start jobs until every test has an outcome, and write the table."""
    lines = args.out.with_suffix(".jsonl")
    if not args.goon:
        lines.unlink(missing_ok=True)
    for name in NAMES:
        while start_job(args, name, lines) != 0:
            test = lines.with_suffix(".now").read_text()
            if read(lines).get(test, {}).get("name") != name:
                add(lines, {"test": test, "name": name, "outcome": "hung", "why": "a rank has ended, or never did"})
    args.out.write_text(table(read(lines)))
    print(Counter(row["outcome"] for row in read(lines).values()))


def start_job(args: argparse.Namespace, name: str, lines: Path) -> int:
    folder = tempfile.mkdtemp()
    for inner in ("barrier", "test_dir", "init_dir"):
        Path(folder, inner).mkdir()
    command = ["mpirun", "-n", str(args.ranks), sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
    environment = os.environ | {"BACKEND": name, "WORLD_SIZE": str(args.ranks), "TEMP_DIR": folder}
    return subprocess.run([*command, "--worker", str(lines)], env=environment, check=False).returncode


def add(lines: Path, row: dict[str, str]) -> None:
    with lines.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(lines: Path) -> dict[str, dict]:
    """The last outcome of each test."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {row["test"]: row for row in rows}


def table(rows: dict[str, dict]) -> str:
    count = Counter(row["outcome"] for row in rows.values())
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    order = sorted(rows.values(), key=lambda row: (row["outcome"], row["test"]))
    cells = [f"| {row['test']} | {row['outcome']} | {row['why'].replace('|', '/')} |" for row in order]
    return "\n".join([summary, "", "| test | outcome | reason |", "|---|---|---|", *cells, ""])


def work(args: argparse.Namespace) -> None:
    """A rank: runs the tests that have no outcome yet, or were skipped under another name."""
    import torch
    import torch.distributed as dist

    from collectives.job import start_mpi

    world = start_mpi().COMM_WORLD
    import torch.testing._internal.distributed.distributed_test as suite
    from torch.testing._internal.common_utils import TestCase

    from collectives.torch_backend import MPIStore

    torch.set_num_threads(1)
    ways = {"rank": world.rank, "world_size": world.size, "_barrier": lambda self, *_, **__: dist.barrier()}
    cases = type("Cases", (TestCase, suite.DistributedTest._DistTestBase), ways)
    outcomes = MPIStore(world)
    lines = Path(args.worker)
    known = read(lines)
    skipped = {
        test for test, row in known.items() if row["outcome"] == "skipped" and row["name"] != os.environ["BACKEND"]
    }
    for test in unittest.TestLoader().getTestCaseNames(cases):
        if args.only not in test or (test in known and test not in skipped):
            continue
        if world.rank == 0:
            lines.with_suffix(".now").write_text(test)
        outcome, why = run(cases, test, args, MPIStore(world), dist, suite)
        outcomes.set(f"{test}/{world.rank}", json.dumps([outcome, why]))
        if world.rank == 0:
            row = verdict(outcomes, test, args) | {"test": test, "name": os.environ["BACKEND"]}
            add(lines, row)
            print(f"{row['outcome']:8} {test} {row['why']}", flush=True)
            if row["outcome"] == "hung":
                world.Abort(1)
            outcomes.set(f"{test}/go on", "")
        outcomes.wait([f"{test}/go on"], timedelta(seconds=10 * args.limit))
    outcomes.close()


def run(cases: type, test: str, args: argparse.Namespace, store, dist, suite) -> tuple[str, str]:
    """One test on one rank, in a new default group."""
    import threading

    from torch.testing._internal.common_distributed import TEST_SKIPS

    timer = threading.Timer(2 * args.limit, os._exit, [1])  # where rank 0 itself is stuck
    timer.start()
    limit = timedelta(seconds=args.limit / 2)
    dist.init_process_group(args.backend, store=store, rank=store.comm.rank, world_size=args.ranks, timeout=limit)
    result = unittest.TestResult()
    case = cases(test)
    case.file_name = tempfile.mktemp()
    outcome = "passed", ""
    try:
        case.run(result)
        if result.skipped:
            outcome = "skipped", result.skipped[0][1]
        elif result.failures or result.errors:
            skips = {f"SystemExit: {skip.exit_code}": skip.message for skip in TEST_SKIPS.values()}
            trace = (result.failures + result.errors)[0][1].splitlines()
            why = next(line for line in reversed(trace) if re.match(r"[\w.]+(Error|Exit|Exception|Warning)\b", line))
            outcome = ("skipped", skips[why]) if why in skips else ("failed", why)
    except BaseException as error:
        outcome = "failed", str(error)
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        outcome = "failed", f"destroy_process_group: {error}"
    store.close()
    timer.cancel()
    return outcome


def verdict(outcomes, test: str, args: argparse.Namespace) -> dict[str, str]:
    """What the ranks say together; the worst counts."""
    said = []
    for rank in range(args.ranks):
        try:
            outcomes.wait([f"{test}/{rank}"], timedelta(seconds=args.limit))
        except Exception:
            return {"outcome": "hung", "why": f"rank {rank} has not ended after {args.limit:g} s; others: {said}"}
        said.append(json.loads(outcomes.get(f"{test}/{rank}")))
    for outcome in ("failed", "skipped"):
        if whys := [f"{why}" for seen, why in said if seen == outcome]:
            return {"outcome": outcome, "why": whys[0]}
    return {"outcome": "passed", "why": ""}


if __name__ == "__main__":
    main()
