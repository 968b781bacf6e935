"""Sequence parallelism compared with the plain GPT: loss and every gradient; also with tensor and data parallelism."""

import numpy as np
import pytest
import torch

from parallelism.numerics.dropout import BatchPosition


def test_dropout_keeps_as_many_as_it_should():
    from parallelism.numerics.dropout import Dropout

    x = torch.ones(4, 500, 50)
    for p in (0.1, 0.5):
        y = Dropout(p, layer=1, position=BatchPosition(seed=1))(x)
        mask = y > 0
        assert torch.allclose(y[mask], torch.tensor(1 / (1 - p)))
        assert abs(mask.float().mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / x.numel())
        for dim in range(3):  # no row along any dim is exceptional
            rows = mask.float().mean(dim=[other for other in range(3) if other != dim])
            assert (rows - (1 - p)).abs().max() < 6 * np.sqrt(p * (1 - p) * len(rows) / x.numel())
        other = Dropout(p, layer=2, position=BatchPosition(seed=1))(x) > 0
        both = (mask & other).float().mean()
        assert abs(both - (1 - p) ** 2) < 5 / np.sqrt(x.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_or_not_dropout_is_the_same(dtype, monkeypatch):
    from parallelism.numerics import dropout

    x = torch.randn(3, 4, 5, 37, dtype=dtype)
    drop = dropout.AttentionDropout(torch.randint(-(2**62), 2**62, (3, 4)), 0.3).between(
        torch.arange(5), torch.arange(37)
    )
    compiled = drop(x)
    monkeypatch.setattr(dropout, "kernels", lambda: None)
    assert torch.equal(compiled, drop(x))
    assert 0 < (compiled == 0).float().mean() < 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 16, 37])
def test_attention_with_dropout_in_one_pass_is_that_in_several(queries, causal):
    """In float32, both agree up to rounding with torch's autograd of the plain formula in float64."""
    from parallelism.numerics import dropout
    from parallelism.sequence.partial_attention import ScoreRules, attend, attend_backward

    torch.manual_seed(queries)
    keys = queries if causal else 37
    q, k, v = (2 * torch.randn(2, 3, length, 8) for length in (queries, keys, keys))
    gradient = torch.randn(q.shape)
    drop = dropout.AttentionDropout(torch.randint(-(2**62), 2**62, (2, 3)), 0.3).between(
        torch.arange(queries), torch.arange(keys)
    )
    rules = ScoreRules(causal, None, drop)
    out, log = attend(q, k, v, rules)
    actual = [out, *attend_backward(gradient, (q, k, v, out, log), rules)]
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) * drop(torch.ones_like(scores))
    (expected @ v).backward(gradient.double())
    for one, reference in zip(actual, (expected @ v, q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(one, reference.float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_attention_with_dropout_passes_on_what_is_not_finite(number):
    from parallelism.numerics import dropout
    from parallelism.sequence.partial_attention import ScoreRules, attend, attend_backward

    q, k, v = (torch.ones(1, 1, 20, 8) for _ in range(3))
    q[0, 0, 11, 0] = number
    drop = dropout.AttentionDropout(torch.zeros(1, 1, dtype=torch.int64), 0.3).between(*[torch.arange(20)] * 2)
    rules = ScoreRules(True, None, drop)
    out, log = attend(q, k, v, rules)
    assert out.isfinite().all(-1)[0, 0].tolist() == [row != 11 for row in range(20)]
    dq, *_ = attend_backward(torch.ones_like(out), (q, k, v, out, log), rules)
    assert dq.isnan().any(-1)[0, 0].tolist() == [row == 11 for row in range(20)]


@pytest.mark.parametrize("order", ["zigzag", "striped"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_all_ranks_have_as_much_to_do(order, ring):
    from parallelism.sequence.token_shards import TokenShards

    shards = TokenShards(2 * ring * 64, ring, order=order)
    work = np.zeros(ring)
    for member in range(ring):
        here = shards.ring_positions(member)
        for source in range(ring):
            there, pair = shards.ring_positions(source), shards.pair(member, source)
            pairs = np.zeros((len(here), len(there)), bool)
            if pair:
                block = pairs[pair.queries, pair.keys]
                block[:] = np.tril(np.ones(block.shape, bool)) if pair.causal else True
            assert (pairs == (here[:, None] >= there)).all()  # exactly the pairs of the mask
            work[member] += pairs.sum()
    assert work.max() <= 1.1 * work.mean()


def test_the_tokens_of_all_ranks_are_the_sequence():
    from parallelism.sequence.token_shards import ORDERS, TokenShards

    for order in ORDERS:
        for ring, parts in ((1, 1), (2, 2), (3, 1), (1, 4)):
            shards = TokenShards(48, ring, parts, order)
            positions = np.concatenate([shards.positions(rank) for rank in range(ring * parts)])
            assert sorted(positions) == list(range(48))


def by_parts(q, k, v, num_parts, documents=None):
    from parallelism.sequence.part_attention import SequenceParts, part_attention
    from parallelism.sequence.ring_attention import Ring

    return part_attention(q, k, v, SequenceParts(Ring(), num_parts), documents, None)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 6])
def test_attention_by_parts_is_that_of_the_whole(num_parts, has_documents):
    torch.manual_seed(num_parts)
    q, k, v, gradient = torch.randn(4, 2, 3, 24, 8, dtype=torch.float64)
    documents = (torch.arange(24) >= torch.tensor([[5], [12]])).long() if has_documents else None
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    if has_documents:
        mask = (mask & (documents[:, :, None] == documents[:, None]))[:, None]
    results = []
    for attend in (
        lambda *qkv: by_parts(*qkv, num_parts, documents),
        lambda *qkv: torch.nn.functional.scaled_dot_product_attention(*qkv, attn_mask=mask),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = attend(*leaves)
        y.backward(gradient)
        results.append([y, *(leaf.grad for leaf in leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_attention_by_parts_of_each_head_alone_has_the_same_bits():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 28, 12)
    alone = [by_parts(*(x[:, head : head + 1] for x in (q, k, v)), 4) for head in range(5)]
    assert torch.equal(by_parts(q, k, v, 4), torch.cat(alone, 1))
