import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from models.config import ModelConfig
from models.decoder import CrossEntropy, Decoder, flops_per_token
from mpi_tests.helpers.models import random_tokens, randomized
from training.settings.derived import checked

SMALL: dict[str, Any] = {"vocab_size": 29, "block_size": 12, "n_layer": 2, "n_head": 3, "n_embd": 24}


def numpy_logits(model, tokens, positions=None, documents=None):
    """Compute GPT-2 head by head, position by position, from the paper's formulas."""
    positions = np.arange(len(tokens)) if positions is None else positions
    documents = np.zeros(len(tokens)) if documents is None else documents
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def attention(x, name):
        n_head, n_kv_head = model.config.n_head, model.config.num_kv_heads
        head_size = x.shape[1] // n_head
        heads = np.split(linear(x, f"{name}.c_attn"), n_head + 2 * n_kv_head, axis=1)
        out = []
        for head in range(n_head):
            shared = n_head + head * n_kv_head // n_head
            q, k, v = heads[head], heads[shared], heads[shared + n_kv_head]
            for t in range(len(x)):
                visible = [s for s in range(t + 1) if documents[s] == documents[t]]
                scores = np.exp(k[visible] @ q[t] / math.sqrt(head_size))
                out.append(scores @ v[visible] / scores.sum())
        return linear(np.reshape(out, (n_head, len(x), -1)).swapaxes(0, 1).reshape(len(x), -1), f"{name}.c_proj")

    def mlp(x, name):
        x = linear(x, f"{name}.c_fc")
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return linear(x, f"{name}.c_proj")

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][positions]
    for layer in range(model.config.n_layer):
        block = f"transformer.h.{layer}"
        x = x + attention(norm(x, f"{block}.ln_1"), f"{block}.attn")
        x = x + mlp(norm(x, f"{block}.ln_2"), f"{block}.mlp")
    return norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seq", [1, 7, 12])
def test_forward_agrees_with_numpy(bias, seq):
    model = randomized(ModelConfig(**SMALL, bias=bias))
    tokens, targets = random_tokens(2, seq), random_tokens(2, seq, seed=1)
    logits, loss = model(tokens, targets)
    expected = np.stack([numpy_logits(model, row) for row in tokens.numpy()])
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    log_probs = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_probs, targets.numpy()[..., None], -1).mean()
    assert loss.item() == pytest.approx(nats, rel=1e-9)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_grouped_heads_agree_with_numpy(n_kv_head):
    model = randomized(ModelConfig(**(SMALL | {"n_head": 4}), n_kv_head=n_kv_head))
    assert model.transformer.h[0].attn.c_attn.weight.shape == (24 + 2 * 6 * n_kv_head, 24)
    tokens = random_tokens(2, 7)
    expected = np.stack([numpy_logits(model, row) for row in tokens.numpy()])
    np.testing.assert_allclose(model(tokens)[0].detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_documents_and_positions_agree_with_numpy():
    model, tokens = randomized(ModelConfig(**SMALL)), random_tokens(2, 7)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 3]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 0]])
    rows = zip(tokens.numpy(), positions.numpy(), documents.numpy(), strict=True)
    expected = np.stack([numpy_logits(model, *row) for row in rows])
    actual, _ = model(tokens, positions=positions, documents=documents)
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_targets_that_do_not_count():
    logits, targets = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(7, (2, 5))
    targets[0, 2:4] = -100
    log_probs = logits.log_softmax(-1)[targets != -100]  # (tokens with a target, vocab_size)
    at_target = log_probs.gather(-1, targets[targets != -100][:, None]).mean()
    assert CrossEntropy()(logits, targets).item() == pytest.approx(-at_target.item())


def test_later_tokens_leave_earlier_logits_as_they_are():
    model = Decoder(ModelConfig(**SMALL))
    tokens = random_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 29
    before, after = model(tokens)[0][0], model(changed)[0][0]
    assert torch.equal(before[:7], after[:7])
    assert (before[7:] != after[7:]).any(dim=1).all()


def test_a_fresh_model_guesses_uniformly():
    _, loss = Decoder(ModelConfig(**SMALL))(random_tokens(8, 12), random_tokens(8, 12, seed=1))
    assert loss.item() == pytest.approx(math.log(29), abs=0.05)


def test_the_loss_is_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = Decoder(ModelConfig(**SMALL))(random_tokens(2, 12), random_tokens(2, 12, seed=1))
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), random_tokens(2, 12, 1).flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_dropout_acts_in_training_only():
    tokens = random_tokens(2, 12)
    model, without = Decoder(ModelConfig(**SMALL, dropout=0.5)), Decoder(ModelConfig(**SMALL))
    assert torch.equal(model.eval()(tokens)[0], without(tokens)[0])
    model.train()
    assert not torch.equal(model(tokens)[0], model(tokens)[0])


def test_initial_weights_depend_on_the_seed_alone():
    def weights(seed):
        return torch.cat([p.flatten() for p in Decoder(ModelConfig(**SMALL), seed).parameters()])

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(weights(1), first)
    assert not torch.equal(weights(2), first)


def test_initial_weights_follow_gpt2():
    model = Decoder(ModelConfig(n_layer=8, bias=True))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif ".ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02), name
            assert p.mean().item() == pytest.approx(0, abs=0.05 * std), name


def test_names_are_those_of_hugging_face():
    per_block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    expected = [f"transformer.{name}.weight" for name in ("wte", "wpe")]
    expected += [f"transformer.h.{layer}.{name}.weight" for layer in range(2) for name in per_block]
    model = Decoder(ModelConfig(**SMALL))
    assert [name for name, _ in model.named_parameters()] == [*expected, "transformer.ln_f.weight"]
    assert model.lm_head.weight is model.transformer.wte.weight


def test_flops_of_gpt2_small():
    config = ModelConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True)
    with torch.device("meta"):
        model = Decoder(config)
    assert model.num_params() == 123_653_376  # 124,439,808 less 1024 x 768 positions
    assert flops_per_token(config, model.num_params()) == 6 * 123_653_376 + 12 * 12 * 768 * 1024
    assert flops_per_token(config, model.num_params(), is_frozen=True) == 4 * 123_653_376 + 12 * 12 * 768 * 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 100, "n_head": 6}, "n_embd=100 is not divisible by n_head=6: use 96 or 102"),
        ({"n_embd": 4, "n_head": 6}, "n_embd=4 is not divisible by n_head=6: use 6"),
        (
            {"n_embd": 24, "n_head": 6, "n_kv_head": 4},
            "n_head=6 is not divisible by n_kv_head=4: use one of 1, 2, 3, 6",
        ),
        ({"n_kv_head": 0}, "n_kv_head=0 must be from 1 to 65536"),
        ({"n_layer": 0}, "n_layer=0 must be from 1 to 1000"),
        ({"vocab_size": -1}, "vocab_size=-1 must be from 1 to 1048576 tokens"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checked(ModelConfig(**fields))


@pytest.mark.parametrize("seq", [0, 13])
def test_a_sequence_must_fit(seq):
    with pytest.raises(ValueError, match=f"a sequence of {seq} tokens: pass 1 to block_size=12"):
        Decoder(ModelConfig(**SMALL))(random_tokens(1, seq))
