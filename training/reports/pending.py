"""Pending steps, whose numbers are read later, so that the host does not wait for a step it has just launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from models.gpt import flops_per_token
from models.report import Metrics
from parallelism.buffers.transfer import Readback

if TYPE_CHECKING:
    from training.parallel.run import TrainingRun


class PendingStep(NamedTuple):
    """A step that has been launched, with the numbers that the host already knows."""

    run: TrainingRun
    names: list[str]  # of this rank's gradients
    readback: Readback  # mean loss, this rank's loss, the norm, and the verdict's numbers
    begin_s: float
    comm_s: float
    metrics_so_far: dict[str, Any]  # further fields of `Metrics`

    def metrics(self) -> Metrics:
        """Wait for this step, but not for later ones.  Collective.

        Raises: InputError on every rank if the step is not finite and the run is to stop.
        """
        run, config, metrics_so_far = self.run, self.run.config, self.metrics_so_far
        mean_loss, loss, norm, *verdict = self.readback.read().tolist()
        run.guard.tell(metrics_so_far["iter"], self.names, verdict, loss, norm)
        step_s = self.readback.ended_s - max(self.begin_s, run.ended_s)  # a device begins after the previous step
        run.ended_s = self.readback.ended_s
        tokens_per_s = run.sampler.batch_size * config.block_size / step_s
        flops_per_s = tokens_per_s * flops_per_token(run.gpt.config, run.num_params)
        return Metrics(
            max_iters=config.max_iters,
            loss=mean_loss,
            grad_norm=norm,
            tokens_per_s=tokens_per_s,
            flops_per_s=flops_per_s,
            mfu=config.peak_tflops and flops_per_s / (config.peak_tflops * 1e12 * run.mesh.comm.size),
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
