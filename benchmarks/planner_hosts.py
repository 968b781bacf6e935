"""Compare the planner's predictions with runs on clusters of the rig whose hosts differ in speed and link.

    COLLECTIVES_LINKS=0 python benchmarks/planner_hosts.py --output planner-hosts.json

Each cluster has four hosts of one rank, which get fractions of their part of the cores, and links of some rates.
`benchmarks/planner.py` measures the hosts, predicts a step of each layout, and runs it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from helpers.result_files import output, table, write

from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from mpi_tests.rig import Rig

CLUSTERS = {  # rates of the links, and fractions of the cores
    "one slow host": ("1gbit", "1,1,1,0.5"),
    "two speeds": ("1gbit", "1,0.5,1,0.5"),
    "three speeds": ("1gbit", "1,1,0.5,0.25"),
    "three speeds, slow links": ("300mbit", "1,0.7,0.7,0.5"),
    "one slow link": ("1gbit,1gbit,300mbit,1gbit", "1,1,1,1"),
    "slow hosts with slow links": ("1gbit,1gbit,300mbit,300mbit", "1,1,0.5,0.5"),
}
WHAT = ("predicted", "measured")
LAYOUTS = ("dp 4", "dp 4, zero 1", "dp 2, pp 2", "pp 4")


def compare(rate: str, cpu: str, flags: list[str], folder: Path) -> dict[str, Any]:
    """Return the results of `benchmarks/planner.py` on a rig."""
    path = folder / "planner.json"
    with Rig(4, slots=1, rate=rate, cpu=cpu) as rig:
        words = ["benchmarks/planner.py", *flags, "--layouts", *LAYOUTS, "--output", path]
        run = rig.launch(sys.executable, *words, timeout=900)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(path.read_text())["results"]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--n_layer", type=positive, default=4)
    parser.add_argument("--n_embd", type=positive, default=256)
    parser.add_argument("--block_size", type=positive, default=256, help="tokens a sample")
    parser.add_argument("--samples", type=positive, default=16, help="of a step, on all ranks together")
    parser.add_argument("--steps", type=positive, default=5)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    names = ("n_layer", "n_embd", "block_size", "samples", "steps")
    flags = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    results, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in progress_bar(args.clusters, "cluster"):
            results[name] = compare(*CLUSTERS[name], [*flags, "--micro_batch_size", "1"], Path(folder))
            for layout, figures in results[name]["layouts"].items():
                columns = [f"{figures[f'{what}_{unit}']:.0f}" for unit in ("mib", "ms") for what in WHAT]
                ratios = [f"{figures[f'predicted_to_measured_{unit}']:.2f}" for unit in ("mib", "ms")]
                rows.append([name, layout, *columns, *ratios])
    print(table(["hosts", "layout", "MiB: predicted", "measured", "ms: predicted", "measured", "MiB", "ms"], rows))
    if args.output:
        write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
