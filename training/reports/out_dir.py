"""Output folder of a run, which never overwrites another run's metrics."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from parallelism.planner.settings import to_toml
from training.reports.jsonl import METRICS, SETTINGS, draw_missing
from training.settings.fields import RunSettings


def take_out_dir(settings: RunSettings, before: str = "") -> str:
    """Create a run's folder, and save its settings there for `--config`; return it, or "" if it writes nothing."""
    if not settings.out_dir or settings.eval_only:
        return ""
    folder = own_out_dir(settings.out_dir, before)
    Path(folder, SETTINGS).write_text(to_toml(settings), encoding="utf-8")
    return folder


def own_out_dir(requested: str, before: str = "") -> str:
    """Return the requested folder, or the first free one of `out-2`, `out-3`, ... if it holds another run's metrics.

    A run that resumes one that wrote to `before`, of the same series, appends to that folder.  What a killed run has
    not drawn is drawn.
    """
    if has_metrics(before) and (before == requested or re.fullmatch(re.escape(stem(requested)) + r"-\d+", before)):
        return before
    if not has_metrics(requested):
        return requested
    draw_missing(requested)
    for number in count(2):
        path = f"{stem(requested)}-{number}"
        with suppress(FileExistsError):
            os.mkdir(path)
            return path
        draw_missing(path)
    raise AssertionError("numbers end")


def has_metrics(folder: str) -> bool:
    return bool(folder) and Path(folder, METRICS).exists()


def stem(folder: str) -> str:
    """Return the folder's name without a trailing slash, for appending a number; an absolute path for `.`."""
    return (
        os.path.abspath(folder)
        if os.path.basename(os.path.normpath(folder)) in (".", "..")
        else os.path.normpath(folder)
    )
