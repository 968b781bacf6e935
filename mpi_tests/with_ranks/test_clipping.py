"""The norm of all gradients, for any distribution over ranks: equal to that on one rank, over stages bit for bit."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallelism.buffers.arena import Arena
from parallelism.mesh import Mesh, Within
from parallelism.numerics.clipping import BLOCK, GradientClip
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


class Norms(TorchDispatchMode):
    """Counts the norms of tensors that torch computes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::linalg_vector_norm"
        return func(*args, **(kwargs or {}))


def clip_of_arena(comm, shapes, dtype):
    """Return the clip of parameters in an arena, with gradients over many magnitudes, and these."""
    model = nn.ParameterList([torch.zeros(shape) for shape in shapes])
    arena = Arena(model, comm, dtype=dtype)
    arena.gradients.copy_(torch.randn(len(arena.gradients)) * 10 ** torch.randn(len(arena.gradients)))
    masters, mesh = MasterWeights.of(model, arena), Mesh(comm)
    masters.take_gradients()
    return GradientClip(1.0, model, masters, mesh), [piece.grad.clone() for piece in masters.pieces.values()]


def sum_of_squares(gradient):
    """Return the sum over blocks, one after the other, of the squared norm of each."""
    norms = [torch.linalg.vector_norm(block, dim=0) for block in gradient.reshape(-1).split(BLOCK)]
    return torch.stack(norms).double().square_().cumsum(0)[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shapes", "count"),
    [([(3, BLOCK)] * 2, 1), ([(5, 2 * BLOCK), (BLOCK,)] * 20, 1), ([(61, 30), (BLOCK,), (30,), (4, 30)], 5)],
)
@pytest.mark.sizes(1)
def test_gradients_that_follow_each_other_are_read_in_one_pass(comm, dtype, shapes, count):
    """Lengths that are no multiple of a block end a pass, and their last block is one of its own."""
    clip, gradients = clip_of_arena(comm, shapes, dtype)
    with Norms() as norms:
        clip()
    assert norms.count == count
    assert clip.of_each.tolist() == [sum_of_squares(gradient).item() for gradient in gradients]


@pytest.mark.sizes(1)
def test_the_same_blocks_say_which_gradients_are_finite(comm):
    clip, _ = clip_of_arena(comm, [(4, BLOCK)] * 3, torch.float32)
    for value in (math.nan, math.inf, -math.inf):
        clip.masters.pieces["1"].grad.fill_(0)[2, 3] = value
        clip()
        names, are_finite = clip.take(torch.device("cpu"))
        assert (names, are_finite.tolist()) == (["2", "1", "0"], [True, False, True])
