"""Checkpoints of a run, from which another one can resume in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from collectives import InputError
from models.mixture import routers
from models.model import Model
from parallelism.checkpoint import (
    CheckpointLoader,
    Checkpoints,
    Extent,
    Stop,
    TensorShard,
    fingerprint,
    make_states,
    state_parts,
)
from parallelism.numerics.master_weights import MasterWeights
from parallelism.planner import presets
from training.config import AUTO, Config

if TYPE_CHECKING:
    from training.run import TrainingRun

MODEL = (*presets.SHAPE, "block_size", "num_experts")  # settings that must agree with a checkpoint


class Saving:
    """Writes checkpoints of a run to the folder in its settings, and resumes from one.  Collective.

    `first` is the first step: 1, or the one after that of the checkpoint `source`, whose run wrote to `out_dir`.

    Raises: InputError for a folder that another run writes to, a checkpoint of another model or of other data, or a
    missing one.
    """

    def __init__(self, run: TrainingRun, parts: dict[str, TensorShard]):
        self.run = run
        self.parts = {name: part._replace(tensor=torch.empty(0)) for name, part in parts.items()}  # their extents
        comm, config = run.mesh.comm, run.config
        self.interval = config.checkpoint_interval
        self.same = {**model_settings(config), "optimizer": config.optimizer}
        self.same |= {"data": fingerprint(run.tokens.ids), "batch_size": run.sampler.batch_size, "seed": config.seed}
        self.out_dir, self.source = "", config.init_from
        with ExitStack() as cleanup:
            self.stop = Stop(comm)
            cleanup.callback(self.stop.close)
            self.checkpoints = Checkpoints(config.checkpoint_dir, comm, config.checkpoints_kept)
            cleanup.callback(self.checkpoints.release)
            self.first = 1 + (self.resume() if config.resume else 0)
            self.taken = cleanup.pop_all()

    def state(self) -> Iterator[TensorShard]:
        """Yield this rank's shards of the master weights and of the optimizer's states."""
        pieces = self.run.masters.pieces
        for name, part in own_weights(self.run.masters, self.parts).items():
            yield part
            yield from state_parts(part, self.run.optimizer.state[pieces[name]])
        yield from router_biases(self.run.gpt)

    def whole(self) -> dict[str, Any]:
        return {**self.same, "loss_scale": [*self.run.scale.state()], "out_dir": self.run.out_dir or ""}

    def resume(self) -> int:
        """Restore the run's state; return the step of the checkpoint, or 0 if there is none."""
        setting = self.run.config.resume
        path = self.checkpoints.newest() if setting == AUTO else setting
        if path is None:
            return 0
        make_states(self.run.optimizer)
        loaded = self.checkpoints.load(self.state(), path, self.same)
        with self.run.mesh.comm.agreed("resume"):
            self.run.scale.load(*loss_scale(path, loaded.whole))
        self.run.replica.gather()
        self.source = str(path)
        self.out_dir = str(loaded.whole.get("out_dir", self.run.config.out_dir))
        return loaded.step

    def after(self, step: int, before: Callable[[], None]) -> str:
        """Save a checkpoint if one is due; return the name of a received signal to stop the run, if any.

        `before` is called before saving.  Collective.
        """
        signal = self.stop.received()
        self.checkpoints.poll()
        if signal or step == self.run.config.max_iters or (self.interval and step % self.interval == 0):
            before()
            self.checkpoints.save(step, self.state(), self.whole())
        return signal

    def close(self) -> None:
        """Wait for the pending checkpoint; then release the folder and the signals."""
        with self.taken:
            self.checkpoints.wait()


def load_weights(run: TrainingRun, parts: Mapping[str, TensorShard]) -> tuple[str, int]:
    """Load only the weights from the checkpoint to resume from; return it and its step.  Collective.

    Raises: InputError for a checkpoint of another model, or a missing one.
    """
    config = run.config
    loader = CheckpointLoader(config.checkpoint_dir, run.mesh.comm)
    path = loader.newest() if config.resume == AUTO else config.resume
    if path is None:
        raise InputError(
            f"resume={AUTO}: {config.checkpoint_dir} has no complete checkpoint; name one, or another folder"
        )
    loaded = loader.load(
        [*own_weights(run.masters, parts).values(), *router_biases(run.gpt)], path, model_settings(config)
    )
    run.replica.gather()
    return str(path), loaded.step


def model_settings(config: Config) -> dict[str, Any]:
    family = {"model": config.model.partition("-")[0]}
    return family | {name: getattr(config, name) for name in MODEL}


def own_weights(masters: MasterWeights, parts: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    """Return this rank's shards of the master weights, by parameter name."""
    return {name: parts[name].within(masters.spans[name], piece.detach()) for name, piece in masters.pieces.items()}


def router_biases(gpt: Model) -> Iterator[TensorShard]:
    for name, router in routers(gpt):
        extent = Extent(tuple(router.bias.shape), 0, len(router.bias))
        yield TensorShard(f"{name}.bias", "parameter", extent, router.bias)


def loss_scale(path: Any, whole: Mapping[str, Any]) -> tuple[float, int]:
    """Return a checkpoint's loss scale; raise ValueError if it is invalid."""
    match whole.get("loss_scale"):
        case [float(value), int(good_steps)] if 0 < value < math.inf:
            return value, good_steps
    raise ValueError(f"{path}: loss_scale={whole.get('loss_scale')!r} is none: resume from another checkpoint")
