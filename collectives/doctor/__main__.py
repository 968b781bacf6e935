"""Say what works here and what does not, one line each, with remedies; exit with 1 if there is a problem.

python -m collectives.doctor
mpirun -n 4 python -m collectives.doctor --json doctor.json
"""

import argparse
import json
import math
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

UNDER_MPIRUN = "To examine ranks and hosts: mpirun -n 4 python -m collectives.doctor, with --hostfile for several hosts"


def main() -> int:
    is_first = environment.launched_rank() == 0
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # rank 0 speaks for all
    flags = parse(is_first)
    ranks = environment.first_int(environment.LOCAL_RANKS, environment.cores())
    setting = Setting(limit_s=flags.timeout, local_ranks=ranks)
    report = local_report(setting)
    lines = of_job(report, setting) if is_launched() else alone(report, setting)
    if flags.json and is_first:
        lines += written(flags.json, lines)
    print(*lines, summary(lines), *[UNDER_MPIRUN] * (not is_launched()), sep="\n", flush=True)
    return int(any(line.finding.verdict == "problem" for line in lines))


def parse(is_first: bool) -> argparse.Namespace:
    what = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m collectives.doctor", description=__doc__, formatter_class=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="how long a trial may take (30)")
    if not is_first:
        sys.stderr, errors = sys.stdout, sys.stderr
    flags = parser.parse_args()
    if not is_first:
        sys.stderr = errors
    return flags


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds above 0, as in 30")
    return number


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
