"""Deferred weight gradients: none before the flush, those of the plain model after it; the memory kept meanwhile."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mpi_tests.helpers.models import (
    CONFIG,
    TARGETS,
    TOKENS,
    close,
    llama,
    plain_gradients,
    randomized,
    tensors_alive,
)
from parallelism.step.deferred import WeightGradients, cut, deferring

LLAMA = llama(vocab_size=29, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)


def linear_parameters(model):
    """Return the weights and biases of `F.linear`, except the weight tied to the embedding."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {p for module in linear for p in module.parameters()} - {model.transformer.wte.weight}


@pytest.mark.parametrize("before", [None, 1.0], ids=["", "in-place"])
def test_weights_get_their_gradients_later(before):
    """The flush sets gradients, or adds to existing ones."""
    model, deferred, expected = randomized(CONFIG), WeightGradients(), plain_gradients()
    for p in model.parameters():
        p.grad = None if before is None else torch.full_like(p, before)
    gradients_before = {name: p.grad for name, p in model.named_parameters()}
    with deferring(deferred):
        _, loss = model(TOKENS, TARGETS)
    loss.backward()
    deferred_parameters = linear_parameters(model)
    assert len(deferred_parameters) == 2 * 4 * 2
    for name, p in model.named_parameters():
        if p in deferred_parameters:
            assert p.grad is None if before is None else (p.grad == before).all()
        elif name != "transformer.wte.weight":
            close(p.grad - (before or 0), expected[name])
    deferred.flush()
    for name, p in model.named_parameters():
        close(p.grad - (before or 0), expected[name])
        assert before is None or p.grad is gradients_before[name]
    deferred.flush()  # no gradient is left to add
    close(model.lm_head.weight.grad - (before or 0), expected["transformer.wte.weight"])


def test_at_once():
    model, deferred, expected = randomized(CONFIG), WeightGradients(), plain_gradients()
    with deferring(deferred):
        _, loss = model(TOKENS, TARGETS)
    deferred.at_once = True
    loss.backward()
    for name, p in model.named_parameters():
        close(p.grad, expected[name])


def test_inputs_and_gradients_of_linear_layers_are_all_that_is_kept():
    model, deferred = randomized(replace(CONFIG, bias=False)), WeightGradients()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    sizes = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, y: sizes.append(inputs[0].nbytes + y.nbytes))
    before = tensors_alive()
    with deferring(deferred):
        model(TOKENS, TARGETS)[1].backward()
    new = {begin: size for begin, size in tensors_alive().items() if begin not in before}
    assert len(sizes) == 9
    assert sum(new.values()) == sum(sizes)
    deferred.flush()
    assert tensors_alive().keys() == before.keys()


def test_bfloat16():
    """Float32 weights compute in bfloat16; gradients are rounded as without deferral."""
    results = []
    for deferred in (None, WeightGradients()):
        model = randomized(CONFIG).float()
        with torch.autocast("cpu", torch.bfloat16), deferring(deferred):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        if deferred:
            assert all(p.grad is None for p in linear_parameters(model))
            deferred.flush()
        results.append((loss, [p.grad for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for expected, actual in zip(results[0][1], results[1][1], strict=True):
        assert actual.dtype == torch.float32
        close(actual, expected, rtol=2**-7)


def test_other_calls_of_linear():
    """F.linear is called by keyword, with a single vector, and with frozen and computed weights."""
    deferred, x = WeightGradients(), torch.randn(6, dtype=torch.float64)
    weight, bias, frozen = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 6), (3,), (3, 6)))
    weight.requires_grad_(), bias.requires_grad_()
    with deferring(deferred):
        y = F.linear(x, bias=bias, weight=weight)
        computed = F.linear(x, 2 * weight)
        frozen_out = F.linear(y[:3].repeat(2), frozen)
    computed.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.expand(3, 6))  # at once, as the weight is not a parameter
    weight.grad = None
    frozen_out.sum().backward()
    assert weight.grad is None
    assert bias.grad is None
    deferred.flush()
    gradient = frozen.sum(0).view(2, 3).sum(0)
    torch.testing.assert_close(weight.grad, gradient[:, None] * x)
    torch.testing.assert_close(bias.grad, gradient)
    assert frozen.grad is None


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_parts_have_the_gradients_of_the_whole(config):
    model, deferred, expected = randomized(config), WeightGradients(parts=4), plain_gradients(config)
    model.transformer.ln_f.weight.requires_grad_(False)
    deferred.at_once = True
    with deferring(deferred):
        _, loss = model(TOKENS, TARGETS)
    loss.backward()
    assert model.transformer.ln_f.weight.grad is None
    for name, p in model.named_parameters():
        if p.requires_grad:
            close(p.grad, expected[name])


@pytest.mark.parametrize("layer", [nn.Linear(256, 64), nn.GELU("tanh")], ids=["linear", "gelu"])
def test_parts_have_the_bits_that_each_has_alone(layer):
    """The kernels of one row of a product, or of the last elements of a GELU, have other bits than those of 64 rows."""
    torch.manual_seed(0)
    tokens = torch.randn(1, 64, 256 if isinstance(layer, nn.Linear) else 35)
    results = []
    for length in (64, 1):  # tokens of a rank, each of them a part
        deferred, x = WeightGradients(parts=length), tokens.clone().requires_grad_()
        deferred.at_once = True
        with deferring(deferred):
            y = torch.cat([layer(of_rank.contiguous()) for of_rank in x.split(length, 1)], 1)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        results.append((y, x.grad))
    for whole, alone in zip(*results, strict=True):
        assert torch.equal(whole, alone)


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), nn.Linear(16, 8, bias=False), nn.LayerNorm(16)], ids=str)
def test_parts_of_a_result_are_contiguous(layer):
    """The next layer that computes by parts copies none of them."""
    x = torch.randn(3, 12, 16, requires_grad=True)
    with deferring(WeightGradients(parts=4)):
        y = layer(x)
    assert torch.allclose(y, layer(x), atol=1e-6)
    for part, piece in zip(cut(y, 4), y.split(3, 1), strict=True):
        assert part.data_ptr() == piece.data_ptr()
        assert torch.equal(part.movedim(0, 1), piece)
