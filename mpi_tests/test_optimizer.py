"""How weights are updated: what decays, and the learning rate's course."""

import math

import numpy as np
import pytest
import torch

from models.gpt import GPT, GPTConfig
from models.optimizer import adamw, learning_rate


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4, bias=True))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adamw(model.parameters(), lr=0.5, weight_decay=0.1).step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * (0.95 if p.dim() == 2 else 1))


@pytest.mark.parametrize(("warmup", "last"), [(10, 100), (0, 7), (5, 5), (1, 2)])
def test_warm_up_is_a_line_and_the_rest_a_cosine_to_a_tenth(warmup, last):
    rates = [learning_rate(i, 2.0, warmup, last) for i in range(1, last + 1)]
    np.testing.assert_allclose(rates[:warmup], [2.0 * i / warmup for i in range(1, warmup + 1)])
    turn = np.arange(1, last - warmup + 1) / max(1, last - warmup)  # of half a turn, 0 to 1
    np.testing.assert_allclose(rates[warmup:], [1.1 + 0.9 * math.cos(math.pi * t) for t in turn])
    assert max(rates) <= 2.0
    assert rates[-1] == pytest.approx(0.2 if warmup < last else 2.0)
