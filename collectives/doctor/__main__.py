"""Say what works here and what does not, one line each, with remedies; exit with 1 if there is a problem.

python -m collectives.doctor
mpirun -n 4 python -m collectives.doctor --json doctor.json
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from collectives import environment
from collectives.doctor.finding import Setting, problem
from collectives.doctor.report import Line, summary
from collectives.doctor.run import alone, is_launched, local_report, of_job
from collectives.settings import Parser, Range

SECONDS = Range(0, 3600, open="above", unit="s")
UNDER_MPIRUN = "To examine ranks and hosts: mpirun -n 4 python -m collectives.doctor, with --hostfile for several hosts"


def main(arguments: Sequence[str] | None = None) -> int:
    is_first = environment.launched_rank() == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # rank 0 speaks for all
    try:
        flags = parse(arguments)
    except ValueError as error:
        if is_first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    ranks = environment.first_int(environment.LOCAL_RANKS, environment.cores())
    setting = Setting(limit_s=flags.timeout, local_ranks=ranks)
    report = local_report(setting)
    lines = of_job(report, setting) if is_launched() else alone(report, setting)
    if flags.json and is_first:
        lines += written(flags.json, lines)
    print(*lines, summary(lines), *[UNDER_MPIRUN] * (not is_launched()), sep="\n", flush=True)
    return int(any(line.finding.verdict == "problem" for line in lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Raises: ValueError for what makes no sense."""
    parser = Parser("python -m collectives.doctor", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument(
        "--timeout", type=SECONDS.number, default=30.0, metavar="S", help="how long a trial may take (30)"
    )
    return parser.parse_args(arguments)


def written(path: Path, lines: Sequence[Line]) -> list[Line]:
    """Write the findings as JSON, in one go; a line about it where that fails."""
    when = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": platform.node()}
    text = json.dumps(when | {"findings": [line.to_json() for line in lines]}, indent=1)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(f"{text}\n")
        unfinished.replace(path)
    except OSError as error:
        unwritten = problem(f"--json {path} can't be written ({error.strerror})", "pass another path")
        return [Line(unwritten._replace(topic="json"))]
    return []


if __name__ == "__main__":
    sys.exit(main())
