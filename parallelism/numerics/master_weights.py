"""Master weights: float32 copies of 16-bit parameters, which the optimizer updates.

Source: Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import collectives
from parallelism.buffers.arena import Arena, lay_out, line_length
from parallelism.buffers.gradients import gradient_of, rounding_of
from parallelism.placement import like


class MasterWeights:
    """Weights in at least float32, `pieces`, that an optimizer updates in place of the `params` of the same names.

    `params` are a model's parameters, or the rank's shards of them, the flat elements `spans`, with their gradients.
    Frozen parameters have no pieces and never change.  Pieces have the parameters' placements.

    Parameters of 32 or 64 bits are their own pieces, without a copy.  Otherwise the pieces are slices of one flat
    tensor, `weights`, initialized from `originals`, the whole parameters before rounding, or from the parameters.

    A step consists of `take_gradients`, the optimizer's step, and `give_parameters`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        originals: Mapping[str, Tensor] | None = None,
        spans: Mapping[str, slice] | None = None,
    ):
        self.params = {name: param for name, param in params.items() if param.requires_grad}
        self.spans = dict(spans or {name: slice(0, param.numel()) for name, param in params.items()})
        self.slices, self.count = lay_out(self.params, line_length(torch.float32))  # of flat tensors of all pieces
        self.weights: Tensor | None = None
        self.pieces = self.params
        if not any(is_rounded(param) for param in self.params.values()):
            return
        self.weights = torch.zeros(self.count, dtype=torch.float32, device=next(iter(self.params.values())).device)
        self.pieces, originals = {}, originals or {}
        for name, param in self.params.items():
            value = self.weights[self.slices[name]]
            value.copy_(originals[name].reshape(-1)[self.spans[name]] if name in originals else param.data.view(-1))
            self.pieces[name] = like(param, value.view(param.shape))

    @classmethod
    def of(cls, model: nn.Module, arena: Arena) -> MasterWeights:
        """Create the master weights of a whole arena, and drop the arena's originals."""
        masters = cls(dict(model.named_parameters()), arena.originals)
        arena.originals = {}
        return masters

    @torch.no_grad()
    def take_gradients(self, factor: Tensor | None = None) -> None:
        """Copy the gradients to the pieces, multiplied by a factor if there is one.

        Where their dtypes differ, the copies are slices of one flat tensor, or replace integers in their memory.
        """
        narrow, widened = [], []
        flat: Tensor | None = None
        for name, piece in self.pieces.items():
            gradient = gradient_of(self.params[name])
            assert gradient is not None
            if rounding := rounding_of(self.params[name]):
                gradient = rounding.floats(piece.dtype)
            elif gradient.dtype != piece.dtype:
                narrow.append(gradient)
                if flat is None:
                    flat = torch.empty(self.count, dtype=piece.dtype, device=piece.device)
                gradient = flat[self.slices[name]].view(piece.shape)
                widened.append(gradient)
            piece.grad = gradient
        if widened:
            torch._foreach_copy_(widened, narrow)  # on a GPU, one kernel for many tensors
        if self.pieces and factor is not None:
            scale_all([piece.grad for piece in self.pieces.values() if piece.grad is not None], factor)

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Round the pieces to the parameters, and free the copies of the gradients."""
        if self.weights is not None and self.pieces:
            torch._foreach_copy_([self.params[name] for name in self.pieces], list(self.pieces.values()))
        for name, piece in self.pieces.items():
            if self.weights is not None or rounding_of(self.params[name]):
                piece.grad = None

    @contextmanager
    def exact(self, model: nn.Module, shard: collectives.Communicator | None = None) -> Iterator[None]:
        """Put the unrounded master weights into the model in this context, for reading, not for computing.

        The ranks of `shard` hold pieces of them.  Collective.
        """
        rounded = {name: p for name, p in model.named_parameters() if p.requires_grad and is_rounded(p)}
        before = {param: param.data for param in rounded.values()}
        for name, param in rounded.items():
            param.data = self._gathered(name, param, shard) if shard else self.pieces[name].data
        try:
            yield
        finally:
            for param, data in before.items():
                param.data = data

    def _gathered(self, name: str, param: nn.Parameter, shard: collectives.Communicator) -> Tensor:
        whole = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        if name in self.pieces:
            whole[self.spans[name]] = self.pieces[name].data.view(-1)
        return shard.all_reduce(whole).view(param.shape)


def is_rounded(param: Tensor) -> bool:
    """Return whether a parameter has a narrower dtype than its master weight."""
    return param.dtype.itemsize < torch.float32.itemsize


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype in place; on a GPU, in few kernels if the factor has the same dtype."""
    torch._foreach_mul_(tensors, factor.to(torch.promote_types(tensors[0].dtype, torch.float32)))
