"""ZeRO stage 3: shard parameters, too, and gather each layer's when it is used.

With Psi bytes of parameters and m micro-batches, a rank sends up to 2 m Psi of parameters in a step, in addition to m
Psi of gradients; with stage 1 or 2, it sends Psi of parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.3 and 7.2.2; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", 2023, arXiv 2304.11277, section 3 (units, prefetching).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

import collectives
from parallelism.buffers.arena import allocate, lay_out, line_length
from parallelism.data.units import FlatParam, WorkingBuffer, masters_of, offsets
from parallelism.step.actions import FORWARD, WEIGHTS, Action
from parallelism.step.events import SHARED
from parallelism.zero.gradients import ReducedGradients


class ShardedParameters(ReducedGradients):
    """Stage 3: parameters, gradients and optimizer states are sharded.

    Layers are gathered alternately in two buffers: while one computes, the next is gathered, also that of the following
    action.  A layer's parameters stay gathered until another needs their buffer.  Parameters of several layers, or of
    none, stay gathered from their first use in a step to its end.  Otherwise a parameter is a NaN of the same shape.
    """

    zero_stage = 3

    def build(self) -> None:
        own, dtype, every, shard = self.own, self.dtype, self.ranks.every, self.ranks.shard
        self.uses = self.separate()
        for param in self.params.values():
            every.broadcast(param.data, root=0)
        originals = {name: param.data for name, param in self.params.items()}
        homes = [SHARED, *sorted(chain(*own.stages.values()))]
        params = [{name: p for name, p in self.params.items() if own.home(p) == home} for home in homes]
        laid = [lay_out(of_layer, line_length(dtype)) for of_layer in params]
        units = [self.cut(slices)[::-1] for slices, _ in laid]
        spans = offsets(sum(unit.counts[shard.rank] for unit in of_layer) for of_layer in units)
        flat = allocate(every, spans[-1].stop, dtype, self.device)
        lengths = [max((n for i, (_, n) in enumerate(laid) if slot_of(i) == slot), default=0) for slot in range(3)]
        slots = [WorkingBuffer(every, length, dtype, self.device) for length in lengths]
        gathered = [
            GatheredLayer(units[i], params[i], self.uses, slots[slot_of(i)], flat[span], shard)
            for i, span in enumerate(spans)
        ]
        self.layers = dict(zip(homes, gathered, strict=True))
        names = {*own.trained()}
        chunks = [pair for layer in gathered[::-1] for pair in layer.chunks if names.issuperset(pair[0].slices)]
        trained, weights = [unit for unit, _ in chunks], [chunk for _, chunk in chunks]
        own_gradients = self.reduce_units(trained)
        self.masters = masters_of(trained, shard.rank, self.params, weights, own_gradients, originals)
        self.arrays = flat, self.gradients.tensor
        self._path: list[int] = []  # the layers that this action uses, and the next one after it

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
        with self.waiting():
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
        with self.waiting():
            for layer in self.layers.values():
                layer.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold all parameters in the module in this context, for reading, not for computing.  Collective."""
        for layer in self.layers.values():
            layer.gather()
            copies = {param: view.clone() for param, view in layer.views.items()}
            layer.release()
            layer.put(copies)
        try:
            yield
        finally:
            self._forget()


class GatheredLayer:
    """A layer's parameters, gathered from all ranks' chunks to a buffer; `chunks` are this rank's, with their units.

    They are always gathered to the same address: tensors that autograd has saved, views of parameters included, are
    valid again in the backward pass.
    """

    def __init__(
        self,
        units: Sequence[FlatParam],
        params: Mapping[str, nn.Parameter],
        uses: Mapping[nn.Parameter, Iterable[Tensor]],
        slot: WorkingBuffer,
        weights: Tensor,
        shard: collectives.Communicator,
    ):
        self.slot, self.here = slot, False
        self.views: dict[Tensor, Tensor] = {}  # by parameter and alias
        self.plans: list[collectives.Plan] = []
        self.chunks: list[tuple[FlatParam, Tensor]] = []
        for unit, own in zip(units, offsets(unit.counts[shard.rank] for unit in units), strict=True):
            for name, (span, in_chunk) in unit.cut(shard.rank).items():
                weights[own][in_chunk] = params[name].data.reshape(-1)[span]
            out = slot.tensor[unit.span]
            self.plans.append(shard.plan("all_gather", weights[own], out=out, counts=unit.counts))
            self.views |= {params[name]: slot.tensor[at].view(params[name].shape) for name, at in unit.slices.items()}
            self.chunks.append((unit, weights[own]))
        self.views |= {use: self.views[param] for param in params.values() for use in uses.get(param, ())}
        nan = slot.tensor.new_full((), math.nan)
        self.blanks = {param: nan.expand(param.shape) for param in self.views}
        self.release()

    def fetch(self) -> None:
        """Start gathering, unless that has been started."""
        if self.slot.user is self:
            return
        if self.slot.user:
            self.slot.user.release()
        self.slot.user = self
        for plan in self.plans:
            plan.start()

    def gather(self) -> None:
        """Gather the parameters, and put them into the module."""
        self.fetch()
        if not self.here:
            self._wait()
            self.put(self.views)

    def release(self) -> None:
        """Remove the parameters from the module, after waiting for a gather in progress."""
        if self.slot.user is self:
            self._wait()
            self.slot.user = None
        self.put(self.blanks)

    def _wait(self) -> None:
        for plan in self.plans:
            plan.wait()

    def put(self, values: Mapping[Tensor, Tensor]) -> None:
        """Put values into the module."""
        for param, value in values.items():
            param.data = value
        self.here = values is self.views


def slot_of(index: int) -> int:
    """Return a layer's buffer: 0 outside of layers, else 1 and 2 alternately, to overlap computing and gathering."""
    return 1 + index % 2 if index else 0
