"""Sequence parallelism against the plain GPT: loss and every gradient; mixes with tensor and data parallelism."""

import numpy as np
import pytest
import torch

from parallelism.numerics.dropout import BatchPosition


def test_dropout_keeps_as_many_as_it_should():
    from parallelism.numerics.dropout import Dropout

    x = torch.ones(4, 500, 50)
    for p in (0.1, 0.5):
        y = Dropout(p, layer=1, place=BatchPosition(seed=1))(x)
        kept = y > 0
        assert torch.allclose(y[kept], torch.tensor(1 / (1 - p)))
        assert abs(kept.float().mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / x.numel())
        for dim in range(3):  # no row of any direction is out of the common
            rows = kept.float().mean(dim=[other for other in range(3) if other != dim])
            assert (rows - (1 - p)).abs().max() < 6 * np.sqrt(p * (1 - p) * len(rows) / x.numel())
        other = Dropout(p, layer=2, place=BatchPosition(seed=1))(x) > 0
        both = (kept & other).float().mean()
        assert abs(both - (1 - p) ** 2) < 5 / np.sqrt(x.numel())


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_all_ranks_have_as_much_to_do(order, ring):
    from parallelism.sequence.token_shards import TokenShards

    shares = TokenShards(2 * ring * 64, ring, order=order)
    work = np.zeros(ring)
    for member in range(ring):
        here = shares.of_ring(member)
        for source in range(ring):
            there, pair = shares.of_ring(source), shares.pair(member, source)
            done = np.zeros((len(here), len(there)), bool)
            if pair:
                block = done[pair.queries, pair.keys]
                block[:] = np.tril(np.ones(block.shape, bool)) if pair.causal else True
            assert (done == (here[:, None] >= there)).all()  # what the mask says, no more and no less
            work[member] += done.sum()
    assert work.max() <= 1.1 * work.mean()


def test_the_tokens_of_all_ranks_are_the_sequence():
    from parallelism.sequence.token_shards import ORDERS, TokenShards

    for order in ORDERS:
        for ring, parts in ((1, 1), (2, 2), (3, 1), (1, 4)):
            shares = TokenShards(48, ring, parts, order)
            held = np.concatenate([shares.positions(rank) for rank in range(ring * parts)])
            assert sorted(held) == list(range(48))
