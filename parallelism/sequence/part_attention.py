"""Attention by parts: queries of each part of a sequence attend to the parts before it, then to their own.

A rank of the ring holds some parts, and gathers the keys and values of all.  Each part's result, and its contribution
to the gradients of keys and values, have the same bits on any rank; the owner of the keys adds up these contributions
in the order of the parts.

Source: Llama Team, "The Llama 3 Herd of Models", 2024, arXiv 2407.21783, section 3.3.2 (keys and values are gathered).
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallelism.numerics.dropout import AttentionDropout
from parallelism.sequence.partial_attention import ScoreRules, attend, attend_backward, mask_of, merge, wide
from parallelism.sequence.ring_attention import Ring, window_mask
from parallelism.sequence.token_shards import TokenShards


class SequenceParts(NamedTuple):
    """Parts of a sequence, `num_parts` in all, of which each rank of a ring holds equally many."""

    ring: Ring
    num_parts: int

    @property
    def held(self) -> np.ndarray:
        """Numbers of the parts that each rank holds, (ring, num_parts/ring)."""
        shards = TokenShards(self.num_parts, self.ring.size, order=self.ring.order)
        return np.stack([shards.ring_positions(member) for member in range(self.ring.size)])

    @property
    def own(self) -> list[int]:
        return self.held[self.ring.rank].tolist()

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Gather all tokens in their order, from those of this rank, along a dim."""
        if self.ring.size == 1:
            return x
        gathered = self.ring.members.all_gather(x[None])
        parts = [part for of_rank in gathered for part in of_rank.chunk(len(self.own), dim)]
        return torch.cat([parts[index] for index in self.held.ravel().argsort()], dim)

    def pairs(self, sender: int, owner: int) -> list[tuple[int, int]]:
        """List the parts of one rank's queries, each with a part of another's keys that it attends to."""
        return [(number, keys) for number in self.held[sender] for keys in self.held[owner] if keys <= number]

    def sum_up(self, contributions: Iterable[tuple[tuple[int, int], Tensor]]) -> list[Tensor]:
        """Add up the contributions to each of this rank's parts of keys, in the order of the parts of queries.

        Each rank passes those of its own parts of queries, in order, as ((queries, keys), gradient of the keys).
        """
        if self.ring.size > 1:
            contributions = self.exchange(dict(contributions))
        totals: dict[int, Tensor] = {}
        for (_, keys), of_keys in contributions:
            totals[keys] = totals[keys].add_(of_keys) if keys in totals else of_keys
        return [totals[keys] for keys in self.own]

    def exchange(self, contributions: dict[tuple[int, int], Tensor]) -> list[tuple[tuple[int, int], Tensor]]:
        """Send each contribution to the rank that holds the part of keys; return those to this rank's, in order."""
        rank, ranks = self.ring.rank, range(self.ring.size)
        outward, inward = [self.pairs(rank, other) for other in ranks], [self.pairs(other, rank) for other in ranks]
        sent = torch.stack([contributions.pop(pair) for pairs in outward for pair in pairs])
        counts = (tuple(len(pairs) * sent[0].numel() for pairs in each) for each in (outward, inward))
        received = self.ring.members.all_to_all_v(sent.view(-1), *counts).view(-1, *sent.shape[1:])
        return sorted(zip(chain(*inward), received, strict=True), key=lambda item: item[0])


class PartScores(NamedTuple):
    """Treatment of the scores, in some dtype, of a sequence's parts of `length` tokens."""

    length: int
    dtype: torch.dtype
    device: torch.device
    documents: Tensor | None  # (batch, seq)
    dropout: AttentionDropout | None
    window: int | None = None

    def pieces(self, number: int) -> Iterator[tuple[slice, ScoreRules]]:
        """Yield the keys before a part, and its own, with the rules for its queries."""
        own = slice(number * self.length, (number + 1) * self.length)
        for keys in [slice(0, own.start), own] if number else [own]:
            causal, mask, drop = keys is own, None, None
            positions = torch.arange(own.stop, device=self.device)
            if self.documents is not None or self.window:
                may = window_mask(positions[own], positions[keys], self.window)[None]  # (1, queries, keys)
                if self.documents is not None:
                    may = may & (self.documents[:, own, None] == self.documents[:, None, keys])
                causal, mask = False, mask_of(may, self.dtype)
            if self.dropout:
                drop = self.dropout.between(positions[own], positions[keys])
            yield keys, ScoreRules(causal, mask, drop)


def part_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: SequenceParts,
    documents: Tensor | None,
    dropout: AttentionDropout | None,
    window: int | None = None,
) -> Tensor:
    """Attend to all tokens of the ring, part by part.  Shapes: those of `SequenceAttention`, but n_kv_head = n_head."""
    documents = None if documents is None else parts.gather(documents, 1)
    scores = PartScores(q.shape[2] // len(parts.own), q.dtype, q.device, documents, dropout, window)
    return PartAttentionFunction.apply(q, k, v, parts, scores)


class PartAttentionFunction(torch.autograd.Function):
    """Saves no probabilities, and this rank's keys and values only: the backward pass gathers all of them again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, q: Tensor, k: Tensor, v: Tensor, parts: SequenceParts, scores: PartScores
    ) -> Tensor:
        kv, results = parts.gather(torch.stack((k, v)), 3), []  # (2, batch, n_head, seq, head_size)
        for number, queries in zip(parts.own, q.split(scores.length, 2), strict=True):
            queries, (first, *rest) = queries.contiguous(), scores.pieces(number)
            out, log = attended(queries, kv, *first)
            for piece in rest:
                merge(out, log, *attended(queries, kv, *piece))
            results.append((out, log))
        out, log = (torch.cat(each, 2) for each in zip(*results, strict=True))
        ctx.save_for_backward(q, k, v, out, log)
        ctx.parts, ctx.scores = parts, scores
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (q, k, v, out, log), parts, scores = ctx.saved_tensors, ctx.parts, ctx.scores
        kv, dq = parts.gather(torch.stack((k, v)), 3), torch.zeros_like(out)

        def contributions() -> Iterator[tuple[tuple[int, int], Tensor]]:
            of_parts = zip(*(x.split(scores.length, 2) for x in (q, out, log, wide(gradient), dq)), strict=True)
            for number, (*saved, of_queries) in zip(parts.own, of_parts, strict=True):
                queries, result, logs, of_result = (x.contiguous() for x in saved)
                for keys, rules in scores.pieces(number):
                    part = queries, *kv[:, :, :, keys], result, logs
                    more, *of_keys = attend_backward(of_result, part, rules)
                    of_queries += more
                    dkv = wide(torch.stack(of_keys)).split(scores.length, 3)
                    yield from (((number, at), each) for at, each in enumerate(dkv, keys.start // scores.length))

        dk, dv = torch.cat(parts.sum_up(contributions()), 3)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attended(queries: Tensor, kv: Tensor, keys: slice, rules: ScoreRules) -> tuple[Tensor, Tensor]:
    """Return the result of attention to some keys in at least float32, and the log-sum-exp of its scores."""
    out, log = attend(queries, kv[0, :, :, keys], kv[1, :, :, keys], rules)
    return wide(out), log
