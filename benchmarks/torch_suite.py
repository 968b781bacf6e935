"""Run PyTorch's own tests of backends over gloo and over the collectives, and tabulate passes, failures and skips.

    python benchmarks/torch_suite.py --ranks 4 --out torch-suite.md

The tests are in the wheel: torch.testing._internal.distributed.distributed_test, which needs `pip install expecttest`.
All tests of a backend run in one job, in a new default group each (see torch_suite_ranks.py); a test that has not ended
after `--limit` seconds ends the job, and another job continues after it.  The exit status is 1 if a backend fails
tests that gloo passes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

RANKS_PROGRAM = Path(__file__).with_name("torch_suite_ranks.py")
BAD = ("failed", "hung")
Outcomes = dict[str, dict[str, dict]]  # by test, by backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60, help="seconds that a test may take")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the tests' names")
    parser.add_argument("--backends", nargs="*", default=["gloo", "collectives"], help="to compare with gloo")
    parser.add_argument("--out", type=Path, default=Path("torch-suite.md"))
    args = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        parser.error("PyTorch's tests need expecttest: pip install expecttest")
    if not args.out.resolve().parent.is_dir():
        parser.error(f"there is no folder {args.out.parent}, so make it first")
    lines = args.out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    for backend in args.backends:
        run(args, backend, lines)
    outcomes = read(lines)
    args.out.write_text(table(outcomes, args.backends))
    print(summary(outcomes, args.backends))
    sys.exit(any(behind(outcomes, backend) for backend in args.backends))


def run(args: argparse.Namespace, backend: str, lines: Path) -> None:
    """Start jobs until every test has an outcome."""
    now = lines.with_suffix(".now")
    now.unlink(missing_ok=True)
    while status := start_job(args, backend, lines):
        if not now.exists():
            sys.exit(f"{backend}: {RANKS_PROGRAM.name} ended with status {status} before a test")
        test, num_left = now.read_text().split()
        now.unlink()
        if backend not in read(lines).get(test, {}):
            add(lines, {"test": test, "backend": backend, "outcome": "hung", "why": "a rank has ended, or never did"})
        if num_left == "0":
            break


def start_job(args: argparse.Namespace, backend: str, lines: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for inner in ("barrier", "test_dir", "init_dir"):
            Path(folder, inner).mkdir()
        variables = {"WORLD_SIZE": str(args.ranks), "TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init"}
        words = [backend, lines, "--limit", args.limit, "--only", *args.only]
        command = ["mpirun", "-n", args.ranks, sys.executable, "-W", "ignore", RANKS_PROGRAM, *words]
        return subprocess.run(list(map(str, command)), env=os.environ | variables, check=False).returncode


def add(lines: Path, row: dict[str, str]) -> None:
    with lines.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(lines: Path) -> Outcomes:
    outcomes: Outcomes = {}
    for line in lines.read_text().splitlines() if lines.exists() else []:
        row = json.loads(line)
        outcomes.setdefault(row["test"], {})[row["backend"]] = row
    return outcomes


def behind(outcomes: Outcomes, backend: str) -> list[str]:
    """Return the tests that a backend fails and gloo does not, or that it skips and gloo passes."""
    tests = []
    for test, of in outcomes.items():
        ours, gloos = (of[name]["outcome"] if name in of else "" for name in (backend, "gloo"))
        if backend != "gloo" and ((ours in BAD and gloos not in BAD) or (ours == "skipped" and gloos == "passed")):
            tests.append(test)
    return tests


def summary(outcomes: Outcomes, backends: list[str]) -> str:
    lines = []
    for backend in backends:
        count = Counter(of[backend]["outcome"] for of in outcomes.values() if backend in of)
        lines.append(f"{backend}: {', '.join(f'{number} {outcome}' for outcome, number in sorted(count.items()))}")
        if tests := behind(outcomes, backend):
            lines.append(f"{backend} fails where gloo does not: {', '.join(tests)}")
    return "\n\n".join(lines)


def table(outcomes: Outcomes, backends: list[str]) -> str:
    """Format the outcomes as Markdown: failures first, skipped tests last."""
    severity = ("hung", "failed", "passed", "skipped", "").index
    rows = []
    for test, of in outcomes.items():
        results = [of.get(backend, {"outcome": "", "why": ""}) for backend in backends]
        cells = [test, *(row["outcome"] for row in results), reason(results)]
        rows.append((min(severity(row["outcome"]) for row in results), test, f"| {' | '.join(cells)} |"))
    head = [f"| test | {' | '.join(backends)} | reason |", f"|---|{'---|' * len(backends)}---|"]
    return "\n".join([summary(outcomes, backends), "", *head, *(row for _, _, row in sorted(rows)), ""])


def reason(rows: list[dict]) -> str:
    """Format the backends' reasons, once if they are the same."""
    whys = [(row["backend"], row["why"].replace("|", "/")) for row in rows if row["why"]]
    if len({why for _, why in whys}) == 1 and len(whys) == len(rows):
        return whys[0][1]
    return "; ".join(f"{backend}: {why}" for backend, why in whys)


if __name__ == "__main__":
    main()
