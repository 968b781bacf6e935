"""Activation recomputation: less is kept, blocks run twice, gradients stay the same; with everything that it meets."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from models.gpt import GPT, GPTConfig
from mpi_tests.played import (
    CONFIG,
    DROPPING,
    Players,
    batch_of,
    check_results,
    dropping_results,
    micro_batches,
    model_of,
)
from mpi_tests.test_gpt import random_tokens, randomized
from mpi_tests.test_tensor_parallel import close, each_mode
from parallelism.deferred import WeightGradients, deferring
from parallelism.dropout import Place
from parallelism.pipeline_schedule import registry
from parallelism.plan import gpt2_plan, parallelize
from parallelism.recompute import recompute

TOKENS, TARGETS = random_tokens(2, 8), random_tokens(2, 8, seed=1)


def recomputing(model, place=None):
    for block in model.transformer.h:
        recompute(block, place)
    return model


def gradients(model):
    model(TOKENS, TARGETS)[1].backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_blocks_run_again_and_gradients_stay_the_same():
    model, runs = randomized(CONFIG), []
    for number, block in enumerate(model.transformer.h):
        block.attn.register_forward_hook(lambda *_, number=number: runs.append(number))
    got, wanted = gradients(recomputing(model)), gradients(randomized(CONFIG))
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient)
    assert runs == [*range(CONFIG.n_layer), *reversed(range(CONFIG.n_layer))]
    with torch.no_grad():
        model(TOKENS)
    assert runs[2 * CONFIG.n_layer :] == [*range(CONFIG.n_layer)]


def num_saved(model):
    """How many tensors a forward pass keeps for the backward pass, but parameters."""
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        x = torch.randn(2, 8, CONFIG.n_embd, dtype=torch.float64, requires_grad=True)
        for block in model.transformer.h:
            x = block(x)
    parameters = {p.data_ptr() for p in model.parameters()}
    return len({x.data_ptr() for x in saved} - parameters)


def test_nothing_within_a_block_is_kept():
    assert num_saved(randomized(CONFIG)) > 10 * CONFIG.n_layer
    assert num_saved(recomputing(randomized(CONFIG))) <= CONFIG.n_layer


def test_torchs_own_dropout_draws_the_same_again():
    config = GPTConfig(**{**vars(CONFIG), "dropout": 0.5})
    torch.manual_seed(0)
    wanted = gradients(randomized(config))
    torch.manual_seed(0)
    for name, gradient in gradients(recomputing(randomized(config))).items():
        close(gradient, wanted[name])


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_h1", "zb_v"])
def test_pipelines_with_dropout(name):
    """Other micro-batches go forward before one goes backward: dropout must be where it was, and stay where it is."""
    place = Place(seed=3)
    players = Players(lambda: recomputing(model_of(DROPPING, place), place), registry.make(name, 2, 3), place)
    batch = batch_of(6)
    check_results(players, micro_batches(batch, 3), dropping_results(DROPPING, 6), 1e-10)
    assert torch.equal(place.samples, batch.samples[-2:])


def test_bfloat16_and_putting_off():
    results = []
    for make in (GPT, lambda config: recomputing(GPT(config))):
        model, later = make(CONFIG), WeightGradients()
        with torch.autocast("cpu", torch.bfloat16), deferring(later):
            _, loss = model(TOKENS, TARGETS)
        loss.backward()
        later.add()
        results.append([p.grad for p in model.parameters()])
    for wanted, got in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.sizes(2, 4)
@each_mode
@pytest.mark.parametrize("puts_off", [False, True], ids=["", "put-off"])
def test_split_layers(comm, sequence, puts_off):
    config = GPTConfig(vocab_size=29, block_size=8, n_layer=2, n_head=4, n_embd=16, dropout=0.2)
    results = []
    for wrap in (lambda model, place: model, recomputing):
        model, later, place = randomized(config), WeightGradients() if puts_off else None, Place(seed=1)
        parallelize(model, gpt2_plan(29, 4), comm, sequence=sequence, place=place)
        with deferring(later):
            _, loss = wrap(model, place)(TOKENS, TARGETS)
        place.samples = torch.tensor([7, 8])
        loss.backward()
        if later:
            later.add()
        results.append([p.grad for p in model.parameters()])
    for wanted, got in zip(*results, strict=True):
        close(got, wanted)
