"""Updates of weights, compared with torch's optimizers."""

import math

import pytest
import torch

from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.plain_muon import in_full_precision
from parallelism.numerics.master_weights import MasterWeights
from training.optim.muon import Muon, orthogonal
from training.optim.optimizer import AdamW, Together, adamw, decay_groups
from training.optim.sgd import SGD


def test_matrices_decay_and_vectors_do_not():
    model = Decoder(ModelConfig(vocab_size=5, block_size=4, n_layer=1, n_head=1, n_embd=4, bias=True))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adamw(model.parameters(), lr=0.5, weight_decay=0.1).step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * (0.95 if p.dim() == 2 else 1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs_bit_for_bit(dtype, device):
    """Parameters at any address and states are equal; with a changing rate, a late first gradient, and no gradient."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator, dtype=dtype)
    ours, theirs = (pieces_of(values.to(device, copy=True)) for _ in range(2))
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
    assert not torch.equal(ours[1], pieces_of(values.to(device))[1])


def muon_and_adamw(params):
    vector, matrix = params
    return Together(Muon({"matrix": matrix}, lr=0.1), adamw([vector], lr=0.1, weight_decay=0.1))


MAKE = {
    "adamw": lambda params: adamw(params, lr=0.1, weight_decay=0.1),
    "sgd": lambda params: SGD(decay_groups(params, 0.1), lr=0.1),
    "muon": muon_and_adamw,
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_step_that_is_skipped_leaves_all_as_it_is(make):
    """Parameters and states are unchanged, and the next step is as if the skipped one had not happened."""
    torch.manual_seed(0)
    params = [[torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3, 2))] for _ in range(2)]
    ours, theirs = map(make, params)
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
    assert not torch.equal(params[0][1], torch.ones(3, 2))
    assert {state["step"].item() for state in ours.state.values() if "step" in state} <= {2}


@pytest.mark.parametrize("momentum", [0.8, 0.0])
def test_sgd_is_torchs_bit_for_bit(momentum):
    params = [[torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 70)] for _ in range(2)]
    ours = SGD(decay_groups(params[0], 0.1), lr=0.1, momentum=momentum)
    theirs = torch.optim.SGD(decay_groups(params[1], 0.1), lr=0.1, momentum=momentum, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for pair in zip(*params, strict=True):
            gradient = torch.randn(pair[0].shape, generator=generator)
            for param in pair:
                param.grad = gradient.clone()
        ours.step()
        theirs.step()
        for a, b in zip(*params, strict=True):
            assert torch.equal(a, b)
            if momentum:
                assert torch.equal(ours.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"])


SHAPES = {"square": (8, 8), "wide": (4, 12), "tall": (20, 6), "column": (5, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_muon_is_torchs(dtype):
    """The exception is torch's rounding to bfloat16, which the reference disables."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
    ours, theirs = ({name: torch.nn.Parameter(x.clone()) for name, x in values.items()} for _ in range(2))
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs.values(), **settings)
    for _ in range(3):
        for name, shape in SHAPES.items():
            ours[name].grad = torch.randn(shape, generator=generator, dtype=dtype)
            theirs[name].grad = ours[name].grad.clone()
        optimizers[0].step()
        with in_full_precision():
            optimizers[1].step()
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        for name, param in ours.items():
            torch.testing.assert_close(param, theirs[name], rtol=0, atol=tolerance)
            states = optimizers[0].state[param], optimizers[1].state[theirs[name]]
            torch.testing.assert_close(*(state["momentum_buffer"] for state in states), rtol=0, atol=tolerance)


def test_muon_updates_what_is_stacked_one_by_one():
    """Stacks are rows of several matrices, as queries, keys and values, and experts, whose matrices are (in, out)."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (8, 6), "experts": (3, 4, 8)}
    ours = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for param in ours.values():
        param.grad = torch.randn(param.shape, generator=generator)
    parts = [*ours["rows"].grad.split([4, 2, 2]), *(expert.T for expert in ours["experts"].grad)]
    theirs = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
    for param, part in zip(theirs, parts, strict=True):
        param.grad = part.clone()
    Muon(ours, lr=0.1, rows={"rows": (2, 1, 1)}).step()
    with in_full_precision():
        torch.optim.Muon(theirs, lr=0.1).step()
    torch.testing.assert_close(ours["rows"].detach(), torch.cat([*theirs[:3]]).detach())
    torch.testing.assert_close(ours["experts"].detach(), torch.stack([param.T for param in theirs[3:]]).detach())


@pytest.mark.parametrize("shape", [(6, 6), (3, 40), (40, 3), (2, 5, 9)])
def test_an_orthogonal_matrix_has_the_same_directions(shape):
    """The singular vectors are the same, and the singular values near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert (s > 0.02 * s.max()).all()
    inside = u.mT @ orthogonal(matrix) @ vh.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert ((values > 0.65) & (values < 1.25)).all()
    torch.testing.assert_close(inside, torch.diag_embed(values), rtol=0, atol=1e-10)


def pieces_of(flat):
    """Return parameters of odd lengths at unaligned addresses."""
    slices = (slice(0, 3), slice(5, 117), slice(117, 118), slice(121, 250), slice(251, 400))
    return [torch.nn.Parameter(flat[span]) for span in slices]


def groups_of(params):
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_masters_are_updated_as_float32_parameters_are(grad_dtype):
    """Master weights are equal bit for bit, and the 16-bit parameters are their rounded values."""
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
