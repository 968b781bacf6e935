"""Sharding plans: map modules of a plain model to strategies, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

import collectives
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.experts.exchange import ExpertExchange
from parallelism.experts.expert_parallel import shard_mixture
from parallelism.mesh import listed_divisors
from parallelism.numerics.dropout import BatchPosition, Dropout
from parallelism.placement import Axis, Shard
from parallelism.sequence.sequence_parallel import SequenceAttention, SequenceLoss, SequenceParallel
from parallelism.sequence.token_shards import check_heads
from parallelism.tensor import layers
from parallelism.tensor.tiles import LEAST_COLUMNS


class Axes(NamedTuple):
    """Axes over which a model is divided: tensor, sequence and expert parallelism; and dropout's batch position."""

    tp: Axis
    sp: SequenceParallel | None
    ep: ExpertExchange | None
    position: BatchPosition
    parts: dict[nn.Parameter, nn.Parameter]  # vocabulary shards, by the whole parameter, which several modules may use

    @property
    def whole(self) -> bool:
        """Whether no layer is split, nor computed as if it were."""
        return self.tp.ranks.size == 1 and not self.tp.tiles


Sizes = Mapping[str, int]  # numbers of ranks by axis; "heads" are the sp ranks that exchange heads


class Strategy:
    """How a module is divided over ranks."""

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        """Raise ValueError if these numbers of ranks cannot divide the module."""

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        """Return the replacement for the model's `number`-th module."""
        raise NotImplementedError


ShardingPlan = Mapping[str, Strategy]


@dataclass(frozen=True)
class ColumnParallel(Strategy):
    """Split a linear layer's outputs.

    Each rank holds rows of the weight, (out/tp, in), and maps (..., in) to (..., out/tp).  Of several pieces that are
    each split, such as q, k and v, `pieces` are the relative lengths, named by `settings`.
    """

    pieces: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        for setting, number in zip(self.settings, self.pieces, strict=False):
            check_divisible(f"{setting}={{}}", number, sizes["tp"])
        for number in (*self.pieces, module.out_features):
            check_divisible(f"{name}: out_features={{}}", number, sizes["tp"])
        for piece in self.pieces or (1,):
            check_tiles(f"{name}: out_features", module.out_features * piece // sum(self.pieces or (1,)), sizes)

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        return module if axes.whole else layers.ColumnLinear(module, axes.tp, self.pieces or (1,))


class RowParallel(Strategy):
    """Split a linear layer's inputs, as a column-parallel layer before it outputs them.

    Each rank holds columns of the weight, (out, in/tp), and maps (..., in/tp) to (..., out), the sum over the ranks.
    """

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        check_divisible(f"{name}: in_features={{}}", module.in_features, sizes["tp"])
        check_tiles(f"{name}: in_features", module.in_features, sizes)
        check_columns(f"{name}: in_features", module.in_features, sizes)

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        return module if axes.whole else layers.RowLinear(module, axes.tp)


@dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Split the experts of a `MixtureLayer` over ep, and the hidden width of each over tp.

    `columns` and `rows` name the layers of experts whose outputs, and whose inputs, are hidden.  Outputs of several
    pieces, such as gates and values, are of relative lengths `pieces`.
    """

    columns: tuple[str, ...] = ("c_fc",)
    rows: tuple[str, ...] = ("c_proj",)
    pieces: tuple[int, ...] = (1,)

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        for column in self.columns:
            hidden = module.get_submodule(column).weight.shape[-1] // len(self.pieces)
            check_divisible(f"{name}: hidden_width={{}}", hidden, sizes["tp"])

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        columns, rows = (map(module.get_submodule, names) for names in (self.columns, self.rows))
        shard_mixture(module, columns, rows, axes.ep, axes.tp, self.pieces)
        return module


@dataclass(frozen=True)
class Vocabulary(Strategy):
    """Split an embedding, or the head that may be tied to it, over its `vocab_size` tokens.

    Each rank holds rows of the weight, (vocab_size/tp, width), rounded up.  A head returns logits (..., vocab_size/tp).
    """

    vocab_size: int

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        if sizes["tp"] > self.vocab_size:
            raise ValueError(f"{name}: {self.vocab_size} tokens can't be split over tp={sizes['tp']}: use fewer ranks")
        check_tiles("vocab_size", self.vocab_size, sizes)
        check_columns("vocab_size", self.vocab_size, sizes)

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        if axes.whole:
            return module
        if module.weight not in axes.parts:
            axes.parts[module.weight] = axes.tp.local(module.weight, Shard(0, self.vocab_size, padded=True))
        weight = axes.parts[module.weight]
        if isinstance(module, nn.Embedding):
            return layers.VocabularyEmbedding(weight, axes.tp)
        return layers.VocabularyHead(weight, axes.tp, self.vocab_size)


@dataclass(frozen=True)
class Loss(Strategy):
    """Loss of logits split over `vocab_size` tokens, (batch, seq/sp, vocab_size/tp), and over each sequence's tokens.

    Every rank gets the mean over the tokens of all tp and sp ranks.
    """

    vocab_size: int

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        loss = module if axes.whole else layers.VocabularyCrossEntropy(module, axes.tp, self.vocab_size)
        return SequenceLoss(loss, axes.sp) if axes.sp else loss


@dataclass(frozen=True)
class Attention(Strategy):
    """Attention core, on q, k and v of a shard of the tokens.

    Shapes: q (batch, n_head/tp, seq/sp, head_size), k and v (batch, n_kv_head/tp, seq/sp, head_size).
    """

    n_head: int
    n_kv_head: int

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        try:
            check_heads(self.n_head // sizes["tp"], self.n_kv_head // sizes["tp"], sizes["heads"])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        heads = axes.sp.heads if axes.sp else None
        first = axes.tp.ranks.rank if heads is None else axes.tp.ranks.rank * heads.size + heads.rank
        dropout = Dropout(module.dropout, number, axes.position, first)
        window = getattr(module, "window", None)
        return SequenceAttention(axes.sp, dropout, module, window) if axes.sp or module.dropout else module


class HeadRegion(Strategy):
    """Norms of each head, between a column-parallel layer and attention; every rank holds its parameters.

    Shapes: (batch, n_head/tp, seq/sp, head_size).
    """

    def check(self, name: str, module: Any, sizes: Sizes) -> None:
        if sizes.get("tiles", 0):
            raise ValueError(
                f"{name}: tiles={sizes['tiles']} cut no sum over heads: omit tiles, and tp with reproducible"
            )

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        return module if axes.whole else layers.HeadNorm(module, axes.tp)


class SequenceRegion(Strategy):
    """Norms, dropout and position embeddings between split layers.

    In sequence-parallel mode they operate on (batch, seq/tp, width); every rank holds their parameters.
    """

    def apply(self, module: Any, axes: Axes, number: int) -> nn.Module:
        sequence, rank = axes.tp.sequence, axes.tp.ranks.rank
        if isinstance(module, nn.Dropout):
            return Dropout(module.p, number, axes.position, rank, sequence) if module.p else module
        if axes.whole or not (sequence or axes.tp.tiles):
            return module
        if isinstance(module, nn.Embedding):
            return layers.SequenceEmbedding(module, axes.tp) if sequence else module
        return layers.SequenceNorm(module, axes.tp)


def parallelize(
    model: nn.Module,
    plan: ShardingPlan,
    tp: collectives.Communicator,
    sp: SequenceParallel | None = None,
    sequence: bool = False,
    place: BatchPosition | None = None,
    ep: ExpertExchange | None = None,
    tiles: int = 0,
) -> TensorCollectives:
    """Divide a plain model, identical on all ranks, by a plan; return its collectives over `tp`.  Collective.

    `tp` replaces parameters by the rank's shards, described by their placements; `sequence` also splits activations
    between split layers.  With `sp`, the model's input is the rank's tokens and their positions.  With `ep`, mixtures
    keep the rank's experts.  Dropout masks depend on `place`.  With `tiles`, a power of two that divides the
    sequences, results have the same bits for each size of tp that divides it, also 1, but for mixtures.  Modules that
    have parameters and no strategy are replicated, and reported in a line.

    Raises: InputError on every rank if a pattern matches no module, or ranks cannot divide one.
    """
    with tp.agreed("parallelize"):
        strategy_of = strategies(model, plan, {"tp": tp.size, "heads": sp.heads.size if sp else 1, "tiles": tiles})
    ranks = TensorCollectives(tp)
    axes = Axes(Axis(ranks, sequence, tiles), sp, ep, place or BatchPosition(), parts={})
    modules, names = dict(model.named_modules()), tuple(f"{name}." for name in strategy_of)
    with_parameters = [name for name, module in modules.items() if list(module.parameters(recurse=False))]
    replicated = [name for name in with_parameters if not f"{name}.".startswith(names)]
    for number, (name, module) in enumerate(modules.items()):
        if name in strategy_of:
            parent, _, child = name.rpartition(".")
            replacement = strategy_of[name].apply(module, axes, number).train(module.training)
            setattr(model.get_submodule(parent), child, replacement)
    if replicated and tp.rank == 0:
        print(f"replicated on every rank, as the plan does not name them: {', '.join(replicated)}", flush=True)
    return ranks


def strategies(model: nn.Module, plan: ShardingPlan, sizes: Sizes) -> dict[str, Strategy]:
    """Return the strategy of each module that a plan matches.

    Raises: ValueError if a pattern matches no module, or these numbers of ranks cannot divide one.
    """
    strategy_of = {name: strategy for pattern, strategy in plan.items() for name in matching(model, pattern)}
    for name, strategy in strategy_of.items():
        strategy.check(name, model.get_submodule(name), sizes)
    return strategy_of


def matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that a pattern matches; `*` stands for any part of a name.

    Raises: ValueError with the available names if there is none.
    """
    names = [name for name, _ in model.named_modules() if name]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        raise ValueError(f"the plan names {pattern!r}, but the model has {', '.join(names)}")
    return matches


def check_tiles(what: str, number: int, sizes: Sizes) -> None:
    """Raise ValueError if the tiles cannot cut a number evenly."""
    tiles = sizes.get("tiles", 0)
    if tiles and number % tiles:
        raise ValueError(
            f"{what}={number} is not divisible by tiles={tiles}: use {-(-number // tiles) * tiles}, or fewer tiles"
        )


def check_columns(what: str, number: int, sizes: Sizes) -> None:
    """Raise ValueError if a rank's part of a number is too small for the kernels of larger ones."""
    if sizes.get("tiles", 0) and number < LEAST_COLUMNS * sizes["tp"]:
        raise ValueError(
            f"{what}={number} leaves each of tp={sizes['tp']} ranks fewer than the {LEAST_COLUMNS} columns that the "
            f"same bits need: use at least {LEAST_COLUMNS * sizes['tp']}, or fewer ranks"
        )


def check_divisible(what: str, number: int, size: int) -> None:
    """Check that ranks can divide a number evenly, such as "n_head={}" of it.

    Raises: ValueError with the numbers of ranks that divide it, and the nearest number that these ranks divide.
    """
    if number % size:
        able = listed_divisors(number)
        nearest = max(1, round(number / size)) * size
        other = what.format(nearest).rpartition(": ")[2]
        raise ValueError(f"{what.format(number)} is not divisible by tp={size}: use a tp of {able}, or {other}")
