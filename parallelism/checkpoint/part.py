"""Tensor shards: tensors that hold some elements of a parameter, or of its optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallelism.checkpoint.extent import Extent, LocalShard, num_elements
from parallelism.mesh import Mesh
from parallelism.placement import shards_of
from parallelism.step.optimizer import Optimizer


class TensorShard(NamedTuple):
    """Elements `extent` of a parameter, or of one of its optimizer states.

    `name` is the parameter's name in the whole model, the first one if it is tied; `kind` is "parameter", or the
    optimizer's name for the state, such as "exp_avg".  If several ranks hold the same extent, one of them writes it.
    """

    name: str
    kind: str
    extent: Extent
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}"

    @property
    def flat(self) -> Tensor:
        return self.tensor.detach().view(-1)

    def check(self) -> None:
        """Raise ValueError if the extent is not in the whole, or the tensor is of another length or not contiguous."""
        try:
            num_elements(self.extent)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None
        if self.tensor.numel() != self.extent.length:
            raise ValueError(f"{self}: a tensor of {self.tensor.numel()} elements for {self.extent.length}")
        if not self.tensor.is_contiguous():
            raise ValueError(f"{self}: a tensor with gaps between its elements: save a contiguous one")

    def within(self, span: slice, tensor: Tensor, kind: str = "parameter") -> TensorShard:
        """Return a shard of some flat elements of this one, stored in `tensor`."""
        extent = self.extent._replace(begin=self.extent.begin + span.start, length=span.stop - span.start)
        return self._replace(kind=kind, extent=extent, tensor=tensor)

    def compact(self) -> Tensor:
        """Return a flat host copy, without the padding."""
        if num_elements(self.extent) == self.extent.length:
            return self.flat.to("cpu", copy=True)
        runs = self.extent.runs().tolist()
        return torch.cat([self.flat[:0], *(self.flat[here : here + count] for here, _, count in runs)]).cpu()


def model_parts(
    model: nn.Module, mesh: Mesh | None = None, tied: Iterable[Sequence[str]] = ()
) -> dict[str, TensorShard]:
    """Return this rank's shards of a model's parameters by name, according to their placements on the mesh.

    `tied` lists each tied parameter's names in the whole model; this rank's model may have another than the first.
    """
    first, parts = {name: names[0] for names in tied for name in names}, {}
    for name, p in model.named_parameters():
        sharded, shape = shards_of(p), list(p.shape)
        for shard in reversed(sharded.values()):
            shape[shard.dim] = shard.length
        local = [LocalShard(shard, mesh.coords[axis], mesh.shape[axis]) for axis, shard in sharded.items() if mesh]
        extent = Extent(tuple(shape), 0, p.numel(), tuple(local))
        parts[name] = TensorShard(first.get(name, name), "parameter", extent, p.detach())
    return parts


def state_parts(part: TensorShard, states: Mapping[str, Tensor]) -> Iterator[TensorShard]:
    """Yield an optimizer's states of a parameter by kind, each as large as the shard, or a scalar."""
    for kind, tensor in states.items():
        extent = part.extent if tensor.dim() else Extent((), 0, 1)
        yield part._replace(kind=kind, extent=extent, tensor=tensor)


@torch.no_grad()
def make_states(optimizer: Optimizer) -> None:
    """Have an optimizer allocate the states that its first step would, to be filled; parameters do not change."""
    lacking = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None]
    for p in lacking:
        p.grad = torch.zeros_like(p)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in lacking:
        p.grad = None
