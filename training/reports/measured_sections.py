"""Measured sections of a run's report: time breakdown of some steps, and a pipeline's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from collectives.bench.page import Column, Section, Table
from parallelism.pipeline.schedule.picture import LABELS, WAIT, action_of
from parallelism.pipeline.schedule.price import Span, bubble
from training.reports.profile import KINDS, ProfiledStep, StepProfiler
from training.reports.time_table import NAMES

COLORS = dict(zip(KINDS, (0, 5, 1, 3, 8, 2, 9, 11, 6, 4, 7, 10), strict=True))
ACTION_COLORS = {**{LABELS[kind]: color for kind, color in zip("FBIW", (0, 2, 2, 4), strict=True)}, WAIT: 10}
MOST_SPANS = 1000  # drawn in a timeline
MEANING = (
    ", by the host's clock. A wait for other ranks counts for their axis: communication that shows, or a slower rank; "
    "comm is the sum of all waits. "
    "tp, sp and ep split layers, sequences and experts; dp reduces gradients and gathers parameters; pp sums up tied "
    "gradients; all ranks agree on the norm, the loss and the step. What is left is other."
)


def measured_sections(profiler: StepProfiler) -> list[Section]:
    """Draw the time breakdown of some steps, and the predicted and the measured pipeline."""
    sections = [times_section(profiler.steps)] if profiler.steps else []
    if profiler.planned and profiler.happened:
        sections.append(pipeline_section(profiler))
    return sections


def times_section(steps: Sequence[ProfiledStep]) -> Section:
    iterations = sorted({step.iteration for step in steps})
    text = f"Means of {len(iterations)} steps alone, {iterations[0]} to {iterations[-1]}, on each rank{MEANING}"
    kinds = [kind for kind in KINDS if any(step.seconds[kind] for step in steps)]
    rows = []
    for rank in sorted({step.rank for step in steps}):
        own = [step for step in steps if step.rank == rank]
        times = [1e3 * fmean(step.seconds[kind] for step in own) for kind in kinds]
        whole = (1e3 * fmean(step.step_s for step in own), 1e3 * fmean(step.comm_s for step in own))
        rows.append((rank, *whole, *times, max(step.memory_mib for step in own)))
    columns = [*map(Column, ("rank", "step, ms", "comm, ms", *(NAMES[kind] for kind in kinds), "memory, MiB"))]
    axis = {"unit": "ms", "label": "time of a step"}
    common = {"kind": "bars", "table": "times", "row": "rank", "name": "rank"}
    parts = [{"column": NAMES[kind], "color": COLORS[kind]} for kind in kinds]
    charts = [
        {**common, "title": "Time by kind", "x": axis, "parts": parts},
        {
            **common,
            "title": "Most memory so far",
            "x": {"unit": "MiB", "label": "memory"},
            "parts": [{"column": "memory, MiB", "color": 0}],
        },
    ]
    each = [
        (s.iteration, s.rank, 1e3 * s.step_s, 1e3 * s.comm_s, *(1e3 * s.seconds[kind] for kind in kinds)) for s in steps
    ]
    every = Table("steps", "Each step and rank, ms", [Column("step"), *columns[:-1]], each)
    return Section("Where the time goes", [text], charts, [Table("times", "Means by rank, ms", columns, rows), every])


def pipeline_section(profiler: StepProfiler) -> Section:
    """Draw a step's timelines on the same time axis."""
    planned, happened = profiler.planned, profiler.happened
    assert planned
    timelines: dict[str, Sequence[Span]] = {"predicted": planned.spans, "happened": happened}
    end_ms = 1e3 * max(span.end_s for spans in timelines.values() for span in spans)
    idle = bubble(filter(action_of, happened), planned.schedule.num_ranks, max(span.end_s for span in happened))
    text = (
        f"One step alone, of rank 0's pipeline, whose ranks are counted along pp, by schedule {planned.schedule.name}: "
        f"predicted from the medians of its own actions and messages, with a bubble of {planned.bubble:.1%}, and as it "
        f"happened, with {idle:.1%}."
    )
    rows = [(name, *cells) for name, spans in timelines.items() for cells in map(cells_of, spans[:MOST_SPANS])]
    if any(len(spans) > MOST_SPANS for spans in timelines.values()):
        text += f" The first {MOST_SPANS} entries of each are shown."
    kinds = {row[3] for row in rows}
    colors = [{"name": kind, "color": color} for kind, color in ACTION_COLORS.items() if kind in kinds]
    charts = [
        {
            "kind": "lanes",
            "title": f"Pipeline, {title}",
            "table": "pipeline",
            "timeline": name,
            "end": end_ms,
            "kinds": colors,
            "x": {"unit": "ms", "label": "time"},
        }
        for name, title in (("predicted", "as predicted"), ("happened", "as it happened"))
    ]
    columns = [Column(name) for name in ("timeline", "rank", "what", "kind", "begin, ms", "end, ms")]
    return Section("Pipeline", [text], charts, [Table("pipeline", "Actions and waits of the step", columns, rows)])


def cells_of(span: Span) -> tuple[int, str, str, float, float]:
    action = action_of(span)
    kind = LABELS[action.kind] if action else span.what.split()[0]
    what = f"{action.kind}{action.micro_batch}" if action else span.what
    return span.rank, what, kind, 1e3 * span.begin_s, 1e3 * span.end_s
