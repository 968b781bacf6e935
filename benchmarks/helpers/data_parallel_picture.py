"""Draw the results of benchmarks/data_parallel.py: a bar for each way, beside the formula's value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Mapping[str, float]]
PANELS = {
    "through the busiest rank (MiB a step)": {"busiest_mib": "sent and received"},
    "out of a group (MiB a step)": {"out_of_group_mib": "sent"},
    "memory of a rank (MiB)": {
        "parameters_mib": "parameters",
        "gradients_mib": "gradients",
        "states_mib": "optimizer's states",
        "working_mib": "more, at the peak",
    },
    "time (ms a step)": {"computing_ms": "computing", "exposed_ms": "exposed communication"},
}
FORMULAS = {
    "through the busiest rank (MiB a step)": "busiest_formula_mib",
    "memory of a rank (MiB)": "held_formula_mib",
}


def picture(figures: Figures) -> Any:
    """Draw a panel for each quantity."""
    from matplotlib.figure import Figure  # takes half a second, so only when drawing

    rows = {name: {**values, "working_mib": working(values)} for name, values in figures.items()}
    figure = Figure(figsize=(16, 2.5 + 0.4 * len(figures)), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (title, parts) in zip(panels, PANELS.items(), strict=True):
        bars(axes, rows, parts)
        if title in FORMULAS:
            axes.plot([values[FORMULAS[title]] for values in rows.values()], list(rows), "kD", ms=5, label="formula")
        axes.set_xlabel(title)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize="small")
    panels[0].invert_yaxis()
    return figure


def working(values: Mapping[str, float]) -> float:
    model_mib = values["parameters_mib"] + values["gradients_mib"] + values["states_mib"]
    return max(0.0, values["peak_mib"] - model_mib)


def bars(axes: Any, figures: Figures, parts: Mapping[str, str]) -> None:
    """Draw a bar for each way, with its parts stacked."""
    left = [0.0] * len(figures)
    for part, label in parts.items():
        widths = [max(0.0, values[part]) for values in figures.values()]
        axes.barh(list(figures), widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
