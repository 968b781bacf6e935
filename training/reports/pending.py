"""Pending steps, whose numbers are read later, so that the host does not wait for a step it has just launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parallelism.buffers.transfer import Moment, Readback
from parallelism.numerics.non_finite import StepGuard
from training.reports.metrics import Metrics


class Meter:
    """What turns the numbers of a step into its metrics; `peak_flops_per_s` is that of all devices, if known."""

    def __init__(
        self,
        guard: StepGuard,
        max_iters: int,
        tokens_per_step: int,
        flops_per_token: int,
        peak_flops_per_s: float | None,
    ):
        self.guard, self.max_iters, self.tokens_per_step = guard, max_iters, tokens_per_step
        self.flops_per_token, self.peak_flops_per_s = flops_per_token, peak_flops_per_s


class PendingStep(NamedTuple):
    """A step that has been launched, with the numbers that the host already knows."""

    meter: Meter
    names: list[str]  # of this rank's gradients
    readback: Readback  # mean loss, this rank's loss, the norm, and the verdict's numbers
    begin: Moment
    comm_s: float
    metrics_so_far: dict[str, Any]  # further fields of `Metrics`

    def metrics(self) -> Metrics:
        """Wait for this step, but not for later ones.  Collective.

        Raises: InputError on every rank if the step is not finite and the run is to stop.
        """
        meter, metrics_so_far = self.meter, self.metrics_so_far
        mean_loss, loss, norm, *verdict = self.readback.read().tolist()
        meter.guard.tell(metrics_so_far["iter"], self.names, verdict, loss, norm)
        step_s = self.readback.ended.since(self.begin)  # of a device: it begins after the previous step
        tokens_per_s = meter.tokens_per_step / step_s
        flops_per_s = tokens_per_s * meter.flops_per_token
        return Metrics(
            max_iters=meter.max_iters,
            loss=mean_loss,
            grad_norm=norm,
            tokens_per_s=tokens_per_s,
            flops_per_s=flops_per_s,
            mfu=meter.peak_flops_per_s and flops_per_s / meter.peak_flops_per_s,
            compute_ms=(step_s - self.comm_s) * 1e3,
            comm_ms=self.comm_s * 1e3,
            **metrics_so_far,
        )


class LateReport:
    """Reports steps in order: on the host immediately, on a device once the next one has been launched."""

    def __init__(self, report: Callable[[Metrics], Any]):
        self.report = report
        self.latest: PendingStep | None = None

    def add(self, step: PendingStep) -> None:
        """Report the previous step.  Collective."""
        self.flush()
        self.latest = step
        if not step.readback.is_late:
            self.flush()

    def flush(self) -> None:
        """Report the latest step, too.  Collective."""
        step, self.latest = self.latest, None
        if step is not None:
            self.report(step.metrics())
