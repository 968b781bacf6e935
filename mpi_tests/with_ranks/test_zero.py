"""ZeRO's stages compared with plain data parallelism, step by step, and the memory of each rank."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.helpers.zero_bytes import expected_held_bytes, expected_sent_bytes, held, with_counters
from collectives import Communicator, InputError
from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.models import own_rows
from mpi_tests.helpers.ranks import IS_PROOF
from parallelism import (
    Batch,
    DataParallel,
    GradientClip,
    Mesh,
    PipelineParallel,
    Sharded,
    ShardGroups,
    parallelize,
    recompute,
)
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.master_weights import MasterWeights
from parallelism.numerics.precision import Precision
from parallelism.pipeline.schedule import registry
from training.parallel.decoder import layers_of, plan_of

NUM_STEPS = 50 if IS_PROOF else 8
SAMPLES = 24  # divisible by 1, 2, 3, 4 and 8 ranks
STAGES = (1, 2, 3)
LAYERS = ["blocks.0", "blocks.1", "blocks.2"]
SMALL_BUCKETS = 2e-3  # MiB: several buckets
GPT_CONFIG = ModelConfig(vocab_size=32, block_size=8, n_layer=4, n_head=2, n_embd=16)
FLOAT32, MIXED = Precision(), Precision("bfloat16", master_weights=True, grad_dtype="bfloat16")

each_stage = pytest.mark.parametrize("zero_stage", STAGES)


class Block(nn.Module):
    """A block with parameters that have fewer elements than there are ranks, and with frozen ones."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(10, 33), nn.Linear(33, 10)
        self.gain = nn.Parameter(torch.full((1,), 0.5))
        self.shift = nn.Parameter(torch.randn(3))
        self.wide.bias.requires_grad_(False)

    def forward(self, x):
        return {"x": x + self.gain * self.narrow(self.wide(x).tanh()) + self.shift.sum()}


class Model(nn.Module):
    """A model with parameters used only on request, and a buffer."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Linear(6, 10), nn.Linear(10, 1)
        self.blocks = nn.ModuleList(Block() for _ in LAYERS)
        self.extra = nn.Linear(1, 1)
        self.frozen = nn.Parameter(torch.randn(40), requires_grad=False)
        self.register_buffer("shift", torch.randn(1))

    def forward(self, x, use_extra=True):
        y = self.enter(x.to(self.frozen.dtype)) + self.frozen[:10]
        for block in self.blocks:
            y = block(y)["x"]
        y = self.leave(y) + self.shift.to(y.dtype)
        return (self.extra(y) if use_extra else y).square().mean()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(seed))


def adamw(params):
    params = list(params)
    matrices, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def sgd(params):
    return torch.optim.SGD([{"params": list(params)}], lr=1e-2, momentum=0.9, weight_decay=0.01)


class Run:
    """Training of a model with a ZeRO stage, or without ZeRO (0)."""

    def __init__(
        self,
        comm,
        zero_stage,
        make=adamw,
        group="all",
        model=None,
        layers=LAYERS,
        mesh=None,
        count=False,
        precision=FLOAT32,
        **reduction,
    ):
        self.comm, self.mesh = comm, mesh or Mesh(comm)
        self.plain = model or Model(seed=comm.rank if zero_stage else 0)  # rank 0's parameters are broadcast
        self.whole, self.shard = nullcontext, None
        if zero_stage == 0:
            options = {"bucket_mb": SMALL_BUCKETS, **reduction, **precision.arena_dtypes}
            self.model = DataParallel(self.plain, comm, **options)
            self.masters = self.model.replica.masters
            self.optimizer = make(self.masters.pieces.values())
            return
        ranks, self.counters = ShardGroups.of(comm, group), []
        if count:
            ranks, self.counters = with_counters(ranks)
        options = {"bucket_mb": SMALL_BUCKETS, **reduction, **precision.arena_dtypes}
        self.model = Sharded(self.plain, ranks, make, zero_stage, layers, **options)
        self.zero = self.model.replica
        self.masters, self.whole, self.shard = self.zero.masters, self.zero.whole, ranks.shard

    def step(self, *inputs, clip=None, micro_batches=1, **options):
        """Train a step; return the loss of the rank's samples."""
        self.model.zero_grad()
        total = 0.0
        for number, part in enumerate(zip(*(x.chunk(micro_batches) for x in inputs), strict=True), 1):
            with nullcontext() if number == micro_batches else self.model.no_sync():
                loss = self.model(*part, **options)
                loss = loss[1] if isinstance(loss, tuple) else loss
                (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        self.masters.take_gradients()
        if clip:
            self.norm = GradientClip(clip, self.plain, self.masters, self.mesh)().item()
        self.update()
        return total

    def update(self):
        if self.shard:
            self.zero.update()
        else:
            self.optimizer.step()
            self.masters.give_parameters()

    def train(self, num_steps, **options):
        """Train; return the mean losses of all ranks' samples."""
        losses = [self.step(own_rows(self.comm, batch(seed)), **options) for seed in range(num_steps)]
        return self.comm.all_reduce(np.array(losses), op="avg")

    def parameters(self):
        with self.whole(), self.masters.exact(self.plain, self.shard):
            return {name: p.detach().clone() for name, p in self.plain.named_parameters()}


def close(actual, want, tolerance=1e-6):
    assert actual.keys() == want.keys()
    for name, p in want.items():
        torch.testing.assert_close(actual[name], p, rtol=0, atol=tolerance * float(p.abs().max()), msg=name)


def check_stages(comm, num_steps, make=adamw, stages=STAGES, group="all", dtype=torch.float32, **options):
    plain = Run(comm, 0, make, model=Model(seed=0).to(dtype))
    want = plain.train(num_steps, **options)
    for zero_stage in stages:
        run = Run(comm, zero_stage, make, group, model=Model(seed=comm.rank).to(dtype))
        np.testing.assert_allclose(run.train(num_steps, **options), want, rtol=1e-6)
        close(run.parameters(), plain.parameters())


def equal(actual, want):
    assert actual.keys() == want.keys()
    assert [name for name in want if not torch.equal(actual[name], want[name])] == []


@pytest.mark.sizes(1, 4, proof=(2, 3, 8))
def test_steps_are_those_of_plain_data_parallelism(comm):
    check_stages(comm, NUM_STEPS, clip=0.5)


@pytest.mark.sizes(2, 3)
def test_sgd_with_momentum(comm):
    check_stages(comm, NUM_STEPS, sgd, clip=0.5)


def check_bits(comm, num_steps, precision=FLOAT32):
    plain = Run(comm, 0, reproducible=True, precision=precision)
    want = plain.train(num_steps)
    for zero_stage in STAGES:
        run = Run(comm, zero_stage, reproducible=True, precision=precision)
        assert run.train(num_steps).tolist() == want.tolist()
        equal(run.parameters(), plain.parameters())
        with run.whole():
            equal(dict(run.plain.named_parameters()), dict(plain.plain.named_parameters()))


@pytest.mark.sizes(3, proof=(1, 2, 4, 8))
def test_the_same_order_of_sums_gives_the_same_bits(comm):
    check_bits(comm, NUM_STEPS)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.sizes(3, proof=(1, 8))
def test_master_weights_are_those_of_plain_data_parallelism(comm, dtype, grad_dtype):
    """Master weights start as rank 0's weights before rounding; frozen parameters are rounded and have none."""
    check_bits(comm, 6, Precision(dtype, master_weights=True, grad_dtype=grad_dtype))


@pytest.mark.sizes(1, 2, 3)
def test_micro_batches_add_up(comm):
    check_stages(comm, 5, micro_batches=4, clip=0.5, dtype=torch.float64)


@pytest.mark.sizes(6, proof=(4, 8))
def test_groups_share_and_replicate_across(comm):
    """Two groups of three ranks."""
    check_stages(comm, 4, group=comm.size // 2, micro_batches=2, clip=0.5)


@pytest.mark.sizes(4)
def test_nodes_are_groups(mpi_comm, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2")
    comm = Communicator(mpi_comm)
    ranks = ShardGroups.of(comm, "node")
    same_node, across = (part.all_gather(np.array([comm.rank])).tolist() for part in (ranks.shard, ranks.replicate))
    assert same_node == ([0, 1] if comm.rank < 2 else [2, 3])
    assert across == ([0, 2] if comm.rank % 2 == 0 else [1, 3])


@each_stage
@pytest.mark.sizes(1, 2, 3)
def test_parameters_that_a_pass_does_not_reach_count_as_zero(comm, zero_stage):
    """The pass misses the parameters on all ranks, or on all but one."""
    plain, run = Run(comm, 0), Run(comm, zero_stage)
    for everywhere in (False, True, False):
        x, use_extra = own_rows(comm, batch(1)), everywhere or comm.rank == 0
        for flag in (False, use_extra):
            plain.step(x, use_extra=flag)
            run.step(x, use_extra=flag)
    close(run.parameters(), plain.parameters())


@each_stage
@pytest.mark.sizes(1, 3, 8)
def test_every_trained_element_has_one_owner(comm, zero_stage):
    run = Run(comm, zero_stage)
    owners = {name: np.zeros(p.numel()) for name, p in run.plain.named_parameters()}
    whole = run.parameters()
    masters = run.zero.masters
    for name, piece in masters.pieces.items():
        owners[name][masters.spans[name]] += 1
        assert torch.equal(piece.flatten(), whole[name].flatten()[masters.spans[name]])
        assert piece.dim() == whole[name].dim()
        assert set(run.zero.optimizer.state[piece]) == set()
    for name, p in run.plain.named_parameters():
        assert np.all(comm.all_reduce(owners[name]) == p.requires_grad), name


@each_stage
@pytest.mark.sizes(2)
def test_pieces_that_are_loaded_become_parameters(comm, zero_stage):
    run = Run(comm, zero_stage)
    run.train(1)
    with torch.no_grad():
        for name, piece in run.zero.masters.pieces.items():
            span = run.zero.masters.spans[name]
            piece.copy_(torch.arange(span.start, span.stop).view_as(piece))
    run.zero.gather()
    for name, value in run.parameters().items():
        if run.plain.get_parameter(name).requires_grad:
            assert value.flatten().tolist() == list(range(value.numel())), name


@pytest.mark.sizes(2)
def test_gradients_are_cleared_between_reductions_of_stage_1(comm):
    run = Run(comm, 1)
    run.train(1)
    with pytest.raises(RuntimeError, match=r"reduced to their owners: zero_grad\(\) before"):
        run.model(own_rows(comm, batch(0))).backward()


@pytest.mark.sizes(1, 2)
def test_gradients_that_are_replaced_in_stage_1_are_refused(comm):
    run = Run(comm, 1)
    run.model.zero_grad()
    run.plain.zero_grad()  # of the model itself, which sets them to None
    with pytest.raises(
        RuntimeError, match=r"^the gradient of .* was replaced, .*: clear gradients by the module's zero"
    ):
        run.model(own_rows(comm, batch(0))).backward()


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.sizes(1, 4)
def test_gradients_are_never_held_whole(comm, zero_stage):
    run = Run(comm, zero_stage)
    params = [p for p in run.plain.parameters() if p.requires_grad]
    counts = []
    for p in params:
        p.register_hook(lambda _: counts.append(sum(q.numel() for q in params if q.grad is not None)))
    run.train(2, micro_batches=2)
    largest = max(sum(p.numel() for p in bucket.params) for bucket in run.zero.buckets)
    working = sum(len(buffer.tensor) for buffer in run.zero.working)
    whole = sum(p.numel() for p in params)
    assert max(counts) <= largest
    assert largest <= working < 0.8 * whole
    assert len(run.zero.arrays[1]) < whole / comm.size + 16 * len(params)
    assert all(p.grad is None for p in params)


def storage_bytes(module):
    return [p.untyped_storage().nbytes() for p in module.parameters()]


@pytest.mark.sizes(1, 2)
def test_two_layers_are_gathered_at_a_time_and_the_last_two_once_for_both_passes(comm):
    run = Run(comm, 3)
    resident, coming, layers = [], [], [run.zero.layers[number] for number in range(len(LAYERS))]

    def look(*_):
        resident.append([i for i, block in enumerate(run.plain.blocks) if max(storage_bytes(block)) > 4])
        coming.append([i for i, layer in enumerate(layers) if layer.slot.user is layer])

    for block in run.plain.blocks:
        block.wide.register_forward_hook(look)
        block.wide.register_full_backward_hook(look)
    run.train(1)
    assert resident == [[0], [1], [1, 2], [1, 2], [1], [0, 1]]
    assert coming == [[0, 1], [1, 2], [1, 2], [1, 2], [0, 1], [0, 1]]
    assert set(storage_bytes(run.plain)) == {4}
    assert all(p.isnan().all() for p in run.plain.parameters())


@pytest.mark.sizes(1, 2)
def test_losses_without_gradients_are_those_of_the_updated_parameters(comm):
    plain, run = Run(comm, 0), Run(comm, 3)
    plain.train(1)
    run.train(1)
    for _ in range(2):
        with torch.no_grad():
            assert run.model(batch(0)).item() == pytest.approx(plain.model(batch(0)).item(), rel=1e-6)
        plain.train(1)
        run.train(1)


@pytest.mark.sizes(1, 2)
def test_what_was_gathered_before_an_update_is_gathered_anew(comm):
    """Computing a loss without gradients between the backward pass and the update gathers the old parameters."""
    plain, run = Run(comm, 0), Run(comm, 3)
    for one in (plain, run):
        for _ in range(2):
            one.model.zero_grad()
            one.model(own_rows(comm, batch(1))).backward()
            with torch.no_grad():
                one.model(batch(0))
            one.masters.take_gradients()
            one.update()
    with torch.no_grad():
        assert run.model(batch(0)).item() == pytest.approx(plain.model(batch(0)).item(), rel=1e-6)


def tokens(comm, seed):
    ids = torch.randint(0, GPT_CONFIG.vocab_size, (SAMPLES, 9), generator=torch.Generator().manual_seed(seed))
    mine = own_rows(comm, ids)
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def gpt_layers(config):
    return [f"transformer.h.{i}" for i in range(config.n_layer)]


def gpt_run(mesh, zero_stage, recomputed):
    model = Decoder(GPT_CONFIG).double()
    parallelize(model, plan_of(GPT_CONFIG), mesh.tp)
    for block in model.transformer.h if recomputed else ():
        recompute(block, BatchPosition())
    return Run(mesh.dp, zero_stage, model=model, layers=gpt_layers(GPT_CONFIG), mesh=mesh)


@each_stage
@pytest.mark.sizes(4)
def test_clipped_steps_are_those_of_plain_data_parallelism_bit_for_bit(comm, zero_stage):
    """Norms are equal, too, although each rank sums the squares of its own shards, cut at any place of a parameter."""
    config = ModelConfig(vocab_size=61, block_size=8, n_layer=2, n_head=3, n_embd=30, bias=True)
    layers, each = gpt_layers(config), {"reproducible": True}
    plain = Run(comm, 0, model=Decoder(config), **each)
    run = Run(comm, zero_stage, model=Decoder(config), layers=layers, **each)
    for seed in range(10):
        for one in (plain, run):
            one.step(*tokens(comm, seed), clip=0.3)
        assert run.norm == plain.norm
        assert run.norm > 0.3
    equal(run.parameters(), plain.parameters())


@each_stage
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.sizes(4, proof=(2,))
def test_split_layers_tied_and_recomputed(comm, zero_stage, recomputed):
    mesh = Mesh(comm, tp=2)
    runs = [gpt_run(mesh, stage, recomputed) for stage in (0, zero_stage)]
    for seed in range(3):
        for run in runs:
            run.step(*tokens(mesh.dp, seed), clip=0.3, micro_batches=2)
    close(runs[1].parameters(), runs[0].parameters(), 1e-10)


def piped(comm, mesh, zero_stage, group="all"):
    model = Decoder(GPT_CONFIG).double()
    schedule = registry.make_schedule("1f1b", 2, 2)
    sharing = {"make_optimizer": adamw, "zero_group": group, "zero_stage": zero_stage}
    pp = PipelineParallel(model, layers_of(model), schedule, mesh, **sharing)
    return model, pp


@pytest.mark.parametrize("group", ["all", 1])
@pytest.mark.sizes(4, proof=(2, 8))
def test_pipelines_share_states(comm, group):
    """The embedding and the head, on two ranks of the pipeline, are tied."""
    mesh = Mesh(comm, pp=2)
    plain_model, plain = piped(comm, mesh, 0)
    model, pp = piped(comm, mesh, 1, group)
    plain_optimizer = adamw(plain_model.parameters())
    plain_masters = MasterWeights(dict(plain_model.named_parameters()))
    tied, norms, want = [("transformer.wte.weight", "lm_head.weight")], [], []
    clip = GradientClip(0.3, model, pp.replica.masters, mesh, tied)
    plain_clip = GradientClip(0.3, plain_model, plain_masters, mesh, tied)
    for seed in range(3):
        batches = [Batch(*pair) for pair in zip(*(x.chunk(2) for x in tokens(mesh.dp, seed)), strict=True)]
        plain.step(batches)
        pp.step(batches)
        norms.append(clip().item())
        plain_masters.take_gradients()
        want.append(plain_clip().item())
        plain_optimizer.step()
        pp.replica.update()
        plain.zero_grad()
        pp.zero_grad()
    np.testing.assert_allclose(norms, want, rtol=1e-10)
    assert len(pp.replica.masters.pieces) <= len(list(model.parameters()))
    close(model.state_dict(), plain_model.state_dict(), 1e-10)


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize(("precision", "each"), [(FLOAT32, (4, 4, 8)), (MIXED, (2, 2, 12))], ids=["float32", "mixed"])
@pytest.mark.sizes(4, proof=(8,))
def test_bytes_are_those_of_the_formulas(comm, zero_stage, precision, each):
    """In mixed precision, the memory is (2 + 2 + K) Psi bytes with K = 12."""
    config = ModelConfig(vocab_size=64, block_size=8, n_layer=4, n_head=2, n_embd=64)
    model = Decoder(config)
    num_params = sum(p.numel() for p in model.parameters())
    run = Run(comm, zero_stage, model=model, layers=gpt_layers(config), count=True, precision=precision)
    for counter in run.counters:
        counter.nbytes = 0
    run.step(*tokens(comm, 0))
    measured = held(*run.zero.arrays, run.zero.optimizer, run.zero.masters)
    for actual, want in zip(measured, expected_held_bytes(zero_stage, num_params, comm.size, *each), strict=True):
        assert actual == pytest.approx(want, rel=0.05)
    sent = comm.all_reduce(np.array([sum(counter.nbytes for counter in run.counters)]))[0] / comm.size
    last_two = each[0] * sum(p.numel() for p in model.transformer.h[-2:].parameters())
    assert sent == pytest.approx(expected_sent_bytes(zero_stage, each[0] * num_params, comm.size, last_two), rel=0.02)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["blocks.7"], "layer 'blocks.7' is not a module of the model: it has enter, leave, blocks"),
        (["blocks", "blocks.1"], "is in layer 'blocks' and layer 'blocks.1'"),
        (["blocks.0", "nothing"], "layer 'nothing' has no parameters"),
        (["enter"], "second.weight is in layer 'enter' and no layer"),
    ],
)
@pytest.mark.sizes(1, 2)
def test_layers_that_will_not_do_are_refused(comm, layers, words):
    model = Model()
    model.nothing, model.second = nn.Tanh(), nn.Linear(6, 10)
    model.second.weight = model.enter.weight
    with pytest.raises(InputError, match=words):
        Sharded(model, ShardGroups.of(comm), adamw, 3, layers)


@pytest.mark.parametrize("group", [0, 3, "rack"])
@pytest.mark.sizes(4)
def test_groups_that_do_not_divide_the_ranks_are_refused(comm, group):
    with pytest.raises(
        InputError, match=f"zero_group {group} does not divide 4 ranks: use all, node, or one of 1, 2, 4"
    ):
        ShardGroups.of(comm, group)
