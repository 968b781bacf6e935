"""Steps whose numbers are read later, so that the host waits for no work of a device that it has just begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from models.gpt import flops_per_token
from models.report import Metrics
from parallelism.buffers.transfer import Readback

if TYPE_CHECKING:
    from training.run import TrainingRun


class PendingStep(NamedTuple):
    """A step that has been begun, and what the host knows of it by then."""

    run: TrainingRun
    names: list[str]  # of the gradients of this rank
    readback: Readback  # of the mean loss, this rank's loss, the norm, and the verdict's numbers
    begin_s: float
    comm_s: float
    metrics_so_far: dict[str, Any]  # further fields of `Metrics`

    def metrics(self) -> Metrics:
        """Wait for this step, and no later one.  Collective.

        Raises: InputError on every rank where the step is not finite, if the run is to stop.
        """
        run, config, metrics_so_far = self.run, self.run.config, self.metrics_so_far
        mean_loss, loss, norm, *verdict = self.readback.read().tolist()
        run.guard.tell(metrics_so_far["iter"], self.names, verdict, loss, norm)
        step_s = self.readback.ended_s - max(self.begin_s, run.ended_s)  # a device begins when it has ended the last
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
    """Reports steps in their order: those of the host at once, those of a device when the next one has been begun."""

    def __init__(self, report: Callable[[Metrics], Any]):
        self.report = report
        self.latest: PendingStep | None = None

    def add(self, step: PendingStep) -> None:
        """Report the step before.  Collective."""
        self.flush()
        self.latest = step
        if not step.readback.is_late:
            self.flush()

    def flush(self) -> None:
        """Report the latest step, too: ahead of what is to come after it.  Collective."""
        step, self.latest = self.latest, None
        if step is not None:
            self.report(step.metrics())
