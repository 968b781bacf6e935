"""Activation recomputation: fewer activations, blocks run twice, equal gradients; combined with all other features."""

from functools import partial

import pytest
import torch

from models.config import ModelConfig
from mpi_tests.helpers.models import close, each_mode, random_tokens, randomized
from parallelism.numerics.dropout import BatchPosition
from parallelism.step.deferred import WeightGradients, deferring
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import MODES, plan_of, recompute_model

TOKENS, TARGETS = random_tokens(2, 8), random_tokens(2, 8, seed=1)
each_kind = pytest.mark.parametrize("mode", MODES)


def recomputing(model, position=None, mode="full"):
    recompute_model(model, mode, position)
    return model


@pytest.mark.sizes(2, 4)
@each_mode
@pytest.mark.parametrize("defers", [False, True], ids=["", "put-off"])
@each_kind
def test_split_layers(comm, sequence, defers, mode):
    config = ModelConfig(vocab_size=29, block_size=8, n_layer=2, n_head=4, n_embd=16, dropout=0.2)
    results = []
    for wrap in (lambda model, position: model, partial(recomputing, mode=mode)):
        model, deferred, position = randomized(config), WeightGradients() if defers else None, BatchPosition(seed=1)
        parallelize(model, plan_of(model.config), comm, sequence=sequence, place=position)
        with deferring(deferred):
            _, loss = wrap(model, position)(TOKENS, TARGETS)
        position.samples = torch.tensor([7, 8])
        loss.backward()
        if deferred:
            deferred.flush()
        results.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        close(actual, expected)
