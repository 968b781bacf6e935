"""ZeRO stage 3: shard parameters, too, and gather each layer's when it is used.

With Psi bytes of parameters and m micro-batches, a rank sends up to 2 m Psi of parameters in a step, in addition to m
Psi of gradients; with stage 1 or 2, it sends Psi of parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.3 and 7.2.2; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", 2023, arXiv 2304.11277, section 3 (units, prefetching).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

import collectives
from parallelism.buffers.arena import allocate, lay_out, line_length, one_dtype
from parallelism.pipeline.events import SHARED
from parallelism.pipeline.schedule.actions import FORWARD, WEIGHTS, Action
from parallelism.zero.gradients import ReducedGradients
from parallelism.zero.units import FlatParam, ShardGroups, masters_of, offsets

Params = Mapping[str, nn.Parameter]
New = Callable[[int], tuple[Any, Tensor]]  # a flat array, and torch's view of it


class ShardedParameters(ReducedGradients):
    """Stage 3: parameters, gradients and optimizer states are sharded.

    Layers are gathered alternately in two buffers: while one computes, the next is gathered, also that of the following
    action.  A layer's parameters stay gathered until another needs their buffer.  Parameters of several layers, or of
    none, stay gathered from their first use in a step to its end.  Otherwise a parameter is a NaN of the same shape.
    """

    zero_stage = 3

    def build(self) -> None:
        own, ranks = self.own, self.ranks
        dtype = self.dtype or one_dtype(self.params.values())
        for param in self.params.values():
            ranks.every.broadcast(param.data, root=0)
        originals = {name: param.data for name, param in self.params.items()}
        homes = [SHARED, *sorted(chain(*own.stages.values()))]
        params = [{name: p for name, p in self.params.items() if own.home(p) == home} for home in homes]
        new = partial(allocate, ranks.every, dtype=dtype, device=self.device)
        units = [self._units(of_layer, line_length(dtype)) for of_layer in params]
        array, parts = own_chunks(units, ranks.shard.rank, new)
        slots = make_slots(units, new)
        gathered = [GatheredLayer(parts[i], params[i], slots[slot_of(i)], ranks) for i in range(len(homes))]
        self.layers = dict(zip(homes, gathered, strict=True))
        trained = [part for of_layer in parts[::-1] for part in of_layer if own.trained(part.unit.slices)]
        of_trained, weights = [part.unit for part in trained], [part.weights for part in trained]
        self.reduce_units(of_trained, self.grad_dtype or dtype)
        self.masters = masters_of(of_trained, ranks.shard.rank, self.params, weights, self.gradients.own, originals)
        self.arrays = array, self.gradients.array
        self._path: list[int] = []  # the layers that this action uses, and the next one after it

    def _units(self, params: Mapping[str, nn.Parameter], line: int) -> list[FlatParam]:
        """Return the units of a layer's buffer, in which trained and frozen parameters are separate."""
        slices, _ = lay_out(params, line)
        parts = self.own.runs(slices, lambda name: self.ranks.averaging(params[name]))
        return [FlatParam.of(part, line, self.ranks.shard.size) for part in parts]

    def before(self, action: Action, following: Action | None) -> None:
        super().before(action, following)
        coming = self._used(following)[:1] if following else []
        self._path = self._used(action) + coming
        if action.kind == WEIGHTS:
            self._fetch(coming)
        else:
            self._open(SHARED)

    def _used(self, action: Action) -> list[int]:
        """Return the layers whose parameters an action needs, in order; a WEIGHTS action needs none."""
        part = self.own.stages[action.stage]
        return [] if action.kind == WEIGHTS else [*part] if action.kind == FORWARD else [*reversed(part)]

    def after(self, action: Action) -> None:
        super().after(action)
        self._path = []

    def parameters_needed(self, layer: int) -> None:
        """Gather a layer's parameters and prefetch the next; do nothing outside of actions, where shapes suffice."""
        if layer in self._path:
            self._open(layer)
            coming = self._path[self._path.index(layer) + 1 :][:1]
            self._fetch(other for other in coming if self.layers[other].slot is not self.layers[layer].slot)

    def _open(self, layer: int) -> None:
        with self.waiting():
            self.layers[layer].gather()

    def _fetch(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self.layers[layer].fetch()

    def step_done(self) -> None:
        super().step_done()
        self._forget()

    def gather(self) -> None:
        """Copy the pieces to this rank's shards, and drop gathered parameters, which are outdated.  Collective."""
        super().gather()
        self._forget()

    def _forget(self) -> None:
        """Release all gathered parameters."""
        for layer in self.layers.values():
            layer.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters in the module in this context, for reading, not for computing.  Collective."""
        for layer in self.layers.values():
            layer.gather()
            copies = [(param, param.data.clone()) for param in layer.views]
            layer.release()
            for param, copy in copies:
                param.data = copy
        try:
            yield
        finally:
            self._forget()


class FlatParamShard(NamedTuple):
    """A unit of a layer, and this rank's chunk of it, as an array and as a tensor."""

    unit: FlatParam
    array: Any
    weights: Tensor


class GatherBuffer:
    """Working memory for one gathered layer at a time; each layer is always gathered to the same address.

    Tensors that autograd has saved, views of parameters included, are therefore valid again in the backward pass.
    """

    def __init__(self, array: Any, tensor: Tensor):
        self.array, self.tensor = array, tensor
        self.layer: GatheredLayer | None = None


class GatheredLayer:
    """Parameters that are gathered together, in one buffer, from all ranks' shards."""

    def __init__(self, parts: Sequence[FlatParamShard], params: Params, slot: GatherBuffer, ranks: ShardGroups):
        self.slot, self.here = slot, False
        self.views: dict[nn.Parameter, Tensor] = {}
        self.plans: list[collectives.Plan] = []
        for unit, array, weights in parts:
            for name, (span, place) in unit.cut(ranks.shard.rank).items():
                weights[place] = params[name].data.reshape(-1)[span]
            out = slot.array[unit.place]
            self.plans.append(ranks.shard.plan("all_gather", array, out=out, counts=unit.counts))
            self.views |= {params[name]: slot.tensor[at].view(params[name].shape) for name, at in unit.slices.items()}
        nan = slot.tensor.new_full((), math.nan)
        self.blanks = {param: nan.expand(param.shape) for param in params.values()}
        self.release()

    def fetch(self) -> None:
        """Start gathering, unless that has been started."""
        if self.slot.layer is self:
            return
        if self.slot.layer:
            self.slot.layer.release()
        self.slot.layer = self
        for plan in self.plans:
            plan.start()

    def gather(self) -> None:
        """Gather the parameters, and put them into the module."""
        self.fetch()
        if not self.here:
            for plan in self.plans:
                plan.wait()
            self._set(self.views)

    def release(self) -> None:
        """Remove the parameters from the module, after waiting for a gather in progress."""
        if self.slot.layer is self:
            for plan in self.plans:
                plan.wait()
            self.slot.layer = None
        self._set(self.blanks)

    def _set(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        for param, value in values.items():
            param.data = value
        self.here = values is self.views


def own_chunks(units: Sequence[Sequence[FlatParam]], rank: int, new: New) -> tuple[Any, list[list[FlatParamShard]]]:
    """Allocate one array for a rank's chunks; return it and the shards of each layer.  Collective."""
    counts = [unit.counts[rank] for of_layer in units for unit in of_layer]
    array, flat = new(sum(counts))
    places = iter(offsets(counts))
    parts = [[(unit, next(places)) for unit in of_layer] for of_layer in units]
    return array, [[FlatParamShard(unit, array[place], flat[place]) for unit, place in of_layer] for of_layer in parts]


def slot_of(index: int) -> int:
    """Return a layer's buffer: 0 outside of layers, else 1 and 2 alternately, to overlap computing and gathering."""
    return 1 + index % 2 if index else 0


def make_slots(units: Sequence[Sequence[FlatParam]], new: New) -> list[GatherBuffer]:
    """Allocate the gather buffers, each as long as its longest layer.  Collective."""
    lengths = [0, 0, 0]
    for index, parts in enumerate(units):
        slot = slot_of(index)
        lengths[slot] = max(lengths[slot], *(unit.place.stop for unit in parts), 0)
    return [GatherBuffer(*new(count)) for count in lengths]
