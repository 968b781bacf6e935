"""The plain mixture of experts, compared with a loop over tokens."""

import math

import pytest
import torch
from torch.nn import functional as F

from models.config import ModelConfig
from models.decoder import Decoder, flops_per_token
from models.mixture import BIAS_STEP, DROPPED, Mixture, balance, routers
from training.settings.derived import checked

SHAPE = {"vocab_size": 29, "block_size": 8, "n_layer": 2, "n_head": 2, "n_embd": 16}
CONFIG = ModelConfig(**SHAPE, num_experts=6, experts_per_token=2)


def mixture_of(config=CONFIG, seed=0, bias=False):
    """Make a float64 mixture with weights large enough for experts to differ."""
    generator = torch.Generator().manual_seed(seed)
    mixture = Mixture(config).double()
    for p in mixture.parameters():
        torch.nn.init.normal_(p, std=0.5, generator=generator)
    if bias:
        torch.nn.init.normal_(mixture.router.bias, std=0.5, generator=generator)
    return mixture


def tokens_of(batch=3, seq=8, seed=1):
    return torch.randn(batch, seq, CONFIG.n_embd, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_token(mixture, config, x):
    """Compute a mixture token by token from the formulas; return the result and the sequences' balance loss."""
    router, rows, losses = mixture.router, [], []
    most = math.inf
    if config.expert_capacity is not None:
        most = math.ceil(config.expert_capacity * x.shape[1] * config.experts_per_token / config.num_experts)
    for sequence in x:
        load, choices, preferred = [0] * config.num_experts, [0] * config.num_experts, 0
        for token in sequence:
            scores = router.weight @ token
            scores = scores.softmax(0) if config.router == "softmax" else scores.sigmoid()
            biased = [s + b for s, b in zip(scores.tolist(), router.bias.tolist(), strict=True)]
            best = sorted(range(config.num_experts), key=lambda e: -biased[e])[: config.experts_per_token]
            is_constant = config.router == "sigmoid" and len(best) == 1  # if it was normalized
            total = 1 if is_constant or not config.normalizes_choices else sum(scores[e] for e in best)
            row = 0 * token
            for e in best:
                choices[e] += 1
                load[e] += 1
                if load[e] <= most:
                    hidden = token @ mixture.c_fc.weight[e]
                    if config.is_gated:
                        gate, up = hidden.chunk(2)
                        hidden = gate * torch.sigmoid(gate) * up
                    else:
                        hidden = F.gelu(hidden, approximate="tanh")
                    row = row + scores[e] / total * (hidden @ mixture.c_proj.weight[e])
            rows.append(row)
            preferred = preferred + scores / scores.sum() / len(sequence)
        fractions = torch.tensor(choices) * config.num_experts / (config.experts_per_token * len(sequence))
        losses.append((fractions * preferred).sum())
    return torch.stack(rows).view(x.shape), config.balance_loss * sum(losses) / len(losses)


@pytest.mark.parametrize("changes", [
    {}, {"experts_per_token": 1}, {"experts_per_token": 6}, {"balance_loss": 0.3}, {"expert_capacity": 0.7},
    {"expert_capacity": 0.7, "balance_loss": 0.3, "experts_per_token": 3},
    {"router": "softmax", "is_gated": True, "activation": "silu", "balance_loss": 0.3},
    {"router": "softmax", "normalizes_choices": False, "experts_per_token": 3}, {"normalizes_choices": False},
], ids=str)  # fmt: skip
def test_a_mixture_is_a_sum_over_each_tokens_experts(changes):
    config = ModelConfig(**SHAPE, num_experts=6, **changes)
    ours, theirs = mixture_of(config, bias=True), mixture_of(config, bias=True)
    x, y = tokens_of().requires_grad_(), tokens_of().requires_grad_()
    result, (expected, loss) = ours(x), by_token(theirs, config, y)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(x.shape, dtype=x.dtype)
    (result * weights).sum().backward()
    ((expected * weights).sum() + loss).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-12)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=name)
        assert q.grad.any(), name


def test_a_scaled_loss_scales_the_balance_loss_too():
    config = ModelConfig(**SHAPE, num_experts=6, balance_loss=0.3)
    gradients = []
    for scale in (1.0, 8.0):
        mixture = mixture_of(config)
        mixture.router.loss_scale = scale
        (mixture(tokens_of()).sum() * scale).backward()
        gradients.append(mixture.router.weight.grad / scale)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_beyond_the_capacity_the_last_tokens_of_each_sequence_are_dropped_in_training_alone():
    config = ModelConfig(**SHAPE, num_experts=6, experts_per_token=1, expert_capacity=1.5)
    router = mixture_of(config).router
    with torch.no_grad():
        router.bias[3] = 9.0
    experts, _ = router(tokens_of(batch=2, seq=8))
    assert experts[..., 0].tolist() == [[3, 3, *[DROPPED] * 6]] * 2  # capacity of 1.5 x 8 / 6 tokens
    assert (router.eval()(tokens_of(batch=2, seq=8))[0] == 3).all()


def test_the_bias_follows_the_sign_of_the_error_of_the_load():
    gpt = Decoder(CONFIG)
    tokens = torch.randint(29, (4, 8), generator=torch.Generator().manual_seed(0))
    for part in tokens.chunk(2):
        gpt(part, part)[1].backward()
    loads = {name: router.loads.clone() for name, router in routers(gpt)}
    assert len(loads) == CONFIG.n_layer
    with torch.no_grad():
        gpt(tokens)  # no effect on the loss
    balance([router for _, router in routers(gpt)])
    for name, router in routers(gpt):
        assert loads[name].sum() == tokens.numel() * 2
        signs = [(load < 32 * 2 / 6) - (load > 32 * 2 / 6) for load in loads[name].tolist()]
        torch.testing.assert_close(router.bias, BIAS_STEP * torch.tensor(signs, dtype=torch.float32))
        assert not router.loads.any()


def test_a_router_by_softmax_has_no_bias():
    model = Decoder(ModelConfig(**SHAPE, num_experts=6, router="softmax"))
    tokens = torch.randint(29, (4, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens)[1].backward()
    balance([router for _, router in routers(model)])
    for _, router in routers(model):
        assert not router.bias.any()
        assert not router.loads.any()


def test_the_bias_evens_out_a_router_that_prefers_one_expert():
    config = ModelConfig(**SHAPE, num_experts=4, experts_per_token=1)
    mixture, x = mixture_of(config), tokens_of(batch=64, seq=8)
    with torch.no_grad():
        mixture.router.weight.mul_(0.02)
        mixture.router.bias[2] = 0.2
    heaviest = []
    for _ in range(300):
        mixture(x).sum().backward()
        heaviest.append(float(mixture.router.loads.max() / mixture.router.loads.mean()))
        balance([mixture.router])
    assert heaviest[0] > 3.9
    assert max(heaviest[-10:]) < 1.3


def test_flops_count_the_experts_chosen():
    gpt = Decoder(CONFIG)
    one = Decoder(ModelConfig(**SHAPE))
    routers_params = 2 * 6 * 16
    num_params = one.num_params() + 2 * 8 * 16**2 + routers_params  # 2 experts for one MLP, in each of 2 blocks
    assert flops_per_token(CONFIG, gpt.num_params()) == flops_per_token(one.config, num_params)


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token=5 is more than num_experts=4: use from 1 to 4"),
    ({"num_experts": 4, "experts_per_token": 0}, "experts_per_token=0 must be from 1 to"),
    ({"num_experts": -1}, "num_experts=-1 must be from 0 to"),
    ({"num_experts": 4, "expert_capacity": 0.0}, "expert_capacity=0.0 must be above 0"),
    ({"num_experts": 4, "balance_loss": -1.0}, "balance_loss=-1.0 must be from 0 to"),
])  # fmt: skip
def test_what_a_mixture_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        checked(ModelConfig(**SHAPE, **changes))
