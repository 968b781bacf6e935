"""Export a run's latest numbers to Prometheus, in a file for node exporter's textfile collector.

Source: Prometheus, "Exposition formats" and "Metric and label naming", and node exporter's README on its collector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.job.system import replacing
from training.reports.facts import RunFacts
from training.reports.metrics import Record
from training.reports.sink import Sink


class Series(NamedTuple):
    """Metric of a record's field, in base units: `factor` times the field."""

    name: str
    kind: str
    help: str
    factor: float = 1.0


SERIES = {
    "iter": Series("training_steps_total", "counter", "Steps done, those before a resumed checkpoint included."),
    "max_iters": Series("training_planned_steps", "gauge", "Steps after which the run ends."),
    "tokens": Series("training_tokens_total", "counter", "Tokens trained on, those before a checkpoint included."),
    "loss": Series("training_loss_nats", "gauge", "Mean training loss of the step, a token."),
    "val_loss": Series("training_validation_loss_nats", "gauge", "Mean loss over the held-back part, a token."),
    "grad_norm": Series("training_gradient_norm", "gauge", "Norm of all gradients, before clipping."),
    "lr": Series("training_learning_rate", "gauge", "Learning rate of the step."),
    "tokens_per_s": Series("training_tokens_per_second", "gauge", "Tokens of the step by its time, of all ranks."),
    "flops_per_s": Series("training_flops_per_second", "gauge", "The model's operations by the step's time."),
    "mfu": Series("training_model_flops_utilization_ratio", "gauge", "Share of the devices' peak, from 0 to 1."),
    "compute_ms": Series("training_compute_seconds", "gauge", "Time of the step other than comm.", 1e-3),
    "comm_ms": Series("training_comm_seconds", "gauge", "Time in which rank 0 waited for other ranks.", 1e-3),
    "memory_mib": Series("training_peak_memory_bytes", "gauge", "Most memory that rank 0 has had.", 2**20),
    "findings": Series("training_health_findings", "gauge", "Ranks or links that are slow or wait for input now."),
    "bubble": Series("training_pipeline_bubble_ratio", "gauge", "Share of the step in which pp ranks wait, 0 to 1."),
}


class TextFile(Sink):
    """Writes the latest value of each number to a file, which is replaced atomically.

    The run's folder is a label, as several runs of a host may have files.
    """

    def open(self, facts: RunFacts, show: Callable[[str], None]) -> None:
        super().open(facts, show)
        self.labels, self.latest = f'{{run="{escaped(facts.out_dir)}"}}', Record()

    def write(self, record: Record) -> None:
        self.latest |= {**record, "tokens": record["iter"] * self.facts.tokens_per_step}
        with self.writing(self.target) as path, replacing(path) as temporary:
            temporary.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Format the available numbers in Prometheus's text format."""
        lines = []
        for field, series in SERIES.items():
            if (value := self.latest.get(field)) is not None:
                lines += [f"# HELP {series.name} {series.help}", f"# TYPE {series.name} {series.kind}"]
                lines.append(f"{series.name}{self.labels} {number(value * series.factor)}")
        return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Format a number as Go parses it.

    >>> number(3.5), number(float("inf")), number(float("nan"))
    ('3.5', '+Inf', 'NaN')
    """
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(float(value)), f"{float(value):.15g}")


def escaped(label: str) -> str:
    r"""Escape a label's value.

    >>> print(escaped('a"b\\c'))
    a\"b\\c
    """
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
