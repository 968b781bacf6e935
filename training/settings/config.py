"""Configuration of a training run: its settings, filled and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from collectives.algorithms.groups import Topology
from collectives.job.settings import check
from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.data.sampler import DistributedSampler
from parallelism.mesh import MeshShape, axes_of, mesh_shape
from parallelism.numerics.precision import Precision
from parallelism.pipeline.schedule.actions import Schedule
from parallelism.planner import presets
from parallelism.planner.uses import check_uses
from parallelism.tensor.sharding_plan import strategies
from training.data.packing import Windows, training_windows, validation_windows
from training.data.tokenizer import BYTE_VOCABULARY, BYTES, TOKEN_IDS, saved_name
from training.data.tokens import Tokens
from training.lora.adapters import Factors
from training.lora.peft import adapter_factors, fill_from_adapter
from training.parallel.compiling import check_compiler
from training.parallel.decoder import plan_of
from training.settings import checks, paths
from training.settings.derived import make_model, tokens_of
from training.settings.fields import RunSettings
from training.weights.hf import initialize, load_config


class Inputs(NamedTuple):
    """Inputs of a run, the same on every rank."""

    tokens: Tokens
    windows: Windows  # to train on
    val_windows: Windows
    val_parts: dict[str, Windows]  # of several files, by path
    num_micro_batches: list[int]  # by dp rank
    batch_size: int  # over all ranks
    schedule: Schedule
    precision: Precision
    model: Decoder  # before it is divided
    factors: dict[str, Factors] | None  # of the adapters of lora_from


@dataclass
class Config(RunSettings):
    """A run's settings, as flags, in a TOML file, or in Python; those that are None follow from others.

    Raises: ValueError for invalid values.
    """

    def __post_init__(self):
        check(self, "init_from")
        shape, number = load_config(self.init_from) if self.init_from else None, self.num_micro_batches
        presets.fill(self, None if shape is None else presets.weights_preset(vars(shape)))
        self.num_micro_batches = number  # follows from the batch, which may follow from the number of ranks
        if shape is not None:
            presets.set_missing(self, {"vocab_size": shape.vocab_size})
        presets.set_missing(self, {"tokenizer": BYTES if shape is None else weights_tokenizer(self.init_from, shape)})
        check(self)
        presets.refuse_other_family(self)
        fill_from_adapter(self)

    def checked(self, topology: Topology, rank: int = 0) -> Inputs:
        """Check the settings against each other, the ranks, and the data; return the inputs of a run.

        Nothing is communicated or printed.  Rank 0 also checks what is installed, and that the profile can be written.

        Raises: ValueError with the value and the remedy.
        """
        check_uses(self, checks.USES)
        checks.check_weights(self)
        checks.check_rates(self)
        checks.check_corruption(self)
        paths.check_logs(self, rank)
        paths.check_profile(self, rank)
        precision = Precision(self.dtype, self.master_weights, self.grad_dtype)
        mesh, head_ranks = self.check_layout(topology)
        lengths = mesh.lengths

        tokens = tokens_of(self)
        checks.check_vocabulary(self, tokens)
        checks.check_memory(self, tokens.vocab_size, topology)
        windows, val_windows = training_windows(tokens, self.val_fraction, self.block_size, self.seed)
        val_parts = validation_windows(tokens, self.block_size)
        numbers = checks.micro_batches_by_rank(self, lengths["dp"], len(windows))
        checks.check_balance_load(self, numbers)
        batch_size = self.micro_batch_size * sum(numbers)
        DistributedSampler(len(windows), batch_size, rank=0, size=1)  # raises for an epoch without steps
        schedule = checks.make_schedule(self, numbers[mesh.coords(rank)["dp"]])

        model = make_model(self, tokens.vocab_size)
        if self.init_from:
            initialize(model, self.init_from)
        factors = adapter_factors(model, self)
        sizes = {**lengths, "heads": head_ranks, "tiles": self.tiles or 0}
        strategies(model, plan_of(model.config), sizes)  # raises if not divisible
        check_compiler(self)  # last, as its import takes long
        return Inputs(tokens, windows, val_windows, val_parts, numbers, batch_size, schedule, precision, model, factors)

    def check_layout(self, topology: Topology) -> tuple[MeshShape, int]:
        """Check the layout against the ranks; return their mesh, and the number of sp ranks that exchange heads.

        Raises: ValueError with the value and the remedy.
        """
        num_ranks = len(topology.node_of)
        checks.check_mixture(self, num_ranks)
        mesh = mesh_shape(num_ranks, **axes_of(self))
        head_ranks = checks.check_sequences(self, mesh.lengths)
        checks.check_zero_group(self, mesh, topology)
        checks.check_reproducible(self, mesh.lengths)
        return mesh, head_ranks


def weights_tokenizer(folder: str, shape: ModelConfig) -> str | None:
    """Return the tokenizer in a folder of weights, or bytes if these can be the model's tokens, or None."""
    name = saved_name(Path(folder))
    if name in (None, TOKEN_IDS):
        return BYTES if shape.vocab_size == BYTE_VOCABULARY else None
    return name
