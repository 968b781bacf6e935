"""Non-finite losses and gradients: all ranks name the first rank with one; the step is skipped, done or an error."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from parallelism.numerics.non_finite import GradientMonitor
from parallelism.step.deferred import WeightGradients


def first(monitor):
    """Return the name of the first non-finite gradient."""
    names, finite = monitor.take(torch.device("cpu"))
    return next((name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite), "")


def watched(model):
    return GradientMonitor({param: name for name, param in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_overflow_when_they_are_added(dtype):
    """The gradients of the weight and the bias overflow when products are added; non-finite ones stay so."""
    layer = nn.Linear(2, 1).to(dtype)
    monitor = watched(layer)
    deferred = WeightGradients(partial(monitor.gradient_ready, micro_batch=0))
    for scale, name in ((1e10, ""), (1e30, "weight"), (1.0, "weight"), (math.inf, "weight")):
        deferred.defer(
            layer.weight, layer.bias, torch.full((3, 2), 1e10, dtype=dtype), torch.full((3, 1), scale).to(dtype)
        )
        deferred.flush()
        assert first(monitor) == name
    layer.weight.grad = None
    deferred.defer(layer.weight, layer.bias, torch.zeros(1, 2, dtype=dtype), torch.ones(1, 1, dtype=dtype))
    deferred.flush()
    assert first(monitor) == "bias"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_that_are_watched(dtype):
    """The monitor finds the first one in the backward pass of any micro-batch, and accepts large finite gradients."""
    model = nn.ParameterDict({name: torch.ones(8, dtype=dtype) for name in "abcd"})
    model["d"].requires_grad_(False)
    monitor = watched(model)
    for param in "abc":
        model[param].register_post_accumulate_grad_hook(partial(monitor.gradient_ready, micro_batch=0))
    factors = {"a": 1.0, "b": 2e4, "c": 2e4}

    def backward():
        for name in "cba":
            (model[name] * factors[name]).sum().backward()

    backward()
    assert first(monitor) == ""
    factors |= {"a": math.inf, "b": math.nan}
    backward()
    factors |= {"a": 1.0, "b": 1.0}
    backward()
    assert first(monitor) == "b"
    assert first(monitor) == ""
