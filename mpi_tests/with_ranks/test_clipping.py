"""The norm of all gradients, for any distribution over ranks: equal to that on one rank, over stages bit for bit."""

import math

import pytest
import torch
from torch import nn

from parallelism.mesh import Mesh, Within
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.master_weights import MasterWeights
from parallelism.placement import Shard, place

SHAPES = {"embedding": (61, 30), "norm": (30,), "projection": (30, 120), "experts": (4, 30, 16), "head": (61, 30)}


def gradients(names=tuple(SHAPES)):
    """Draw the same gradients on every rank, over many magnitudes."""
    by_name = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(seed)
        by_name[name] = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    return {name: by_name[name] for name in names}


def norm_of(grads, mesh, placements=None, limit=math.inf, **options):
    """Return the norm of parameters with these gradients, and the parameters."""
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()})
    for name, p in model.items():
        p.grad = grads[name].clone()
        place(p, **(placements or {}).get(name, {}))
    masters = MasterWeights(dict(model.named_parameters()))
    masters.take_gradients()
    return GradientClip(limit, model, masters, mesh, **options)().item(), model


@pytest.mark.sizes(1, 2, 3)
def test_what_all_ranks_have_counts_once(comm):
    mesh, grads = Mesh(comm), gradients()
    want = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
    norm, model = norm_of(grads, mesh, limit=2.0)
    assert norm == pytest.approx(want, rel=1e-6)
    for name, p in model.items():
        torch.testing.assert_close(p.grad, grads[name] * (2.0 / want), rtol=1e-5, atol=0)
    mesh.free()


@pytest.mark.sizes(8)
def test_shards_along_axes_of_any_names_are_counted_by_their_ranks(comm):
    mesh = Mesh(comm, dp=2, rows=2, columns=2, ep=Within("dp", 2))
    placements = {
        "embedding": {"rows": Shard(0, 61, padded=True)},
        "projection": {"columns": Shard(1, 120, pieces=(2, 1, 1))},
        "experts": {"ep": Shard(0, 4), "columns": Shard(2, 16)},
    }
    grads = gradients()
    want = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
    for name, placement in placements.items():
        for axis, shard in placement.items():
            grads[name] = shard.local(grads[name], mesh.coords[axis], mesh.shape[axis]).contiguous()
    assert norm_of(grads, mesh, placements)[0] == pytest.approx(want, rel=1e-6)
    mesh.free()


@pytest.mark.sizes(2, 4)
def test_stages_have_the_norm_of_one_bit_for_bit(comm):
    """The last stage's head is tied to the first one's embedding, and counts once."""
    alone, mesh = Mesh(comm), Mesh(comm, pp=comm.size)
    names = tuple(SHAPES)[:-1]
    want, _ = norm_of(gradients(names), alone)
    own = gradients(names[comm.rank :: comm.size])
    if comm.rank == comm.size - 1:
        own["head"] = gradients()["embedding"]
    assert norm_of(own, mesh, tied=[("embedding", "head")])[0] == want
    alone.free()
    mesh.free()


@pytest.mark.sizes(1)
def test_the_norm_is_that_in_float64_whatever_the_magnitudes(comm):
    """Squares of elements that are 2**-25 of the largest, and less, vanish."""
    mesh = Mesh(comm)
    for magnitude in (1e-30, 1e-3, 1.0, 1e15):
        values = [gradient * magnitude for gradient in gradients().values()]
        want = math.sqrt(sum(value.double().square().sum().item() for value in values))
        grads = {f"p{number}": value for number, value in enumerate(values)}
        assert norm_of(grads, mesh)[0] == pytest.approx(want, rel=1e-7)
    assert norm_of({"p": torch.zeros(5)}, mesh)[0] == 0
    assert norm_of({"p": torch.tensor([1.0, 2**-30])}, mesh)[0] == 1
    mesh.free()


@pytest.mark.sizes(1, 2, 3, 8)
def test_ranks_with_pieces_have_the_norm_of_one_bit_for_bit(comm):
    """Pieces of ZeRO, of odd lengths, and all ranks' shares of what they all hold."""
    mesh, grads, alone = Mesh(comm), gradients(), Mesh(comm.split(comm.rank))
    want, _ = norm_of(grads, alone)
    assert norm_of(grads, mesh)[0] == want
    names, lengths = [*grads], {name: gradient.numel() for name, gradient in grads.items()}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in grads.items()})
    spans = {
        name: slice(lengths[name] * comm.rank // comm.size, lengths[name] * (comm.rank + 1) // comm.size)
        for name in names
    }
    pieces = {name: nn.Parameter(torch.zeros(spans[name].stop - spans[name].start)) for name in names}
    for name, piece in pieces.items():
        piece.grad = grads[name].reshape(-1)[spans[name]].clone()
    masters = MasterWeights(pieces, spans=spans)
    masters.take_gradients()
    assert GradientClip(math.inf, model, masters, mesh)().item() == want
    alone.comm.free()
    mesh.free()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.sizes(1, 2)
def test_a_number_that_is_not_finite_makes_the_norm_so_and_its_parameter_is_named(comm, value):
    mesh, grads = Mesh(comm), gradients(("embedding", "norm", "projection"))
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in grads.items()})
    grads["norm"][7] = value
    for name, p in model.items():
        p.grad = grads[name]
    masters = MasterWeights(dict(model.named_parameters()))
    masters.take_gradients()
    clip = GradientClip(1.0, model, masters, mesh)
    norm = clip().item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    names, are_finite = clip.take(torch.device("cpu"))
    assert names == ["projection", "norm", "embedding"]
    if comm.size == 1:
        assert are_finite.tolist() == [True, False, True]
    mesh.free()
