"""Summary of a run: the last line of its log, and the top of its report."""

from __future__ import annotations

import math
from collections.abc import Sequence

from training.reports.metrics import Record, scaled

NUMBERS = {"loss", "tokens_per_s", "compute_ms", "comm_ms", "memory_mib"}  # of a step that counts


def summary(records: Sequence[Record], wall_s: float | None = None) -> dict[str, str]:
    """Return a run's results in words, by name: losses, tokens, time, speed and memory; empty before its first step.

    Tokens are those of all steps, those before a resumed checkpoint included.  Speeds are means over the time of the
    recorded steps after the first one, which sets up.  Records without these numbers are skipped.
    """
    steps = [record for record in records if record.keys() >= NUMBERS]
    if not steps:
        return {}
    last, timed = steps[-1], steps[1:] or steps
    entries = {"final loss": f"{last['loss']:.4f} at step {last['iter']}"}
    validations = [record for record in records if math.isfinite(record.get("val_loss", math.nan))]
    if validations:
        best = min(validations, key=lambda record: record["val_loss"])
        entries["best validation loss"] = f"{best['val_loss']:.4f} at step {best['iter']}"
    entries["tokens"] = f"{round(last['iter'] * last['tokens_per_s'] * step_s(last)):,}"
    if wall_s is not None:
        entries["wall time"] = f"{wall_s:.1f} s"
    rate, prefix = scaled(mean_over_time(timed, "tokens_per_s"))
    entries["speed"] = f"{rate:.1f}{prefix} tok/s"
    if all(step.get("mfu") is not None for step in timed):
        entries["MFU"] = f"{mean_over_time(timed, 'mfu'):.1%}"
    entries["peak memory"] = f"{max(step['memory_mib'] for step in steps):.0f} MiB"
    return entries


def step_s(record: Record) -> float:
    """Return the seconds of a recorded step."""
    return (record["compute_ms"] + record["comm_ms"]) / 1e3


def mean_over_time(steps: Sequence[Record], field: str) -> float:
    """Return the mean of a rate over the time of some steps."""
    whole_s = sum(map(step_s, steps))
    return sum(step[field] * step_s(step) for step in steps) / whole_s if whole_s else math.nan
