"""Plans: which modules of a plain model get which treatment, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from torch import nn

from parallelism.exchange import Exchange
from parallelism.shard import Shard
from parallelism.tensor_parallel import (
    Axis,
    ColumnLinear,
    RowLinear,
    SequenceEmbedding,
    SequenceNorm,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    VocabularyHead,
)

if TYPE_CHECKING:
    from collectives import Communicator


class Treatment(Protocol):
    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Raise ValueError where `size` ranks cannot share the module."""

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """The module that takes its place."""


Plan = Mapping[str, Treatment]


@dataclass(frozen=True)
class Column:
    """Outputs split.  Of several pieces, such as q, k and v, `shares` are the relative lengths: numbers of heads."""

    shares: tuple[int, ...] = ()
    gather_output: bool = False

    def check(self, name: str, module: nn.Linear, size: int) -> None:
        for number in self.shares:
            check_shares(name, "heads", number, size)
        check_shares(name, "outputs", module.out_features, size)

    def apply(self, module: nn.Linear, axis: Axis) -> nn.Module:
        return ColumnLinear(module, axis, self.shares or (1,), self.gather_output)


@dataclass(frozen=True)
class Row:
    """Inputs split, as a column-split layer before it leaves them."""

    def check(self, name: str, module: nn.Linear, size: int) -> None:
        check_shares(name, "inputs", module.in_features, size)

    def apply(self, module: nn.Linear, axis: Axis) -> nn.Module:
        return RowLinear(module, axis)


@dataclass(frozen=True)
class Vocabulary:
    """An embedding, the head that may be tied to it, or the loss after that, split along `vocab_size` tokens."""

    vocab_size: int

    def check(self, name: str, module: nn.Module, size: int) -> None:
        if size > self.vocab_size:
            raise ValueError(f"{name}: {self.vocab_size} tokens can't be split over {size} ranks: use tp of fewer")

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        if not isinstance(module, nn.Embedding | nn.Linear):
            return VocabularyCrossEntropy(module, axis, self.vocab_size)
        weight = axis.part(module.weight, Shard(0, self.vocab_size, padded=True))
        if isinstance(module, nn.Embedding):
            return VocabularyEmbedding(weight, axis)
        return VocabularyHead(weight, axis, self.vocab_size)


@dataclass(frozen=True)
class Between:
    """A norm, or an embedding of positions, between split layers: on 1/tp of the sequence in sequence-parallel mode."""

    def check(self, name: str, module: nn.Module, size: int) -> None:
        pass

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        if not axis.sequence:
            return module
        return SequenceNorm(module, axis) if isinstance(module, nn.LayerNorm) else SequenceEmbedding(module, axis)


def tensor_parallel(model: nn.Module, comm: Communicator, plan: Plan, sequence: bool = False) -> list[str]:
    """Split a plain model, the same on all ranks of `comm`, as a plan says.  Collective.

    Parameters become the rank's parts, whose `shard` says of what.  Returns the names of modules that have parameters
    and no treatment: every rank has the whole of them.

    Raises: InputError on every rank where a pattern names no module, or ranks cannot share one.
    """
    with comm.agreed("tensor_parallel"):
        treated = {name: treatment for pattern, treatment in plan.items() for name in matching(model, pattern)}
        for name, treatment in treated.items():
            treatment.check(name, model.get_submodule(name), comm.size)
    axis = Axis(Exchange(comm), sequence)
    untreated = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    for name, treatment in treated.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, treatment.apply(model.get_submodule(name), axis))
    return [name for name in untreated if name not in treated]


def matching(model: nn.Module, pattern: str) -> list[str]:
    """The names of the modules that a pattern means, `*` standing for any part of a name.

    Raises: ValueError where there is none, with the names there are.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"the plan names {pattern!r}, but the model has {', '.join(names)}")
    return found


def check_shares(name: str, what: str, number: int, size: int) -> None:
    """Refuse what ranks cannot share evenly.

    Raises: ValueError with the numbers of ranks that can, and the nearest number of things.
    """
    if number % size:
        able = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
        nearest = max(1, round(number / size)) * size
        raise ValueError(
            f"{name}: {number} {what} can't be split over tp={size}: use a tp of {able}, or {nearest} {what}"
        )


def gpt2_plan(vocab_size: int, n_head: int, n_kv_head: int | None = None) -> dict[str, Treatment]:
    """A GPT-2, its modules named as Hugging Face names them: one sum over the ranks for attention, and one for the MLP."""
    kv, vocabulary, between = n_kv_head or n_head, Vocabulary(vocab_size), Between()
    return {
        "transformer.wte": vocabulary,
        "transformer.wpe": between,
        "transformer.h.*.ln_*": between,
        "transformer.h.*.attn.c_attn": Column(shares=(n_head, kv, kv)),
        "transformer.h.*.attn.c_proj": Row(),
        "transformer.h.*.mlp.c_fc": Column(),
        "transformer.h.*.mlp.c_proj": Row(),
        "transformer.ln_f": between,
        "lm_head": vocabulary,
        "loss": vocabulary,
    }
