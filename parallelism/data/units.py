"""ZeRO's units: parameters that are flattened together, the chunk of each that a rank owns, and the pieces in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import collectives
from collectives.schedule.moves import even_runs
from parallelism.buffers.arena import allocate
from parallelism.buffers.gradients import own_gradient, rounding_of
from parallelism.mesh import listed_divisors
from parallelism.numerics.master_weights import MasterWeights
from parallelism.placement import like, shard_of


class ShardGroups(NamedTuple):
    """Ranks over which gradients are averaged: `every` one.

    Each rank of `shard` owns different chunks; ranks of `replicate`, if there are any, own the same ones.  Non-expert
    parameters, if ep divides experts, have groups of their own, `undivided`, in which more ranks own the same chunks.
    """

    every: collectives.Communicator
    shard: collectives.Communicator
    replicate: collectives.Communicator | None = None
    undivided: ShardGroups | None = None

    @classmethod
    def of(
        cls, comm: collectives.Communicator, group: str | int = "all", whole: collectives.Communicator | None = None
    ) -> ShardGroups:
        """Shard over all ranks of `comm`, within each "node", or within groups of `group` consecutive ranks.

        `whole` consists of these ranks and those that differ from them in ep.  Collective.

        Raises: InputError if a group does not divide the ranks, or nodes differ in their numbers of ranks.
        """
        with comm.agreed("zero_group"):
            groups = groups_of(group, comm.size, comm.topology.nodes)
        shard: collectives.Communicator | None = comm
        replicate: collectives.Communicator | None = None
        if len(groups) > 1:
            mine = next(i for i, members in enumerate(groups) if comm.rank in members)
            shard, replicate = comm.split(mine), comm.split(groups[mine].index(comm.rank))
        assert shard is not None
        if whole is None or whole.size == comm.size:
            return cls(comm, shard, replicate)
        return cls(comm, shard, replicate, cls(whole, shard, whole.split(shard.rank)))

    def averaging(self, param: Tensor) -> ShardGroups:
        """Return the groups that average a parameter's gradients, by its placement."""
        return self if self.undivided is None or shard_of(param, "ep") else self.undivided

    def free(self) -> None:
        """Free the groups' communicators.  Collective."""
        if self.replicate:
            self.shard.free()
            self.replicate.free()
        if self.undivided and self.undivided.replicate:
            self.undivided.replicate.free()


def groups_of(group: str | int, size: int, nodes: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return the ranks of each group.

    >>> groups_of(2, 4, nodes=[(0, 1, 2, 3)])
    [[0, 1], [2, 3]]
    """
    if group == "all":
        return [list(range(size))]
    if group == "node":
        groups = [list(node) for node in nodes]
        if len({len(node) for node in groups}) > 1:
            lengths = ", ".join(str(len(node)) for node in groups)
            raise ValueError(f"zero_group node: nodes have {lengths} ranks: start as many on each, or use all")
        return groups
    if not isinstance(group, int) or group < 1 or size % group:
        able = listed_divisors(size)
        raise ValueError(f"zero_group {group} does not divide {size} ranks: use all, node, or one of {able}")
    return [list(part) for part in even_runs(size, size // group)]


class FlatParam(NamedTuple):
    """Parameters that are reduced or gathered together: the slice of each, and each rank's chunk, of whole lines."""

    slices: dict[str, slice]
    chunks: list[slice]

    @classmethod
    def of(cls, slices: Mapping[str, slice], line: int, size: int) -> FlatParam:
        """Make a unit of neighbours in an arena, sharded over `size` ranks.

        >>> FlatParam.of({"a": slice(16, 600)}, line=16, size=2).chunks
        [slice(16, 320, None), slice(320, 608, None)]
        """
        start = min(span.start for span in slices.values())
        num_lines = -(-(max(span.stop for span in slices.values()) - start) // line)
        cuts = [start + run.start * line for run in even_runs(num_lines, size)]
        return cls(dict(slices), [slice(*pair) for pair in pairwise([*cuts, start + num_lines * line])])

    @property
    def span(self) -> slice:
        return slice(self.chunks[0].start, self.chunks[-1].stop)

    @property
    def counts(self) -> list[int]:
        return [chunk.stop - chunk.start for chunk in self.chunks]

    def relative(self, span: slice) -> slice:
        """Return a slice of the arena relative to the unit's start."""
        return shifted(span.start, span.stop, self.span.start)

    def cut(self, rank: int) -> dict[str, tuple[slice, slice]]:
        """Return a rank's pieces by parameter: the slice of its flat elements, and the slice of the rank's chunk.

        >>> FlatParam.of({"a": slice(0, 20), "b": slice(32, 50)}, line=16, size=2).cut(1)
        {'b': (slice(0, 18, None), slice(0, 18, None))}
        """
        chunk, shards = self.chunks[rank], {}
        for name, span in self.slices.items():
            start, stop = max(span.start, chunk.start), min(span.stop, chunk.stop)
            if start < stop:
                shards[name] = shifted(start, stop, span.start), shifted(start, stop, chunk.start)
        return shards


def shifted(start: int, stop: int, origin: int) -> slice:
    return slice(start - origin, stop - origin)


class WorkingBuffer:
    """Memory for one bucket or layer at a time: `user` is the one whose values it holds, if any.  Collective."""

    def __init__(self, comm: collectives.Communicator, count: int, dtype: torch.dtype, device: str):
        self.tensor = allocate(comm, count, dtype, device)
        self.user: Any = None


def masters_of(
    units: Sequence[FlatParam],
    rank: int,
    params: Mapping[str, nn.Parameter],
    weights: Iterable[Tensor],
    gradients: Iterable[Tensor],
    originals: Mapping[str, Tensor],
) -> MasterWeights:
    """Return the master weights of a rank's chunks of units: views of the chunks' `weights` and `gradients`.

    `originals` are the whole parameters before they were rounded.
    """
    pieces, spans = {}, {}
    for unit, weight, gradient in zip(units, weights, gradients, strict=True):
        for name, (span, in_chunk) in unit.cut(rank).items():
            pieces[name], spans[name] = part(params[name], weight[in_chunk], gradient[in_chunk]), span
    return MasterWeights(pieces, originals, spans)


def part(whole: nn.Parameter, weight: Tensor, gradient: Tensor) -> nn.Parameter:
    """Return a parameter of some elements, with the dims and placement by which optimizers and norms treat the whole.

    >>> tuple(part(nn.Parameter(torch.zeros(4, 5)), torch.zeros(7), torch.zeros(7)).shape)
    (1, 7)
    """
    shape = whole.shape if len(weight) == whole.numel() else (1,) * (whole.dim() - 1) + (-1,)
    own = like(whole, weight.view(shape))
    if rounding := rounding_of(whole):
        own.rounding = rounding.piece(gradient.view(shape))  # type: ignore[attr-defined]
    else:
        own_gradient(own, gradient.view(shape))
    return own


def offsets(lengths: Iterable[int]) -> list[slice]:
    """Return consecutive slices of these lengths.

    >>> offsets([2, 3])
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(*pair) for pair in pairwise(accumulate(lengths, initial=0))]
