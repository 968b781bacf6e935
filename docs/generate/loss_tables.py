"""Where the results say that this library is slower than its peers, as tables of markdown."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
TABLES = runpy.run_path(str(BENCHMARKS / "table.py"), run_name="table")
RIG = runpy.run_path(str(BENCHMARKS / "rig.py"), run_name="rig")
SPANS = (
    ("from `comm.empty`", "64 KiB to 64 MiB", "auto symmetric", range(TABLES["LARGE"], 1 << 40)),
    ("ordinary", "1 MiB to 64 MiB", "auto ordinary", range(TABLES["ORDINARY"], 1 << 40)),
    ("from `comm.empty`", "to 16 KiB", "auto symmetric", range(TABLES["SMALL"] + 1)),
)


def losses() -> Iterator[str]:
    """Write a row for each combination in which the mean ratio is below 1, the worst first."""
    yield "| MPI | ranks | collective | arrays | sizes | times as fast | least |\n|---|---:|---|---|---|---:|---|"
    for ratio, run, collective, arrays, sizes in sorted(slower(), key=lambda row: row[0].mean):
        least = f"{ratio.least:.2f} at {TABLES['show'](ratio.at)}"
        mean = f"{ratio.mean:.2f}"
        yield f"| {run['mpi']} | {run['ranks']} | {collective} | {arrays} | {sizes} | {mean} | {least} |"


def slower() -> Iterator[tuple[Any, ...]]:
    runs = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("peers-*.json"))]
    best = TABLES["best_peers"](runs)
    for run in runs:
        for collective in TABLES["COLLECTIVES"]:
            for arrays, sizes, name, span in SPANS:
                ratio = TABLES["ratios"](run, best, collective, name, span)
                if ratio.mean < 1:
                    yield ratio, run, collective, arrays, sizes


def between_hosts() -> Iterator[str]:
    """Write a row for each size of the rig's run by the cost model."""
    yield "| bytes | auto took | auto, us | times as fast as Open MPI's |\n|---:|---|---:|---:|"
    for nbytes, took, auto_us, _, _, ratio, *_ in RIG["rows"](json.loads((RESULTS / "rig-openmpi.json").read_text())):
        yield f"| {nbytes} | {took} | {auto_us} | {ratio} |"
