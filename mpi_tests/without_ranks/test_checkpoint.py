"""Checkpoints of several ranks: a GPT saved in one layout and loaded in another; failures to write or read."""

import torch

from models.config import ModelConfig
from mpi_tests.helpers.models import randomized
from parallelism.checkpoint import make_states
from training.optim.optimizer import adamw

CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=3, n_head=8, n_embd=16, bias=True, n_kv_head=4)


def test_a_model_is_as_it_was_when_its_optimizer_has_made_states():
    model = randomized(CONFIG)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = adamw(model.parameters(), 0.1, 0.1)
    make_states(optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
        assert optimizer.state[p].keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
