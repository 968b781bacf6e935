"""Train a GPT or a Llama with hand-written collectives.

mpirun -n 2 python -m training
mpirun -n 2 python -m training --config small
mpirun -n 4 python -m training --micro_batch_size 4
mpirun -n 4 python -m training --tp 2 --sp 2
mpirun -n 4 python -m training --pp 2 --num_micro_batches 4
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import collectives
from models.mixture import balance, scale_losses
from models.model import Model
from parallelism.buffers.transfer import Moment, Readback
from parallelism.numerics.non_finite import Verdict
from parallelism.pipeline.stage import Batch
from parallelism.planner.settings import parse
from training.data.tokenizer import save_tokenizer
from training.data.tokens import TokenWindows
from training.parallel.device import prepare_process
from training.parallel.remains import Remains
from training.parallel.run import TrainingRun
from training.parallel.validation import spread, sum_losses
from training.recovery import train_on_survivors
from training.reports.log import RunLog, open_log
from training.reports.metrics import memory_mib
from training.reports.pending import LateReport, PendingStep
from training.reports.profile import INPUT, OPTIMIZER
from training.sample import sample
from training.settings.config import Config
from training.settings.derived import learning_rate_of
from training.settings.layout import planned
from training.supervision.heartbeat import ENDED, beat
from training.weights.hf import save_hugging_face


class Trained(NamedTuple):
    """Result of a run: the model, unless it only validates, and the records of metrics.jsonl."""

    model: Model | None
    records: list[dict[str, Any]]


def main() -> None:
    comm = collectives.world()
    prepare_process(comm)
    with comm.agreed():
        config = parse(Config, __doc__)
    if config.checkpoint_dir:
        # After the last step, which is saved, a signal changes nothing.  SIG_IGN would discard one that is blocked.
        signal.signal(signal.SIGUSR1, lambda *_: None)
    train_on_survivors(train, config, comm)


def train(config: Config, comm: collectives.Communicator, leave: Callable[[Remains], None] | None = None) -> Trained:
    """Train on the ranks of `comm`, or only validate.  Where others die, hand what this one holds to `leave`.

    Collective.

    Raises: InputError for settings incompatible with each other or with the data, before anything is computed.
    """
    with TrainingRun(planned(config, comm) if config.layout == "auto" else config, comm, leave) as run:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # which `training.__main__` has blocked
        print(run.facts.announcement, flush=True)
        if config.eval_only:
            loss = validate(run)
            print(f"val loss {loss:.4f}")
            return Trained(None, [{"iter": run.first - 1, "val_loss": loss}])
        if run.first > config.max_iters:
            print(f"no steps remain: the checkpoint is of step {run.first - 1}, and max_iters is {config.max_iters}")
        with open_log(comm, run.facts) as log, closing(run.inputs()) as inputs:
            steps = LateReport(log.step)
            for iteration, batches in zip(range(run.first, config.max_iters + 1), inputs, strict=False):
                beat(comm, iteration)
                steps.add(step(run, iteration, batches))
                report_health(run, log)
                if words := run.balance_load():
                    log.show(f"step {iteration}: {words}")
                if run.hashes and iteration % config.hash_interval == 0:
                    settle(run, log, steps, iteration)
                if iteration == config.max_iters or iteration % config.eval_interval == 0:
                    steps.flush()
                    log.validation(iteration, validate(run))
                if run.saving and iteration < config.max_iters and steps.latest is None:  # the last has a checkpoint
                    run.saving.offer(iteration)
                if run.saving and (
                    received := run.saving.after(iteration, partial(settle, run, log, steps, iteration))
                ):
                    log.show(f"{received}: the run ends with a checkpoint of step {iteration}")
                    break
            if run.health:
                run.health.finish()
                report_health(run, log)
            if run.saving:  # before drawing
                run.saving.close()
        model = run.whole()
        save(run, model)
    beat(comm, ENDED)
    return Trained(model, log.records)


def report_health(run: TrainingRun, log: RunLog) -> None:
    """Report which ranks have begun to hold the others up, or have ended to, or had wrong numbers."""
    changes = run.health.news() if run.health else []
    for change in [*changes, *(run.corruption.news() if run.corruption else [])]:
        log.health(change)


def settle(run: TrainingRun, log: RunLog, steps: LateReport, iteration: int) -> None:
    """Report the latest step, and the hash of the state after it unless that is done.  Collective."""
    steps.flush()
    if run.hashes and run.hashes.step != iteration:
        log.hashed(iteration, run.hashes.after(iteration))


def step(run: TrainingRun, iteration: int, batches: list[Batch]) -> PendingStep:
    """Run one training step.  The host does not wait for its device.  Collective."""
    with run.observing(iteration):
        config, timing = run.config, run.profiler.timing
        begin, waited_s = Moment(config.device), run.profiler.waited_s
        with timing(INPUT):
            batches = [batch.to(config.device) for batch in batches]
        weight = run.scale.value / (run.num_micro_batches if config.reproducible else len(batches))
        scale_losses(run.routers, weight)
        run.passes(iteration, batches, [weight] * len(batches))
        loss = run.pipeline.loss_sum / len(batches)
        # Before the update, so that a rank waits for no others between it and its report.
        mean_loss = run.add(run.pipeline.loss_sum)[0] / run.num_micro_batches
        with run.sum_time.waiting():
            bubble = run.pipeline.times.bubble(run.mesh.pp)
        lr = learning_rate_of(config, iteration)
        with timing(OPTIMIZER):
            norm, verdict = update(run, lr, loss)
        if run.corruption:
            run.corruption.after(iteration)
        numbers = torch.cat([torch.stack([mean_loss, loss, norm]), verdict.numbers])
        metrics = {"iter": iteration, "lr": lr, "bubble": bubble, "memory_mib": memory_mib(config.device)}
        comm_s = run.profiler.waited_s - waited_s
        return PendingStep(run.meter, verdict.names, Readback(numbers), begin, comm_s, metrics)


def update(run: TrainingRun, lr: float, loss: torch.Tensor) -> tuple[torch.Tensor, Verdict]:
    """Clip the gradients, update the weights unless the step is to be skipped, and clear the gradients.

    Return the norm before clipping, and the ranks' verdict on the step.  Collective.
    """
    run.masters.take_gradients(run.scale.inverse)
    norm = run.clip()
    verdict = run.guard.judge(loss, norm)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1)
    if run.saving:
        run.saving.offered = 0  # as the state is about to change
    run.optimizer.step(verdict.skipped)
    balance(run.routers, run.sum_loads)
    run.replica.gather()
    run.pipeline.zero_grad()
    return norm, verdict


def validate(run: TrainingRun) -> float:
    """Return the mean loss in nats per token over the validation data, or over some batches of it.  Collective."""
    windows = TokenWindows(run.val_ids, run.config.block_size, seed=None)
    selection = spread(len(windows), run.config.eval_iters * run.sampler.batch_size)
    run.model.eval()
    total, count = run.add(*sum_losses(run.pipeline, run.samples, windows, selection, run.mesh.dp)).tolist()
    run.model.train()
    return total / (count / run.mesh.pp.size)


def save(run: TrainingRun, model: Model) -> None:
    """Print a sample, and save the weights and the tokenizer in the run's folder.  Collective."""
    if run.mesh.comm.rank == 0:
        print(sample(model, run.val_ids[:16], run.config, run.tokens.tokenizer))
    with run.mesh.comm.agreed("weights"):
        if run.out_dir:
            save_hugging_face(model, run.out_dir)
            save_tokenizer(run.tokens.tokenizer, Path(run.out_dir), run.tokens.vocab_size)
            print(f"for more: python -m training.sample --from {run.out_dir}")
