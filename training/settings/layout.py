"""The layout of a run, where its settings leave it open: `--layout auto`, or after the death of ranks.

`--layout auto` is the layout that the planner predicts to be the fastest on the job's ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

import collectives
from collectives import InputError
from collectives.algorithms.groups import Topology
from parallelism.numerics.precision import Precision
from parallelism.pipeline.schedule import registry
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.layout import ZERO_GROUPS
from parallelism.planner.ranks import best_layout
from parallelism.planner.uses import check_uses
from training.data.packing import training_windows
from training.data.tokens import Tokens
from training.parallel.device import own_device
from training.settings.checks import (
    USES,
    check_balance_load,
    check_batch,
    make_schedule,
    micro_batches_by_rank,
    num_micro_batches,
)
from training.settings.config import Config
from training.settings.derived import tokens_of

AXES = "pp", "sp", "tp", "ep"  # the first three divide the ranks


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
    plan = best_layout(comm, job, fixed, config.device)
    if comm.rank == 0:
        print(f"layout {plan.layout} is the best for {comm.size} ranks", flush=True)
    balance = "measured" if plan.layers else config.balance  # with the speeds of the ranks
    return replace(config, layout="given", balance=balance, **plan.layout._asdict())


def planned_for_most(config: Config, comm: collectives.Communicator) -> tuple[Config, int] | None:
    """Return the settings with a layout planned for as many of the first ranks as have one, and the number of these.

    Other ranks get the settings as they are; all get None if no layout fits.  Collective.
    """
    plan = config = replace(config, dp=None)
    for size in range(comm.size, 0, -1):
        members, fits = comm.split(0 if comm.rank < size else None), True
        if members:
            try:
                plan = planned(config, members)
            except InputError:
                fits = False
            members.free()
        if comm.broadcast_object(fits):  # by rank 0, which is a member
            return plan, size
    return None


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
    return TrainingJob.of(config, tokens.vocab_size, global_batch(config, tokens, world_size))


def global_batch(config: Config, tokens: Tokens, world_size: int) -> int:
    """Return the number of samples in a step, if so many ranks train.

    Raises: ValueError for a batch that is not that of the micro-batches.
    """
    dp = config.dp or max(1, world_size // (config.pp * config.sp * config.tp))
    check_batch(config, dp)
    if config.global_batch_size is not None:
        return config.global_batch_size
    windows, _ = training_windows(tokens, config.val_fraction, config.block_size, config.seed)
    return dp * config.micro_batch_size * num_micro_batches(config, dp, len(windows))


def on_fewer_ranks(config: Config, topology: Topology) -> tuple[Config, int]:
    """Return the settings of a run that goes on without some of its ranks, and how many of those left train.

    As many train as can take whole micro-batches of `global_batch_size`, in the layout nearest to the settings' own:
    an axis is as long, or a divisor of its length.

    Raises: ValueError if none can.
    """
    nodes, refusal = topology.node_of, ValueError()
    axes = [divisors(getattr(config, axis)) for axis in AXES]
    for size in range(len(nodes), 0, -1):
        first = Topology.from_ids(nodes[:size])
        for lengths in sorted(product(*axes), key=lambda lengths: -math.prod(lengths)):
            if size % math.prod(lengths[:3]):
                continue
            for smaller in with_axes(config, dict(zip(AXES, lengths, strict=True))):
                try:
                    check_uses(smaller, USES)
                    mesh, _ = smaller.check_layout(first)
                    numbers = micro_batches_by_rank(smaller, mesh.lengths["dp"], sys.maxsize)
                    for number in {*numbers}:
                        make_schedule(smaller, number)
                except ValueError as error:
                    refusal = error
                else:
                    return smaller if can_balance_load(smaller, numbers) else replace(smaller, balance_load=False), size
    raise ValueError(f"no layout of {len(nodes)} ranks or fewer can go on: {refusal}")


def can_balance_load(config: Config, numbers: Sequence[int]) -> bool:
    """Return whether micro-batches may move between dp ranks that have these numbers of them."""
    try:
        check_balance_load(config, numbers)
    except ValueError:
        return False
    return True


def with_axes(config: Config, lengths: Mapping[str, Any]) -> Iterator[Config]:
    """Yield the settings with axes of these lengths, without what has no effect then; first with their own schedule."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(config)}
    own = replace(config, dp=None, **lengths)
    unused = {name for name, use in USES if use.other in AXES and not use.has_effect(lengths[use.other])}
    unused |= {"sequence_parallel"} if own.tp == 1 else set()
    own = replace(own, **{name: defaults[name] for name in unused})
    yield own
    yield replace(own, schedule=defaults["schedule"], virtual_stages=None, zero_group=defaults["zero_group"])


def divisors(length: int) -> list[int]:
    return [number for number in range(1, length + 1) if length % number == 0]
