"""Train a GPT, a Llama or one of their kin with hand-written collectives.

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
from models.decoder import Decoder
from models.mixture import balance, scale_losses
from parallelism.buffers.transfer import Moment, Readback
from parallelism.numerics.non_finite import Verdict
from parallelism.pipeline.stage import Batch, count_targets
from parallelism.planner.settings import parse
from training.data.packing import Windows
from training.data.tokenizer import save_tokenizer
from training.lora.adapters import describe, merge
from training.lora.peft import save_adapter
from training.parallel.device import prepare_process
from training.parallel.remains import Remains
from training.parallel.run import TrainingRun
from training.parallel.validation import spread, sum_losses
from training.recovery import train_on_survivors
from training.reports.log import RunLog, open_log
from training.reports.memory_use import memory_table
from training.reports.metrics import Validation, memory_mib
from training.reports.pending import LateReport, PendingStep
from training.reports.profile import INPUT, OPTIMIZER
from training.reports.time_table import time_table
from training.sample import sample
from training.settings.config import Config
from training.settings.derived import learning_rate_of
from training.settings.layout import planned
from training.supervision.heartbeat import ENDED, beat
from training.weights.export import refusal, save_hugging_face

ADAPTER = "adapter"  # folder of a run's adapters, in its own


class Trained(NamedTuple):
    """Result of a run: the model, unless it only validates, and the records of metrics.jsonl."""

    model: Decoder | None
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
        for notice in filter(None, (run.windows.notice, describe(run.config, run.targets))):
            print(notice, flush=True)
        if config.eval_only:
            validation = validate(run)
            print(*validation.lines(), sep="\n")
            return Trained(None, [validation.record(run.first - 1)])
        if run.first > config.max_iters:
            print(f"no steps remain: the checkpoint is of step {run.first - 1}, and max_iters is {config.max_iters}")
        with open_log(comm, run.facts) as log, closing(run.inputs()) as inputs:
            steps = LateReport(log.step)
            for iteration, batches in zip(range(run.first, config.max_iters + 1), inputs, strict=False):
                beat(comm, iteration)
                steps.add(step(run, iteration, batches))
                report_health(run, log)
                log.table(memory_table(run.profiler.take_memory()))
                if words := run.balance_load():
                    log.show(f"step {iteration}: {words}")
                if run.hashes and iteration % config.hash_interval == 0:
                    settle(run, log, steps, iteration)
                if iteration == config.max_iters or iteration % config.eval_interval == 0:
                    steps.flush()
                    log.validation(iteration, validate(run))
                if config.times_interval and iteration % config.times_interval == 0:
                    log.table(time_table(run.profiler.gathered()))
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
            log.table(time_table(run.profiler.gathered()))
            log.summarize()
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
        scale_losses(run.routers, run.scale.value / (run.num_micro_batches if config.reproducible else len(batches)))
        num_targets, total = count_targets(batches)
        run.passes(iteration, batches, run.loss_weights(num_targets, total))
        loss_sum = (run.pipeline.step_losses * num_targets).sum()
        loss = loss_sum / num_targets.sum().clamp(min=1)
        # Before the update, so that a rank waits for no others between it and its report.
        mean_loss = run.add(loss_sum)[0] / total
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


def validate(run: TrainingRun) -> Validation:
    """Return the losses over the validation data, and over each of several files of it.  Collective."""
    run.model.eval()
    parts = {path: mean_loss(run, windows) for path, windows in run.val_parts.items()}
    validation = Validation(mean_loss(run, run.val_windows), parts)
    run.model.train()
    return validation


def mean_loss(run: TrainingRun, windows: Windows) -> float:
    """Return the mean loss in nats per token over validation data, or over some batches of it.  Collective."""
    selection = spread(len(windows), run.config.eval_iters * run.sampler.batch_size)
    total, count = run.add(*sum_losses(run.pipeline, run.samples, windows, selection, run.mesh.dp)).tolist()
    return total / (count / run.mesh.pp.size)


def save(run: TrainingRun, model: Decoder) -> None:
    """Print a sample, and save the weights and the tokenizer in the run's folder.  Collective.

    Adapters are saved there, too, and merged into the weights.
    """
    if run.targets:
        with run.mesh.comm.agreed("adapters"):
            if run.out_dir:
                save_adapter(model, run.targets, run.config, Path(run.out_dir) / ADAPTER)
        merge(model, run.targets)
    if run.mesh.comm.rank == 0:
        print(sample(model, run.val_windows.prompt, run.config, run.tokens.tokenizer))
    with run.mesh.comm.agreed("weights"):
        if run.out_dir:
            save_hugging_face(model, run.out_dir, run.config.init_from, run.config.export_dtype)
            save_tokenizer(run.tokens.tokenizer, Path(run.out_dir), run.tokens.vocab_size)
            if why := refusal(model.config):
                print(f"{run.out_dir}: {why}")
            print(f"for more: python -m training.sample --from {run.out_dir}")
