"""Plant faults in ranks and links of training runs in random layouts, and see which of them the runs name.

    COLLECTIVES_LINKS=0 python benchmarks/health.py --faults 40 --output health.json

From a random step on, a rank gets a part of its core ("cpu"), computes slowly ("slow") or waits for its input
("input"), or a host of the rig sends and receives at a third of its rate ("link"); in some runs nothing happens
("none").  In others a bit of a rank is flipped once: in its sum of gradients, a gradient, what it gets of the ranks'
sum ("message"), a weight or an optimizer state.  A fault is named right if the first finding is of its kind, of that
rank or host alone, and within 20 steps or 10 s.
"""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

from helpers.result_files import output, table, write

from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from mpi_tests.helpers.bit_flips import TARGETS
from mpi_tests.helpers.faults import Fault, changes, changes_on_rig, refusal
from mpi_tests.rig import Rig

SPEEDS = [("cpu", 0.7), ("cpu", 0.4), ("slow", 0.7), ("slow", 0.4), ("input", 0.3), ("link", 0.3), ("none", 1.0)]
BITS = ["sum", "gradient", "message", "weight", "state"]
KINDS = [*SPEEDS, *((kind, 1.0) for kind in BITS)]
NAMED = {"cpu": "load"}  # the finding's kind, if it is not the fault's
WITHIN, WITHIN_S = 20, 10.0  # steps, or seconds, in which a fault is to be named
STEPS, STEPS_AFTER = range(30, 40), 70  # the first with the fault, and those to the run's end
CHECKED = 40  # the step whose checks find a wrong bit
CHECKS = f"--reproducible --check_interval 10 --max_iters {CHECKED + 2}"
LAYOUTS = {
    2: ["", "--pp 2 --num_micro_batches 4", "--tp 2", "--zero_stage 3"],
    3: ["", "--zero_stage 1"],
    4: ["", "--tp 2", "--pp 2 --num_micro_batches 4", "--pp 4 --num_micro_batches 8", "--sp 2"],
    6: ["", "--tp 2"],
    8: ["--tp 2", "--pp 2 --tp 2 --num_micro_batches 4"],
}
LAYOUTS_WITH_REPLICAS = {
    2: ["", "--zero_stage 1"],
    3: ["", "--zero_stage 1"],
    4: ["", "--pp 2 --num_micro_batches 4", "--tp 2 --tiles 4"],
    6: ["", "--tp 2 --tiles 4"],
    8: ["", "--pp 2 --num_micro_batches 4"],
}
HOSTS = 4


def run(fault: Fault, num_ranks: int, flags: str) -> list[dict]:
    flags = f"--max_iters {fault.step + STEPS_AFTER} {flags}"
    with tempfile.TemporaryDirectory() as folder:  # hosts of the rig have memory of their own
        if fault.kind != "link":
            return changes(fault, num_ranks, flags, Path(folder))
        with Rig(HOSTS, slots=1, rate="1gbit") as rig:
            return changes_on_rig(
                rig, fault.rank + 1, f"{1000 * fault.amount:.0f}mbit", fault.step, flags, Path(folder)
            )


def flipped(fault: Fault, num_ranks: int, flags: str) -> tuple[bool, str]:
    """Return whether a wrong bit is named right, and in which words."""
    first = CHECKED - 1 if fault.kind in ("weight", "state") else CHECKED
    words = refusal(fault._replace(step=first), num_ranks, f"{CHECKS} {flags}")
    return bool(re.match(f"step {CHECKED}: {TARGETS[fault.kind].words.format(rank=fault.rank)}", words)), words


def is_right(fault: Fault, begun: list[dict]) -> bool:
    if fault.kind == "none" or not begun:
        return fault.kind == "none" and not begun
    kind, first = NAMED.get(fault.kind, fault.kind), begun[0]
    is_named = (first["kind"], first["ranks"]) == (kind, [fault.rank])
    is_soon = first["iter"] <= fault.step + WITHIN or first["after_s"] <= WITHIN_S
    return is_named and fault.step <= first["iter"] and is_soon


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=positive, default=20)
    parser.add_argument("--kinds", nargs="+", choices=[kind for kind, _ in KINDS], help="of faults, all if omitted")
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, help="of each run, drawn if omitted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    draw, rows, right = random.Random(args.seed), [], 0
    kinds = [each for each in KINDS if not args.kinds or each[0] in args.kinds]
    for number in progress_bar(range(args.faults), "fault"):
        kind, amount = kinds[number % len(kinds)]
        num_ranks = HOSTS if kind == "link" else args.ranks or draw.choice([*LAYOUTS])
        layouts = LAYOUTS_WITH_REPLICAS if kind in BITS else LAYOUTS
        flags = "" if kind == "link" else draw.choice(layouts[num_ranks])
        fault = Fault(kind, draw.randrange(num_ranks), draw.choice(STEPS), amount)
        if kind in BITS:
            is_named, words = flipped(fault, num_ranks, flags)
        else:
            begun = [each for each in run(fault, num_ranks, flags) if each["begins"]]
            is_named, words = is_right(fault, begun), "; ".join(each["words"] for each in begun)
        right += is_named
        where = [num_ranks, flags or "dp", f"{kind} {amount:g}", fault.rank, fault.step]
        rows.append([*where, "yes" if is_named else "no", words])
        print(*rows[-1], sep=" | ", flush=True)
    print(table(["ranks", "layout", "fault", "rank", "step", "named", "findings"], rows))
    print(f"{right} of {args.faults} named right, within {WITHIN} steps or {WITHIN_S:g} s")
    if args.output:
        write(args.output, {"faults": rows, "right": right, "of": args.faults}, seed=args.seed)


if __name__ == "__main__":
    main()
