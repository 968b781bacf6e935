"""Output folder of a run, which never overwrites another run's metrics."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from parallelism.planner.settings import to_toml
from training.config import Config

METRICS, SETTINGS = "metrics.jsonl", "config.toml"


def prepare_folders(config: Config, rank: int) -> None:
    """Check on rank 0, before the training begins, that its folders are writable."""
    if rank or config.eval_only:
        return
    for name in ("out_dir", "checkpoint_dir"):
        if folder := getattr(config, name):
            probe = Path(folder) / ".writable"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                why = "not a folder" if isinstance(error, FileExistsError) else error.strerror
                raise ValueError(f"{name} {folder} can't be written ({why}): pass another --{name}") from None


def writes(settings: Config) -> bool:
    return bool(settings.out_dir) and not settings.eval_only


def take_out_dir(settings: Config, before: str = "") -> str | None:
    """Create a run's folder, and save its settings there for `--config`; return it, or None."""
    if not writes(settings):
        return None
    folder = own_out_dir(settings.out_dir, before)
    Path(folder, SETTINGS).write_text(to_toml(settings), encoding="utf-8")
    return folder


def own_out_dir(requested: str, before: str = "") -> str:
    """Return the requested folder, or the first free one of `out-2`, `out-3`, ... if it holds another run's metrics.

    A run that resumes one that wrote to `before`, of the same series, appends to that folder.
    """
    if has_metrics(before) and (before == requested or re.fullmatch(re.escape(stem(requested)) + r"-\d+", before)):
        return before
    if not has_metrics(requested):
        return requested
    for number in count(2):
        with suppress(FileExistsError):
            os.mkdir(path := f"{stem(requested)}-{number}")
            return path
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
