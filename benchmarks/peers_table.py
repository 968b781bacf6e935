"""Make tables of the results of benchmarks/peers.py: speedups over the best peer.

    python benchmarks/peers_table.py benchmarks/results/peers-*.json

The best peer at a size is the faster one of the same run: the MPI library's own collective, or gloo's.
"""

import json
import sys
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

LARGE, SMALL, ORDINARY, HUGE = 64 << 10, 16 << 10, 1 << 20, 16 << 20
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
PEERS = ("mpi", "gloo")


class Ratios(NamedTuple):
    """Speedups with one kind of memory, over some sizes."""

    mean: float  # geometric mean
    least: float
    at: int  # bytes at which it is least


def ratios(run: dict, collective: str, name: str, sizes: range) -> Ratios:
    """Return the speedups of `name` over the best peer."""
    speedups = {
        r["bytes"]: min(r["seconds"][peer] for peer in PEERS if peer in r["seconds"]) / r["seconds"][name]
        for r in run["results"]
        if r["collective"] == collective and r["bytes"] in sizes
    }
    at = min(speedups, key=lambda nbytes: speedups[nbytes])
    return Ratios(exp(sum(map(log, speedups.values())) / len(speedups)), speedups[at], at)


def fraction_of_copy(run: dict, collective: str) -> float:
    """Return the lowest fraction of a copy's speed, at 16 MiB and up."""
    results = [r["seconds"] for r in run["results"] if r["collective"] == collective and r["bytes"] >= HUGE]
    return min(seconds["copy"] / seconds["auto symmetric"] for seconds in results)


def bfloat16_rate(run: dict) -> float:
    """Return the bytes per second of a sum of 16 MiB of bfloat16, relative to float32."""
    seconds = next(r["seconds"] for r in run["results"] if (r["collective"], r["bytes"]) == ("all_reduce", HUGE))
    return seconds["auto symmetric"] / seconds["auto bfloat16"]


def show(nbytes: int) -> str:
    """Format a size.

    >>> show(8), show(65536), show(1 << 24)
    ('8 B', '64 KiB', '16 MiB')
    """
    shift = max(shift for shift in (0, 10, 20) if nbytes >> shift)
    return f"{nbytes >> shift} {['B', 'KiB', 'MiB'][shift // 10]}"


def row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(runs: list[dict]) -> list[str]:
    lines = [
        row("MPI", "ranks", "collective", "64 KiB to 64 MiB", "ordinary, from 1 MiB", "to 16 KiB", "of a copy"),
        "|---" * 7 + "|",
    ]
    for run in runs:
        for collective in COLLECTIVES:
            spans = (
                ("auto symmetric", range(LARGE, 1 << 40)),
                ("auto ordinary", range(ORDINARY, 1 << 40)),
                ("auto symmetric", range(SMALL + 1)),
            )
            cases = [ratios(run, collective, name, sizes) for name, sizes in spans]
            cells = [f"{r.mean:.2f} (least {r.least:.2f} at {show(r.at)})" for r in cases]
            lines.append(row(run["mpi"], run["ranks"], collective, *cells, f"{fraction_of_copy(run, collective):.0%}"))
    return lines


def main() -> None:
    runs = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    print("\n".join(table(runs)))
    for run in runs:
        print(f"{run['mpi']}, {run['ranks']} ranks: bfloat16 {bfloat16_rate(run):.2f} times the bytes/s of float32")


if __name__ == "__main__":
    main()
