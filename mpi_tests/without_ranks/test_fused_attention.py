"""The choice of the fused kernel for a block of attention."""

from types import SimpleNamespace

import pytest
import torch

from parallelism.sequence.partial_attention import Dropping, OnCPU, OnCUDA, ScoreRules, kernel

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
