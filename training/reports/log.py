"""Log of a run: lines on the terminal, and records for its sinks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tqdm import tqdm

import collectives
from collectives.job import environment
from parallelism.checkpoint import StateHash
from training.reports.facts import RunFacts
from training.reports.finding import HealthChange
from training.reports.html import HTMLReport
from training.reports.jsonl import JSONLines
from training.reports.metrics import Metrics, Record, Validation, iteration_line
from training.reports.prometheus import TextFile
from training.reports.sink import Sink
from training.reports.summary import summary
from training.reports.tensorboard import TensorBoard
from training.reports.wandb import WeightsAndBiases

SINKS: dict[str, type[Sink]] = {
    "out_dir": JSONLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "prometheus": TextFile,
    "report": HTMLReport,
}  # by the setting that names their file, folder or project


@contextmanager
def open_log(comm: collectives.Communicator, facts: RunFacts) -> Iterator[RunLog]:
    """Open a run's log, and on rank 0 the sinks that its settings name, in this context.  Collective.

    Raises: InputError for a sink that does not start.
    """
    targets = {**vars(facts.config), "out_dir": facts.out_dir}
    sinks = [kind(targets[name]) for name, kind in SINKS.items() if targets[name] and comm.rank == 0]
    with RunLog(facts, sinks, comm.rank == 0 and environment.on_terminal()) as log:
        with comm.agreed("logs"):
            log.open()
        yield log


class RunLog:
    """Prints steps and validations, and writes a record of each to `sinks`.

    Every `log_interval`-th step is reported, and the last.  On leaving, also after an error, it closes the sinks.
    """

    def __init__(self, facts: RunFacts, sinks: list[Sink], progress: bool = False):
        self.facts, self.sinks, self.progress = facts, sinks, progress
        self.records: list[Record] = []
        self.findings = 0  # about ranks, that last
        self.max_iters, self.log_interval = facts.config.max_iters, facts.config.log_interval
        # mpirun may give a rank a terminal of width and height 0, for which this returns 80 x 24.
        width, height = shutil.get_terminal_size()
        self.bar = tqdm(
            total=self.max_iters, unit="iter", file=sys.stdout, disable=not progress, ncols=width, nrows=height
        )
        self.closing = ExitStack()
        self.begin_s = time.perf_counter()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bar.close()
        self.closing.close()

    def open(self) -> None:
        """Open the sinks.

        Raises: ValueError for one that does not start.
        """
        for sink in self.sinks:
            sink.open(self.facts, self.show)
            self.closing.callback(sink.close)

    def step(self, metrics: Metrics) -> None:
        is_reported = metrics.iter % self.log_interval == 0 or metrics.iter == self.max_iters
        if is_reported:
            self.show(iteration_line(metrics))
        self.bar.update()
        if is_reported:
            self.record(metrics._asdict())

    def validation(self, iteration: int, validation: Validation) -> None:
        for line in validation.lines():
            self.show(f"iter {iteration}/{self.max_iters} | {line}")
        self.record(validation.record(iteration))

    def health(self, change: HealthChange) -> None:
        self.show(str(change))
        finding, begins = change.finding, change.begins
        self.findings += 1 if begins else -1
        health = {"kind": finding.kind, "ranks": [*finding.ranks], "begins": begins, "words": str(change)}
        self.record({"iter": change.step, "findings": self.findings, "health": health})

    def hashed(self, step: int, state: StateHash) -> None:
        for sink in self.sinks:
            sink.write_hash(step, state)
        self.record({"iter": step, "hash": state.hash})

    def table(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.show(line)

    def summarize(self) -> None:
        """Show what the run has come to."""
        if entries := summary(self.records, time.perf_counter() - self.begin_s):
            self.show(f"summary: {', '.join(f'{name} {value}' for name, value in entries.items())}")

    def show(self, line: str) -> None:
        if self.progress:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def record(self, record: Record) -> None:
        """Write a record to all sinks; the first one of a run says what has changed since the checkpoint."""
        if not self.records and self.facts.resumed_with:
            record = {**record, "resumed_with": self.facts.resumed_with}
        self.records.append(record)
        for sink in self.sinks:
            sink.write(record)
