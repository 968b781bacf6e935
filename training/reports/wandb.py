"""Sink for Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Callable

from training.reports.facts import RunFacts
from training.reports.metrics import Record
from training.reports.sink import Sink, numbers


class WeightsAndBiases(Sink):
    """Logs numbers over the steps, and the run's settings, to a project."""

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        try:
            import wandb

            self.run = wandb.init(project=self.target, config=dict(vars(facts.config)))
        except Exception as error:  # its own exceptions, as for a missing login
            words = " ".join(str(error).split())
            raise ValueError(f"wandb={self.target} does not start ({words}): log in, or omit it") from None

    def write(self, record: Record) -> None:
        self.run.log(numbers(record), step=record["iter"])

    def close(self) -> None:
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))
