"""Space-time diagrams: a lane for each rank, time to the right, messages across.

A diagram is of events, in seconds, planned (`collectives.schedule.events`) or measured (`collectives.bench`).
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

COLORS = {"wait": "0.85", "reduce": "C3", "work": "C2"}
LABELS = {"wait": "at its messages", "reduce": "reduces", "work": "copies, reads, barriers"}
NARROW, WIDE = 4.0, 9.0  # inches


class Bar(NamedTuple):
    """A rank's work from `begin` to `end`: a key of `COLORS`."""

    rank: int
    begin: float
    end: float
    kind: str


class MessageLine(NamedTuple):
    """A message from a rank that can send it at `begin` to one that has it at `end`."""

    source: int
    dest: int
    begin: float
    end: float


class Diagram(NamedTuple):
    title: str
    num_ranks: int
    bars: Sequence[Bar]
    lines: Sequence[MessageLine]

    @property
    def end(self) -> float:
        ends = [bar.end for bar in self.bars] + [line.end for line in self.lines]
        return max(ends, default=0.0)


def figure(diagrams: Sequence[Diagram]) -> Any:
    """Draw diagrams side by side, over the same time: a matplotlib figure."""
    from matplotlib.figure import Figure  # takes half a second, paid only for drawing
    from matplotlib.ticker import MaxNLocator

    height = min(40.0, 1.5 + 0.35 * max(diagram.num_ranks for diagram in diagrams))
    chart = Figure(figsize=(WIDE * len(diagrams), max(NARROW, height)), layout="constrained")
    end, unit, scale = time_axis(max(diagram.end for diagram in diagrams))
    for number, diagram in enumerate(diagrams, 1):
        axes = chart.add_subplot(1, len(diagrams), number, title=diagram.title, xlabel=f"time ({unit})", ylabel="rank")
        axes.set_xlim(0, end)
        axes.set_ylim(diagram.num_ranks - 0.5, -0.5)  # rank 0 on top
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        draw(axes, diagram, scale)
    entries = {
        label: handle for axes in chart.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    chart.legend(entries.values(), entries, loc="outside lower center", ncols=len(entries) or 1)
    return chart


def refuse(path: str, option: str = "") -> None:
    """Raise ValueError for a path where no file can be put, for a folder, and for a device, which would be replaced.

    A file is created beside it and removed, as permissions alone do not tell.  `option` precedes the path in the
    message, as "--json " or "report=".
    """
    trial, why = f"{path}.{os.getpid()}.tmp", "not a regular file"
    if os.path.isfile(path) or (path and not os.path.exists(path)):
        try:
            with open(trial, "xb"):
                return os.unlink(trial)
        except OSError as error:
            why = str(error.strerror)
    raise ValueError(f"{option}{path} can't be written ({why}): pass a path in an existing, writable folder")


def refuse_picture(path: str, option: str = "") -> None:
    """Refuse a path as `refuse` does, and any where matplotlib is not installed."""
    refuse(path, option)
    if find_spec("matplotlib") is None:
        raise ValueError(f"{option}{path} needs matplotlib: pip install '.[plots]'")


def save(chart: Any, path: str) -> None:
    """Write a matplotlib figure as PNG, in one go."""
    chart.savefig(f"{path}.part", format="png")
    os.replace(f"{path}.part", path)


def time_axis(seconds: float) -> tuple[float, str, float]:
    """Return the end of the axis, its unit, and the number of units in a second.

    >>> time_axis(0.002)
    (2.04, 'ms', 1000.0)
    """
    unit, scale = next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e3)) if seconds * scale >= 1), ("us", 1e6)
    )
    return 1.02 * seconds * scale or 1.0, unit, scale


def draw(axes: Any, diagram: Diagram, scale: float) -> None:
    """Draw bars on the ranks' lanes, and a slanted line for each message."""
    from matplotlib.collections import LineCollection

    kinds = dict.fromkeys(bar.kind for bar in diagram.bars)
    for kind in kinds:
        bars = [bar for bar in diagram.bars if bar.kind == kind]
        widths = [(bar.end - bar.begin) * scale for bar in bars]
        begins, ranks = [bar.begin * scale for bar in bars], [bar.rank for bar in bars]
        axes.barh(ranks, widths, left=begins, height=0.5, color=COLORS[kind], edgecolor="w", label=LABELS[kind])
    ends = [[(m.begin * scale, m.source), (m.end * scale, m.dest)] for m in diagram.lines]
    if ends:
        axes.add_collection(LineCollection(ends, colors="C0", linewidths=0.8, alpha=0.8, label="messages"))
