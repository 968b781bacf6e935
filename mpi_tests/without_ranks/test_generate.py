"""Sampling from a GPT, compared with the model's logits of the whole text."""

import re

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.generate import caching, draw, generate
from mpi_tests.helpers.models import llama, random_tokens, randomized

SMALL = {"vocab_size": 29, "block_size": 12, "n_layer": 2, "n_head": 3, "n_embd": 24}


@pytest.mark.parametrize(
    "config",
    [ModelConfig(**SMALL), ModelConfig(**SMALL, n_kv_head=1), ModelConfig(**SMALL, bias=True), llama(**SMALL)],
    ids=["", "grouped heads", "biases", "llama"],
)
def test_kept_keys_and_values_give_the_logits_of_the_whole_text(config):
    gpt, tokens = randomized(config), random_tokens(2, 12)
    whole = gpt(tokens)[0]
    with caching(gpt), torch.no_grad():
        parts = [
            gpt(tokens[:, :5])[0],
            *(gpt(tokens[:, i : i + 1], positions=torch.tensor([i]))[0] for i in range(5, 12)),
        ]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert torch.equal(gpt(tokens)[0], whole)  # the cache is gone


def test_top_p_keeps_the_fewest_that_have_so_much():
    probability = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    for top_p, nucleus in ((0.4, {1}), (0.41, {1, 3}), (0.75, {1, 3, 2}), (1.0, {0, 1, 2, 3})):
        generator = torch.Generator().manual_seed(0)
        tokens = draw(probability.log().expand(2000, -1), 1.0, None, top_p, generator)
        assert set(tokens.flatten().tolist()) == nucleus


def test_logits_that_are_not_finite():
    with pytest.raises(ValueError, match="logits are not finite"):
        draw(torch.tensor([[0.0, float("nan")]]), 1.0, None, None, None)


@pytest.mark.parametrize("kind", [ModelConfig, llama])
def test_generate_with_top_k_1_repeats_the_likeliest_token(kind):
    model = randomized(kind(**SMALL))
    tokens = random_tokens(2, 9)
    out = generate(model, tokens, 8, top_k=1)
    assert out.shape == (2, 17)
    assert torch.equal(out[:, :9], tokens)
    for end in range(9, 17):
        likeliest = model(out[:, max(0, end - 12) : end])[0][:, -1].argmax(-1)
        assert torch.equal(out[:, end], likeliest)


def test_generate_samples_from_the_softmax():
    model = randomized(ModelConfig(**SMALL))
    prompt = random_tokens(1, 3)
    draws = generate(
        model, prompt.expand(20000, -1), 1, temperature=2.0, top_k=5, generator=torch.Generator().manual_seed(0)
    )
    best = model(prompt)[0][0, -1].topk(5)
    expected = (best.values / 2).softmax(-1)
    frequency = torch.bincount(draws[:, -1], minlength=29) / 20000
    assert frequency[best.indices].tolist() == pytest.approx(expected.tolist(), abs=0.02)
    assert frequency[best.indices].sum() == 1


def test_generate_repeats_with_its_generator():
    model = Decoder(ModelConfig(**SMALL))
    first, again, other = (
        generate(model, random_tokens(1, 3), 20, top_k=100, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be positive: for the likeliest token, top_k=1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1: to sample from all tokens, top_p=None"),
        ({"top_k": 0}, "top_k=0 must be at least 1: to sample from all tokens, top_k=None"),
    ],
)
def test_generate_errors(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        generate(Decoder(ModelConfig(**SMALL)), random_tokens(1, 3), 1, **options)
