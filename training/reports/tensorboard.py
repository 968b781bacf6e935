"""Sink for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable

from training.reports.facts import RunFacts
from training.reports.metrics import Record
from training.reports.sink import Sink, numbers


class TensorBoard(Sink):
    """Writes numbers over the steps to a folder."""

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.target)

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["iter"])

    def close(self) -> None:
        self.writer.close()
