"""Metrics of a step: its line on the terminal, and its record in metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from collectives.job import system

Record = dict[str, Any]  # the fields of `Metrics`, or iter and one of val_loss, hash, or health with findings


class Metrics(NamedTuple):
    iter: int
    max_iters: int
    loss: float  # nats per token
    grad_norm: float
    lr: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None  # 0 to 1; None if the peak is unknown
    compute_ms: float
    comm_ms: float
    memory_mib: float
    bubble: float | None = None  # idle fraction of a pipeline's step, 0 to 1


class Validation(NamedTuple):
    """Mean losses, in nats per token, over the validation data, and over each of several files of it, by path."""

    loss: float
    parts: Mapping[str, float] = MappingProxyType({})

    def record(self, iteration: int) -> Record:
        """Return the fields of metrics.jsonl; those of a file have its path behind a slash, as TensorBoard groups."""
        perplexities = {"val_perplexity": perplexity(self.loss)} if self.parts else {}
        parts = {f"val_loss/{path}": loss for path, loss in self.parts.items()}
        parts |= {f"val_perplexity/{path}": perplexity(loss) for path, loss in self.parts.items()}
        return {"iter": iteration, "val_loss": self.loss, **perplexities, **parts}

    def lines(self) -> list[str]:
        if not self.parts:
            return [f"val loss {self.loss:.4f}"]
        named = {"": self.loss, **{f" of {path}": loss for path, loss in self.parts.items()}}
        return [f"val loss{name} {loss:.4f} | perplexity {perplexity(loss):.2f}" for name, loss in named.items()]


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats per token.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def iteration_line(m: Metrics) -> str:
    (tokens, kilo), (flops, giga) = scaled(m.tokens_per_s), scaled(m.flops_per_s)
    parts = [
        f"iter {m.iter}/{m.max_iters}",
        f"loss {m.loss:.4f}",
        f"grad norm {m.grad_norm:.2f}",
        f"lr {m.lr:.2e}",
        f"{tokens:.1f}{kilo} tok/s",
        f"{flops:.1f} {giga}FLOP/s",
        *([] if m.mfu is None else [f"MFU {m.mfu:.1%}"]),
        f"compute {m.compute_ms:.0f} ms",
        f"comm {m.comm_ms:.0f} ms",
        *([] if m.bubble is None else [f"bubble {m.bubble:.1%}"]),
        f"mem {m.memory_mib:.0f} MiB",
    ]
    return " | ".join(parts)


def scaled(value: float) -> tuple[float, str]:
    """Split off the SI prefix with which "%.1f" prints less than 1000."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while value >= 999.95 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return value, prefixes[0]


def memory_mib(device: str) -> float:
    """Return the peak memory of this rank's process, or of its device, in MiB."""
    return (system.peak_memory_bytes() if device == "cpu" else torch.cuda.max_memory_allocated(device)) / 2**20


def to_json(record: Record) -> str:
    """Format a record as a line of metrics.jsonl.  JSON has no word for a number that is not finite: it is null.

    >>> to_json({"iter": 3, "loss": math.nan, "lr": 0.5})
    '{"iter": 3, "loss": null, "lr": 0.5, "not_finite": {"loss": "NaN"}}'
    """
    words = {
        name: json.dumps(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    more = {"not_finite": words} if words else {}
    return json.dumps({**record, **dict.fromkeys(words), **more}, allow_nan=False)


def from_json(line: str) -> Any:
    """Parse a line of metrics.jsonl.

    >>> from_json('{"iter": 3, "loss": null, "not_finite": {"loss": "-Infinity"}}')
    {'iter': 3, 'loss': -inf}

    Raises: ValueError for a line that is not JSON.
    """
    record = json.loads(line)
    if isinstance(record, dict) and isinstance(words := record.pop("not_finite", None), dict):
        record |= {name: float(str(word)) for name, word in words.items()}
    return record
