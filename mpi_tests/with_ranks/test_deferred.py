"""Deferred weight gradients: none before the flush, those of the plain model after it."""

import pytest
import torch

from mpi_tests.helpers.models import CONFIG, TARGETS, TOKENS, close, each_mode, part, plain_gradients, randomized
from parallelism.step.deferred import WeightGradients, deferring
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import plan_of


@pytest.mark.sizes(1, 2, 4)
@each_mode
def test_split_layers(comm, sequence):
    model, deferred, expected = randomized(CONFIG), WeightGradients(), plain_gradients()
    parallelize(model, plan_of(CONFIG), comm, sequence=sequence)
    with deferring(deferred):
        _, loss = model(TOKENS, TARGETS)
    loss.backward()
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}
    assert len(matrices) == 8
    assert all(p.grad is None for p in matrices.values())
    deferred.flush()
    for name, p in model.named_parameters():
        close(p.grad, part(p, expected[name], comm))


@pytest.mark.sizes(2)
@each_mode
def test_split_layers_in_bfloat16(comm, sequence):
    results = []
    for deferred in (None, WeightGradients()):
        model = randomized(CONFIG).float()
        parallelize(model, plan_of(CONFIG), comm, sequence=sequence)
        with torch.autocast("cpu", torch.bfloat16), deferring(deferred):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        if deferred:
            deferred.flush()
        results.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == torch.float32
        close(actual, expected, rtol=2**-7)
