"""ZeRO, stage 3: ranks share the parameters, too, and gather a layer's when they need it.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054, sections 5.3 and 7.2.2; Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel", 2023, arXiv 2304.11277, section 3 (units, prefetching).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from parallelism.buffers.arena import allocate, lay_out, line_length, one_dtype
from parallelism.zero.gradients import GradientShard
from parallelism.zero.states import MakeOptimizer, Zero
from parallelism.zero.units import FlatParam, ShardGroups, masters_of, offsets, pieces

if TYPE_CHECKING:
    from collectives import Plan

Params = Mapping[str, nn.Parameter]
New = Callable[[int], tuple[Any, Tensor]]  # a flat array, and torch's view of it


class ShardedParameters(Zero):
    """Stage 3: each rank has of parameters, gradients and the optimizer's states what belongs to its pieces.

    `layers` are the names of modules, in the order in which they run.  A layer's parameters are gathered before its
    forward pass, and again before its backward pass, while the layer before it computes; in between each is a NaN of
    the same shape.  What is in no layer stays from the beginning of the forward pass to the end of the backward pass.
    Gradients go as in stage 2, a layer's at a time.

    Layers give tensors, alone or in tuples, lists or dicts, and all their gradients come through these.

    Raises: InputError for a layer that isn't there, that has no parameters, or that shares some with another.
    """

    zero_stage = 3

    def __init__(
        self,
        module: nn.Module,
        ranks: ShardGroups,
        make_optimizer: MakeOptimizer,
        layers: Sequence[str],
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **reduction: Any,
    ):
        with ranks.every.agreed("ShardedParameters"):
            owned = divided(module, layers)
            dtype = dtype or one_dtype(module.parameters())
        super().__init__(module, ranks)
        for param in self.params.values():
            ranks.every.broadcast(param.data, root=0)
        originals = {name: param.data for name, param in self.params.items()}
        new = partial(allocate, ranks.every, dtype=dtype, device=device)
        units = [units_of(params, line_length(dtype), ranks.shard.size) for params in owned]
        array, parts = own_chunks(units, ranks.shard.rank, new)
        self.slots = make_slots(units, new)
        self.layers = [GatheredLayer(parts[i], params, self.slots[slot_of(i)], ranks) for i, params in enumerate(owned)]
        self._share_gradients(parts, originals, device, grad_dtype or dtype, reduction)
        self.arrays = array, self.gradients.array
        self.optimizer = make_optimizer(list(self.masters.pieces.values()))
        for index, name in enumerate(["", *layers]):
            module.get_submodule(name).register_forward_pre_hook(partial(self._before_forward, index))
            module.get_submodule(name).register_forward_hook(partial(self._after_forward, index))

    def _share_gradients(
        self,
        parts: list[list[FlatParamShard]],
        originals: Mapping[str, Tensor],
        device: str,
        dtype: torch.dtype,
        reduction: dict[str, Any],
    ) -> None:
        """From the last layer's to the first's, as they appear."""
        trained = [part for of_layer in parts[::-1] for part in of_layer if self._is_trained(part.unit)]
        units = [part.unit for part in trained]
        self.gradients = GradientShard(self.params, units, self.ranks, device, dtype, self.waiting, **reduction)
        self.across = self.gradients.across
        owned = [
            pieces(part.unit, self.ranks.shard.rank, self.params, part.weights, gradient)
            for part, gradient in zip(trained, self.gradients.own, strict=True)
        ]
        self.masters = masters_of(owned, originals)
        self.attend(self.gradients.buckets)

    def _is_trained(self, unit: FlatParam) -> bool:
        return self.params[next(iter(unit.slices))].requires_grad

    @property
    def reduces(self) -> bool:
        return True

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the pieces' gradients, in place."""
        self.gradients.clear()

    def gather(self) -> None:
        """Make this rank's shards what its pieces are: the next pass gathers anew.  Collective."""
        self.masters.give_parameters()
        self._forget()

    def _forget(self) -> None:
        """Let go what is gathered."""
        for layer in self.layers:
            layer.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Where the module has all its parameters, to be read: not to compute with them.  Collective."""
        copy_out(self.layers)
        try:
            yield
        finally:
            self._forget()

    def _before_forward(self, index: int, module: nn.Module, args: Any) -> None:
        self._open(index)
        if not self._in_backward:  # where a layer is computed again
            self._fetch(index + 1)

    def _after_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward:
            return
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, index))
        if index or not torch.is_grad_enabled():
            self.layers[index].release()

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        self._begin_backward()
        for layer in self.layers[1:]:
            if layer is not self.layers[index] and layer.here:
                layer.release()  # its own backward pass is over
        self._open(index)
        self._fetch(index - 1 if index else len(self.layers) - 1)

    def _end_backward(self) -> None:
        super()._end_backward()
        self._forget()

    def _open(self, index: int) -> None:
        with self.waiting():
            self.layers[index].gather()

    def _fetch(self, index: int) -> None:
        if index < len(self.layers):
            self.layers[index].fetch()


class FlatParamShard(NamedTuple):
    """A unit of a layer, and this rank's chunk of it, as an array and as torch has it."""

    unit: FlatParam
    array: Any
    weights: Tensor


class GatherBuffer:
    """Working memory, where one layer at a time is gathered: whenever it is, to the same place.

    So what autograd has kept of a layer's parameters, views of them too, is right again in the backward pass.
    """

    def __init__(self, array: Any, tensor: Tensor):
        self.array, self.tensor = array, tensor
        self.layer: GatheredLayer | None = None


class GatheredLayer:
    """Parameters that are gathered together, in a slot, from all ranks' shards."""

    def __init__(self, parts: Sequence[FlatParamShard], params: Params, slot: GatherBuffer, ranks: ShardGroups):
        self.slot, self.here = slot, False
        self.views: dict[nn.Parameter, Tensor] = {}
        self.plans: list[Plan] = []
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
        """Begin to gather, unless that has begun."""
        if self.slot.layer is self:
            return
        if self.slot.layer:
            self.slot.layer.release()
        self.slot.layer = self
        for plan in self.plans:
            plan.start()

    def gather(self) -> None:
        """Give the module its parameters."""
        self.fetch()
        if not self.here:
            for plan in self.plans:
                plan.wait()
            self._set(self.views)

    def release(self) -> None:
        """Take them away, and what is on its way."""
        if self.slot.layer is self:
            for plan in self.plans:
                plan.wait()
            self.slot.layer = None
        self._set(self.blanks)

    def _set(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        for param, value in values.items():
            param.data = value
        self.here = values is self.views


def copy_out(layers: Iterable[GatheredLayer]) -> None:
    """Give a module copies of its parameters, until these layers are released.  Collective."""
    for layer in layers:
        layer.gather()
        copies = [(param, param.data.clone()) for param in layer.views]
        layer.release()
        for param, copy in copies:
            param.data = copy


def divided(module: nn.Module, layers: Sequence[str]) -> list[dict[str, nn.Parameter]]:
    """The parameters in no layer, and those of each, by their names in the module.

    Raises: ValueError for layers that will not do.
    """
    known = [name for name, _ in module.named_modules() if name]
    if missing := [layer for layer in layers if layer not in known]:
        raise ValueError(f"layer {missing[0]!r} is no module of the model: it has {', '.join(known)}")
    owners: dict[nn.Parameter, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        inside = [layer for layer in layers if name.startswith(f"{layer}.")]
        for owner in inside or [""]:
            if owners.setdefault(param, owner) != owner:
                rivals = " and ".join(f"layer {rival!r}" if rival else "no layer" for rival in (owners[param], owner))
                raise ValueError(f"{name} is in {rivals}: leave what they share to the whole model, or name one layer")
    parts: dict[str, dict[str, nn.Parameter]] = {"": {}, **{layer: {} for layer in layers}}
    for name, param in module.named_parameters():
        parts[owners[param]][name] = param
    if empty := [layer for layer in layers if not parts[layer]]:
        raise ValueError(f"layer {empty[0]!r} has no parameters: leave it out")
    return list(parts.values())


def units_of(params: Params, line: int, size: int) -> list[FlatParam]:
    """In a layer's slot: what is trained, and what is frozen, of which there are no gradients."""
    slices, _ = lay_out(params, line)
    groups = [[name for name in slices if params[name].requires_grad == trained] for trained in (True, False)]
    return [FlatParam.of({name: slices[name] for name in group}, line, size) for group in groups if group]


def own_chunks(units: Sequence[Sequence[FlatParam]], rank: int, new: New) -> tuple[Any, list[list[FlatParamShard]]]:
    """An array of a rank's chunks, one after the other, and the parts of each layer.  Collective."""
    counts = [unit.counts[rank] for of_layer in units for unit in of_layer]
    array, flat = new(sum(counts))
    places = iter(offsets(counts))
    parts = [[(unit, next(places)) for unit in of_layer] for of_layer in units]
    return array, [[FlatParamShard(unit, array[place], flat[place]) for unit, place in of_layer] for of_layer in parts]


def slot_of(index: int) -> int:
    """One for what is in no layer, and two for the layers by turns: one computes while the next one's comes."""
    return 1 + index % 2 if index else 0


def make_slots(units: Sequence[Sequence[FlatParam]], new: New) -> list[GatherBuffer]:
    """As long as the longest of the layers that use them.  Collective."""
    lengths = [0, 0, 0]
    for index, parts in enumerate(units):
        slot = slot_of(index)
        lengths[slot] = max(lengths[slot], *(unit.place.stop for unit in parts), 0)
    return [GatherBuffer(*new(count)) for count in lengths]


def tensors(output: Any) -> Iterator[Tensor]:
    """Those of what a module gives."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)
