"""Training goes on where ranks die: the others shrink their communicator, and resume.

They resume from the last step if they hold the whole state after it, else from the newest snapshot or checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import collectives
from collectives import InputError
from collectives.job import environment
from collectives.job.launch import dead_ranks, is_rank_failure
from parallelism.checkpoint import Checkpoints, TensorShard, hash_state
from training.parallel.device import prepare_process
from training.parallel.remains import Remains, are_whole
from training.parallel.saving import snapshots_beside
from training.settings.config import Config
from training.settings.derived import tokens_of
from training.settings.fields import AUTO, RunSettings
from training.settings.layout import global_batch, on_fewer_ranks, planned_for_most

T = TypeVar("T")
Train = Callable[[Config, "collectives.Communicator", Callable[[Remains], None]], T]


def train_on_survivors(train: Train[T], config: Config, comm: collectives.Communicator) -> T | None:
    """Return the result of `train(config, comm, leave)`; where ranks die, resume on those that are left.

    The global batch stays, and the micro-batch size unless it was planned.  Ranks that no layout has a use for wait,
    and return None.  The job must be one that goes on without ranks that die, and write checkpoints; else their death
    ends it.  Collective.

    Raises: InputError on every rank if no layout can go on.
    """
    survives = environment.survives_ranks() and bool(config.checkpoint_dir) and not config.eval_only
    size, left = comm.size, [Remains()]
    while True:
        try:
            if comm.size == size:
                return train(config, comm, left.append)
            fewer, trains = on_the_rest(config, comm, size)
            # Snapshots would be sent to ranks that wait, too, which do not load them.
            interval = fewer.snapshot_interval if trains == comm.size else 0
            save_remains(left[-1], replace(fewer, snapshot_interval=interval), comm)
            left = [Remains()]
            gc.collect()  # the run's memory, which its error has held
            members = comm if trains == comm.size else comm.split(0 if comm.rank < trains else None)
            result = train(fewer, members, left.append) if members else None
            comm.barrier()
            return result
        except (RuntimeError, ValueError) as error:  # ranks that see a death late may first refuse another's input
            deaths = dead_ranks(comm.mpi)
            if not survives or not (deaths or is_rank_failure(error)):
                raise
            failure = str(error)
        num_before, comm = comm.size, comm.shrink()
        if comm.size == num_before:
            raise collectives.CommunicationError(failure)  # of something else
        prepare_process(comm)
        print(f"{deaths or failure}: {comm.size} of {size} ranks continue", flush=True)


def save_remains(remains: Remains, config: RunSettings, comm: collectives.Communicator) -> None:
    """Save the state after the newest step of which these ranks hold all shards, if there is one.  Collective."""
    for step in sorted({*comm.all_gather_object(remains.step)} - {0}, reverse=True):
        own = remains if remains.step == step else Remains()
        of_ranks = comm.all_gather_object((own.whole, own.names, own.weights()))
        whole, names = next((whole, names) for whole, names, _ in of_ranks if whole)
        if are_whole(names, (weights for _, _, weights in of_ranks)):
            try:
                save(step, own.shards, whole, config, comm)
                print(f"step {step} is saved: the ranks left hold all of it", flush=True)
            except InputError as error:
                print(f"step {step} is not saved: {error}", flush=True)
            return


def save(
    step: int,
    shards: Sequence[TensorShard],
    whole: Mapping[str, Any],
    config: RunSettings,
    comm: collectives.Communicator,
) -> None:
    """Save a snapshot where the settings have these, else a checkpoint.  Collective.

    Raises: InputError on every rank for memory or a disk that is full, and, of checkpoints, replicas that differ.
    """
    if config.hash_interval:
        whole = {**whole, "hash": hash_state(shards, comm).hash}
    with ExitStack() as cleanup:
        saved = checkpoints = Checkpoints(config.checkpoint_dir, comm, config.checkpoints_kept)
        cleanup.callback(checkpoints.release)
        if config.snapshot_interval:
            saved = snapshots = snapshots_beside(checkpoints, config)
            cleanup.callback(snapshots.messages.Free)
            cleanup.callback(snapshots.release)
        saved.save(step, shards, whole)
        saved.wait()


def on_the_rest(config: Config, comm: collectives.Communicator, size: int) -> tuple[Config, int]:
    """Return the settings of a run that began on `size` ranks, for those left, and how many of them train.  Collective.

    The layout is planned if the run's was and the planner has one, else the nearest to the settings' own.

    Raises: InputError on every rank if no layout can go on.
    """
    with comm.agreed("layout"):
        batch = global_batch(config, tokens_of(config), size)
        same = replace(config, global_batch_size=batch, num_micro_batches=None, resume=AUTO)
    choice = planned_for_most(same, comm) if config.layout == "auto" else None
    if choice is None:
        with comm.agreed("layout"):
            choice = on_fewer_ranks(replace(same, layout="given"), comm.topology)
    fewer, trains = choice
    axes = ", ".join(f"{axis} {getattr(fewer, axis)}" for axis in ("pp", "sp", "tp", "ep") if getattr(fewer, axis) > 1)
    waiting = ", ".join(map(str, range(trains, comm.size)))
    idle = f"; without ranks {waiting}, which wait" if waiting else ""
    print(f"training on {trains} ranks, {axes or 'dp'}{idle}", flush=True)
    return fewer, trains
