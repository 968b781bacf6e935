"""Which linear layers of a model have adapters, by our names of modules or Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.tensor.sharding_plan import ColumnParallel, RowParallel, matching
from training.parallel.decoder import plan_of
from training.weights.families import FamilyTable
from training.weights.tables import table_of

BLOCKS = "transformer.h."


class Target(NamedTuple):
    """A linear layer of Hugging Face's model, `path` there, which is all of the outputs of our `layer`, or some.

    `lengths` are the relative numbers of outputs that are stacked in our layer, of which these are the `number`-th.
    """

    layer: str
    path: str
    lengths: tuple[int, ...]
    number: int

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def suffix(self) -> str:
        """The path within a block, which tells an attention's projection from an MLP's."""
        return ".".join(self.path.split(".")[-2:])

    def is_called(self, word: str) -> bool:
        return any(f".{path}".endswith(f".{word}") for path in (self.layer, self.path))


def all_targets(model: Decoder) -> list[Target]:
    """Return the linear layers of the model's blocks, in order; those of experts are none."""
    lengths: dict[str, tuple[int, ...]] = {}
    targets: list[Target] = []
    for pattern, strategy in plan_of(model.config).items():
        if pattern.startswith(BLOCKS) and isinstance(strategy, ColumnParallel | RowParallel):
            pieces = strategy.pieces if isinstance(strategy, ColumnParallel) else ()
            lengths |= dict.fromkeys(matching(model, pattern), pieces)
    for layer in (name for name, _ in model.named_modules() if name in lengths):
        paths = paths_of(model.config, layer)
        stacked = lengths[layer] if len(paths) > 1 else (1,)
        targets += [Target(layer, path, stacked, number) for number, path in enumerate(paths)]
    return targets


def paths_of(config: ModelConfig, layer: str) -> Sequence[str]:
    """Return Hugging Face's names of the layers that are stacked in one of ours."""
    table = table_of(config)
    if not isinstance(table, FamilyTable):
        return [layer]
    return [name.removesuffix(".weight") for name in table.names(f"{layer}.weight")]


def targets_of(model: Decoder, words: Iterable[str]) -> list[Target]:
    """Return the layers with one of these names, or all of the blocks' if there are no words.

    Raises: ValueError with the names there are for a word that is none.
    """
    every, words = all_targets(model), [*words]
    for word in words:
        if not any(target.is_called(word) for target in every):
            names = sorted({target.layer.rpartition(".")[2] for target in every} | {target.name for target in every})
            raise ValueError(f"lora_targets={word} is not a linear layer of the blocks: use {', '.join(names)}")
    return [target for target in every if not words or any(target.is_called(word) for word in words)]
