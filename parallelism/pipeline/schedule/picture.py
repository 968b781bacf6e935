"""Schedule pictures: a grid with a lane per rank, time to the right, and a cell per action.

A cell's width is the action's duration.  Its name is `F3` if ranks have one stage each, `6F3` if several.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from collectives.schedule.draw import time_axis
from parallelism.pipeline.schedule.price import Span, Timeline
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, parse

COLORS = {FORWARD: "#3465b0", BACKWARD: "#2f8f5b", INPUTS: "#21918c", WEIGHTS: "#e08e2b"}
LABELS = {FORWARD: "forward", BACKWARD: "backward", INPUTS: "backward, inputs", WEIGHTS: "backward, weights"}
TERMINAL = {FORWARD: 44, BACKWARD: 42, INPUTS: 46, WEIGHTS: 43}  # backgrounds
WAIT, WAIT_COLOR, OTHER_COLOR = "wait", "0.85", "#8a4fa3"  # measured spans, by their first word
MOST_COLUMNS = 400
NARROW, WIDEST, TALLEST = 8.0, 40.0, 40.0  # inches
SPAN, DIGIT = 0.25, 0.08  # mean width of a span, and width of a digit


class ScheduleGrid(NamedTuple):
    title: str
    num_ranks: int
    spans: Sequence[Span]

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def planned(timeline: Timeline) -> ScheduleGrid:
    return ScheduleGrid(title(timeline), timeline.schedule.num_ranks, timeline.spans)


def title(timeline: Timeline) -> str:
    _, unit, scale = time_axis(timeline.span_s)
    return (
        f"{timeline.schedule.name}: {timeline.span_s * scale:.4g} {unit}, bubble {timeline.bubble:.1%}, "
        f"live activations at most {alive(timeline.schedule.peaks)}"
    )


def alive(peaks: Sequence[int]) -> str:
    """Format the peaks of live activations.

    >>> alive([4, 3, 2]), alive([4, 4, 4])
    ('4 3 2', '4 on each rank')
    """
    return f"{peaks[0]} on each rank" if len(set(peaks)) == 1 else " ".join(map(str, peaks))


def action_of(span: Span) -> Action | None:
    """Return a span's action, or None for other spans."""
    try:
        return parse(span.what)
    except ValueError:
        return None


class DrawnAction(NamedTuple):
    span: Span
    action: Action
    label: str
    paleness: float  # 0 for its rank's first stage, below 1 for the last


def cells(grid: ScheduleGrid) -> list[DrawnAction]:
    actions = [(span, action) for span in grid.spans if (action := action_of(span))]
    stages: dict[int, list[int]] = {}
    for rank, stage in sorted({(span.rank, action.stage) for span, action in actions}):
        stages.setdefault(rank, []).append(stage)
    is_alone = all(len(own) == 1 for own in stages.values())
    drawn = []
    for span, action in actions:
        label = f"{action.kind}{action.micro_batch}" if is_alone else str(action)
        own = stages[span.rank]
        drawn.append(DrawnAction(span, action, label, own.index(action.stage) / len(own)))
    return drawn


def text(grid: ScheduleGrid, columns: int = MOST_COLUMNS, colored: bool = False) -> str:
    """Return the grid as text: an action's name in columns proportional to its time, one letter if too narrow.

    >>> from parallelism.pipeline.schedule.basic import one_f_one_b
    >>> from parallelism.pipeline.schedule.price import price
    >>> print(text(planned(price(one_f_one_b(2, 3)))))
    1f1b: 12 s, bubble 25.0%, live activations at most 2 1
    rank 0  F0F1....B0--F2B1--..B2--
    rank 1  ..F0B0--F1B1--F2B2--....
    """
    actions = cells(grid)
    margin = len(f"rank {grid.num_ranks - 1}  ")
    ideal = max((len(cell.label) / length(cell.span) for cell in actions if length(cell.span)), default=0.0)
    scale = min(ideal, (columns - margin) / grid.end_s) if grid.end_s else 0.0
    lanes = [
        f"{f'rank {rank}':{margin}}{lane([c for c in actions if c.span.rank == rank], grid.end_s, scale, colored)}"
        for rank in range(grid.num_ranks)
    ]
    return "\n".join([grid.title, *lanes])


def length(span: Span) -> float:
    return span.end_s - span.begin_s


def lane(row: Iterable[DrawnAction], end_s: float, scale: float, colored: bool) -> str:
    """Return one rank's cells, with `scale` columns per second."""
    line, at = "", 0
    for cell in sorted(row, key=lambda cell: cell.span.begin_s):
        begin, end = round(cell.span.begin_s * scale), round(cell.span.end_s * scale)
        named = cell.label if len(cell.label) <= end - begin else cell.action.kind
        line += "." * (begin - at) + paint(named[: end - begin], end - begin, cell.action, colored)
        at = end
    return line + "." * (round(end_s * scale) - at)


def paint(word: str, width: int, action: Action, colored: bool) -> str:
    """Color a cell by its kind, lighter for every other micro-batch, to distinguish neighbours."""
    if not colored or not width:
        return word.ljust(width, "-")
    light = action.micro_batch % 2
    return f"\x1b[{30 if light else 97};{TERMINAL[action.kind] + 60 * light}m{word:{width}}\x1b[0m"


def figure(grids: Sequence[ScheduleGrid]) -> Any:
    """Return a matplotlib figure of grids one above the other, on the same time axis."""
    from matplotlib.figure import Figure  # takes half a second, so only when drawing

    end, unit, scale = time_axis(max(grid.end_s for grid in grids))
    lanes = [0.4 * grid.num_ranks + 0.8 for grid in grids]
    most = max(Counter((n, span.rank) for n, grid in enumerate(grids) for span in grid.spans).values(), default=0)
    width = min(WIDEST, max(NARROW, most * SPAN))
    fig = Figure(figsize=(width, min(TALLEST, sum(lanes) + 0.5)), layout="constrained")
    every = fig.subplots(len(grids), squeeze=False, sharex=True, height_ratios=lanes).flat
    for axes, grid in zip(every, grids, strict=True):
        axes.set(title=grid.title, ylabel="rank", xlim=(0, end), ylim=(grid.num_ranks - 0.5, -0.5))
        axes.yaxis.get_major_locator().set_params(integer=True)
        draw(axes, grid, scale, width / end)
    axes.set_xlabel(f"time ({unit})")
    labelled = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in fig.axes)
    entries = {label: handle for pairs in labelled for handle, label in pairs}
    fig.legend(entries.values(), entries, loc="outside lower center", ncols=6)
    return fig


def draw(axes: Any, grid: ScheduleGrid, scale: float, unit_inches: float) -> None:
    """Draw bars on the ranks' lanes, with the micro-batch's number in those that are wide enough."""
    actions = sorted(cells(grid), key=lambda cell: cell.paleness)  # the legend uses the first one's color
    for kind, label in LABELS.items():
        some = [cell for cell in actions if cell.action.kind == kind]
        colors = [(COLORS[kind], 1 - 0.7 * cell.paleness) for cell in some]  # with opacity
        bars(axes, [cell.span for cell in some], scale, colors, label)
    others = [span for span in grid.spans if not action_of(span)]
    for word in dict.fromkeys(span.what.split()[0] for span in others):
        some_others = [span for span in others if span.what.split()[0] == word]
        at_edge = {} if word == WAIT else {"middle": 0.4, "height": 0.15}  # others may overlap with actions
        bars(axes, some_others, scale, WAIT_COLOR if word == WAIT else OTHER_COLOR, word, **at_edge)
    for cell in actions:
        number = str(cell.action.micro_batch)
        if length(cell.span) * scale * unit_inches > DIGIT * len(number):
            middle = (cell.span.begin_s + cell.span.end_s) / 2 * scale
            color = "w" if cell.paleness < 0.5 else "k"
            axes.text(middle, cell.span.rank, number, ha="center", va="center", size=8, color=color, in_layout=False)


def bars(
    axes: Any, spans: Sequence[Span], scale: float, color: Any, label: str, middle: float = 0.0, height: float = 0.8
) -> None:
    if spans:
        begins, widths = [span.begin_s * scale for span in spans], [length(span) * scale for span in spans]
        ranks = [span.rank + middle for span in spans]
        axes.barh(ranks, widths, height, begins, color=color, edgecolor="w", lw=0.5, label=label)
