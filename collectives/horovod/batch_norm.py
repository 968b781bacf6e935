"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from collectives.horovod.functions import Sum, allreduce
from collectives.horovod.process_sets import size


class SyncBatchNorm(_BatchNorm):
    """Normalize `(batch, channels, ...)` by the mean and variance of all ranks' batches, whose sizes may differ.

    On one rank, and in evaluation by running statistics, it is `torch.nn.BatchNorm`.  Otherwise all ranks call the
    layer, forwards and backwards.

    Cost: two all-reduces of `channels` numbers forwards, two backwards: deviations are taken from the mean of all
    ranks, because a variance from sums of squares loses precision where the mean is large.
    Source: Ioffe and Szegedy, "Batch Normalization", 2015, section 3, over a batch that the ranks hold together.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm of a tensor of {input.dim()} dims: pass (batch, channels, ...)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        self._check_input_dim(input)
        if size() == 1 or not (self.training or self.running_mean is None):
            return super().forward(input)
        batch_and_space = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        x = input if input.dtype == torch.float64 else input.float()
        local = x.new_full((1,), x.numel() / x.shape[1])
        sums = allreduce(torch.cat([x.sum(batch_and_space), local]), op=Sum)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        deviations = x - mean.view(shape)
        variance = allreduce((deviations * deviations).sum(batch_and_space), op=Sum) / count
        if self.training and self.running_mean is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        normalized = deviations * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards a batch's, or average them all where `momentum` is None."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(variance.to(self.running_var.dtype), weight)
