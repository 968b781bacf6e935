"""`--layout auto`: use the layout that the planner predicts to be the fastest on the job's ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import collectives
from parallelism.numerics.precision import Precision
from parallelism.pipeline.schedule import registry
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.layout import ZERO_GROUPS
from parallelism.planner.ranks import best_layout
from training.data.tokens import TokenWindows, split
from training.parallel.device import own_device
from training.settings.checks import check_batch, num_micro_batches
from training.settings.config import Config
from training.settings.derived import tokens_of


def planned(config: Config, comm: collectives.Communicator) -> Config:
    """Return the settings with the planned layout and the same global batch, after measuring the ranks.  Collective.

    Axes and other parts of the layout that the settings change from their defaults stay.

    Raises: InputError if no layout fits.
    """
    with comm.agreed("layout"):
        config = replace(config, device=own_device(config.device, comm))
        job, fixed = job_of(config, comm.size), fixed_by(config)
    if comm.rank == 0:
        print(f"planning a layout for {comm.size} ranks", flush=True)
    layout = best_layout(comm, job, fixed, config.device).layout
    if comm.rank == 0:
        print(f"layout {layout} is the best for {comm.size} ranks", flush=True)
    return replace(config, layout="given", **layout._asdict())


def fixed_by(config: Config) -> dict[str, Any]:
    """Return the parts of the layout that the settings change from their defaults, other than the micro-batches.

    Raises: ValueError for values that no planned layout has.
    """
    for name, choices in (("schedule", registry.names()), ("zero_group", ZERO_GROUPS)):
        if (value := getattr(config, name)) not in choices:
            raise ValueError(
                f"{name}={value} can't be planned by layout=auto: use {', '.join(choices)}, or omit layout"
            )
    names = [name for name in ParallelLayout._fields if not name.endswith(("micro_batches", "micro_batch_size"))]
    defaults = {field.name: field.default for field in fields(config)}
    return {name: value for name in names if (value := getattr(config, name)) != defaults[name]}


def job_of(config: Config, world_size: int) -> TrainingJob:
    """Return the training job for which the planner searches a layout.

    Raises: ValueError for settings that no layout supports.
    """
    Precision(config.dtype, config.master_weights, config.grad_dtype)
    if config.reproducible:
        raise ValueError("layout=auto chooses the micro-batch size, on which the bits of reproducible depend: omit one")
    tokens = tokens_of(config)
    batch = config.global_batch_size
    dp = config.dp or max(1, world_size // (config.pp * config.sp * config.tp))
    check_batch(config, dp)
    if batch is None:
        windows = TokenWindows(split(tokens, config.val_fraction, config.block_size)[0], config.block_size, config.seed)
        batch = dp * config.micro_batch_size * num_micro_batches(config, dp, len(windows))
    return TrainingJob.of(config, tokens.vocab_size, batch)
