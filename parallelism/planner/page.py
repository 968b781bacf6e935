"""A plan as one HTML page: the best layouts, their steps' time and memory, and both over the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from collectives.bench.page import Column, Section, Table, page
from parallelism.planner.layout import TrainingJob
from parallelism.planner.memory import Memory
from parallelism.planner.place import Machine
from parallelism.planner.report import TIMES, report, utilization
from parallelism.planner.scaling import ScalePoint
from parallelism.planner.search import PlannedLayout, SearchResult
from parallelism.planner.step import Time

GB = 1e9
DIGITS = 4
PARTS = {field: f"{words}, ms" for field, words in TIMES.items()}
KINDS = {field: f"{field}, GB" for field in Memory._fields[:-1]}
FIGURES = "step, ms", "tokens/s", "MFU, %", "bubble, %", "communication, %", "memory, GB"


class PlannedJob(NamedTuple):
    """A job and its machine, the result of a search for it, and the best layouts of other numbers of ranks."""

    job: TrainingJob
    machine: Machine
    result: SearchResult
    points: Sequence[ScalePoint] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.job.global_batch_size * self.job.model.block_size


def plan_page(plan: PlannedJob, words: Sequence[str], command: str) -> str:
    """Return the page; `words` describe the request, and `command` trains with the first layout."""
    sections = [layouts_section(plan, words)]
    if any(point.planned for point in plan.points):
        sections.append(scaling_section(plan))
    lines = [line for line in report(plan.job, plan.machine, plan.result) if line and not line.startswith("  ")]
    sections.append(Section("In words", [*lines, f"To train with the first: {command}"]))
    return page("Plan", sections)


def layouts_section(plan: PlannedJob, words: Sequence[str]) -> Section:
    rows = []
    for number, planned in enumerate(plan.result.best, 1):
        mfu = utilization(plan.job, plan.machine, planned.time.total)
        parts = *milliseconds(planned.time), *gigabytes(planned.memory)
        rows.append((number, str(planned.layout), *figures(planned, plan.tokens, mfu), *parts))
    names = *FIGURES, *PARTS.values(), *KINDS.values()
    columns = Column("layout"), Column("flags of train.py"), *columns_of(names)
    common = {"kind": "bars", "table": "layouts", "row": "layout", "name": "layout"}
    charts = [
        {**common, "title": "A step's time", "x": {"unit": "ms", "label": "time"}, "parts": colored(PARTS.values())},
        {
            **common,
            "title": "A rank's memory",
            "x": {"unit": "GB", "label": "memory"},
            "parts": colored(KINDS.values()),
        },
    ]
    return Section("Layouts", words, charts, [Table("layouts", "The best layout of each mesh", columns, rows)])


def scaling_section(plan: PlannedJob) -> Section:
    """Draw time and memory over the number of ranks, beside the first time divided by the number of ranks."""
    limit, rows = plan.machine.memory_bytes / GB, []
    first = next(point for point in plan.points if point.planned)
    assert first.planned
    work_ms = 1e3 * first.planned.time.total * first.ranks
    for ranks, planned, mfu, why in plan.points:
        cells = figures(planned, plan.tokens, mfu) if planned else (None,) * len(FIGURES)
        rows.append(
            (ranks, *cells, work_ms / ranks if planned else None, limit, str(planned.layout) if planned else why)
        )
    columns = Column("ranks"), *columns_of((*FIGURES, "ideal, ms", "limit, GB")), Column("layout")
    x = {"column": "ranks", "log": True, "unit": "", "label": "ranks", "name": "ranks"}
    common = {"kind": "lines", "table": "ranks", "x": x}
    charts = [
        {
            **common,
            "title": "A step's time",
            "y": {"log": True, "unit": "ms"},
            "lines": beside("step, ms", "ideal, ms"),
        },
        {
            **common,
            "title": "A rank's memory",
            "y": {"zero": True, "unit": "GB"},
            "lines": beside("memory, GB", "limit, GB"),
        },
    ]
    text = f"The same step of {plan.tokens} tokens on other numbers of ranks, each with its fastest layout."
    return Section("Numbers of ranks", [text], charts, [Table("ranks", "The fastest layouts", columns, rows)])


def beside(column: str, other: str) -> list[dict[str, object]]:
    """Describe a line, and a thin one beside it."""
    return [
        {"name": column.partition(",")[0], "column": column, "color": 0, "marker": 0},
        {"name": other.partition(",")[0], "column": other, "color": 7, "thin": True, "dash": 2},
    ]


def figures(planned: PlannedLayout, tokens: int, mfu: float) -> tuple[float, ...]:
    time = planned.time
    parts = (100 * each / time.total for each in (time.bubble, time.exposed))
    return 1e3 * time.total, tokens / time.total, 100 * mfu, *parts, planned.memory.total / GB


def milliseconds(time: Time) -> list[float]:
    return [1e3 * part for part in time]


def gigabytes(memory: Memory) -> list[float]:
    return [part / GB for part in memory.parts.values()]


def columns_of(names: Iterable[str]) -> list[Column]:
    return [Column(name, digits=DIGITS) for name in names]


def colored(names: Iterable[str]) -> list[dict[str, object]]:
    return [{"column": name, "color": color} for color, name in enumerate(names)]
