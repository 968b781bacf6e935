"""Make a table of a benchmark on the rig: `auto` beside the best algorithm, the wire's share, and the model's time.

python -m mpi_tests.rig run -- python -m collectives.bench all_reduce -A all auto mpi -f 8 -e 16M --json rig.json
python benchmarks/rig_table.py rig.json
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEERS = ("mpi", "gloo", "nccl")
HEADING = ("bytes", "auto took", "auto, us", "best", "auto / best", "MPI's / auto", "of the wire", "model / measured")


def rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each size of in-place results."""
    sizes: dict[int, dict[str, Any]] = defaultdict(dict)
    for result in document["results"]:
        if result["in_place"]:
            sizes[result["bytes"]][result["name"]] = result
    for nbytes, by_name in sizes.items():
        auto, mpi = by_name["auto"], by_name["mpi"]["median_us"]
        ours = {name: r["median_us"] for name, r in by_name.items() if name not in (*PEERS, "auto")}
        best = min(ours, key=ours.__getitem__)
        models = sorted((by_name[name]["model_us"] / us, name) for name, us in ours.items())
        (least, lowest), (most, highest) = models[0], models[-1]
        yield (
            str(nbytes),
            auto["algorithm"],
            f"{auto['median_us']:.0f}",
            best,
            f"{auto['median_us'] / ours[best]:.2f}",
            f"{mpi / auto['median_us']:.2f}",
            f"{auto['bound_percent']:.0f}%",
            f"{least:.2f} ({lowest}) to {most:.2f} ({highest})",
        )


def table(document: dict[str, Any]) -> list[str]:
    lines = [HEADING, ("---",) * len(HEADING), *rows(document)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print("\n".join(table(json.loads(Path(sys.argv[1]).read_text()))))
