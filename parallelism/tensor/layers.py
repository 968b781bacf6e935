"""Tensor parallelism: linear layers, embeddings and the loss split over the ranks of an axis.

A plan maps the modules of a plain model to strategies; `parallelize` replaces the modules.  In sequence-parallel mode,
norms, dropout and the residual stream between split layers have 1/tp of the sequence.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallelism.buffers import autograd
from parallelism.placement import SEQ, Axis, Shard
from parallelism.step.deferred import autocast, current
from parallelism.tensor.tiles import shard_of_sum, sum_over_ranks, tiled, tree_sum


class ColumnFunction(torch.autograd.Function):
    """x W^T of the whole x and a row shard of W; the gradient of x is summed over the ranks.

    That sum overlaps with the computation of W's gradient, unless that is deferred, or the axis has tiles.  If x is
    split, its second gather overlaps with the computation of x's gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, axis: Axis, pieces: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        ctx.axis, ctx.weight, ctx.pieces, ctx.deferred = axis, weight, pieces, current(weight)
        ctx.save_for_backward(x)
        return F.linear(gathered(x, axis), autocast(weight))  # of (batch, seq, in)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (x,), ranks, sequence = ctx.saved_tensors, ctx.axis.ranks, ctx.axis.sequence
        # from (seq/tp, batch, in) to (seq, batch, in)
        gathering = ranks.start("all_gather", x.movedim(SEQ, 0)) if sequence else None
        weight = ctx.weight.to(gradient.dtype)
        if ctx.axis.tiles:
            dx = tiled(lambda out: gradient[..., out] @ weight[out], len(weight), ctx.axis.own_tiles, ctx.pieces)
        else:
            dx = gradient @ weight
            # (seq, batch, in) to (seq/tp, batch, in), or (batch, seq, in)
            summing = ranks.start(*(("reduce_scatter", dx.movedim(SEQ, 0)) if sequence else ("all_reduce", dx)))
        if gathering:
            x = gathering.wait().movedim(0, SEQ)  # (batch, seq, in)
        dw = None
        if ctx.deferred:
            dw = ctx.deferred.defer(ctx.weight, None, x, gradient)
        elif ctx.needs_input_grad[1]:
            # (out/tp, batch x seq) (batch x seq, in)
            dw = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.weight.dtype)
        if ctx.axis.tiles:
            dx = sum_of_tiles(dx, ctx.axis).to(gradient.dtype)
        else:
            dx = summing.wait().movedim(0, SEQ) if sequence else summing.wait()
        return dx, dw, None, None  # (batch, seq/tp, in) or (batch, seq, in); (out/tp, in)


def column(x: Tensor, weight: Tensor, axis: Axis, pieces: tuple[int, ...] = (1,)) -> Tensor:
    """Apply a column-split `F.linear`, in the dtype that autocast would choose."""
    return ColumnFunction.apply(autocast(x), weight, axis, pieces)


class RowFunction(torch.autograd.Function):
    """x W^T of the rank's columns of W, whose tiles are summed along a tree, in at least float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, num_tiles: int) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.deferred = weight, current(weight)
        ctx.save_for_backward(x)
        cast = autocast(weight)
        return tiled(lambda inner: F.linear(x[..., inner], cast[:, inner]), x.shape[-1], num_tiles)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        dw = None
        if ctx.deferred:
            dw = ctx.deferred.defer(ctx.weight, None, x, gradient)
        elif ctx.needs_input_grad[1]:
            # (out, batch x seq) (batch x seq, in/tp)
            dw = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(ctx.weight.dtype)
        return gradient @ ctx.weight.to(gradient.dtype), dw, None


class ColumnLinear(nn.Module):
    """Column-parallel linear layer: each rank gets the whole x and computes some outputs y.

    Shapes: x (batch, seq, in), or (batch, seq/tp, in) if the sequence is split; y (batch, seq, out/tp).
    """

    def __init__(self, linear: nn.Linear, axis: Axis, pieces: tuple[int, ...] = (1,)):
        super().__init__()
        shard = Shard(0, linear.out_features, pieces)
        self.axis, self.pieces = axis, pieces
        self.weight = axis.local(linear.weight, shard)
        self.bias = None if linear.bias is None else axis.local(linear.bias, shard)

    def forward(self, x: Tensor) -> Tensor:
        y = column(x, self.weight, self.axis, self.pieces)
        return y if self.bias is None else y + self.bias


class RowLinear(nn.Module):
    """Row-parallel linear layer: each rank has some inputs, and y is the sum over the ranks.

    Shapes: x (batch, seq, in/tp); y (batch, seq, out), or (batch, seq/tp, out) if the sequence is split.
    """

    def __init__(self, linear: nn.Linear, axis: Axis):
        super().__init__()
        self.axis = axis
        self.weight = axis.local(linear.weight, Shard(1, linear.in_features))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.tiles:
            x = autocast(x)
            y = summed(RowFunction.apply(x, self.weight, self.axis.own_tiles), self.axis).to(x.dtype)
        else:
            y = summed(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else between_layers(torch.add, self.axis, y, self.bias)


class ReplicatedLinear(nn.Module):
    """Linear layer between split ones, without bias, that every rank holds.

    Shapes: x (batch, seq, in), y (batch, seq, out), or (batch, seq/tp, ...) if the sequence is split.
    """

    def __init__(self, linear: nn.Linear, axis: Axis):
        super().__init__()
        self.axis, self.weight = axis, linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return between_layers(F.linear, self.axis, x, self.weight)


def summed(y: Tensor, axis: Axis) -> Tensor:
    """Return the sum over the ranks, or this rank's shard of it if the sequence is split."""
    if axis.tiles:
        return autograd.Conjugate.apply(y, partial(sum_of_tiles, axis=axis), partial(gathered, axis=axis))
    return autograd.reduce_scatter(y, axis.ranks, SEQ) if axis.sequence else autograd.reduce(y, axis.ranks)


def sum_of_tiles(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of all ranks' tiled products, or this rank's shard of it if the sequence is split."""
    if axis.sequence:
        return autograd.in_dim(partial(shard_of_sum, ranks=axis.ranks), SEQ, x)
    return sum_over_ranks(x, axis.ranks)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return all tokens; matrix products of tiles need them in one order of memory."""
    if not axis.sequence:
        return x.view_as(x)
    whole = autograd.in_dim(axis.ranks.all_gather, SEQ, x)
    return whole.contiguous() if axis.tiles else whole


def between_layers(call: Callable[..., Tensor], axis: Axis, x: Tensor, *params: Tensor) -> Tensor:
    """Call a function of the tokens between split layers, (batch, seq[/tp], width), and of replicated parameters.

    These parameters' gradients are summed over the ranks if the sequence is split.  With tiles, those of each tile of
    the sequence are computed by themselves, and summed as products are.
    """
    if not axis.tiles:
        return call(x, *(autograd.copy(param, axis.ranks) if axis.sequence else param for param in params))
    copies = zip(*(copies_for_tiles(param, axis) for param in params), strict=True)
    tiles = zip(x.unflatten(SEQ, (axis.token_tiles, -1)).unbind(SEQ), copies, strict=True)
    return torch.cat([contiguous(call(contiguous(tile), *of_tile)) for tile, of_tile in tiles], SEQ)


def copies_for_tiles(parameter: Tensor, axis: Axis) -> Sequence[Tensor]:
    """Return a replicated parameter once for each tile of the sequence that this rank has between split layers."""

    def sum_up(gradients: Tensor) -> Tensor:
        own = tree_sum(gradients.unbind())
        return sum_over_ranks(own, axis.ranks) if axis.sequence else own

    return autograd.Conjugate.apply(parameter, lambda p: p.expand(axis.token_tiles, *p.shape), sum_up).unbind()


def contiguous(x: Tensor) -> Tensor:
    """Return x, which is contiguous, as is its gradient: sums have the same bits for the same order of memory."""
    return autograd.Conjugate.apply(x, lambda x: x.contiguous().view_as(x), Tensor.contiguous)


class SequenceNorm(nn.Module):
    """A LayerNorm or RMSNorm on a shard of the sequence, or in tiles of it."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, axis: Axis):
        super().__init__()
        self.axis, self.shape = axis, norm.normalized_shape
        self.eps: Any = norm.eps
        self.is_rms, self.weight, self.bias = isinstance(norm, nn.RMSNorm), norm.weight, getattr(norm, "bias", None)
        self.offset = getattr(norm, "offset", 0)

    def forward(self, x: Tensor) -> Tensor:
        params = [self.weight] if self.bias is None else [self.weight, self.bias]
        return between_layers(self.normalize, self.axis, x, *params)

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = weight + self.offset if self.offset else weight
        if self.is_rms:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class HeadNorm(SequenceNorm):
    """A norm of each of a rank's heads, which have all tokens; its parameters' gradients are summed over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        params = [self.weight] if self.bias is None else [self.weight, self.bias]
        return self.normalize(x, *(autograd.copy(param, self.axis.ranks) for param in params))


class SequenceEmbedding(nn.Module):
    """An embedding, such as that of positions, of which each rank looks up its shard of the sequence."""

    def __init__(self, embedding: nn.Embedding, axis: Axis):
        super().__init__()
        self.axis, self.weight = axis, embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        return autograd.split(F.embedding(indices, self.weight), self.axis.ranks, dim=-2)  # (..., seq/tp, width)


class VocabularyEmbedding(nn.Module):
    """An embedding with rows split over the ranks; the vocabulary is padded to a multiple of the ranks."""

    def __init__(self, weight: nn.Parameter, axis: Axis):
        super().__init__()
        self.axis, self.weight = axis, weight
        self.begin = axis.ranks.rank * len(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, here = local_rows(tokens, self.begin, len(self.weight))
        return summed(F.embedding(rows, self.weight) * here[..., None], self.axis)  # (batch, seq[/tp], width)


class VocabularyHead(nn.Module):
    """The head, split as the embedding: returns a rank's logits in training, for `VocabularyCrossEntropy`, else all."""

    def __init__(self, weight: nn.Parameter, axis: Axis, vocab_size: int):
        super().__init__()
        self.axis, self.weight, self.vocab_size = axis, weight, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        logits = column(x, self.weight, self.axis)
        if self.training:
            return logits
        return autograd.gather(logits, self.axis.ranks, dim=-1)[..., : self.vocab_size]


def local_rows(tokens: Tensor, begin: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens' local row numbers, 0 for those of other ranks, and a mask of the local ones."""
    rows = tokens - begin
    here = (rows >= 0) & (rows < length)
    return rows * here, here


class VocabularyCrossEntropy(nn.Module):
    """The loss of a `models.decoder.CrossEntropy`, from logits split over the vocabulary, which are never gathered."""

    def __init__(self, loss: Any, axis: Axis, vocab_size: int):
        super().__init__()
        self.loss, self.axis, self.vocab_size, self.ignored = loss, axis, vocab_size, loss.ignored

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.total(logits, targets) / (targets != self.ignored).sum().clamp(min=1)

    def total(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not self.training:
            return self.loss.total(logits, targets)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        flat, targets = logits.flatten(0, 1), targets.flatten()  # (batch x seq, vocab_size/tp), (batch x seq)
        mask = targets != self.ignored
        return CrossEntropyFunction.apply(flat, targets, mask, self.axis, self.vocab_size)


class CrossEntropyFunction(torch.autograd.Function):
    """Sum of log sum exp(logits) - logits[target], with reductions over the ranks.

    Saves one tensor as large as the rank's logits, their softmax.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, logits: Tensor, targets: Tensor, mask: Tensor, axis: Axis, vocab_size: int
    ) -> Tensor:
        ranks = axis.ranks
        begin = ranks.rank * logits.shape[-1]
        num_real = min(max(vocab_size - begin, 0), logits.shape[-1])
        real = logits[:, :num_real]  # without padding
        highest = real.amax(-1) if num_real else logits.new_full(logits.shape[:1], -math.inf)
        highest = ranks.all_reduce(highest, op="max")
        exps = torch.zeros_like(logits)
        torch.exp(real - highest[:, None], out=exps[:, :num_real])
        rows, here = local_rows(targets, begin, logits.shape[-1])
        at_target = logits.gather(-1, rows[:, None])[:, 0] * here
        if axis.tiles:
            sums = tree_sum([tile.sum(-1) for tile in exps.chunk(axis.own_tiles, -1)])
            sums, at_target = sum_over_ranks(torch.stack([sums, at_target]), ranks)
        else:
            sums, at_target = ranks.all_reduce(torch.stack([exps.sum(-1), at_target]))  # (2, batch x seq)
        ctx.save_for_backward(exps.div_(sums[:, None]), rows, here, mask)
        return ((sums.log() + highest - at_target) * mask).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        softmax, rows, here, mask = ctx.saved_tensors
        d = softmax.scatter_add(-1, rows[:, None], -here.to(softmax.dtype)[:, None])
        d *= (mask * gradient)[:, None]
        return d, None, None, None, None
