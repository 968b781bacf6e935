"""Reports of a training run: a line per iteration, metrics.jsonl and loss.png."""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

from collectives.job import system
from collectives.job.system import replacing


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


def peak_memory_mib() -> float:
    """Return this process's peak resident memory, in MiB."""
    return system.peak_memory_bytes() / 2**20


class TrainingReport:
    """Print iterations and validations, and record them in `out_dir`; None writes no files.

    Every `log_interval`-th iteration is reported, and the last.

    Each is appended to metrics.jsonl immediately, and passed to `sinks`, as a record: the fields of `Metrics`, or iter
    and val_loss.  loss.png is drawn on leaving, also after an error.  Failures to write, as on a full disk, are
    reported once, and do not stop the run.
    """

    def __init__(
        self,
        out_dir: str | None,
        max_iters: int,
        vocab_size: int,
        progress: bool,
        goes_on: bool = False,
        log_interval: int = 1,
        sinks: Sequence[Callable[[dict[str, Any]], None]] = (),
    ):
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.max_iters, self.goes_on = max_iters, goes_on
        self.log_interval, self.sinks = log_interval, sinks
        self.vocab_size = vocab_size
        self.progress = progress
        # mpirun may give a rank a terminal of width and height 0, for which this returns 80 x 24.
        width, height = shutil.get_terminal_size()
        self.bar = tqdm(
            total=max_iters,
            unit="iter",
            file=sys.stdout,
            disable=not progress,
            ncols=width,
            nrows=height,
        )
        self.records: list[dict[str, Any]] = []
        self.file: TextIO | None = None
        self.failed_outputs: set[str] = set()

    def __enter__(self):
        if self.out_dir is not None:
            with self.writing("metrics.jsonl") as path:
                self.file = path.open("a" if self.goes_on else "w")
        return self

    def __exit__(self, *exc_info):
        self.bar.close()
        if self.out_dir is not None:
            with self.writing("metrics.jsonl"):
                if self.file is not None:
                    self.file.close()
            with self.writing("loss.png") as path, replacing(path) as temporary:
                loss_figure(self.records, self.vocab_size).savefig(temporary, format="png")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Report a failure to write, once."""
        assert self.out_dir is not None
        path = self.out_dir / name
        try:
            yield path
        except OSError as error:
            if name not in self.failed_outputs:
                self.show(f"{path} can't be written ({error.strerror}): the run continues without it")
                self.failed_outputs.add(name)

    def iteration(self, metrics: Metrics):
        is_reported = metrics.iter % self.log_interval == 0 or metrics.iter == self.max_iters
        if is_reported:
            self.show(iteration_line(metrics))
        self.bar.update()
        if is_reported:
            self.record(metrics._asdict())

    def validation(self, iter_num: int, loss: float):
        self.show(f"iter {iter_num}/{self.max_iters} | val loss {loss:.4f}")
        self.record({"iter": iter_num, "val_loss": loss})

    def show(self, line: str):
        if self.progress:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def record(self, record: dict[str, Any]):
        self.records.append(record)
        for sink in self.sinks:
            sink(record)
        if self.file is not None:
            with self.writing("metrics.jsonl"):
                print(to_json(record), file=self.file, flush=True)


def to_json(record: dict[str, Any]) -> str:
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


def draw_recorded(out_dir: str, vocab_size: int) -> None:
    """Draw loss.png from metrics.jsonl, whose last line may be incomplete."""
    records = []
    for line in Path(out_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            records.append(from_json(line))
    with replacing(Path(out_dir, "loss.png")) as temporary:
        loss_figure(records, vocab_size).savefig(temporary, format="png")


def loss_figure(records: list[dict[str, Any]], vocab_size: int):
    """Draw the training loss, faint and smoothed, the validation losses, and log(vocab_size)."""
    from matplotlib.figure import Figure  # takes half a second, so only when drawing

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss (nats per token)")
    train = {record["iter"]: record["loss"] for record in records if "loss" in record}
    val = {record["iter"]: record["val_loss"] for record in records if "val_loss" in record}
    axes.plot(list(train), list(train.values()), color="C0", alpha=0.3)
    axes.plot(list(train), smoothed(list(train.values())), color="C0", label="training, smoothed")
    axes.plot(list(val), list(val.values()), "o", color="C1", label="validation")
    axes.axhline(math.log(vocab_size), color="gray", linestyle="--", label=f"uniform guess over {vocab_size}")
    axes.legend()
    return figure


def smoothed(losses: list[float]) -> list[float]:
    """Return centred means over 1/20 of the run, narrower towards its ends, so that the curve does not lag."""
    last = len(losses) - 1
    halves = [min(i, last - i, len(losses) // 40) for i in range(len(losses))]
    return [float(np.mean(losses[i - half : i + half + 1])) for i, half in enumerate(halves)]
