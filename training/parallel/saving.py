"""Checkpoints of a run, from which another one can resume in any layout."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

import collectives
from collectives import InputError
from collectives.job import environment
from models.decoder import Decoder
from models.mixture import routers
from parallelism.checkpoint import (
    CheckpointLoader,
    Checkpoints,
    Extent,
    Snapshots,
    StateHash,
    Stop,
    TensorShard,
    hash_state,
    make_states,
    state_parts,
)
from parallelism.checkpoint.folders import number_of, snapshot_folder
from parallelism.data.replica import Replica
from parallelism.numerics.exact import ExactSums
from parallelism.numerics.non_finite import LossScale
from parallelism.planner import presets
from parallelism.step.optimizer import Optimizer
from training.parallel.remains import Remains
from training.settings.fields import AUTO, RunSettings

MODEL = (*presets.SHAPE, "block_size", "num_experts")  # settings that must agree with a checkpoint
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096  # of a file, by which weights are told apart
ADAPTERS = ("lora_rank", "lora_alpha")  # likewise, of a run that has adapters


class Shards:
    """A rank's shards of the weights, as checkpoints hold them: `parts` has their extents, by parameter name."""

    def __init__(self, model: Decoder, replica: Replica, parts: Mapping[str, TensorShard]):
        self.model, self.replica = model, replica
        self.parts = {name: part._replace(tensor=torch.empty(0)) for name, part in parts.items()}

    def weights(self) -> Iterator[tuple[TensorShard, torch.Tensor]]:
        """Yield the shards of the master weights, each with the parameter that the optimizer updates."""
        masters = self.replica.masters
        for name, piece in masters.pieces.items():
            yield self.parts[name].within(masters.spans[name], piece.detach()), piece

    def state(self, optimizer: Optimizer) -> Iterator[TensorShard]:
        """Yield this rank's shards of the master weights and of the optimizer's states."""
        for part, piece in self.weights():
            yield part
            yield from state_parts(part, optimizer.state[piece])
        yield from self.router_biases()

    def router_biases(self) -> Iterator[TensorShard]:
        for name, router in routers(self.model):
            extent = Extent(tuple(router.bias.shape), 0, len(router.bias))
            yield TensorShard(f"{name}.bias", "parameter", extent, router.bias)


class StateHashes:
    """Hashes a run's weights and optimizer states, `state()`; `step` is the latest step that was hashed.

    `names` are the tensors of the whole model, in order.
    """

    def __init__(
        self, comm: collectives.Communicator, state: Callable[[], Iterator[TensorShard]], names: Sequence[str]
    ):
        self.comm, self.state, self.order = comm, state, {name: index for index, name in enumerate(names)}
        self.step, self.latest = -1, StateHash("", {})

    def after(self, step: int) -> StateHash:
        """Return the hash after a step, with the tensors in the model's order.  Collective.

        Raises: InputError for a tensor that differs between the ranks that hold it.
        """
        if step != self.step:
            try:
                state = hash_state(self.state(), self.comm)
            except InputError as error:
                raise InputError(f"step {step}: {error}") from None
            tensors = sorted(state.tensors.items(), key=lambda item: self.order[item[0]])
            self.step, self.latest = step, state._replace(tensors=dict(tensors))
        return self.latest


class Saving:
    """Writes checkpoints of a run to the folder in its settings, and resumes from one.  Collective.

    `data` describes the data, which must agree; `conditions` need not, and `conditions_before` are the checkpoint's.
    With `hashes`, each checkpoint's index has the hash of its tensors.  `first` is the first step: 1, or the one after
    that of the checkpoint `source`, whose run wrote to `out_dir`.

    Raises: InputError for a folder that another run writes to, a checkpoint of another model or of other data, or a
    missing one.
    """

    snapshots: Snapshots | None = None

    def __init__(
        self,
        config: RunSettings,
        comm: collectives.Communicator,
        shards: Shards,
        optimizer: Optimizer,
        scale: LossScale,
        data: Mapping[str, Any],
        conditions: Mapping[str, Any],
        hashes: StateHashes | None = None,
        exact: ExactSums | None = None,
    ):
        self.exact = exact
        self.config, self.comm, self.shards, self.optimizer, self.scale = config, comm, shards, optimizer, scale
        self.conditions, self.hashes = conditions, hashes
        self.conditions_before: Mapping[str, Any] = {}
        self.interval = config.checkpoint_interval
        self.same = {**model_settings(config), "optimizer": config.optimizer, **data, "seed": config.seed}
        if exact:
            self.same |= self.computed()
        self.out_dir, self.source = "", config.init_from
        with ExitStack() as cleanup:
            self.stop = Stop(comm)
            cleanup.callback(self.stop.close)
            self.checkpoints = Checkpoints(config.checkpoint_dir, comm, config.checkpoints_kept)
            cleanup.callback(self.checkpoints.release)
            if config.snapshot_interval:
                self.snapshots = snapshots_beside(self.checkpoints, config)
                cleanup.callback(self.snapshots.release)
            self.first = 1 + (self.resume() if config.resume else 0)
            self.names = self.tensor_names() if environment.survives_ranks() else frozenset()
            self.taken = cleanup.pop_all()
        self.offer(self.first - 1)

    def tensor_names(self) -> frozenset[str]:
        """Return the names of the whole model's tensors.  Collective."""
        own = [part.name for part, _ in self.shards.weights()] + [part.name for part in self.shards.router_biases()]
        return frozenset(chain(*self.comm.all_gather_object(own)))

    def whole(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint's index has beside the shards.  Collective."""
        return self.metadata() | ({"hash": self.hashes.after(step).hash} if self.hashes else {})

    def metadata(self) -> dict[str, Any]:
        """Return what a checkpoint's index has beside the shards but for their hash, which is collective."""
        exponents = {"exponents": self.exact.state()} if self.exact else {}
        rest = {"loss_scale": [*self.scale.state()], "out_dir": self.out_dir, "conditions": self.conditions}
        return {**self.same, **self.computed(), **exponents, **rest}

    def computed(self) -> dict[str, Any]:
        """Return the settings of what is computed at once, on which the bits of a step depend."""
        return {name: getattr(self.config, name) for name in ("micro_batch_size", "sequence_parts", "tiles")}

    def resume(self) -> int:
        """Restore the run's state; return the step of the checkpoint, or 0 if there is none."""
        loader, path = self.newest() if self.config.resume == AUTO else (self.checkpoints, self.config.resume)
        if path is None:
            return 0
        make_states(self.optimizer)
        loaded = loader.load(self.shards.state(self.optimizer), path, self.same)
        with self.comm.agreed("resume"):
            self.scale.load(*loss_scale(path, loaded.whole))
            if self.exact and "exponents" in loaded.whole:
                try:
                    self.exact.load(loaded.whole["exponents"])
                except ValueError as error:
                    raise ValueError(f"{path}: {error}: resume from another checkpoint") from None
        self.shards.replica.gather()
        self.source = str(path)
        self.out_dir = str(loaded.whole.get("out_dir", self.config.out_dir))
        self.conditions_before = loaded.whole.get("conditions", {})
        return loaded.step

    def newest(self) -> tuple[Checkpoints, Path | None]:
        """Return the newest snapshot or checkpoint, None if there is none, and what loads it.  Collective."""
        snapshot = self.snapshots.newest() if self.snapshots else None
        checkpoint = self.checkpoints.newest(after=number_of(snapshot) if snapshot else 0)
        return (self.snapshots, snapshot) if self.snapshots and not checkpoint else (self.checkpoints, checkpoint)

    def after(self, step: int, before: Callable[[], None]) -> str:
        """Save a checkpoint if one is due; return the name of a received signal to stop the run, if any.

        `before` is called before saving.  Collective.
        """
        signal = self.stop.received()
        self.checkpoints.poll()
        self.snap(step, before)
        if signal or step == self.config.max_iters or (self.interval and step % self.interval == 0):
            before()
            self.checkpoints.save(step, self.shards.state(self.optimizer), self.whole(step))
        return signal

    def offer(self, step: int) -> None:
        """Offer the state after a step, which has been reported, in case that others die."""
        self.offered, self.exponents = step, self.exact.exponents if self.exact else None

    def remains(self) -> Remains:
        """Return what this rank holds of the state that it has offered, once others have died."""
        if not self.offered:
            return Remains()
        if self.exact and self.exponents is not None:  # those of the next step may have been chosen
            self.exact.exponents = self.exponents
        return Remains(self.offered, [*self.shards.state(self.optimizer)], self.metadata(), self.names)

    def snap(self, step: int, before: Callable[[], None]) -> None:
        """Save a snapshot if one is due.  Collective."""
        if self.snapshots is None:
            return
        if step == self.first:  # the optimizer has its states now
            self.snapshots.reserve(self.shards.state(self.optimizer))
        self.snapshots.poll()
        if step % self.config.snapshot_interval == 0 and step < self.config.max_iters:  # which is saved to disk
            before()
            self.snapshots.save(step, self.shards.state(self.optimizer), self.whole(step))

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint or a snapshot is being written."""
        return self.checkpoints.is_pending or bool(self.snapshots and self.snapshots.is_pending)

    def close(self) -> None:
        """Wait for the pending checkpoint; then remove snapshots, and release the folder and the signals."""
        with self.taken:
            self.checkpoints.wait()
            if self.snapshots:
                self.snapshots.close()
                self.snapshots = None


def snapshots_beside(checkpoints: Checkpoints, config: RunSettings) -> Snapshots:
    """Open the snapshots of a run with checkpoints, in one sequence of numbers; keep existing ones to resume from.

    Raises: InputError for a folder that is not there, or cannot be written.  Collective.
    """
    comm = checkpoints.comm
    with comm.agreed("snapshots"):
        if not Path(config.snapshot_dir).is_dir():
            why = f"snapshot_dir={config.snapshot_dir} is not a folder on {platform.node()}"
            raise ValueError(f"{why}: pass one in memory, or omit snapshot_interval")
    folder = comm.broadcast_object(snapshot_folder(Path(config.snapshot_dir), checkpoints.directory))
    snapshots = Snapshots(folder, comm)
    if config.resume != AUTO:
        snapshots.clear()
    snapshots.numbers = checkpoints.numbers = count(max(next(snapshots.numbers), next(checkpoints.numbers)))
    return snapshots


def load_weights(config: RunSettings, comm: collectives.Communicator, shards: Shards) -> tuple[str, int]:
    """Load only the weights from the checkpoint to resume from; return it and its step.  Collective.

    Raises: InputError for a checkpoint of another model, or a missing one.
    """
    loader = CheckpointLoader(config.checkpoint_dir, comm)
    path = loader.newest() if config.resume == AUTO else config.resume
    if path is None:
        raise InputError(
            f"resume={AUTO}: {config.checkpoint_dir} has no complete checkpoint; name one, or another folder"
        )
    weights = [shard for shard, _ in shards.weights()]
    loaded = loader.load([*weights, *shards.router_biases()], path, model_settings(config))
    shards.replica.gather()
    return str(path), loaded.step


def model_settings(config: RunSettings) -> dict[str, Any]:
    family = {"model": config.model.partition("-")[0]}
    adapters = {name: getattr(config, name) for name in ADAPTERS} if config.lora_rank else {}
    if adapters:
        adapters["init_from's weights"] = weights_digest(config.init_from)
    return family | {name: getattr(config, name) for name in MODEL} | adapters


@cache
def weights_digest(directory: str) -> str:
    """Return a hash of samples of a folder's weights, by which those of another model are told apart."""
    digest = blake2b(digest_size=8)
    for path in sorted(path for path in Path(directory).iterdir() if path.suffix in (".safetensors", ".bin")):
        length = path.stat().st_size
        with path.open("rb") as file:
            for offset in range(0, length, max(1, length // NUM_SAMPLES)):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def loss_scale(path: Any, whole: Mapping[str, Any]) -> tuple[float, int]:
    """Return a checkpoint's loss scale; raise ValueError if it is invalid."""
    match whole.get("loss_scale"):
        case [float(value), int(good_steps)] if 0 < value < math.inf:
            return value, good_steps
    raise ValueError(f"{path}: loss_scale={whole.get('loss_scale')!r} is none: resume from another checkpoint")
