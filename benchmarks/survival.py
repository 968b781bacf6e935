"""Kill random ranks of training runs in random layouts, and time until the others finish the next step.

    python benchmarks/survival.py --kills 20 --output survival.json
    python benchmarks/survival.py --kills 20 --way fork --output restart.json
    python benchmarks/survival.py --kills 20 --way hosts --output hosts.json

Each run loses two ranks, one after the other, at any moment: of a step, a snapshot, a checkpoint or a validation.  The
others go on without them, or a supervisor starts the job again.  Its last loss is compared with that of a run
of one rank that loses none.  By the way of hosts, it loses those of the rig, each of one rank, with their memory; it
has snapshots, and no checkpoints.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
from helpers.result_files import output, table, write

from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from mpi_tests.helpers.survival import WAYS, Cluster, Outcome, train
from mpi_tests.rig import Rig

BATCH = "--micro_batch_size 2 --global_batch_size 24 --max_iters 30 --eval_interval 4 --snapshot_interval 2"
NUM_HOSTS = 4
STEPS = 8, 18  # after which ranks die
LAYOUTS = {
    2: ["", "--zero_stage 3"],
    3: ["", "--zero_stage 2"],
    4: [
        "--zero_stage 1", "--tp 2", "--tp 2 --zero_stage 3", "--pp 2", "--pp 2 --schedule zb_h1 --zero_stage 1",
        "--pp 2 --schedule zb_v", "--sp 2", "--sp 2 --tp 2", "--pp 2 --tp 2", "--pp 2 --sp 2",
    ],
    6: ["--zero_stage 1", "--tp 2", "--pp 2 --zero_stage 2"],
    8: ["--pp 2 --tp 2 --sp 2", "--pp 2 --tp 2 --zero_stage 1", "--tp 2 --zero_stage 3"],
}  # fmt: skip


def run(num_ranks: int, flags: str, draw: random.Random, way: str, deaths: int) -> Outcome:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return train(num_ranks, f"{BATCH} {flags}", Path(folder), STEPS[:deaths], draw, way)


def run_on_hosts(draw: random.Random) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, Rig(NUM_HOSTS, slots=1, rate="none") as rig:
        cluster = Cluster(rig, Path(folder))
        return train(NUM_HOSTS, f"{BATCH} --checkpoint_interval 0", Path(folder), STEPS, draw, cluster=cluster)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=positive, default=20)
    parser.add_argument(
        "--way", choices=[*WAYS, "hosts"], default="shrink", help="by which a run continues (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, choices=LAYOUTS, help="of each run, drawn if omitted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    draw, expected = random.Random(args.seed), run(1, "", random.Random(0), "fork", deaths=0).val_loss
    rows, seconds, killed, differences = [], [], 0, [0.0]
    with progress_bar(args.kills, "kill") as bar:
        while killed < args.kills:
            num_ranks = args.ranks or draw.choice([*LAYOUTS])
            flags = draw.choice(LAYOUTS[num_ranks])
            number = min(len(STEPS), num_ranks - 1) if args.way.startswith("shrink") else len(STEPS)
            if args.way == "hosts":
                num_ranks, flags, outcome = NUM_HOSTS, f"dp, {NUM_HOSTS} hosts", run_on_hosts(draw)
            else:
                outcome = run(num_ranks, flags, draw, args.way, number)
            rows += [[num_ranks, flags, kill.before, kill.after, f"{kill.seconds:.2f}"] for kill in outcome.kills]
            seconds += [kill.seconds for kill in outcome.kills]
            killed += number
            if len(outcome.kills) < number:
                print(
                    f"{num_ranks} ranks, {flags}: ended after {len(outcome.kills)} of {number} kills:",
                    *outcome.lines,
                    sep="\n",
                )
            else:
                differences.append(abs(outcome.val_loss / expected - 1))
            bar.update(number)
    print(table(["ranks", "layout", "last step", "next step", "s"], rows))
    median, late = np.percentile(seconds, [50, 95])
    print(f"training continued after {len(seconds)} of {killed} kills")
    print(f"last losses are within {max(differences):.1e} of that of one rank that loses none")
    print(f"from a kill to the next finished step: median {median:.2f} s, 95% within {late:.2f} s")
    if args.output:
        results = {"kills": rows, "survived": len(seconds), "of": killed, "median_s": median, "within_95_s": late}
        results["losses_within"] = max(differences)
        write(args.output, results, way=args.way, seed=args.seed)


if __name__ == "__main__":
    main()
