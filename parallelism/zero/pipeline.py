"""ZeRO, stages 2 and 3, in a pipeline: ranks share the gradients, and the parameters, of each layer of their stages.

A layer's gradients go to their owners in each micro-batch's backward pass, or in the part of it that is for weights.
There they add up.  With stage 3 its parameters come for each forward and each backward pass, unless they are there yet.
With Psi bytes of parameters and m micro-batches, a rank sends m Psi of gradients in a step, and of parameters Psi, or
with stage 3 up to 2 m Psi.  With stage 1 it sends 2 Psi in all.

All ranks that share follow the same schedule, so that they send the same in the same order.

Source: as of `parallelism.zero.gradients` and `parallelism.zero.parameters`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelism.buffers.arena import Arena, allocate, lay_out, line_length, one_dtype
from parallelism.data.exposed_time import ExposedTime
from parallelism.numerics.master_weights import MasterWeights
from parallelism.pipeline.gradients import Tied, TiedGradients
from parallelism.pipeline.schedule.actions import BACKWARD, FORWARD, WEIGHTS, Action
from parallelism.pipeline.stage import Layer
from parallelism.zero.gradients import GradientShard, ReduceBucket
from parallelism.zero.parameters import GatheredLayer, copy_out, make_slots, own_chunks, slot_of
from parallelism.zero.states import MakeOptimizer, gather_in_place, run
from parallelism.zero.units import FlatParam, ShardGroups, masters_of, offsets, pieces

if TYPE_CHECKING:
    from collectives import Communicator
    from models.optimizer import Optimizer

SHARED = -1  # instead of a layer's number, before all of these: of several layers, or of none


class LocalParameters(NamedTuple):
    """What a rank has of a model: its parameters, and the layers, by number, that use each; and those of its stages.

    `tied` are the names of parameters that other ranks of `pp` may have, too.
    """

    model: nn.Module
    users: Mapping[nn.Parameter, set[int]]
    parts: Mapping[int, range]
    tied: Tied
    pp: Communicator

    @classmethod
    def of(
        cls, model: nn.Module, layers: Sequence[Layer], parts: Mapping[int, range], tied: Tied, pp: Communicator
    ) -> LocalParameters:
        users: dict[nn.Parameter, set[int]] = {param: set() for param in model.parameters()}
        for number in chain(*parts.values()):
            for name in layers[number].modules:
                for param in model.get_submodule(name).parameters():
                    users[param].add(number)
        return cls(model, users, parts, tied, pp)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def home(self, param: nn.Parameter) -> int:
        """The layer that uses it alone, or SHARED."""
        return next(iter(self.users[param])) if len(self.users[param]) == 1 else SHARED

    def units(self, slices: Mapping[str, slice], line: int, size: int) -> list[FlatParam]:
        """Neighbours of one layer, without what is tied, of which each is alone; all trained, or all frozen."""
        params, alone = self.params, set(chain(*self.tied))

        def kind(name: str) -> tuple[int, bool, str]:
            return self.home(params[name]), params[name].requires_grad, name if name in alone else ""

        return [FlatParam.of({name: slices[name] for name in names}, line, size) for _, names in groupby(slices, kind)]

    def first(self, unit: FlatParam) -> nn.Parameter:
        """One of a unit's parameters, which are alike."""
        return self.model.get_parameter(next(iter(unit.slices)))


class ShardedLayers(ExposedTime):
    """What is the same in both stages: a rank's masters, and how their gradients come.

    Each action of the schedule is to be between `begin` and `end`; and a layer is to be computed by `layer`.  After
    a step's actions and `wait()` the pieces' gradients are the average over the ranks; then `tied.sum_up()` is due.
    """

    zero_stage: int
    masters: MasterWeights
    optimizer: Optimizer

    def __init__(self, own: LocalParameters, ranks: ShardGroups):
        self.own, self.ranks, self.params = own, ranks, own.params
        self._ending: list[int] = []  # layers whose gradients will be whole in this action, first to last
        self._buckets: dict[int, list[ReduceBucket]] = defaultdict(list)

    def share(
        self,
        units: Sequence[FlatParam],
        weights: Sequence[Tensor],
        originals: Mapping[str, Tensor],
        device: str,
        dtype: torch.dtype,
        reduction: Mapping[str, Any],
    ) -> None:
        """Have the gradients of units, in `dtype`, go to their owners; of each unit the rank has these weights.

        What whole parameters were before they were rounded is in `originals`.  Collective.
        """
        rank = self.ranks.shard.rank
        self.gradients = GradientShard(self.params, units, self.ranks, device, dtype, self.waiting, **reduction)
        for unit, bucket in zip(units, self.gradients.buckets, strict=True):
            self._buckets[self.own.home(self.own.first(unit))].append(bucket)
        places = offsets(unit.counts[rank] for unit in units)
        chunks = {name: place for unit, place in zip(units, places, strict=True) for name in unit.slices}
        self.tied = TiedGradients(self.own.tied, self.own.model, self.gradients.array, chunks, self.own.pp)
        parts = zip(units, weights, self.gradients.own, strict=True)
        self.masters = masters_of([pieces(unit, rank, self.params, *part) for unit, *part in parts], originals)

    def begin(self, action: Action, following: Action | None) -> None:
        """Before an action; another follows on this rank, or none."""
        self._ending = layers_of(action, self.own.parts) if action.kind in (BACKWARD, WEIGHTS) else []

    def end(self, action: Action) -> None:
        """After an action: what several layers of its stages share comes last."""
        self._reduce_behind(SHARED)
        if action.kind in (BACKWARD, WEIGHTS):
            for bucket in self._buckets[SHARED]:
                users = set().union(*(self.own.users[self.params[name]] for name in bucket.names))
                if users.intersection(self.own.parts[action.stage]):
                    bucket.start()

    def layer(self, number: int, compute: Callable[..., Tensor], x: Tensor | None, batch: Any) -> Tensor:
        """A layer's forward pass."""
        y = compute(x, batch)
        if y.requires_grad:
            y.register_hook(partial(self.before_backward, number))
        return y

    def before_backward(self, number: int, gradient: Tensor) -> None:
        """Layers behind this one have their gradients, unless these are put off."""
        self._reduce_behind(number)

    def appeared(self, weight: Tensor) -> None:
        """Of gradients that have been put off, those behind this one's layer come first."""
        number = self.own.home(weight)  # type: ignore[arg-type]
        if number != SHARED:
            self._reduce_behind(number)

    def _reduce_behind(self, number: int) -> None:
        """Send gradients of layers behind this one to their owners; those under way move on."""
        for bucket in self.gradients.buckets:
            if bucket.under_way:
                bucket.advance()
        while self._ending and self._ending[0] > number:
            for bucket in self._buckets[self._ending.pop(0)]:
                bucket.start()

    def wait(self) -> None:
        with self.waiting():
            for bucket in self.gradients.buckets:
                bucket.wait()
            run(self.gradients.across)

    def update(self) -> None:
        """Update this rank's pieces, and parameters with them.  Collective."""
        self.optimizer.step()
        self.gather()

    def gather(self) -> None:
        """Make parameters what their owners' pieces are.  Collective."""
        self.masters.give_parameters()

    def zero_grad(self) -> None:
        """Clear the pieces' gradients, in place."""
        self.gradients.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Where the model has all its parameters, to be read.  Collective."""
        yield


class ShardedLayerGradients(ShardedLayers):
    """Stage 2: each rank has all parameters of its stages, and gradients and the optimizer's states of its pieces.

    A layer's own gradients are there from its backward pass until the next layer's; where weights' parts are put off,
    those of norms and embeddings until then.  Collective.
    """

    zero_stage = 2

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        make: MakeOptimizer,
        device: str,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        super().__init__(own, ranks)
        arena, shard = Arena(own.model, ranks.every, device, gradients=False, dtype=dtype), ranks.shard
        arena.broadcast(ranks.every)
        grad_dtype = grad_dtype or one_dtype(self.params.values())
        trained = {name: place for name, place in arena.slices.items() if self.params[name].requires_grad}
        units = own.units(trained, arena.line, shard.size)[::-1]
        weights = [arena.flat_parameters[unit.chunks[shard.rank]] for unit in units]
        self.share(units, weights, arena.originals, device, grad_dtype, reduction)
        self.gathering = gather_in_place(arena, units, ranks)
        self.arrays = arena.parameters, self.gradients.array
        self.optimizer = make(list(self.masters.pieces.values()))

    def gather(self) -> None:
        super().gather()
        run(self.gathering)


class ShardedLayerParameters(ShardedLayers):
    """Stage 3: each rank has of parameters, gradients and the optimizer's states what belongs to its pieces.

    A layer's parameters stay until another's come to the same working memory, of which there is enough for two layers,
    by turns; while one computes, the next comes, be it that of the action which follows.  What layers share stays from
    its first use in a step to its end.  Else each parameter is a NaN of the same shape.  Collective.
    """

    zero_stage = 3

    def __init__(
        self,
        own: LocalParameters,
        ranks: ShardGroups,
        make: MakeOptimizer,
        device: str,
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        super().__init__(own, ranks)
        dtype = dtype or one_dtype(self.params.values())
        for param in self.params.values():
            ranks.every.broadcast(param.data, root=0)
        originals = {name: param.data for name, param in self.params.items()}
        homes = [SHARED, *sorted(chain(*own.parts.values()))]
        params = [{name: p for name, p in self.params.items() if own.home(p) == home} for home in homes]
        line, size = line_length(dtype), ranks.shard.size
        units = [own.units(lay_out(of_layer, line)[0], line, size) for of_layer in params]
        new = partial(allocate, ranks.every, dtype=dtype, device=device)
        array, parts = own_chunks(units, ranks.shard.rank, new)
        slots = make_slots(units, new)
        gathered = [GatheredLayer(parts[i], params[i], slots[slot_of(i)], ranks) for i in range(len(homes))]
        self.shared, self.layers = gathered[0], dict(zip(homes[1:], gathered[1:], strict=True))
        trained = [part for of_layer in parts[::-1] for part in of_layer if own.first(part.unit).requires_grad]
        units_trained, weights = [part.unit for part in trained], [part.weights for part in trained]
        self.share(units_trained, weights, originals, device, grad_dtype or dtype, reduction)
        self.arrays = array, self.gradients.array
        self.optimizer = make(list(self.masters.pieces.values()))
        self._path: list[int] = []  # the layers that are used in this action, and the next one then

    def begin(self, action: Action, following: Action | None) -> None:
        super().begin(action, following)
        coming = used(following, self.own.parts)[:1] if following else []
        self._path = used(action, self.own.parts) + coming
        if action.kind == WEIGHTS:
            self._fetch(coming)

    def end(self, action: Action) -> None:
        super().end(action)
        self._path = []

    def layer(self, number: int, compute: Callable[..., Tensor], x: Tensor | None, batch: Any) -> Tensor:
        self._open(number)
        return super().layer(number, compute, x, batch)

    def before_backward(self, number: int, gradient: Tensor) -> None:
        super().before_backward(number, gradient)
        self._open(number)

    def _open(self, number: int) -> None:
        """Give a layer its parameters, and let the next ones come; outside of actions shapes alone count."""
        if number not in self._path:
            return
        layer = self.layers[number]
        with self.waiting():
            self.shared.gather()
            layer.gather()
        coming = self._path[self._path.index(number) + 1 :][:1]
        self._fetch(other for other in coming if self.layers[other].slot is not layer.slot)

    def _fetch(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.layers[number].fetch()

    def gather(self) -> None:
        super().gather()
        self._forget()

    def _forget(self) -> None:
        """Let go what is gathered: the next step gathers anew."""
        for layer in (self.shared, *self.layers.values()):
            layer.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        copy_out([self.shared, *self.layers.values()])
        try:
            yield
        finally:
            self._forget()


def layers_of(action: Action, parts: Mapping[int, range]) -> list[int]:
    """Those of an action's stage, in the order of a forward or a backward pass.

    >>> layers_of(Action(1, BACKWARD, 0), {1: range(4, 7)})
    [6, 5, 4]
    """
    part = parts[action.stage]
    return [*part] if action.kind == FORWARD else [*reversed(part)]


def used(action: Action, parts: Mapping[int, range]) -> list[int]:
    """The layers whose parameters an action needs: the part for the weights needs none."""
    return [] if action.kind == WEIGHTS else layers_of(action, parts)
