"""Sink for metrics.jsonl, and for loss.png, which is drawn from the same records."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from collectives.job.system import replacing
from parallelism.checkpoint import StateHash
from training.reports.facts import RunFacts
from training.reports.metrics import Record, from_json, to_json
from training.reports.sink import Sink

METRICS, SETTINGS, PICTURE = "metrics.jsonl", "config.toml", "loss.png"
HASHES = "hashes.jsonl"


class JSONLines(Sink):
    """Appends each record to metrics.jsonl immediately, and draws loss.png at the end, in the run's folder.

    The hashes of all tensors are appended to hashes.jsonl, in the order of the model's parameters.
    """

    file: TextIO | None = None
    hashes: TextIO | None = None

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        super().open(facts, show)
        self.records: list[Record] = []
        mode: Literal["a", "w"] = "a" if facts.first > 1 else "w"
        with self.writing(os.path.join(self.target, METRICS)) as path:
            self.file = path.open(mode)
        if facts.config.hash_interval:
            with self.writing(os.path.join(self.target, HASHES)) as path:
                self.hashes = path.open(mode)

    def write(self, record: Record) -> None:
        self.records.append(record)
        if self.file is not None:
            with self.writing(os.path.join(self.target, METRICS)):
                print(to_json(record), file=self.file, flush=True)

    def write_hash(self, step: int, state: StateHash) -> None:
        if self.hashes is not None:
            with self.writing(os.path.join(self.target, HASHES)):
                print(json.dumps({"step": step, **state._asdict()}), file=self.hashes, flush=True)

    def close(self) -> None:
        for name, file in ((METRICS, self.file), (HASHES, self.hashes)):
            with self.writing(os.path.join(self.target, name)):
                if file is not None:
                    file.close()
        with self.writing(os.path.join(self.target, PICTURE)) as path:
            draw(path, self.records, self.facts.vocab_size)


def draw_missing(folder: str) -> None:
    """Draw loss.png of a run that was killed before it could: some mpirun give its ranks 0.2 s after Ctrl-C.

    The last line of its metrics.jsonl may be incomplete.
    """
    metrics, settings, picture = (Path(folder, name) for name in (METRICS, SETTINGS, PICTURE))
    with suppress(OSError):
        if picture.exists() and picture.stat().st_mtime >= metrics.stat().st_mtime:
            return
        records = []
        for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                records.append(from_json(line))
        vocab_size = None
        with suppress(FileNotFoundError, tomllib.TOMLDecodeError):
            vocab_size = tomllib.loads(settings.read_text(encoding="utf-8")).get("vocab_size")
        draw(picture, [record for record in records if isinstance(record, dict) and "iter" in record], vocab_size)


def draw(path: Path, records: list[Record], vocab_size: int | None) -> None:
    with replacing(path) as temporary:
        loss_figure(records, vocab_size).savefig(temporary, format="png")


def loss_figure(records: list[Record], vocab_size: int | None):
    """Draw the training loss, faint and smoothed, the validation losses, and log(vocab_size)."""
    from matplotlib.figure import Figure  # takes half a second, so only when drawing

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss (nats per token)")
    train = {record["iter"]: record["loss"] for record in records if "loss" in record}
    val = {record["iter"]: record["val_loss"] for record in records if "val_loss" in record}
    axes.plot(list(train), list(train.values()), color="C0", alpha=0.3)
    axes.plot(list(train), smoothed(list(train.values())), color="C0", label="training, smoothed")
    axes.plot(list(val), list(val.values()), "o", color="C1", label="validation")
    if vocab_size:
        axes.axhline(math.log(vocab_size), color="gray", linestyle="--", label=f"uniform guess over {vocab_size}")
    axes.legend()
    return figure


def smoothed(losses: list[float]) -> list[float]:
    """Return centred means over 1/20 of the run, narrower towards its ends, so that the curve does not lag."""
    last = len(losses) - 1
    halves = [min(i, last - i, len(losses) // 40) for i in range(len(losses))]
    return [float(np.mean(losses[i - half : i + half + 1])) for i, half in enumerate(halves)]
