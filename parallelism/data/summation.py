"""The order in which gradients are added up: every sum of gradients is made or described here.

A rank's micro-batches are added one after the other, in the order of their backward passes: by autograd, in place, or
by `add`, where each is reduced over the ranks first.  The uses of a tied parameter are added up apart, and together at
the end, so that it does not matter whether they are on one rank.  Ranks are added by the collective that reduces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from parallelism.buffers.gradients import gradient_of


@torch.no_grad()
def add(total: Tensor, gradient: Tensor, micro_batch: int | None) -> None:
    """Add the gradient of a micro-batch, numbered within the global batch, to the sum of those before."""
    total.add_(gradient)


class TiedSums:
    """The sums of parameters that are used in several places of a rank: `uses` are the further ones, by parameter."""

    def __init__(self, uses: Mapping[nn.Parameter, Sequence[Tensor]]):
        self.uses = uses
        self._owner: dict[Tensor, nn.Parameter] = {use: param for param, others in uses.items() for use in others}

    def owner(self, tensor: Tensor) -> Tensor:
        """Return the parameter to whose gradient `tensor` contributes, or `tensor` itself."""
        return self._owner.get(tensor, tensor)

    def complete(self, param: Tensor) -> None:
        """Make a parameter's gradient that of all its uses, whose sums begin anew."""
        if uses := self.uses.get(param):  # type: ignore[call-overload]
            self._complete(param, uses)

    @torch.no_grad()
    def _complete(self, param: Tensor, uses: Sequence[Tensor]) -> None:
        for use in uses:
            total, summand = gradient_of(param), gradient_of(use)
            assert total is not None
            assert summand is not None
            total.add_(summand)
            summand.zero_()
