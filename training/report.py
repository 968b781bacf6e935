"""A training run, or two side by side, as one HTML page: charts, tables, the machine and the command.

mpirun -n 2 python -m training --report out/report.html
python -m training.report out out-2 --html both.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives.bench.page import Chart, Column, Section, Table, page, pairs
from collectives.job.settings import Parser
from collectives.job.system import write
from collectives.schedule import draw
from models.report import from_json, smoothed
from training.reports.out_dir import METRICS, SETTINGS

Record = dict[str, Any]
MOST_ROWS = 1000  # of records listed
SMOOTHED_FROM = 80  # number of losses from which a smoothed curve is drawn
SECOND = 3  # index of the second run's first color
FIELDS = {
    "step": "iter", "loss": "loss", "loss, smoothed": "smoothed", "validation loss": "val_loss",
    "gradient norm": "grad_norm", "learning rate": "lr", "tokens/s": "tokens_per_s", "compute, ms": "compute_ms",
    "comm, ms": "comm_ms", "bubble": "bubble", "memory, MiB": "memory_mib",
}  # fmt: skip


def main() -> int:
    """Write a page from the metrics of one run or two."""
    parser = Parser("python -m training.report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"one or two run folders with {METRICS}")
    parser.add_argument("--html", type=Path, required=True, metavar="FILE", help="output HTML file")
    try:
        flags = parser.parse_args()
        if len({*map(Path.resolve, flags.runs)}) < len(flags.runs):
            raise ValueError(f"{flags.runs[0]} is given twice: pass one run, or two to compare")
        if len(flags.runs) > 2:
            raise ValueError(f"{len(flags.runs)} runs can't be compared: pass one, or two")
        draw.refuse(str(flags.html), "--html ")
        records = {str(run): read(run) for run in flags.runs}
        settings = [settings_of(i, run) for i, run in enumerate(flags.runs) if (run / SETTINGS).exists()]
        write(flags.html, report(records, settings))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(run: Path) -> list[Record]:
    """Read a run's records.

    Raises: ValueError with the remedy.
    """
    path = run / METRICS
    try:
        records = [from_json(line) for line in path.read_text().splitlines()]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: pass the folder that a run has written to") from None
    except ValueError:
        records = [None]
    if not all(isinstance(record, dict) and isinstance(record.get("iter"), int) for record in records):
        raise ValueError(f"{path}: has a line that is not a record of a run: pass another folder")
    if not records:
        raise ValueError(f"{path}: has no record: pass another folder")
    return records


def settings_of(number: int, run: Path) -> Section:
    lines = (line.partition(" = ") for line in (run / SETTINGS).read_text(encoding="utf-8").splitlines())
    entries = {name: value for name, mark, value in lines if mark}
    return Section(f"Settings of {run}", tables=[pairs(f"settings{number}", f"{SETTINGS} of {run}", entries)])


def report(runs: Mapping[str, Sequence[Record]], more: Sequence[Section] = ()) -> str:
    """Write the page of one or two named runs, with further sections after the records."""
    return page(f"Training: {', '.join(runs)}", [records_section(runs), *more])


def records_section(runs: Mapping[str, Sequence[Record]]) -> Section:
    """Draw and list the runs' records."""
    texts = [
        "Times and memory are of rank 0, by the host's clock; comm is its wait for other ranks, compute the rest of a "
        "step, and memory the most that it has had so far."
    ]
    rows: list[tuple] = []
    are_smoothed = any(sum("loss" in record for record in records) >= SMOOTHED_FROM for records in runs.values())
    if are_smoothed:
        texts.append("Smoothed losses are centred means over 1/20 of a run.")
    for name, records in runs.items():
        steps = by_step(records)
        if are_smoothed:
            smooth(steps)
        every = -(-len(steps) // MOST_ROWS) or 1
        if every > 1:
            texts.append(f"{name}: every {every}th of {len(steps)} records, the last one, and those with a validation.")
        selection = [s for i, s in enumerate(steps) if i % every == 0 or "val_loss" in s or i == len(steps) - 1]
        rows += [(name, *(step.get(field) for field in FIELDS.values())) for step in selection]
    table = Table("records", "What was recorded, by step", [Column("run"), *map(Column, FIELDS)], rows)
    tables = [table.without(table.empty | ({"run"} if len(runs) == 1 else set()))]
    has_bubble = "bubble" not in table.empty
    charts = charts_of([*runs], are_smoothed, has_bubble)
    if len(runs) > 1:
        texts.append("Solid lines are of {}, dashed ones of {}.".format(*runs))
        tables.append(comparison(runs))
    return Section("Losses, speed, time and memory", texts, charts, tables)


def by_step(records: Sequence[Record]) -> list[Record]:
    """Merge the training and validation records of each step; a resumed run's replace earlier ones."""
    steps: dict[int, Record] = {}
    for record in records:
        steps.setdefault(record["iter"], {}).update(record)
    return [step for _, step in sorted(steps.items())]


def smooth(steps: Sequence[Record]) -> None:
    """Add means over 1/20 of the run, as in loss.png."""
    losses = [step for step in steps if "loss" in step]
    for step, value in zip(losses, smoothed([step["loss"] for step in losses]), strict=True):
        step["smoothed"] = value


def charts_of(runs: Sequence[str], are_smoothed: bool, has_bubble: bool) -> list[Chart]:
    """Draw losses, tokens/s, times and memory over the steps."""
    training = [("training", "loss, smoothed", 0)] if are_smoothed else [("training", "loss", 0)]
    if are_smoothed and len(runs) == 1:
        training.insert(0, ("training, each step", "loss", 6))
    times = ("compute", "compute, ms", 0), ("comm", "comm, ms", 1)
    linear: dict[str, Any] = {"unit": "", "zero": True}
    charts = [
        chart(runs, "Loss, nats a token", {"unit": ""}, *training, ("validation", "validation loss", 1)),
        chart(runs, "Tokens a second, all ranks", linear, ("tokens/s", "tokens/s", 0)),
        chart(runs, "Time of a step", {"unit": "ms", "log": True}, *times),
        chart(runs, "Memory of rank 0", {**linear, "unit": "MiB"}, ("memory", "memory, MiB", 0)),
    ]
    if has_bubble:
        charts.append(chart(runs, "Pipeline bubble, part of a step", linear, ("bubble", "bubble", 0)))
    return charts


def chart(runs: Sequence[str], title: str, y: Mapping[str, Any], *lines: tuple[str, str, int]) -> Chart:
    """Describe a chart over the steps, with lines of a name, a column and a color; a second run has other colors."""
    described = []
    for number, run in enumerate(runs):
        of_run = {"dash": number, "where": {"run": run} if len(runs) > 1 else {}}
        for name, column, color in lines:
            look = {"color": color + SECOND * number, "thin": column == "loss" and len(lines) > 2}
            if column == "validation loss":
                look["marker"] = number
            described.append({"name": f"{name} ({run})" if len(runs) > 1 else name, "column": column, **look, **of_run})
    x = {"column": "step", "unit": "", "label": "step", "name": "step"}
    return {"kind": "lines", "title": title, "table": "records", "x": x, "y": y, "lines": described}


def comparison(runs: Mapping[str, Sequence[Record]]) -> Table:
    """List two runs' losses side by side, at the steps recorded by both."""
    first, second = ({step["iter"]: step for step in by_step(records)} for records in runs.values())
    rows = []
    for step in sorted(first.keys() & second.keys()):
        for field, name in (("loss", "training"), ("val_loss", "validation")):
            a, b = first[step].get(field), second[step].get(field)
            if a is not None and b is not None:
                rows.append((step, name, a, b, b - a))
    every = -(-len(rows) // MOST_ROWS) or 1
    columns = [Column("step"), Column("loss"), *map(Column, runs), Column("difference")]
    return Table("comparison", "Losses side by side; difference: the second less the first", columns, rows[::every])


if __name__ == "__main__":
    sys.exit(main())
