"""Test README and the home page from scratch: run their commands in a clone of this checkout, in a fresh Debian.

python -m mpi_tests.stranger bookworm            # Python 3.11
python -m mpi_tests.stranger forky --whole       # Python 3.14; all of `make test`

Needs root, Linux, debootstrap and git.  The root file system is created anew beneath build/stranger, with this
machine's Debian mirror and pip configuration.  The clone has committed changes only.  A table of the commands is
written beside the root file system; the exit status is 1 if one of them fails.

Commands that need a cluster or a GPU are skipped.  `SHORTER` lists commands and their substitutes, which are short, or
run in an environment of their own.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpi_tests.helpers.debian import check_possible, make_root, run_inside
from mpi_tests.helpers.launch import ROOT

BUILD = ROOT / "build" / "stranger"
PACKAGES = ("ca-certificates", "make", "python3", "python3-venv")
PAGES = ("README.md", "docs/index.md")
HOME = "/root/project"  # folder of the clone within the new root
NOT_RUN = {
    r"\b(sbatch|qsub|bsub|srun|salloc)\b|8x8": "needs a cluster",
    r"mpi_tests\.rig": "needs network namespaces",
    r"--device cuda|gpu_check": "needs a GPU",
}
SMALL = "--max_iters 2 --warmup_iters 0 --n_layer 2 --n_head 4 --n_embd 8 --block_size 8 --micro_batch_size 2"
SMALL += " --sample_tokens 2"
TESTS = (
    "make .venv/kernels && source .venv/bin/activate"
    " && python -m pytest mpi_tests/without_ranks/test_schedule.py -k ring"
    " && mpirun -n 4 python -m pytest --with-mpi --only-mpi mpi_tests/with_ranks/test_tensor_parallel.py"
)
ALONE = "python3 -m venv build/alone && source build/alone/bin/activate"
SHORTER = (  # commands and their substitutes
    (r"make train", "make train ARGS='--max_iters 20'"),
    (r"make test", TESTS),
    (r"(pip install .*)", rf"{ALONE} && \1 && mpirun -n 2 python examples/sum.py"),
    (r"(.*mpirun .*(?:train\.py|-m training)\b(?!\.).*)", rf"\1 {SMALL} --val_fraction 0.002"),
    (r"(.*-m collectives\.bench\b(?!\.).*)", r"\1 -b 1K -e 64K -n 5"),
)


class Step(NamedTuple):
    """A command of a page, the command that runs in its place, and the reason if it is skipped."""

    command: str
    run: str
    reason: str = ""


class Row(NamedTuple):
    """A row of the table: a step, its outcome and its duration."""

    step: Step
    outcome: str
    seconds: float = 0.0

    def __str__(self) -> str:
        took = f"{self.seconds:.0f}" if self.seconds else ""
        run = "" if self.step.run == self.step.command or self.step.reason else f"`{self.step.run}`"
        return f"| `{self.step.command}` | {self.outcome} | {took} | {run} |"


def commands(text: str) -> list[str]:
    r"""Return the commands in the bash blocks of a Markdown file, without their comments.

    >>> commands("Then:\n```bash\nmake train    # minutes\n\nmake test\n```\n```\noutput\n```\n")
    ['make train', 'make test']
    """
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def step_of(command: str, whole: bool) -> Step:
    """Return the step for a command.

    >>> step_of("sbatch hostfiles/slurm.sh", whole=False).reason
    'needs a cluster'
    >>> step_of("make train", whole=False).run, step_of("make test", whole=True).run
    ("make train ARGS='--max_iters 20'", 'make test')
    """
    reason = next((words for pattern, words in NOT_RUN.items() if re.search(pattern, command)), "")
    shorter = [re.sub(f"^{pattern}$", run, command) for pattern, run in SHORTER if re.fullmatch(pattern, command)]
    if whole and command == "make test":
        shorter = []
    return Step(command, shorter[0] if shorter else command, reason)


def follow(root: Path, text: str, whole: bool, log: Path) -> Iterator[Row]:
    """Run the commands of pages in order, as if in one shell, and yield a row for each."""
    before: list[str] = []  # commands that change the state of the shell
    for command in commands(text):
        step = step_of(command, whole)
        if step.reason:
            yield Row(step, f"not run: {step.reason}")
            continue
        begin = time.monotonic()
        status = run_inside(root, HOME, " && ".join([*before, step.run]), log)
        if re.match(r"(source|\.|cd|export) ", command):
            before.append(command)
        yield Row(step, "passed" if status == 0 else f"FAILED ({status})", time.monotonic() - begin)


def table(rows: list[Row], system: str) -> str:
    head = [system, "", "| command | outcome | seconds | what was run for it |", "|---|---|---:|---|"]
    return "\n".join([*head, *map(str, rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser("python -m mpi_tests.stranger", description=__doc__.splitlines()[0])
    parser.add_argument("suite", help="Debian suite, such as bookworm")
    parser.add_argument("--whole", action="store_true", help="run all of `make test` instead of a few of its tests")
    args = parser.parse_args()
    check_possible()
    root, log, out = (BUILD / f"{args.suite}{end}" for end in ("", ".log", ".md"))
    make_root(root, args.suite, PACKAGES, HOME)
    log.write_text("")
    run_inside(root, HOME, "(. /etc/os-release; echo $PRETTY_NAME; python3 --version) > /root/system", log)
    system = ", ".join(Path(f"{root}/root/system").read_text().split("\n")[:2])
    rows = []
    text = "\n".join(Path(f"{root}{HOME}", page).read_text() for page in PAGES)
    for row in follow(root, text, args.whole, log):
        rows.append(row)
        out.write_text(table(rows, system))
        print(row, flush=True)
    failed = [row for row in rows if row.outcome.startswith("FAILED")]
    print(f"{system}: {sum(row.outcome == 'passed' for row in rows)} commands passed, {len(failed)} failed; log: {log}")
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
