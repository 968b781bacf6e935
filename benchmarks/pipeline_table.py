"""Make tables of the results of benchmarks/pipeline_parallel.py.

    python benchmarks/pipeline_table.py benchmarks/results/pipeline-parallel-*.json

Ratios are ours over torch's: of steps, and of their overhead over the schedule's price.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

TITLES = ("ranks", "", "price, ms", "ours", "torch", "ratio", "overhead: ours", "torch", "ratio")


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def row(ranks: int, name: str, figures: Mapping[str, float | None]) -> str:
    price, *pairs = (
        figures[key] for key in ("price_ms", "ours_ms", "torch_ms", "ours_overhead_ms", "torch_overhead_ms")
    )
    steps, overheads = pairs[:2], pairs[2:]
    return line(str(ranks), name, number(price), *comparison(*steps), *comparison(*overheads))


def number(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.1f}"


def comparison(ours: float | None, theirs: float | None) -> tuple[str, str, str]:
    """Return both numbers, and their ratio if the peer's is positive."""
    ratio = "" if ours is None or theirs is None or theirs <= 0 else f"{ours / theirs:.2f}"
    return number(ours), number(theirs), ratio


def table(ranks: int, results: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    rows = [row(ranks, name, figures) for name, figures in results.items()]
    return [line(*TITLES), "|---" * len(TITLES) + "|", *rows]


def main() -> None:
    for path in sys.argv[1:]:
        run = json.loads(Path(path).read_text())
        print("\n".join(table(run["ranks"], run["results"])))


if __name__ == "__main__":
    main()
