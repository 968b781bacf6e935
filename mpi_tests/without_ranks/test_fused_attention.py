"""The choice of the fused kernel for a block of attention."""

from types import SimpleNamespace

import pytest
import torch

from parallelism.numerics.dropout import AttentionDropout
from parallelism.sequence import partial_attention
from parallelism.sequence.partial_attention import (
    Dropping,
    OnCPU,
    OnCUDA,
    ScoreRules,
    attend,
    attend_backward,
    kernel,
    mask_of,
)

MASK = torch.ones(4, 4)


def tensor(device, dtype="bfloat16", length=64, head=64):
    return SimpleNamespace(
        device=torch.device(device), dtype=getattr(torch, dtype), shape=torch.Size([1, 2, length, head])
    )


@pytest.mark.parametrize(
    ("q", "k", "causal", "mask", "drop", "expected"),
    [
        (tensor("cpu", "float32"), tensor("cpu", "float32"), True, MASK, None, OnCPU),
        (tensor("cpu", "float64"), tensor("cpu", "float64"), False, None, MASK, None),
        (tensor("cuda"), tensor("cuda"), False, None, MASK, None),
        (tensor("cuda"), tensor("cuda"), True, None, None, OnCUDA),
        (tensor("cuda", "float16"), tensor("cuda", length=32), False, None, None, OnCUDA),
        (tensor("cuda"), tensor("cuda", length=32), True, None, None, None),
        (tensor("cuda"), tensor("cuda"), True, MASK, None, None),
        (tensor("cuda", "float32"), tensor("cuda", "float32"), True, None, None, None),
        (tensor("cuda", head=60), tensor("cuda", head=60), True, None, None, None),
        (tensor("cuda", head=512), tensor("cuda", head=512), True, None, None, None),
    ],
)
def test_each_takes_what_it_can(q, k, causal, mask, drop, expected):
    assert kernel(q, k, ScoreRules(causal, mask, drop)) is expected


def test_ours_takes_dropout_of_the_host():
    assert kernel(tensor("cpu"), tensor("cpu"), ScoreRules(False, None, MASK)) is Dropping


def test_flash_attention_reads_the_log_of_some_queries_as_it_lies_in_memory(monkeypatch):
    """Its backward kernel ignores the strides of the log-sum-exp, unlike those of the other tensors."""
    read = []

    def backward(gradient, q, k, v, out, log, *rest):
        read.append(torch.as_strided(log, log.shape, torch.empty(log.shape).stride()))
        return q, k, v

    aten = SimpleNamespace(_scaled_dot_product_flash_attention_backward=backward)
    monkeypatch.setattr(partial_attention, "aten", aten)
    q = torch.zeros(1, 2, 4, 8)
    log = torch.arange(16.0).view(1, 2, 8)[:, :, 4:]  # of the second half of the queries
    OnCUDA.backward(q, (q, q, q, q, log), ScoreRules(False))
    assert read[0].tolist() == [[[4, 5, 6, 7], [12, 13, 14, 15]]]


@pytest.mark.parametrize("drops", [False, True], ids=["masked", "dropped"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 20])
def test_a_head_has_the_same_bits_alone_and_among_others(length, drops):
    """As it lies in the memory of a product's result: beside the others, or by itself."""
    batch, heads, head = 12, 4, 36
    dtype = torch.float32 if drops else torch.float64  # for which no kernel takes a mask
    generator, positions = torch.Generator().manual_seed(length), torch.arange(length)
    qkv, gradient = (torch.randn(batch, length, n, heads, head, dtype=dtype, generator=generator) for n in (3, 1))
    of_heads = torch.randint(1 << 60, (batch, heads), generator=generator)

    def run(own):
        if drops:
            rules = ScoreRules(True, None, AttentionDropout(of_heads[:, own], 0.1).between(positions, positions))
        else:
            rules = ScoreRules(False, mask_of(torch.ones(batch, length, length, dtype=torch.bool).tril(), dtype))
        q, k, v = (x.transpose(1, 2) for x in qkv[:, :, :, own].contiguous().unbind(2))
        out, log = attend(q, k, v, rules)
        of_out = gradient[:, :, 0, own].contiguous().transpose(1, 2)
        return out, log, *attend_backward(of_out, (q, k, v, out, log), rules)

    for alone, among in zip(run([2]), run([0, 1, 2, 3]), strict=True):
        assert torch.equal(alone[:, 0], among[:, 2])
