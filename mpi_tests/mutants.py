"""Put faults into a copy of the code, one by one, and run for each the few tests that ought to catch it.

python -m mpi_tests.mutants
python -m mpi_tests.mutants --only pipeline zero.py --out mutants.md    # the table's other rows stay as they are
python -m mpi_tests.mutants --patience 10    # on a machine that others use
python -m mpi_tests.mutants --tree ../another/checkout

A fault is caught where its tests pass without it and, with it, one of them fails, crashes or runs without end; tests
that can't be imported, or none that ran, catch nothing.  Exits with 1 if a fault is not caught.  The table is written
after each.
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
CLEAN_LIMIT_S = 300.0  # of tests without a fault; with one, a few times what they took, and more
SLOWER, MORE_S, COMPILING_S = 4, 30.0, 120.0  # on ranks, a test alone may take no longer than the latter two
AGAIN = 3  # times as long for a second run, where the first was late: the machine may have been busy
TERMINATION_S = 10.0
FAULTLESS = Lock()  # held by the thread that runs a selection without a fault: each runs once
PYTEST = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "--color=no")
PASSED, FAILED, LATE, BROKEN = "passed", "failed", "without end", "broken"  # a run of tests
CAUGHT = "caught"  # a mutant
SUMMARY = re.compile(r"\b[1-9]\d* (passed|failed|errors?)\b")
OF_A_TEST = re.compile(r"==== rank \d+ of \d+: \S+::.*")  # what the ranks print where they end the job themselves
IN_A_TEST = re.compile(r"^  File .*, line \d+ in pytest_(pyfunc_call|runtest_protocol)$", re.M)
CRASH = re.compile(r"Fatal Python error: .*")  # by a signal, as after a wrong address
OF_A_BUILD = re.compile(r"\b(SyntaxError|IndentationError|numba\.core\.errors\.\w+Error|CompileException)\b.*")
HEAD = """By `make mutants`, in parts; caught are those that make a test fail, or run without end.

| file | fault | tests | verdict | day | s |
|---|---|---|---|---|---:|
"""


class Ended(NamedTuple):
    """How a run of tests ended: `PASSED` if there were some and all passed, or another word, and why."""

    word: str
    why: str
    seconds: float


class Verdict(NamedTuple):
    """What became of a mutant: `CAUGHT`, or another word."""

    word: str
    why: str
    seconds: float = 0.0


def copy_tree(tree: Path, folder: Path) -> Path:
    """Copy what git tracks in `tree`, and what it does not ignore, as it is now."""
    listed = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return folder


def files_of(tree: Path, tests: Selection) -> list[str]:
    """Return the test files of that name: where there is a folder with_ranks/, those in it, or those elsewhere."""
    files = sorted((tree / "mpi_tests").rglob(tests.file))
    if not files:
        raise FileNotFoundError(f"no {tests.file} beneath {tree / 'mpi_tests'}")
    matches = [file for file in files if (file.parent.name == "with_ranks") == tests.need_ranks]
    return list(map(str, matches or files))


def command(tree: Path, tests: Selection, test_limit_s: float) -> list[str]:
    """Return the command line that runs some tests of a tree, on ranks each for no longer than `test_limit_s`."""
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
    """Compile the kernels of a tree, for which the first of its tests on ranks would have too little time."""
    module = "mpi_tests.helpers.compile_kernels"
    subprocess.run([sys.executable, "-m", module], cwd=tree, env=surroundings(tree), check=True)


def run(tree: Path, tests: Selection, limit_s: float, test_limit_s: float, kernels: str = "kernels") -> Ended:
    """Run some tests of a tree, in which the folder `kernels` keeps what Numba compiles."""
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
    """Return how pytest ended, by its exit status and output, and why.

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
    """Return the first line that begins with the first of some words that any line begins with; "" for none."""
    lines = output.splitlines()
    return next((line for start in starts for line in lines if line.startswith(start)), "")


def family(pid: int) -> list[int]:
    """Return a process and all that it, and those in turn, have started."""
    children: list[str] = []
    with suppress(OSError):
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            children += listed.read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def end(process: subprocess.Popen) -> None:
    """End a process and its family: mpirun ends its ranks if it is asked, not if it is killed."""
    members = family(process.pid)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATION_S)


def examine(clean: dict[Selection, Ended], patience: float, tree: Path, mutant: Mutant) -> Verdict:
    """Put a fault into a copy, run its tests until one fails, and take it out again.

    `clean` are runs without a fault, to which those of its tests are added.
    """
    limits_s = patience * CLEAN_LIMIT_S, patience * COMPILING_S
    for tests in mutant.tests:
        with FAULTLESS:
            if tests not in clean:
                clean[tests] = run(tree, tests, *limits_s)
                if clean[tests].word != PASSED:  # while it compiled, for longer than its tests may take
                    clean[tests] = run(tree, tests, *limits_s)
    if broken := [f"{tests}: {clean[tests].why}" for tests in mutant.tests if clean[tests].word != PASSED]:
        return Verdict("BROKEN SELECTION", "; ".join(broken))
    path = tree / mutant.file
    text = path.read_text() if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return Verdict("DOES NOT APPLY", f"is in the file {text.count(mutant.old)} times")
    stat, begin = path.stat(), time.monotonic()
    compiled = "njit" in text  # in a folder of its own, so that the faultless need not be compiled again
    kernels, more_s = ("faulty_kernels", COMPILING_S) if compiled else ("kernels", MORE_S)
    path.write_text(text.replace(mutant.old, mutant.new))
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
    """Examine mutants, in as many threads as there are copies, and those that need ranks in one; `tell` of each."""
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
    """Return the first cells of a mutant's row, by which it is found again."""
    return "|" + cells(mutant.file, f"`{mutant.fault}`", "<br>".join(map(str, mutant.tests)))


def cells(*values: object) -> str:
    r"""Return cells of a row in Markdown.

    >>> print(cells("a | b", 3))
     a \| b | 3 |
    """
    return "".join(f" {text} |" for text in (str(value).replace("|", r"\|") for value in values))


def earlier(path: Path, mutants: Iterable[Mutant]) -> dict[Mutant, str]:
    """Return the rows that a table has of these mutants; what is no longer one is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {mutant: next((line for line in lines if line.startswith(name(mutant))), "") for mutant in mutants}
    return {mutant: line for mutant, line in rows.items() if line and line != not_run(mutant)}


def not_run(mutant: Mutant) -> str:
    return name(mutant) + cells("not run", "", "")


def table(rows: Mapping[Mutant, str], mutants: Sequence[Mutant]) -> str:
    """Return the rows, in the order of `mutants`, and below how many of all are caught."""
    lines = [rows.get(mutant, not_run(mutant)) for mutant in mutants]
    caught = sum(
        line.removeprefix(name(mutant)).startswith(f" {CAUGHT}") for mutant, line in zip(mutants, lines, strict=True)
    )
    return (
        HEAD + "\n".join([*lines, "", f"{caught} of {len(mutants)} caught, {len(mutants) - len(rows)} not run"]) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="repository to be examined: this one")
    parser.add_argument("-k", "--only", nargs="+", default=[""], help="words, one of which a mutant's row must have")
    parser.add_argument("--jobs", type=int, default=2, help="runs without ranks at a time: 2")
    parser.add_argument("--patience", type=float, default=1.0, help="how many times as long as usual a run may take: 1")
    parser.add_argument("--out", type=Path, help="file for the table, too")
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
