"""Where the results say that this library is slower than its peers, as tables of markdown."""

import json
import re
import runpy
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"
RIG = runpy.run_path(str(BENCHMARKS / "rig_table.py"), run_name="rig_table")
ARRAYS = {"call": "ordinary", "symmetric": "from `comm.empty`"}  # by column
SHORT_BYTES = 16 << 10


def losses() -> Iterator[str]:
    """Write a row for each combination in which the mean ratio is below 1, the worst first.

    A call is compared with the MPI library's own collective in the same runs, which are those of README's table.
    """
    yield "| beside | collective | arrays | sizes | times as fast | least |\n|---|---|---|---|---:|---:|"
    rows = [row for path in sorted(RESULTS.glob("calls-*.md")) for row in ratios(path.read_text())]
    for mean, least, *where in sorted(rows):
        if mean < 1:
            yield f"| {' | '.join(where)} | {mean:.2f} | {least:.2f} |"


def ratios(text: str) -> Iterator[tuple[Any, ...]]:
    """Read the mean and least ratio of each collective, kind of arrays and span of sizes from a table of calls.

    Those of long vectors are in its summary.
    """
    beside = re.match(r"Calls, plans and (.*)'s own collectives on (\d ranks)", text)
    assert beside
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    times, summary = (
        [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head) and row[1][0].isdecimal()]
        for head in (row for row in rows if row[0] == "collective")
    )
    for long, (column, arrays) in product(summary, ARRAYS.items()):
        collective = long["collective"]
        yield *map(float, long[column].split(", ")), ", ".join(beside.groups()), collective, arrays, "64 KiB to 64 MiB"
        short = [
            float(row["MPI"]) / float(row[column])
            for row in times
            if row["collective"] == collective and int(row["bytes"]) <= SHORT_BYTES
        ]
        yield geometric_mean(short), min(short), ", ".join(beside.groups()), collective, arrays, "to 16 KiB"


def between_hosts() -> Iterator[str]:
    """Write a row for each size of the rig's run by the cost model."""
    yield "| bytes | auto took | auto, us | times as fast as Open MPI's |\n|---:|---|---:|---:|"
    for nbytes, took, auto_us, _, _, ratio, *_ in RIG["rows"](json.loads((RESULTS / "rig-openmpi.json").read_text())):
        yield f"| {nbytes} | {took} | {auto_us} | {ratio} |"
