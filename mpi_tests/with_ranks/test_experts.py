"""Expert parallelism: dispatch, combine and every gradient, compared with the plain mixture."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collectives import Communicator
from models.config import ModelConfig
from models.mixture import LocalRouting, routers
from mpi_tests.helpers.models import close, each_mode, random_tokens, randomized
from parallelism import ExpertExchange, ExpertParallel, Mesh, Within, parallelize
from parallelism.placement import shards_of
from training.parallel.decoder import plan_of

NODES = {1: "1x1", 2: "2x1", 4: "2x2", 5: "2x3", 8: "4x2"}  # by size; with 5 ranks, the last node has fewer
WIDTH, CHOICES, PER_RANK = 6, 3, 4
CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=2, n_head=4, n_embd=16, n_hidden=24, bias=True, num_experts=8)


@pytest.fixture(params=["one host", "several"])
def ranks(mpi_comm, monkeypatch, request):
    """Yield a communicator whose ranks are on one host, or simulate several hosts."""
    if request.param == "several":
        monkeypatch.setenv("COLLECTIVES_FAKE_NODES", NODES[mpi_comm.size])
    comm = Communicator(mpi_comm)
    yield comm
    comm.free()


@pytest.mark.sizes(1, 2, 4, 5)
def test_peers_are_what_the_ranks_of_the_node_have_written(ranks):
    x = ranks.empty((2, 3), "float64")
    x[:] = ranks.rank
    ranks.barrier()
    node = next(node for node in ranks.topology.nodes if ranks.rank in node)
    assert [peer.tolist() for peer in ranks.peers(x)] == [[float(rank)] * 6 for rank in node]
    assert [peer.tolist() for peer in ranks.peers(x[1:])] == [[float(rank)] * 3 for rank in node]
    with pytest.raises(ValueError, match="allocate it with their `empty`"):
        ranks.peers(np.zeros(3))
    ranks.barrier()


def routed(size, step, lengths):
    """Return all ranks' tokens and choices of a step; with each step, more tokens choose the first experts."""
    generator = torch.Generator().manual_seed(step)
    num_experts = PER_RANK * size
    scores = torch.rand((size, max(lengths), num_experts), generator=generator)
    scores[..., :PER_RANK] += 0.3 * step
    experts = scores.topk(CHOICES).indices
    experts[torch.rand(experts.shape, generator=generator) < 0.1] = -1
    x = torch.randn((size, max(lengths), WIDTH), generator=generator, dtype=torch.float64)
    factors = torch.randn((num_experts, WIDTH), generator=generator, dtype=torch.float64)
    pick = [slice(length) for length in lengths]
    return [experts[r, p] for r, p in enumerate(pick)], [x[r, p] for r, p in enumerate(pick)], factors


def worked(routing, x, factors):
    """Apply experts to tokens; an expert scales rows by factors of its own and by the number of the choice."""
    rows = routing.dispatch(x)
    numbers = torch.arange(1.0, CHOICES + 1, dtype=x.dtype).repeat(len(x), 1)
    scales = routing.dispatch(numbers).gather(1, routing.choices[:, None])
    each = [factor.expand(count, -1) for factor, count in zip(factors, routing.counts, strict=True)]
    return routing.combine(rows.sin() * scales * torch.cat(each))


@pytest.mark.sizes(1, 2, 5, proof=(4, 8))
def test_rows_go_to_their_experts_and_back_as_on_one_rank(ranks):
    exchange, size = ExpertExchange(ranks), ranks.size
    for step in range(5):
        lengths = [20 + (step * r) % 7 for r in range(size)]
        experts, xs, factors = routed(size, step, lengths)
        x, whole = xs[ranks.rank].clone().requires_grad_(), torch.cat(xs).requires_grad_()
        own = factors.chunk(size)[ranks.rank]
        y = worked(exchange.route(experts[ranks.rank], len(factors)), x, own)
        expected = worked(LocalRouting(torch.cat(experts), len(factors)), whole, factors)
        close(y, expected.split(lengths)[ranks.rank])
        y.square().sum().backward()
        expected.square().sum().backward()
        close(x.grad, whole.grad.split(lengths)[ranks.rank])
    exchange.free()


@pytest.mark.sizes(4)
@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_rows_of_16_bits_are_summed_in_float32(ranks, dtype, large):
    exchange, num_tokens = ExpertExchange(ranks), 12
    experts = torch.arange(16).repeat(num_tokens, 1)  # each token chooses all 16
    routing = exchange.route(experts, 16)
    rows = torch.ones(sum(routing.counts), 3, dtype=dtype)
    if ranks.rank == 0:
        rows[: routing.counts[0]] = large  # adding 1 to it has no effect in 16 bits
    actual = routing.combine(rows)
    assert actual.dtype == dtype
    assert ((actual.double() - (large + 15)).abs() <= 2).all()  # rounded once on each host
    exchange.free()


@pytest.mark.sizes(8)
def test_bytes_between_hosts_are_one_row_for_each_token_and_host(mpi_comm, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "4x2")
    comm = Communicator(mpi_comm)
    exchange = ExpertExchange(comm)
    sent = []
    send = comm.send
    monkeypatch.setattr(comm, "send", lambda x, dest, **more: (sent.append((x, dest)), send(x, dest, **more))[1])
    num_tokens, width = 40, 24
    every = torch.rand((8, num_tokens, 32), generator=torch.Generator().manual_seed(0)).topk(8).indices
    routing = exchange.route(every[comm.rank], 32)
    x = torch.randn(num_tokens, width).requires_grad_()
    hosts = [{int(expert) // 8 for expert in token} for token in every[comm.rank]]
    own = comm.rank // 2
    minimum = sum(len(token - {own}) for token in hosts) * width * x.element_size()
    rows = routing.dispatch(x)
    assert sum(x.nbytes for x, _ in sent) == minimum
    assert all(dest // 2 != own for _, dest in sent)
    sent.clear()
    y = routing.combine(rows * 2)
    theirs = comm.mpi.allgather([len([1 for token in hosts if host in token]) for host in range(4)])
    back = sum(theirs[r][own] for r in range(comm.rank % 2, 8, 2) if r != comm.rank) * width * x.element_size()
    assert sum(x.nbytes for x, _ in sent) == back
    sent.clear()
    y.sum().backward()
    assert sum(x.nbytes for x, _ in sent) == minimum + back
    np.testing.assert_allclose(x.grad.numpy(), 16.0)
    exchange.free()
    comm.free()


def local(parameter, whole, mesh):
    for axis, shard in shards_of(parameter).items():
        whole = shard.local(whole, mesh.coords[axis], mesh.shape[axis])
    return whole


@pytest.mark.sizes(2, 4, proof=(8,))
@each_mode
@pytest.mark.parametrize(("changes", "tp"), [
    ({}, 1), ({"experts_per_token": 1}, 1), ({"expert_capacity": 0.6, "balance_loss": 0.2}, 1), ({}, 2),
    ({"expert_capacity": 0.6, "balance_loss": 0.2}, 2),
], ids=str)  # fmt: skip
def test_loss_and_every_gradient_are_the_plain_mixtures(new_comm, sequence, changes, tp):
    config = ModelConfig(**{**vars(CONFIG), **changes})
    mesh = Mesh(new_comm, tp=tp, **({"ep": Within("dp", 2)} if new_comm.size // tp > 1 else {}))
    plain, split = randomized(config), randomized(config)
    exchange = ExpertExchange(mesh.ep) if mesh.ep.size > 1 else None
    plan = plan_of(config)
    parallelize(split, plan, mesh.tp, sequence=sequence, ep=exchange)
    dp = mesh.dp
    tokens, targets = random_tokens(2 * dp.size, 8), random_tokens(2 * dp.size, 8, seed=1)
    _, expected = plain(tokens, targets)
    _, loss = split(tokens.chunk(dp.size)[dp.rank], targets.chunk(dp.size)[dp.rank])
    expected.backward()
    loss.backward()
    close(dp.all_reduce(loss.detach().clone(), op="avg"), expected)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert dict(split.named_parameters()).keys() == gradients.keys()
    for name, p in split.named_parameters():
        is_expert = mesh.ep.size > 1 and ".mlp.c_" in name
        assert ("ep" in shards_of(p)) == is_expert
        replicas = mesh.along("dp/ep") if is_expert else dp
        close(replicas.all_reduce(p.grad.clone(), op="avg"), local(p, gradients[name], mesh))
    for (_, ours), (_, theirs) in zip(routers(split), routers(plain), strict=True):
        assert torch.equal(dp.all_reduce(ours.loads.clone()), theirs.loads)
    if exchange:
        exchange.free()
    mesh.free()


class Experts(nn.Module):
    def __init__(self, generator, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 4)


class GatedMixture(nn.Module):
    """A user's mixture with gated experts, the best of which each token chooses, of no class of this project."""

    def __init__(self, num_experts=4, width=6, hidden=8):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.gate = (Experts(generator, num_experts, width, hidden) for _ in range(2))
        self.down = Experts(generator, num_experts, hidden, width)
        self.scores, self.dropout = nn.Linear(width, num_experts, bias=False, dtype=torch.float64), nn.Identity()
        nn.init.normal_(self.scores.weight, generator=generator)
        self.route, self.num_experts = LocalRouting, num_experts

    def router(self, x):
        weights, experts = self.scores(x).softmax(-1).max(-1, keepdim=True)
        return experts, weights

    def mix(self, x, experts, weights):
        routing = self.route(experts.flatten(0, 1), self.num_experts)
        rows, factors = routing.dispatch(x.flatten(0, 1)), routing.dispatch(weights.flatten(0, 1))
        layers = zip(rows.split(routing.counts), self.gate.weight, self.up.weight, self.down.weight, strict=True)
        y = torch.cat([(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in layers])
        return routing.combine(y * factors).view(x.shape)

    def forward(self, x):
        return self.dropout(self.mix(x, *self.router(x)))


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_mixture_of_a_user_s_own_is_divided(new_comm, tp):
    mesh = Mesh(new_comm, tp=tp, **({"ep": Within("dp", 2)} if new_comm.size > tp else {}))
    exchange = ExpertExchange(mesh.ep) if mesh.ep.size > 1 else None
    plain, split = (nn.Sequential(GatedMixture()) for _ in range(2))
    parallelize(split, {"0": ExpertParallel(columns=("gate", "up"), rows=("down",))}, mesh.tp, ep=exchange)
    whole = torch.randn(mesh.dp.size, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = slice(mesh.dp.rank, mesh.dp.rank + 1)  # a sequence on each rank of dp
    expected, y = plain(whole), split(whole[own])
    close(y, expected[own])
    expected.square().mean().backward()
    y.square().mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in split.named_parameters():
        replicas = mesh.along("dp/ep") if "ep" in shards_of(p) else mesh.dp
        close(replicas.all_reduce(p.grad.clone(), op="avg"), local(p, gradients[name], mesh))
    if exchange:
        exchange.free()
    mesh.free()
