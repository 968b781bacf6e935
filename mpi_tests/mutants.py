"""Mutation testing: insert faults into a copy of the code one by one, and run the few tests that should catch each.

python -m mpi_tests.mutants
python -m mpi_tests.mutants --only pipeline zero.py --out mutants.md    # keeps the other rows of the table
python -m mpi_tests.mutants --patience 10    # on a shared machine
python -m mpi_tests.mutants --tree ../another/checkout

A fault is caught if its tests pass without it and, with it, one of them fails, crashes or exceeds its time limit.
Tests that cannot be imported, or a selection that runs none, catch nothing.  The exit status is 1 if a fault is not
caught.  The table is written after each fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from tqdm import tqdm

from mpi_tests.helpers.launch import environment, find_mpirun
from mpi_tests.mutants_list import MUTANTS, Mutant, Selection

ROOT = Path(__file__).resolve().parent.parent
CLEAN_LIMIT_S = 300.0  # for tests without a fault; with one: SLOWER times their duration, and MORE_S
SLOWER, MORE_S, COMPILING_S = 4, 30.0, 120.0  # the last two limit a single test on ranks
AGAIN = 3  # factor on the limit of a second run after a timeout, as the machine may have been busy
TERMINATION_S = 10.0
FAULTLESS = Lock()  # held while a thread runs a selection without a fault, so that each runs only once
PYTEST = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "--color=no")
PASSED, FAILED, LATE, BROKEN = "passed", "failed", "without end", "broken"  # outcomes of a run of tests
CAUGHT = "caught"  # outcome of a mutant
SUMMARY = re.compile(r"\b[1-9]\d* (passed|failed|errors?)\b")
OF_A_TEST = re.compile(r"==== rank \d+ of \d+: \S+::.*")  # the line that ranks print when they abort the job
IN_A_TEST = re.compile(r"^  File .*, line \d+ in pytest_(pyfunc_call|runtest_protocol)$", re.M)
CRASH = re.compile(r"Fatal Python error: .*")  # by a signal such as SIGSEGV
OF_A_BUILD = re.compile(r"\b(SyntaxError|IndentationError|numba\.core\.errors\.\w+Error|CompileException)\b.*")
HEAD = """By `make mutants`, in parts; caught are those that make a test fail, or run without end.

| file | fault | tests | verdict | day | s |
|---|---|---|---|---|---:|
"""


class Ended(NamedTuple):
    """Outcome of a run of tests and its reason; `PASSED` if at least one test ran and all passed."""

    word: str
    why: str
    seconds: float


class Verdict(NamedTuple):
    """Outcome of a mutant: `CAUGHT`, or another word, with its reason."""

    word: str
    why: str
    seconds: float = 0.0


def copy_tree(tree: Path, folder: Path) -> Path:
    """Copy the files of `tree` that git tracks or does not ignore, with uncommitted changes."""
    listing = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return folder


def files_of(tree: Path, tests: Selection) -> list[str]:
    """Return the test files of that name: those in with_ranks/ if the tests need ranks, else the others, else all."""
    files = sorted((tree / "mpi_tests").rglob(tests.file))
    if not files:
        raise FileNotFoundError(f"no {tests.file} beneath {tree / 'mpi_tests'}")
    matches = [file for file in files if (file.parent.name == "with_ranks") == tests.need_ranks]
    return list(map(str, matches or files))


def command(tree: Path, tests: Selection, test_limit_s: float) -> list[str]:
    """Return the command line that runs some tests of a tree; on ranks, each test is limited to `test_limit_s`."""
    selection = [*files_of(tree, tests), *(["-k", tests.keys] if tests.keys else [])]
    if not tests.ranks:
        return [sys.executable, *PYTEST, "-m", "not mpi", *selection]
    launcher = [find_mpirun(), "-n", str(tests.ranks), sys.executable]
    return [*launcher, *PYTEST, "--with-mpi", "--only-mpi", f"--rank-timeout={test_limit_s:g}", *selection]


def surroundings(tree: Path, kernels: str = "kernels") -> dict[str, str]:
    """Return the environment of an activated .venv, for a tree."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment() | {"PATH": path, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(tree / kernels)}


def compile_kernels(tree: Path) -> None:
    """Compile the kernels of a tree, which would exceed the time limit of the first test on ranks."""
    module = "mpi_tests.helpers.compile_kernels"
    subprocess.run([sys.executable, "-m", module], cwd=tree, env=surroundings(tree), check=True)


def run(tree: Path, tests: Selection, limit_s: float, test_limit_s: float, kernels: str = "kernels") -> Ended:
    """Run some tests of a tree; `kernels` is Numba's cache folder."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        line = command(tree, tests, test_limit_s)
        process = subprocess.Popen(line, cwd=tree, env=surroundings(tree, kernels), **streams)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end(process)
            return Ended(LATE, f"not finished after {limit_s:.0f} s", time.monotonic() - begin)
        output.seek(0)
        word, why = outcome(status, output.read())
    return Ended(word, why, time.monotonic() - begin)


def outcome(status: int, output: str) -> tuple[str, str]:
    """Classify pytest's exit status and output; return the outcome and its reason.

    >>> outcome(0, "1 passed, 3 skipped in 0.1s"), outcome(0, "3 skipped in 0.1s")
    (('passed', ''), ('broken', 'no test ran'))
    >>> outcome(1, "FAILED test_a.py::test_b - assert 1 == 2\\n1 failed in 0.1s")
    ('failed', 'FAILED test_a.py::test_b - assert 1 == 2')
    >>> outcome(2, "ERROR test_a.py\\n1 error in 0.1s")
    ('broken', 'exit status 2: ERROR test_a.py')
    """
    counts = set(SUMMARY.findall(output))
    if status == 0:
        return (PASSED, "") if counts == {"passed"} else (BROKEN, "no test ran")
    reason = first_line(output, "FAILED", "ERROR", "====")
    if (crash := CRASH.search(output)) and IN_A_TEST.search(output, crash.end()):
        return FAILED, crash[0]
    if status != 1:
        return BROKEN, f"exit status {status}: {reason}"
    if build := OF_A_BUILD.search(output):
        return BROKEN, build[0]
    if result := OF_A_TEST.search(output):
        return (LATE if "not finished after" in result[0] else FAILED), result[0]
    return (FAILED if counts - {"passed"} else BROKEN), reason


def first_line(output: str, *starts: str) -> str:
    """Return the first line that begins with `starts[0]`, or else with `starts[1]` and so on; "" if none does."""
    lines = output.splitlines()
    return next((line for start in starts for line in lines if line.startswith(start)), "")


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: list[str] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += file.read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def end(process: subprocess.Popen) -> None:
    """End a process and its descendants: mpirun ends its ranks when terminated, but not when killed."""
    members = family(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)


def examine(clean: dict[Selection, Ended], patience: float, tree: Path, mutant: Mutant) -> Verdict:
    """Insert a fault into a copy, run its tests until one fails, and remove it again.

    `clean` caches the runs without a fault by selection; this adds those of the fault's tests.
    """
    limits_s = patience * CLEAN_LIMIT_S, patience * COMPILING_S
    for tests in mutant.tests:
        with FAULTLESS:
            if tests not in clean:
                clean[tests] = run(tree, tests, *limits_s)
                if clean[tests].word != PASSED:  # its compilation may have exceeded the tests' limit
                    clean[tests] = run(tree, tests, *limits_s)
    if broken := [f"{tests}: {clean[tests].why}" for tests in mutant.tests if clean[tests].word != PASSED]:
        return Verdict("BROKEN SELECTION", "; ".join(broken))
    path = tree / mutant.file
    text = path.read_text() if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return Verdict("DOES NOT APPLY", f"is in the file {text.count(mutant.old)} times")
    stat, begin = path.stat(), time.monotonic()
    compiled = "njit" in text  # in a separate cache, so that the code without the fault need not be compiled again
    kernels, more_s = ("faulty_kernels", COMPILING_S) if compiled else ("kernels", MORE_S)
    path.write_text(text.replace(mutant.old, mutant.new))
    future_ns = max(time.time_ns(), stat.st_mtime_ns + 10**9)  # in one second, Python would take the old bytecode
    os.utime(path, ns=(stat.st_atime_ns, future_ns))
    try:
        for tests in mutant.tests:
            limits_s = patience * (more_s + SLOWER * clean[tests].seconds), patience * more_s
            result = run(tree, tests, *limits_s, kernels)
            if result.word == LATE:
                result = run(tree, tests, *(AGAIN * limit_s for limit_s in limits_s), kernels)
            if result.word != PASSED:
                word = "BROKEN BUILD" if result.word == BROKEN else CAUGHT
                return Verdict(word, result.why, time.monotonic() - begin)
        return Verdict("SURVIVED", "", time.monotonic() - begin)
    finally:
        path.write_text(text)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def examine_all(
    mutants: Sequence[Mutant], copies: Sequence[Path], patience: float, tell: Callable[[Mutant, Verdict], None]
) -> None:
    """Examine mutants in one thread per copy, those that need ranks in a single thread; call `tell` for each."""
    examine_one = partial(examine, {}, patience)
    bar = tqdm(total=len(mutants), unit="mutant", file=sys.stderr, disable=None)
    for with_ranks, some in ((False, copies), (True, copies[:1])):
        idle: SimpleQueue[Path] = SimpleQueue()
        for copy in some:
            idle.put(copy)

        def within(mutant: Mutant, idle: SimpleQueue[Path] = idle) -> Verdict:
            copy = idle.get()
            try:
                return examine_one(copy, mutant)
            finally:
                idle.put(copy)

        mine = [mutant for mutant in mutants if mutant.need_ranks == with_ranks]
        if mine and with_ranks:
            compile_kernels(copies[0])
        with ThreadPoolExecutor(len(some)) as threads:
            for mutant, verdict in zip(mine, threads.map(within, mine), strict=True):
                tell(mutant, verdict)
                bar.write(f"{mutant}: {' '.join(map(str, verdict))}", file=sys.stderr)
                bar.update()
    bar.close()


def row(mutant: Mutant, verdict: Verdict) -> str:
    word, why, seconds = verdict
    text = word if word == CAUGHT else f"**{word}** {why}".strip()
    return name(mutant) + cells(text, date.today(), f"{seconds:.0f}")


def name(mutant: Mutant) -> str:
    """Return the first cells of a mutant's row, which identify it."""
    return "|" + cells(mutant.file, f"`{mutant.fault}`", "<br>".join(map(str, mutant.tests)))


def cells(*values: object) -> str:
    r"""Format cells of a Markdown row.

    >>> print(cells("a | b", 3))
     a \| b | 3 |
    """
    return "".join(f" {text} |" for text in (str(value).replace("|", r"\|") for value in values))


def earlier(path: Path, mutants: Iterable[Mutant]) -> dict[Mutant, str]:
    """Return the rows of an existing table by mutant, without those of removed mutants."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {mutant: next((line for line in lines if line.startswith(name(mutant))), "") for mutant in mutants}
    return {mutant: line for mutant, line in rows.items() if line and line != not_run(mutant)}


def not_run(mutant: Mutant) -> str:
    return name(mutant) + cells("not run", "", "")


def table(rows: Mapping[Mutant, str], mutants: Sequence[Mutant]) -> str:
    """Format the rows in the order of `mutants`, followed by the number of mutants caught."""
    lines = [rows.get(mutant, not_run(mutant)) for mutant in mutants]
    caught = sum(
        line.removeprefix(name(mutant)).startswith(f" {CAUGHT}") for mutant, line in zip(mutants, lines, strict=True)
    )
    return (
        HEAD + "\n".join([*lines, "", f"{caught} of {len(mutants)} caught, {len(mutants) - len(rows)} not run"]) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="repository to examine (default: this one)")
    parser.add_argument("-k", "--only", nargs="+", default=[""], help="only mutants whose row has one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs without ranks (default: 2)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on all time limits (default: 1)")
    parser.add_argument("--out", type=Path, help="file to write the table to, as well")
    flags = parser.parse_args()
    rows = {mutant: f"{mutant} {' '.join(map(str, mutant.tests))}" for mutant in MUTANTS}
    mutants = [mutant for mutant, row in rows.items() if any(word in row for word in flags.only)]
    by_mutant = earlier(flags.out, MUTANTS) if flags.out else {}
    verdicts: dict[Mutant, Verdict] = {}

    def tell(mutant: Mutant, verdict: Verdict) -> None:
        verdicts[mutant] = verdict
        by_mutant[mutant] = row(mutant, verdict)
        if flags.out:
            flags.out.write_text(table(by_mutant, MUTANTS))

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_tree(flags.tree, Path(folder, str(number))) for number in range(max(1, flags.jobs))]
        examine_all(mutants, copies, flags.patience, tell)
    print(table({mutant: by_mutant[mutant] for mutant in mutants}, mutants), end="")
    return any(verdict.word != CAUGHT for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
