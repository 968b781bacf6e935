"""How weights are updated: what decays, and the learning rate's course."""

import math

import numpy as np
import pytest
import torch

from models.gpt import GPT, GPTConfig
from models.learning_rate import learning_rate
from models.optimizer import AdamW, adamw
from parallelism.numerics.master_weights import MasterWeights


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4, bias=True))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adamw(model.parameters(), lr=0.5, weight_decay=0.1).step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * (0.95 if p.dim() == 2 else 1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs_bit_for_bit(dtype, device):
    """Parameters, wherever they lie in memory, and states; a rate that changes, a late first gradient, none at all."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(400, generator=generator, dtype=dtype)
    ours, theirs = (pieces_of(drawn.to(device, copy=True)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizers = [
        AdamW(groups_of(ours), **settings),
        torch.optim.AdamW(groups_of(theirs), **settings, fused=True),
    ]
    for step in range(6):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(pair[0].shape, generator=generator, dtype=dtype).to(device)
            for param in pair:
                param.grad = gradient.clone() if number + step > 4 and number > 0 else None
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            states = [optimizer.state[param] for optimizer, param in zip(optimizers, (a, b), strict=True)]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][kind], state) for kind, state in states[1].items())
            assert all(states[0][kind].dtype == state.dtype for kind, state in states[1].items())
    assert [len(optimizers[0].state[param]) for param in ours] == [0, 3, 3, 3, 3]
    assert not torch.equal(ours[1], pieces_of(drawn.to(device))[1])


def test_a_step_that_is_skipped_leaves_all_as_it_is():
    """Parameters and states; then the next step is that of who has never met the one skipped."""
    torch.manual_seed(0)
    params = [[torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3, 2))] for _ in range(2)]
    ours, theirs = (adamw(each, lr=0.1, weight_decay=0.1) for each in params)
    for is_skipped in (True, False, True, False):
        for pair in zip(*params, strict=True):
            gradient = torch.full_like(pair[0], math.nan) if is_skipped else torch.randn(pair[0].shape)
            for param in pair:
                param.grad = gradient.clone()
        ours.step(torch.tensor(float(is_skipped)))
        if not is_skipped:
            theirs.step()
        for a, b in zip(*params, strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(ours.state[a][kind], state) for kind, state in theirs.state[b].items())
    assert [state["step"].item() for state in ours.state.values()] == [2, 2]


def pieces_of(flat):
    """Parameters at odd places, of odd lengths."""
    places = (slice(0, 3), slice(5, 117), slice(117, 118), slice(121, 250), slice(251, 400))
    return [torch.nn.Parameter(flat[place]) for place in places]


def groups_of(params):
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]


@pytest.mark.parametrize(("warmup", "last"), [(10, 100), (0, 7), (5, 5), (1, 2)])
def test_warm_up_is_a_line_and_the_rest_a_cosine_to_a_tenth(warmup, last):
    rates = [learning_rate(i, 2.0, warmup, last) for i in range(1, last + 1)]
    np.testing.assert_allclose(rates[:warmup], [2.0 * i / warmup for i in range(1, warmup + 1)])
    turn = np.arange(1, last - warmup + 1) / max(1, last - warmup)  # of half a turn, 0 to 1
    np.testing.assert_allclose(rates[warmup:], [1.1 + 0.9 * math.cos(math.pi * t) for t in turn])
    assert max(rates) <= 2.0
    assert rates[-1] == pytest.approx(0.2 if warmup < last else 2.0)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_masters_are_updated_as_float32_parameters_are(grad_dtype):
    """Bit for bit; and 16-bit parameters are what these are rounded to."""
    torch.manual_seed(0)
    plain = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in {"a": (6, 5), "b": (7,)}.items()}
    params = {name: torch.nn.Parameter(param.detach().bfloat16()) for name, param in plain.items()}
    masters = MasterWeights(params, {name: param.detach().clone() for name, param in plain.items()})
    optimizers = [adamw(each.values(), lr=0.1, weight_decay=0.1) for each in (plain, masters.pieces)]
    for _ in range(3):
        for name, param in params.items():
            param.wide_grad = torch.randn(param.shape).to(grad_dtype)
            plain[name].grad = param.wide_grad.float() * 0.3
        masters.take_gradients(torch.tensor(0.3))
        for optimizer in optimizers:
            optimizer.step()
        masters.give_parameters()
        for name, param in params.items():
            assert torch.equal(masters.pieces[name], plain[name])
            assert torch.equal(param, plain[name].bfloat16())
            assert masters.pieces[name].grad is None
