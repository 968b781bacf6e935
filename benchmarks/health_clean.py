"""Train without a fault beside other load that comes and goes, and count the ranks that are named without cause.

    COLLECTIVES_LINKS=0 python benchmarks/health_clean.py --minutes 60 --output health-clean.json

Other processes compute on 1 to all cores for up to a minute, and not for as long.  A finding of kind "load" or "all" is
no false name: its ranks do get less of their cores.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread

from helpers.result_files import output, table, write

from collectives.job.settings import Parser, positive
from mpi_tests.helpers.faults import TINY, records
from mpi_tests.helpers.launch import end, environment, find_mpirun

BURST_S = 5.0, 60.0
LOAD = ("load", "all")  # kinds of findings that name what other processes do
FOREVER = 10**9  # steps


def load(ended: Event, draw: random.Random, bursts: list[tuple[float, float, int]]) -> None:
    """Have other processes compute in bursts until `ended`; append each burst's begin, end and number of processes."""
    while not ended.wait(draw.uniform(*BURST_S)):
        number, begin_s = draw.randint(1, os.cpu_count() or 1), time.time()
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
        ended.wait(draw.uniform(*BURST_S))
        for process in busy:
            process.kill()
            process.wait()
        bursts.append((begin_s, time.time(), number))


def train(num_ranks: int, minutes: float, flags: list[str], folder: Path) -> None:
    """Train for some minutes; raise RuntimeError with the run's output if it ends earlier."""
    program = [find_mpirun(), "-n", str(num_ranks), sys.executable, "train.py", *TINY.split(), *flags]
    program += ["--max_iters", str(FOREVER), "--out_dir", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        program, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True
    ) as process:
        try:
            words = process.communicate(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            end(process)
            return
    raise RuntimeError("".join(words))


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=positive, default=60)
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args, flags = parser.parse_known_args()
    ended, bursts = Event(), list[tuple[float, float, int]]()
    thread = Thread(target=load, args=(ended, random.Random(args.seed), bursts))
    with tempfile.TemporaryDirectory() as folder:
        thread.start()
        try:
            train(args.ranks, args.minutes, flags, Path(folder))
        finally:
            ended.set()
            thread.join()
        steps = records(Path(folder))
    begun = [{"iter": each["iter"], **each["health"]} for each in steps if each.get("health", {}).get("begins")]
    kinds = Counter(each["kind"] for each in begun)
    false = [each for each in begun if each["kind"] not in LOAD]
    last = max(each["iter"] for each in steps)
    print(table(["findings", "number"], sorted(kinds.items())))
    print(f"{last} steps in {args.minutes} minutes beside {len(bursts)} bursts of load; {len(false)} false names")
    for each in false:
        print(each["iter"], each["words"])
    if args.output:
        results = {"steps": last, "bursts": bursts, "findings": begun, "false": false}
        write(args.output, results, ranks=args.ranks, minutes=args.minutes, flags=flags, seed=args.seed)


if __name__ == "__main__":
    main()
