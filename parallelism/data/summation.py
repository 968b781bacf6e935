"""Summation order of gradients: every sum of gradients is computed or described here.

A rank's micro-batches are added one by one, in the order of their backward passes: by autograd in place, or by `add`
if each is reduced over the ranks first.  Each use of a tied parameter has a sum of its own, and these are added at the
end, so that the result does not depend on whether they are on one rank.  The reducing collective sums over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from parallelism.buffers.gradients import gradient_of


@torch.no_grad()
def add(total: Tensor, gradient: Tensor, micro_batch: int | None) -> None:
    """Add the gradient of a micro-batch, numbered within the global batch, to the sum of the previous ones."""
    total.add_(gradient)


class TiedSums:
    """Gradient sums of parameters that a rank uses in several places: `uses` holds all but the first, by parameter."""

    def __init__(self, uses: Mapping[nn.Parameter, Sequence[Tensor]]):
        self.uses = uses
        self._owner: dict[Tensor, nn.Parameter] = {use: param for param, others in uses.items() for use in others}

    def owner(self, tensor: Tensor) -> Tensor:
        """Return the parameter to whose gradient `tensor` contributes, or `tensor` itself."""
        return self._owner.get(tensor, tensor)

    @torch.no_grad()
    def complete(self, param: Tensor) -> None:
        """Add the sums of a parameter's other uses to its gradient, and reset them."""
        for use in self.uses.get(param, ()):  # type: ignore[call-overload]
            total, summand = gradient_of(param), gradient_of(use)
            assert total is not None
            assert summand is not None
            total.add_(summand)
            summand.zero_()
