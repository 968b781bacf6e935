"""The HTML report of a training run, or of two side by side: charts, tables, the machine and the command."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.bench.page import Chart, Column, Section, Table, page, pairs
from collectives.job.system import write
from training.reports.facts import RunFacts
from training.reports.jsonl import smoothed
from training.reports.measured_sections import measured_sections
from training.reports.metrics import Record
from training.reports.sink import Sink
from training.reports.summary import summary

MOST_ROWS = 1000  # of records listed
SMOOTHED_FROM = 80  # number of losses from which a smoothed curve is drawn
SECOND = 3  # index of the second run's first color
FIELDS = {
    "step": "iter", "loss": "loss", "loss, smoothed": "smoothed", "validation loss": "val_loss",
    "gradient norm": "grad_norm", "learning rate": "lr", "tokens/s": "tokens_per_s", "MFU": "mfu",
    "compute, ms": "compute_ms", "comm, ms": "comm_ms", "bubble": "bubble", "memory, MiB": "memory_mib",
}  # fmt: skip


class HTMLReport(Sink):
    """Writes the report of all records so far at the end."""

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        super().open(facts, show)
        self.records: list[Record] = []
        self.begin_s = time.perf_counter()

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        facts = self.facts
        conditions = conditions_section(vars(facts.config), facts.surroundings, facts.announcement)
        wall_s = time.perf_counter() - self.begin_s
        sections = [*health_sections(self.records), *measured_sections(facts.profiler), conditions]
        with self.writing(self.target) as path:
            write(path, report({facts.out_dir or "this run": self.records}, sections, wall_s))


def report(runs: Mapping[str, Sequence[Record]], more: Sequence[Section] = (), wall_s: float | None = None) -> str:
    """Write the page of one or two named runs, with further sections after the records; of one, its wall time, too."""
    validations = validation_sections(*runs.values()) if len(runs) == 1 else []
    sections = [*summary_sections(runs, wall_s), records_section(runs), *validations, *more]
    return page(f"Training: {', '.join(runs)}", sections)


def summary_sections(runs: Mapping[str, Sequence[Record]], wall_s: float | None) -> list[Section]:
    """List what the runs have come to, side by side."""
    summaries = {name: summary(records, wall_s) for name, records in runs.items()}
    names = dict.fromkeys(name for each in summaries.values() for name in each)
    if not names:
        return []
    rows = [(name, *(each.get(name) for each in summaries.values())) for name in names]
    table = Table("summary", "What the run has come to", [Column("what"), *map(Column, runs)], rows)
    return [Section("Summary", ["Speeds are means over the recorded steps after the first one."], tables=[table])]


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


def health_sections(records: Sequence[Record]) -> list[Section]:
    """List when ranks were slow, waited for input, or had slow links."""
    changes = [record["health"] for record in records if "health" in record]
    if not changes:
        return []
    rows = [(each["kind"], ", ".join(map(str, each["ranks"])), each["words"]) for each in changes]
    return [
        Section(
            "Ranks that held the others up",
            tables=[Table("health", "What began and what ended", [*map(Column, ("kind", "ranks", "what"))], rows)],
        )
    ]


def validation_sections(records: Sequence[Record]) -> list[Section]:
    """List the losses and perplexities of each of several validation files."""
    prefix = "val_loss/"
    rows = [
        (record["iter"], name.removeprefix(prefix), loss, record[name.replace("loss", "perplexity", 1)])
        for record in records
        for name, loss in record.items()
        if name.startswith(prefix)
    ]
    columns = [*map(Column, ("step", "file", "loss", "perplexity"))]
    tables = [Table("validation", "Losses in nats a token, and perplexities", columns, rows)]
    return [Section("Validation by file", tables=tables)] if rows else []


def by_step(records: Sequence[Record]) -> list[Record]:
    """Merge the training and validation records of each step; a resumed run's replace earlier ones."""
    steps: dict[int, Record] = {}
    for record in records:
        if "health" in record:
            continue
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


def conditions_section(settings: Mapping[str, Any], around: Mapping[str, Any], announced: str) -> Section:
    """List the command, the run's announcement, the machine, and the settings."""
    entries = {"command": shlex.join(sys.orig_argv), "run": announced, **around}
    tables = [pairs("machine", "Machine and command", entries), pairs("settings", "RunSettings", settings)]
    return Section("Machine, command and settings", tables=tables)
