"""Train a GPT with hand-written collectives.

mpirun -n 2 python -m training
mpirun -n 2 python -m training --config small
mpirun -n 4 python -m training --micro_batch_size 4
mpirun -n 4 python -m training --tp 2 --sp 2
mpirun -n 4 python -m training --pp 2 --num_micro_batches 4
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

import collectives
from collectives.job import environment
from models.hf import save_hugging_face
from models.killed import drawn_if_killed
from models.model import Model
from models.report import TrainingReport
from models.tokenizer import save_tokenizer
from parallelism.numerics.non_finite import first_not_finite
from parallelism.planner.settings import parse
from training.announcement import announcement
from training.config import Config
from training.layout import laid_out
from training.logs import log_sinks
from training.pending import LateReport
from training.run import TrainingRun
from training.sampling import sample
from training.starting import hold_signals, ignore_late_signals, take_signals


class Trained(NamedTuple):
    """Result of a run: the model, unless it only validates, and the records of metrics.jsonl."""

    gpt: Model | None
    records: list[dict[str, Any]]


def main() -> None:
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # other ranks are silent  # noqa: SIM115
    torch.set_num_threads(environment.threads_per_rank())
    with comm.agreed():
        config = parse(Config, __doc__)
    if config.checkpoint_dir:
        ignore_late_signals()
    train(config, comm)
    if config.checkpoint_dir:
        hold_signals()  # on exit, Python restores the system's handlers, which end the process


def train(config: Config, comm: collectives.Communicator) -> Trained:
    """Train on the ranks of `comm`, or only validate.  Collective.

    Raises: InputError for settings incompatible with each other or with the data, before anything is computed.
    """
    with TrainingRun(laid_out(config, comm) if config.layout == "auto" else config, comm) as run:
        take_signals()
        print(announcement(run), flush=True)
        if config.eval_only:
            return Trained(None, [validated(run)])
        if run.first > config.max_iters:
            print(f"no steps remain: the checkpoint is of step {run.first - 1}, and max_iters is {config.max_iters}")
        records = iterate(run)
        gpt = run.whole()
        leave(run, gpt)
    return Trained(gpt, records)


def validated(run: TrainingRun) -> dict[str, Any]:
    """Print and return the validation loss of the initial weights.  Collective."""
    record = {"iter": run.first - 1, "val_loss": run.validate()}
    print(f"val loss {record['val_loss']:.4f}")
    return record


def iterate(run: TrainingRun) -> list[dict[str, Any]]:
    """Run all steps, validations and checkpoints; return the records.  Collective."""
    config = run.config
    with (
        log_sinks(run) as sinks,
        TrainingReport(
            run.out_dir,
            config.max_iters,
            run.tokens.vocab_size,
            run.progress_bar,
            goes_on=run.first > 1,
            log_interval=config.log_interval,
            sinks=sinks,
        ) as report,
        drawn_if_killed(run.out_dir, run.tokens.vocab_size),
        closing(run.inputs()) as inputs,
    ):
        steps = LateReport(report.iteration)
        for iteration, batches in zip(range(run.first, config.max_iters + 1), inputs, strict=False):
            steps.add(run.step(iteration, batches))
            if iteration == config.max_iters or iteration % config.eval_interval == 0:
                steps.flush()
                report.validation(iteration, run.validate())
            if run.saving and (signal := run.saving.after(iteration, before=steps.flush)):
                report.show(f"{signal}: the run ends with a checkpoint of step {iteration}")
                break
        if run.saving:  # before drawing
            run.saving.close()
    return report.records


def leave(run: TrainingRun, gpt: Model) -> None:
    """Print a sample, and save the weights and the tokenizer in the run's folder.  Collective.

    Raises: InputError for weights that are not finite.
    """
    comm = run.mesh.comm
    with comm.agreed("weights"):
        if name := first_not_finite(dict(gpt.named_parameters())):
            raise ValueError(f"{name} is not finite: no weights are written; lower the learning rate")
    if comm.rank == 0:
        print(sample(gpt, run.val_ids[:16], run.config, run.tokens.tokenizer))
    with comm.agreed("weights"):
        if run.out_dir:
            save_hugging_face(gpt, run.out_dir)
            save_tokenizer(run.tokens.tokenizer, Path(run.out_dir), run.tokens.vocab_size)
            print(f"for more: python -m training.sample --from {run.out_dir}")
