"""Compiled GELUs, gates and rotations, compared with torch's in float64."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.attention import Heads
from models.config import ModelConfig
from models.decoder import Decoder
from models.mlp import Gate
from mpi_tests.helpers.models import family_config, llama
from parallelism.planner.presets import FAMILIES
from training.parallel.decoder import fuse

GELU = nn.GELU(approximate="tanh")
SIZES = {"block_size": 16, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "vocab_size": 64}
LLAMA = llama(**SIZES)
GPT2 = ModelConfig(block_size=16, n_layer=2, n_head=4, n_embd=32, vocab_size=64)
MIXTURE = ModelConfig(block_size=16, n_layer=2, n_head=4, n_embd=32, vocab_size=64, num_experts=4, experts_per_token=2)


def fused(module: nn.Module) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(module))
    fuse(model)
    assert type(model[0]) is not type(module)
    return model[0]


def passes(module, x, *args, gradients):
    """Return the outputs of a module, and the gradient of its input."""
    x = x.detach().requires_grad_()
    results = module(x, *args)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [g.to(r.dtype) for g, r in zip(gradients, results, strict=True)])
    return [*(r.detach() for r in results), x.grad]


def compare(module, x, *args, shapes):
    """Check that the fused module is within 2e-6 of float64."""
    gradients = [torch.randn(shape) for shape in shapes]
    exact = passes(module, x.double(), *args, gradients=gradients)
    for one, other in zip(passes(fused(module), x, *args, gradients=gradients), exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=2e-6)


STRIDED = [
    torch.randn(6, 8).T,
    torch.randn(5, 3, 7).movedim(0, 1),
    torch.randn(6, 8)[:, ::2],
    torch.randn(4, 1).expand(4, 3),
]


@pytest.mark.parametrize("x", [torch.linspace(-20, 20, 40001), 3 * torch.randn(3, 5, 7), *STRIDED])
def test_gelus_are_those_of_float64(x):
    compare(GELU, x, shapes=[x.shape])


@pytest.mark.parametrize("x", [torch.randn(3, 5, 7), torch.randn(6, 8).T, torch.randn(5, 3, 7).movedim(0, 1)])
def test_gelus_have_their_elements_where_their_inputs_have_them(x):
    leaf = x.clone().requires_grad_()
    y = fused(GELU)(leaf)
    y.backward(torch.ones_like(x))
    assert y.stride() == leaf.grad.stride() == x.stride()


@pytest.mark.parametrize("shape", [(3, 5, 14), (2, 2), (4, 64)])
def test_gates_are_those_of_float64(shape):
    compare(Gate(torch.nn.SiLU()), 4 * torch.randn(shape), shapes=[(*shape[:-1], shape[-1] // 2)])


@pytest.mark.parametrize("positions", [None, torch.arange(5) + 7, torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 0, 1]])])
def test_rotated_heads_are_those_of_float64(positions):
    shapes = [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)]
    compare(Heads(LLAMA, "full"), torch.randn(2, 5, 64), positions, shapes=shapes)


def test_ranks_of_several_have_some_of_the_heads():
    """Each of 2 ranks has 2 of 4 heads, and 1 of 2 heads of keys and values."""
    compare(Heads(LLAMA, "full"), torch.randn(2, 5, 32), shapes=[(2, 2, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8)])


def test_bits_do_not_depend_on_where_an_element_lies():
    """Layouts that cut tokens or columns in different places must give the same bits."""
    x, gelu, gate = 3 * torch.randn(1000), fused(GELU), fused(Gate(torch.nn.SiLU()))
    for begin, end in ((0, 1), (3, 20), (17, 1000)):
        assert torch.equal(gelu(x[begin:end]), gelu(x)[begin:end])
    pairs = torch.stack([x, x.flip(0)])  # 1000 columns of gates, and of the values they scale
    whole = gate(pairs.flatten()[None])[0]
    for begin, end in ((0, 1), (3, 20), (17, 1000)):
        assert torch.equal(gate(pairs[:, begin:end].flatten()[None])[0], whole[begin:end])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number):
    x = torch.tensor([number, 1.0])
    assert torch.equal(fused(GELU)(x).isfinite(), torch.tensor([False, True]))
    assert not fused(Gate(torch.nn.SiLU()))(x).isfinite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("module", [GELU, Gate(torch.nn.SiLU()), Heads(LLAMA, "full")], ids=["gelu", "gate", "heads"])
def test_other_dtypes_are_torchs(module, dtype):
    x = torch.randn(2, 5, 64).to(dtype)
    results = module(x)
    gradients = [torch.randn(each.shape) for each in (results if isinstance(results, tuple) else (results,))]
    both = (passes(each, x, gradients=gradients) for each in (module, fused(module)))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


YARN = replace(LLAMA, rope_factor=4.0, rope_original_length=8, rope_scaling="yarn", head_dim=10)
OTHERS = [family_config(name, **SIZES, **({"window": 5} if name == "gemma3_text" else {})) for name in FAMILIES]


@pytest.mark.parametrize("config", [GPT2, MIXTURE, LLAMA, YARN, *OTHERS], ids=lambda config: config.family)
def test_a_model_keeps_its_names_and_is_that_of_float64(config):
    model = Decoder(config)
    one, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fuse(one)
    assert list(one.state_dict()) == list(model.state_dict())
    tokens = torch.randint(0, 64, (2, 16))
    losses = [each(tokens, tokens)[1] for each in (one, exact)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-6, atol=0)
    for p, reference in zip(one.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)
