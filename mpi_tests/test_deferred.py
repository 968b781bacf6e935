"""Weight gradients that are put off: none before, all afterwards, those of the plain model; what is kept meanwhile."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.gpt import GPTConfig
from mpi_tests.test_gpt import random_tokens, randomized
from mpi_tests.test_tensor_parallel import close, each_mode, part
from parallelism.deferred import WeightGradients, deferring
from parallelism.plan import gpt2_plan, parallelize

CONFIG = GPTConfig(vocab_size=29, block_size=8, n_layer=2, n_head=8, n_embd=32, bias=True, n_kv_head=4)
TOKENS, TARGETS = random_tokens(2, 8), random_tokens(2, 8, seed=1)


def linear_parameters(model):
    """Weights that `F.linear` takes, and biases; but not the embedding that is tied to one."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {p for module in linear for p in module.parameters()} - {model.transformer.wte.weight}


def plain_gradients(config=CONFIG):
    model = randomized(config)
    model(TOKENS, TARGETS)[1].backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("before", [None, 1.0], ids=["", "in-place"])
def test_weights_get_their_gradients_later(before):
    """New ones, or added to what is there."""
    model, later, wanted = randomized(CONFIG), WeightGradients(), plain_gradients()
    for p in model.parameters():
        p.grad = None if before is None else torch.full_like(p, before)
    places = {name: p.grad for name, p in model.named_parameters()}
    with deferring(later):
        _, loss = model(TOKENS, TARGETS)
    loss.backward()
    put_off = linear_parameters(model)
    assert len(put_off) == 2 * 4 * 2
    for name, p in model.named_parameters():
        if p in put_off:
            assert p.grad is None if before is None else (p.grad == before).all()
        elif name != "transformer.wte.weight":
            close(p.grad - (before or 0), wanted[name])
    later.add()
    for name, p in model.named_parameters():
        close(p.grad - (before or 0), wanted[name])
        assert before is None or p.grad is places[name]
    later.add()  # there is nothing left to add
    close(model.lm_head.weight.grad - (before or 0), wanted["transformer.wte.weight"])


def test_at_once():
    model, later, wanted = randomized(CONFIG), WeightGradients(), plain_gradients()
    with deferring(later):
        _, loss = model(TOKENS, TARGETS)
    later.at_once = True
    loss.backward()
    for name, p in model.named_parameters():
        close(p.grad, wanted[name])


def tensors_alive():
    """Memory that tensors have, by where it begins: its bytes."""
    gc.collect()
    alive = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}


def test_inputs_and_gradients_of_linear_layers_are_all_that_is_kept():
    model, later = randomized(replace(CONFIG, bias=False)), WeightGradients()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    sizes = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, y: sizes.append(inputs[0].nbytes + y.nbytes))
    before = tensors_alive()
    with deferring(later):
        model(TOKENS, TARGETS)[1].backward()
    kept = {begin: size for begin, size in tensors_alive().items() if begin not in before}
    assert len(sizes) == 9
    assert sum(kept.values()) == sum(sizes)
    later.add()
    assert tensors_alive().keys() == before.keys()


def test_bfloat16():
    """Weights are float32, and computed with in bfloat16: as without putting off, rounded nowhere else."""
    results = []
    for later in (None, WeightGradients()):
        model = randomized(CONFIG).float()
        with torch.autocast("cpu", torch.bfloat16), deferring(later):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        if later:
            assert all(p.grad is None for p in linear_parameters(model))
            later.add()
        results.append((loss, [p.grad for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for wanted, got in zip(results[0][1], results[1][1], strict=True):
        assert got.dtype == torch.float32
        close(got, wanted, rtol=2**-7)


def test_other_calls_of_linear():
    """By name, with one vector, of frozen weights and of computed ones."""
    later, x = WeightGradients(), torch.randn(6, dtype=torch.float64)
    weight, bias, frozen = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 6), (3,), (3, 6)))
    weight.requires_grad_(), bias.requires_grad_()
    with deferring(later):
        y = F.linear(x, bias=bias, weight=weight)
        computed = F.linear(x, 2 * weight)
        frozen_out = F.linear(y[:3].repeat(2), frozen)
    computed.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.expand(3, 6))  # at once, as it is none of a parameter
    weight.grad = None
    frozen_out.sum().backward()
    assert weight.grad is None
    assert bias.grad is None
    later.add()
    gradient = frozen.sum(0).view(2, 3).sum(0)
    torch.testing.assert_close(weight.grad, gradient[:, None] * x)
    torch.testing.assert_close(bias.grad, gradient)
    assert frozen.grad is None


@pytest.mark.sizes(1, 2, 4)
@each_mode
def test_split_layers(comm, sequence):
    model, later, wanted = randomized(CONFIG), WeightGradients(), plain_gradients()
    parallelize(model, gpt2_plan(CONFIG.vocab_size, CONFIG.n_head, CONFIG.n_kv_head), comm, sequence=sequence)
    with deferring(later):
        _, loss = model(TOKENS, TARGETS)
    loss.backward()
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}
    assert len(matrices) == 8
    assert all(p.grad is None for p in matrices.values())
    later.add()
    for name, p in model.named_parameters():
        close(p.grad, part(p, wanted[name], comm))


@pytest.mark.sizes(2)
@each_mode
def test_split_layers_in_bfloat16(comm, sequence):
    results = []
    for later in (None, WeightGradients()):
        model = randomized(CONFIG).float()
        parallelize(model, gpt2_plan(CONFIG.vocab_size, CONFIG.n_head, CONFIG.n_kv_head), comm, sequence=sequence)
        with torch.autocast("cpu", torch.bfloat16), deferring(later):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        if later:
            later.add()
        results.append([p.grad for p in model.parameters()])
    for wanted, got in zip(*results, strict=True):
        assert got.dtype == torch.float32
        close(got, wanted, rtol=2**-7)
