"""The planner: memory compared with real models and autograd's saved tensors, times with manual sums and schedules."""

import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from collectives.algorithms import find
from collectives.algorithms.groups import Topology
from collectives.schedule.cost import predict
from collectives.schedule.fabrics import FABRICS, in_nodes
from collectives.schedule.network import Link, Network, contended
from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.models import llama
from mpi_tests.helpers.saved import saved_bytes
from parallelism.mesh import AXES
from parallelism.numerics.dropout import BatchPosition, Dropout
from parallelism.pipeline.balance import balance
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.actions import count_peaks
from parallelism.pipeline.schedule.picture import action_of
from parallelism.pipeline.schedule.price import Costs, price
from parallelism.pipeline.stage import cut
from parallelism.placement import Shard
from parallelism.planner import Machine, ParallelLayout, TrainingJob, best
from parallelism.planner.__main__ import __doc__ as described
from parallelism.planner.__main__ import command, main
from parallelism.planner.counts import ParamCounts, block_saved, head_saved
from parallelism.planner.flags import parse_request
from parallelism.planner.flops import block_flops, orthogonal_flops
from parallelism.planner.layout import check_mesh, divisors, families, meshes
from parallelism.planner.memory import Memory, alive, memory, model_shards, rank_params, working
from parallelism.planner.passes import PassContext
from parallelism.planner.place import AxisGroup, RankPlacement
from parallelism.planner.ranks import minimal_block
from parallelism.planner.replicas import last_reduced_s
from parallelism.planner.report import misfits, row, slower, utilization
from parallelism.planner.roofline import Roofline
from parallelism.planner.search import PlannedLayout, SearchResult, search
from parallelism.planner.settings import parse
from parallelism.planner.shape import ModelShape
from parallelism.planner.step import StepModel, Time, schedule_times
from parallelism.sequence.sequence_parallel import SequenceAttention
from parallelism.step.actions import FORWARD
from parallelism.tensor.sharding_plan import matching
from training.optim.muon import orthogonal
from training.parallel.decoder import fuse, layers_of, plan_of, recompute_model
from training.settings.config import Config

SMALL = ModelConfig(vocab_size=101, block_size=32, n_layer=5, n_head=4, n_embd=64, n_kv_head=2, bias=True)
LLAMA = llama(vocab_size=101, block_size=32, n_layer=5, n_head=4, n_embd=64, n_kv_head=2, n_hidden=160)
LARGE = ModelConfig(vocab_size=50304, block_size=2048, n_layer=32, n_head=32, n_embd=4096)
NDR = FABRICS["ndr"].network
FREE = Network(Link(0, 0), Link(0, 0), 0, 0, 0)  # links that take no time
SLOW = NDR._replace(between=Link(1e-3, 1e-8), nic=Link(1e-3, 1e-8))  # between nodes
each_schedule = pytest.mark.parametrize("name", registry.names())


def on(world_size, per_node=8, network=NDR, flops_per_s=5e14, memory_bytes=72e9):
    return Machine(in_nodes(world_size, per_node), network, flops_per_s, memory_bytes)


def step_of(job, layout, machine):
    setting = PassContext(job, layout, RankPlacement(layout, machine, job.head_ranks(layout.sp)))
    return StepModel(setting, setting.stage_costs())


def same(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


# Memory of ranks


def parted(model, config, tp):
    """Return the model with each parameter of the length of a rank's shard, as after `parallelize`."""
    treated = {name: kind for pattern, kind in plan_of(config).items() for name in matching(model, pattern)}
    for name, kind in treated.items():
        module, kind = model.get_submodule(name), type(kind).__name__
        if kind in ("ColumnParallel", "RowParallel", "Vocabulary"):
            dim = 1 if kind == "RowParallel" else 0
            whole = module.weight.shape[dim]
            length = Shard(dim, whole, padded=kind == "Vocabulary").local_length(tp)
            shape = [length if d == dim else n for d, n in enumerate(module.weight.shape)]
            module.weight = torch.nn.Parameter(torch.empty(shape))
            if kind == "ColumnParallel" and module.bias is not None:
                module.bias = torch.nn.Parameter(torch.empty(length))
    if config.tied:
        model.lm_head.weight = model.transformer.wte.weight
    return model


WIDE_HEAD = replace(SMALL, vocab_size=4096)  # costs more than three blocks, so that the last stage is the head
SHAPES = [SMALL, replace(SMALL, bias=False), replace(SMALL, n_hidden=80), LLAMA, replace(LLAMA, tied=True), WIDE_HEAD]


@pytest.mark.parametrize("balanced_by", ["counted", "layers"])
@pytest.mark.parametrize("config", SHAPES)
@each_schedule
def test_bytes_of_each_layout_are_those_of_real_models_and_optimizers(name, config, balanced_by):
    job = TrainingJob(config, 4, balance=balanced_by)
    for pp, tp in product((1, 2), (1, 2)):
        schedule = registry.make_schedule(name, pp, 1)
        stages = [schedule.stages(rank) for rank in range(pp)]
        layout = ParallelLayout(pp=pp, tp=tp, schedule=name, virtual_stages=len(stages[0]))
        for rank in range(pp):
            model = parted(Decoder(config), config, tp)
            layers = layers_of(model, counts_ends=balanced_by == "layers")
            parts = balance([layer.cost for layer in layers], layout.num_stages)
            cut(model, layers, {stage: parts[stage] for stage in stages[rank]})
            assert rank_params(job, layout)[rank] == sum(p.numel() for p in model.parameters())


def test_bytes_of_parameters_gradients_and_states():
    """The predictions are those of torch's AdamW after a step."""
    job, model = TrainingJob(SMALL, 1), Decoder(SMALL)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens)[1].backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    usage = memory(job, ParallelLayout(), model_shards(job, ParallelLayout()), owners=1)
    assert usage.parameters == sum(p.nbytes for p in model.parameters())
    assert usage.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert usage.optimizer == sum(state.nbytes for state in states)


@pytest.mark.parametrize(
    ("zero_stage", "per_param"),
    [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)],
)
def test_mixed_precision_is_as_published(zero_stage, per_param):
    """The memory is (2 + 2 + K) Psi bytes with K = 12, sharded over 8 ranks: ZeRO, figure 1."""
    job = TrainingJob(SMALL, 8, dtype="bfloat16", master_weights=True, grad_dtype="bfloat16")
    usage = memory(job, ParallelLayout(dp=8, zero_stage=zero_stage), model_shards(job, ParallelLayout(dp=8)), owners=8)
    total = usage.parameters + usage.gradients + usage.optimizer
    assert total == same(per_param * sum(p.numel() for p in Decoder(SMALL).parameters()))


@pytest.mark.parametrize(
    "config",
    [replace(SMALL, n_kv_head=4, bias=False), replace(SMALL, bias=False), LLAMA, replace(LLAMA, n_kv_head=4)],
    ids=["", "grouped heads", "llama, grouped heads", "llama"],
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_keeps_what_autograd_saves(recompute, config):
    model = Decoder(config)
    fuse(model)
    if recompute == "selective":
        recompute_model(model, recompute)
    block = model.transformer.h[0]
    x = torch.randn(3, 32, 64, requires_grad=True)

    def run():
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if recompute == "full" else block(x)

    job = TrainingJob(config, 3)
    predicted_bytes = block_saved(job, ParallelLayout(recompute=recompute, micro_batch_size=3)).nbytes(job.precision)
    assert predicted_bytes == pytest.approx(saved_bytes(run, block), rel=0.01)


def test_dropout_keeps_neither_masks_nor_probabilities():
    """The prediction is within a twentieth in float32."""
    config = replace(SMALL, n_kv_head=None, bias=False, dropout=0.5)
    block = Decoder(config).transformer.h[0]
    block.attn.attend = SequenceAttention(None, Dropout(0.5, 0, BatchPosition()), block.attn.attend)
    block.attn.resid_dropout, block.mlp.dropout = Dropout(0.5, 1, BatchPosition()), Dropout(0.5, 2, BatchPosition())
    x = torch.randn(3, 32, 64, requires_grad=True)
    saved = saved_bytes(lambda: block(x), block)
    job = TrainingJob(config, 3)
    predicted_bytes = block_saved(job, ParallelLayout(micro_batch_size=3)).nbytes(job.precision)
    assert predicted_bytes == pytest.approx(saved, rel=0.05)


def test_autocast_keeps_weights_in_16_bits_too():
    """The prediction is within a tenth, as autograd saves norms and their results in more than one dtype."""
    block = Decoder(SMALL).transformer.h[0]
    x = torch.randn(3, 32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_bytes(lambda: block(x), block)
    job = TrainingJob(SMALL, 3, dtype="bfloat16")
    predicted_bytes = block_saved(job, ParallelLayout(micro_batch_size=3)).nbytes(job.precision)
    assert predicted_bytes == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_the_head_keeps_what_autograd_saves(config):
    gpt = Decoder(config)
    x, targets = torch.randn(3, 32, 64, requires_grad=True), torch.zeros(3, 32, dtype=torch.int64)
    saved = saved_bytes(lambda: gpt.loss(gpt.lm_head(gpt.transformer.ln_f(x)), targets), gpt)
    job = TrainingJob(config, 3)
    assert head_saved(job, ParallelLayout(micro_batch_size=3)).nbytes(job.precision) == pytest.approx(saved, rel=0.02)


def test_16_bits_are_as_published():
    """34 s b h with dropout masks of one byte, 32 without; tp divides 24 of them, or all in sequence-parallel mode."""
    job = TrainingJob(replace(LARGE, n_head=1), 1, dtype="float16", master_weights=True)
    for tp, sequence in ((1, False), (8, False), (8, True)):
        activations = block_saved(job, ParallelLayout(tp=tp, sequence_parallel=sequence))._replace(float32=0)
        parts = 8 + 24 / tp if not sequence else 32 / tp
        assert activations.nbytes(job.precision) == same(parts * 2048 * 4096)


@each_schedule
def test_activations_alive_are_the_schedules(name):
    """They are equal, also if they are extrapolated from fewer micro-batches."""
    row = registry.REGISTRY[name]
    for pp, m, more in product((1, 2, 3, 4), (1, 2, 5, 16, 27), (0, 1)):
        v = row.virtual_stages + more * row.more
        schedule = registry.make_schedule(name, pp, m, v)
        counts = alive(name, pp, m, v)
        assert tuple(max(map(sum, moments)) for moments in counts) == count_peaks(schedule.orders)
        weights = [random.Random(pp * m).random() for _ in range(pp * v)]
        for order, moments, own in zip(schedule.orders, counts, map(schedule.stages, range(pp)), strict=True):
            now = most = 0.0
            for action in order:
                now += weights[action.stage] * (action.kind == FORWARD)
                most = max(most, now)
                now -= weights[action.stage] * (action.kind in "BW")
            assert max(sum(n * weights[s] for n, s in zip(moment, own, strict=True)) for moment in moments) == same(
                most
            )


class OperatorCount(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [
    SMALL, replace(SMALL, n_kv_head=4), LLAMA, replace(LLAMA, n_kv_head=4), replace(SMALL, bias=False, num_experts=8),
], ids=["grouped gpt", "gpt", "grouped llama", "llama", "experts"])  # fmt: skip
def test_a_minimal_block_has_about_as_many_operators_as_a_models(config):
    """Whose launch it stands for: within a sixth, as its mixture counts no tokens."""
    real = Decoder(replace(config, n_layer=1)).transformer.h[0]
    counts = []
    for block, width in ((real, config.n_embd), (minimal_block(ModelShape.of(config)), 4)):
        x = torch.ones(1, 2, width)
        with OperatorCount() as counter:
            assert block(x).shape == x.shape
        counts.append(counter.number)
    assert counts[1] == pytest.approx(counts[0], rel=1 / 6)


# Time of a step


@each_schedule
def test_a_pipeline_takes_what_its_schedule_takes(name):
    """With links that take no time, it is the simulated time, also for schedules too long to be simulated.

    For those, zb_v's unequal stages cause an error below one percent.
    """
    config = replace(SMALL, n_layer=24)
    for pp, m in ((2, 3), (4, 4), (4, 23), (3, 40)):
        v = registry.REGISTRY[name].virtual_stages
        layout = ParallelLayout(pp=pp, schedule=name, virtual_stages=v, num_micro_batches=m)
        step = step_of(TrainingJob(config, m), layout, on(pp, network=FREE, flops_per_s=1e9))
        forward, inputs, weights = (step.costs[:, kind].sum(1).tolist() for kind in range(3))
        timeline = price(registry.make_schedule(name, pp, m, v), Costs(forward, inputs, weights))
        played_out = name != "zb_v" or m < 4 * pp
        assert step.time().total == (same if played_out else partial(pytest.approx, rel=0.01))(timeline.span_s)
        assert step.least_s() <= timeline.span_s * (1 + 1e-9)
        assert sum(forward + inputs + weights) == same(
            3 * sum(layer.cost for layer in layers_of(Decoder(config))) * 32 / 1e9
        )


@pytest.mark.parametrize("config", [SMALL, LLAMA, replace(LLAMA, n_kv_head=4)], ids=["gpt", "grouped heads", "llama"])
def test_a_block_computes_what_torch_counts(config):
    """The forward FLOPs of matrix products are equal; attention counts without its mask."""
    block, x = Decoder(config).transformer.h[0], torch.ones(3, 32, 64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        block(x)
    assert counter.get_total_flops() == 3 * 32 * block_flops(config)


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_muon_computes_what_torch_counts(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonal(torch.ones(shape))
    assert counter.get_total_flops() == orthogonal_flops(*shape)


def test_muon_by_hand():
    """Muon's matrix products with free links, and its two exchanges with free computation, on four ranks."""
    job, layout = TrainingJob(SMALL, 4, optimizer="muon"), ParallelLayout(dp=4)
    matrices = SMALL.n_layer * (64 * 128 + 64 * 64 + 8 * 64 * 64)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (256, 64), (64, 256)]
    products = SMALL.n_layer * sum(orthogonal_flops(*shape) for shape in shapes)
    alone = step_of(job._replace(optimizer="sgd"), layout, on(4, 1, FREE, 1e9)).update_s
    assert step_of(job, layout, on(4, 1, FREE, 1e9)).update_s - alone == same(products / 4 / 1e9)
    network = Network(Link(0, 0), Link(0, 1e-9), 0, 0, 0)
    sent = 2 * matrices / 4 * 4 * 3 / 4
    assert step_of(job, layout, on(4, 1, network, 1e30)).update_s == pytest.approx(sent * 1e-9, rel=1e-4)


@pytest.mark.parametrize(("zero_stage", "dp", "zero"), [(0, 1, 0), (1, 1, 0), (2, 0.5, 0.5)])
def test_stages_1_and_2_gather_what_they_have_updated(zero_stage, dp, zero):
    """With free computation, each of two ranks sends half of all parameters."""
    network, job = Network(Link(0, 0), Link(0, 1e-9), 0, 0, 0), TrainingJob(replace(SMALL, n_layer=8), 12)
    layout = ParallelLayout(dp=2, zero_stage=zero_stage)
    time = step_of(job, layout, on(2, 1, network, flops_per_s=1e30)).time()
    whole_s = max(rank_params(job, layout)) * 4 * 1e-9
    assert (time.dp / whole_s, time.zero / whole_s) == pytest.approx((dp, zero), rel=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1"])
def test_zero_in_a_pipeline_is_sent_for_each_micro_batch(name):
    """With free computation: gradients, and in stage 3 twice the parameters; two ranks exchange half of each."""
    config, m, per_byte = replace(SMALL, n_layer=8), 6, 1e-9
    network = Network(Link(0, 0), Link(0, per_byte), 0, 0, 0)
    layout = ParallelLayout(dp=2, pp=2, schedule=name, num_micro_batches=m)
    layout = layout._replace(virtual_stages=registry.REGISTRY[name].virtual_stages)
    job = TrainingJob(config, 2 * m)
    half_s = max(rank_params(job, layout)) * 4 / 2 * per_byte
    for zero_stage, passes in ((1, 0), (2, 1), (3, 3)):
        step = step_of(job, layout._replace(zero_stage=zero_stage), on(4, 1, network, flops_per_s=1e30))
        assert step.time().zero == pytest.approx(passes * m * half_s, rel=1e-6)
        assert step.least_s() <= step.time().total * (1 + 1e-9)
    busy = step_of(job, layout._replace(zero_stage=3), on(4, 1, network, flops_per_s=1e6))
    assert busy.time().zero == 0


def test_gradients_of_a_pipeline_go_stage_by_stage():
    """With free computation, at most those of a rank's two stages and of the tied embedding are exposed."""
    config, start_s, per_byte = replace(SMALL, n_layer=8), 1e-3, 1e-9
    job, layout = (
        TrainingJob(config, 4),
        ParallelLayout(dp=2, pp=2, schedule="interleaved", num_micro_batches=2, virtual_stages=2),
    )
    network = Network(Link(0, 0), Link(start_s, per_byte), 0, 0, 0)
    step = step_of(job, layout, on(4, 1, network, flops_per_s=1e30))
    each = 2 * start_s + max(rank_params(job, layout)) * 4 * per_byte
    tied_s = start_s + config.vocab_size * config.n_embd * 4 * per_byte
    assert start_s < step.time().dp <= each + tied_s


def test_zero_makes_pipelines_fit():
    """The memory of a rank decreases with each stage."""
    job, layout = TrainingJob(LARGE, 64), ParallelLayout(dp=8, pp=4, num_micro_batches=8)
    totals = [
        memory(job, layout._replace(zero_stage=stage), model_shards(job, layout), owners=8).total for stage in range(4)
    ]
    assert totals == sorted(totals, reverse=True)
    fixed = {"dp": 8, "pp": 4, "recompute": "none", "micro_batch_size": 1, "schedule": "1f1b"}
    machine = on(32, memory_bytes=(totals[1] + totals[2]) / 2)
    result = search(job, machine, fixed)
    assert result.best[0].layout.zero_stage >= 2


def test_data_parallelism_by_hand():
    """The gradient has three buckets, the first two of which overlap with the backward pass."""
    config = ModelConfig(vocab_size=8, block_size=4, n_layer=2, n_head=1, n_embd=4)
    network = Network(Link(0, 0), Link(1e-3, 1e-6), 0, 0, 0)
    job = TrainingJob(config, 2, bucket_mb=208 * 4 / 2**20)
    step = step_of(job, ParallelLayout(dp=2), on(2, 1, network, flops_per_s=1e6))
    block = 12 * 16 + 8  # matrices and norms
    backward_s = (2 * 2 * 12 * 16 + 2 * 4 * 4 * 4) * 4 / 1e6
    head_s = 2 * 2 * 4 * 8 * 4 / 1e6

    def reduce_s(params):
        return predict(find("all_reduce", "recursive_doubling"), 4 * params, 2, ((0,), (1,)), network=network)

    assert reduce_s(100) == same(1e-3 + 4e-4)
    # The gradients of the last norm and of one block do not fill a bucket; those of the next block do.
    ready = [(head_s, 4), (head_s + backward_s, block), (head_s + 2 * backward_s, block)]
    first_s = ready[2][0] + reduce_s(4 + 2 * block)
    end_s = max(first_s, ready[2][0]) + reduce_s(8 * 4 + 4 * 4)
    assert step.time().dp == same(end_s - ready[2][0])
    assert step.time().compute == same(1.5 * (ready[2][0]))


@pytest.mark.parametrize("config", [SMALL, LLAMA, replace(LLAMA, tied=True)], ids=["gpt", "llama", "tied llama"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_backward_pass_completes_the_gradient_of_every_parameter(config, pp):
    step = step_of(TrainingJob(config, 4), ParallelLayout(dp=2, pp=pp), on(2 * pp))
    for cost, layers in zip(step.costs, step.cut.layers, strict=True):
        completed = sum(count for _, count in step.replicas.appearing(cost, layers))
        assert completed == ParamCounts(config).stages(layers)


def test_gradients_that_are_reduced_in_time_do_not_show():
    assert last_reduced_s([(1, 10), (5, 10), (6, 1)], 10, lambda params: params / 10) == same(6.1)
    assert last_reduced_s([(1, 10), (2, 30)], 10, lambda params: params / 10 + 1) == same(3 + 3 * 2)
    assert last_reduced_s([(1, 1), (2, 1)], 10, lambda params: params) == same(4)


def test_tensor_parallelism_by_hand():
    """A block has two all-reduces forward, and two backward, which long products of the weights hide."""
    network = Network(Link(0, 0), Link(1e-3, 0), 0, 0, 0)
    for flops_per_s, hides in ((1e15, False), (1e3, True)):
        job = TrainingJob(replace(SMALL, n_kv_head=None), 1)
        step = step_of(job, ParallelLayout(tp=2), on(2, 1, network, flops_per_s))
        forward = 2 * SMALL.n_layer + 1 + 2  # with one of the embedding, and two of the loss
        backward = 0 if hides else 2 * SMALL.n_layer + 1
        assert step.time().tp == pytest.approx((forward + backward) * 1e-3, rel=1e-6)


@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_tokens_cross_once_to_each_host_of_their_experts(experts_per_token):
    """In each pass of a block, tokens go to the other host and back: half of them with one expert, all with several."""
    network = Network(Link(0, 0), Link(0, 1e-9), 0, 0, 0)
    config = replace(SMALL, num_experts=8, experts_per_token=experts_per_token)
    step = step_of(TrainingJob(config, 2), ParallelLayout(dp=2, ep=2), on(2, 1, network, 1e30))
    nbytes = SMALL.block_size * SMALL.n_embd * 4
    assert step.time().ep == same(4 * SMALL.n_layer * min(experts_per_token, 2) * nbytes / 2 * 1e-9)
    inside = step_of(TrainingJob(config, 2), ParallelLayout(dp=2, ep=2), on(2, 2, network, 1e30))
    assert inside.time().ep == 0.0


@pytest.mark.parametrize(("ep", "capacity", "rows"), [
    (1, None, 2), (1, 2.0, 2), (1, 0.5, 1), (2, None, 2.5), (2, 2.0, 2.5), (2, 1.0, 2), (2, 0.5, 1),
])  # fmt: skip
def test_activations_are_those_of_the_fullest_rank(ep, capacity, rows):
    """It has a quarter more rows than the mean, if no capacity says otherwise.

    Each row is saved ten times as long, as its input and result, and GELU's; on one rank their sum saves it, too.
    """
    plain, config = (replace(SMALL, num_experts=8, expert_capacity=each) for each in (0.25, capacity))
    layout = ParallelLayout(dp=2, ep=ep)
    none, usage = (model_shards(TrainingJob(each, 2), layout)[0] for each in (plain, config))
    values = SMALL.block_size * SMALL.n_layer * SMALL.n_embd
    assert usage.activations - none.activations == same(4 * (11 if ep == 1 else 10) * (rows - 0.5) * values)


@pytest.mark.parametrize(("ep", "rows"), [(1, 2), (2, 2.5), (4, 2.5)])
def test_gradients_of_a_mixture_are_those_of_its_rows_and_twice_those_of_a_layers_experts(ep, rows):
    width, hidden = SMALL.n_embd, 80
    config = replace(SMALL, num_experts=8, n_hidden=hidden)
    in_block, _ = working(TrainingJob(config, 4), ParallelLayout(dp=4, ep=ep))
    around_gelu = 2 * hidden * rows * SMALL.block_size
    a_layers_experts = 8 // ep * width * hidden
    assert in_block == 4 * (around_gelu + 2 * a_layers_experts)


@pytest.mark.parametrize("zero_stage", range(4))
def test_gradients_that_are_averaged_with_experts_divided(zero_stage):
    """On 4 hosts with ep 2, experts' gradients are averaged over two ranks, and all others over four."""
    network = Network(Link(0, 0), Link(0, 1e-9), 0, 0, 0)
    config = replace(SMALL, num_experts=8)
    layout = ParallelLayout(dp=4, ep=2, zero_stage=zero_stage)
    job = TrainingJob(config, 4, bucket_mb=1e-3)
    step, fewer = (step_of(job, each, on(4, 1, network, 1e30)) for each in (layout, layout._replace(ep=4)))
    assert step.replicas.owners.size == 2
    assert fewer.replicas.owners.size == 1
    usage = memory(job, layout, model_shards(job, layout), owners=2)
    assert usage.optimizer == 8 * max(rank_params(job, layout)) / (2 if zero_stage else 1)
    experts = SMALL.n_layer * 8 * (8 // 2) * SMALL.n_embd**2
    others = max(rank_params(job, layout)) - experts
    averaged_s = 2 * others / 2 * 4 / 2 * 1e-9  # reduced and gathered in halves, by their owners
    assert step.non_experts_s() == (same(averaged_s) if zero_stage else 0.0)


def test_messages_between_stages_pass_between_nodes_or_within():
    network = Network(Link(1e-6, 0), Link(1e-3, 0), 0, 0, 0)
    config = replace(SMALL, n_layer=4)
    for per_node, message_s in ((4, 1e-6), (2, 1e-3)):
        layout = ParallelLayout(dp=1, pp=2, tp=2, num_micro_batches=1, micro_batch_size=1)
        step = step_of(TrainingJob(config, 1), layout, on(4, per_node, network._replace(meet_s=0), 1e9))
        costs = Costs(*(step.costs[:, kind].sum(1).tolist() for kind in range(3)), message_s)
        plain = price(registry.make_schedule("1f1b", 2, 1), costs)
        assert step.pipeline()[0] == same(plain.span_s)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v", "breadth_first"])
def test_stages_of_which_a_rank_has_the_last_passes(name):
    for pp, m in ((2, 5), (4, 9)):
        v = registry.REGISTRY[name].virtual_stages
        schedule = registry.make_schedule(name, pp, m, v)
        costs = Costs(tuple(range(1, pp * v + 1)), 2.0, 1.0, 0.5)
        timeline = price(schedule, costs)
        span_s, ends = schedule_times(name, pp, m, v, costs)
        assert span_s == timeline.span_s
        assert ends == [
            max(span.end_s for span in timeline.spans if action_of(span).stage == stage) for stage in range(pp * v)
        ]


# Placement of the axes


def test_groups_share_the_way_out_of_their_node():
    """Four groups with one rank per node send four times as many bytes through its link, one after the other."""
    network = Network(Link(0, 0), Link(1e-3, 1e-6), 0, 0, 0, nic=Link(1e-4, 5e-7))  # two ranks fill a node's link
    placement = RankPlacement(ParallelLayout(dp=2, tp=4), on(8, 4, network))
    assert placement.replicas.nodes == ((0,), (1,))
    assert placement.replicas.groups == 4
    row = find("all_gather", "ring")
    nbytes = 2000
    alone = predict(row, nbytes, 2, ((0,), (1,)), network=network)
    assert alone == same(1e-3 + 1000e-6)
    assert placement.replicas.seconds("all_gather", nbytes) == same(1e-3 + 3e-4 + 4 * 1000 * 5e-7)
    assert placement.tp.nodes == ((0, 1, 2, 3),)


def test_a_group_on_several_nodes_goes_by_levels():
    """The time is about that predicted for the whole schedule, hierarchical and direct within the nodes."""
    for size, length in ((16, 8), (64, 8), (32, 4)):
        nodes = in_nodes(size, length)
        for collective in ("all_reduce", "reduce_scatter", "all_gather"):
            whole = predict(find(collective, "hierarchical_direct"), 1 << 28, size, nodes, network=NDR)
            assert AxisGroup(nodes, NDR).seconds(collective, 1 << 28) == pytest.approx(whole, rel=0.1)


def test_axes_lie_as_the_mesh_lays_them():
    placement = RankPlacement(ParallelLayout(dp=2, pp=3, sp=4, tp=2), on(48), parts=2)
    assert placement.tp.nodes == ((0, 1),)
    assert placement.heads.nodes == ((0, 1),)
    assert placement.ring == NDR.within
    assert placement.to_stage(0, 1) == contended(NDR, 8).between == NDR.between  # a port each
    assert [len(node) for node in placement.replicas.nodes] == [4, 4]
    assert placement.owners["node"][0].size == 4


# Enumeration of layouts


def test_layouts_multiply_to_the_world_size_and_are_those_asked_for():
    layouts = [*meshes(24, {"tp": 2})]
    assert len(set(layouts)) == len(layouts) == sum(len(divisors(12 // pp)) for pp in divisors(12))
    assert all(mesh.dp * mesh.pp * mesh.sp * mesh.tp == 24 and mesh.tp == 2 for mesh in layouts)
    job = TrainingJob(SMALL, 48)
    for layout in families(job, ParallelLayout(dp=4, pp=2, tp=2), {"schedule": "zb_v", "recompute": "none"}):
        assert layout.dp * layout.micro_batch_size * layout.num_micro_batches == 48
        assert (layout.schedule, layout.virtual_stages, layout.recompute) == ("zb_v", 2, "none")


def divides(job, mesh):
    try:
        check_mesh(job, mesh)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("mode", ["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(4, 4), (12, 4), (6, 2), (8, 1)])
def test_what_ranks_cannot_share_is_what_parallelize_refuses(mode, n_head, n_kv_head):
    config = ModelConfig(vocab_size=16, block_size=48, n_layer=1, n_head=n_head, n_kv_head=n_kv_head, n_embd=24)
    plan, model, job = plan_of(config), Decoder(config), TrainingJob(config, 1, sp_mode=mode)
    for tp, sp in product((1, 2, 3, 4, 6, 8), repeat=2):
        parts = job.head_ranks(sp)
        try:
            for pattern, strategy in plan.items():
                for name in matching(model, pattern):
                    strategy.check(name, model.get_submodule(name), {"tp": tp, "heads": parts})
            is_refused = False
        except ValueError:
            is_refused = True
        assert divides(job, ParallelLayout(sp=sp, tp=tp)) != is_refused, (tp, sp)


def test_sequences_that_ranks_cannot_share():
    job = TrainingJob(SMALL, 1)
    assert [sp for sp in range(1, 33) if divides(job, ParallelLayout(sp=sp))] == [1, 2, 4, 8, 16]
    striped = job._replace(sp_order="striped")
    assert [sp for sp in range(1, 33) if divides(striped, ParallelLayout(sp=sp))] == [1, 2, 4, 8, 16, 32]


def every_time(job, machine):
    """Return the times of all layouts that fit into memory; the search must find the best of them."""
    times = {}
    for mesh in meshes(machine.world_size, {}):
        plan = search(job, machine, {axis: getattr(mesh, axis) for axis in AXES})
        for planned in plan.best:
            times[mesh] = planned.time.total
    return times


def test_the_search_leaves_out_nothing_that_is_better():
    job, machine = TrainingJob(replace(SMALL, n_layer=6), 32), on(8, 4, SLOW._replace(between=Link(1e-5, 1e-9)), 1e11)
    times = every_time(job, machine)
    result = search(job, machine, number=4)
    assert [planned.time.total for planned in result.best] == sorted(times.values())[:4]
    for planned in result.best:
        assert times[ParallelLayout(*planned.layout[:5])] == planned.time.total
    slowest = result.best[0].time.total
    draw = random.Random(0)
    for _ in range(200):
        mesh = draw.choice([mesh for mesh in times if mesh.pp * 2 <= 6])
        layout = draw.choice([*families(job, mesh, {})])
        if layout.num_stages <= 6 and divides(job, mesh):
            assert step_of(job, layout, machine).time().total >= slowest * (1 - 1e-4)


# Properties of all predictions


def test_faster_links_never_make_a_step_longer():
    job = TrainingJob(replace(SMALL, n_layer=8, block_size=64), 64)
    draw = random.Random(1)
    layouts = [
        layout._replace(zero_stage=draw.randrange(4), zero_group=draw.choice(("all", "node")))
        for mesh in meshes(16, {})
        if divides(job, mesh) and mesh.pp <= 8
        for layout in draw.sample([*families(job, mesh, {})], 2)
        if layout.num_stages <= 8
    ]
    assert len({layout.schedule for layout in layouts}) > 3
    for layout in layouts:
        times = []
        for factor in (4.0, 2.0, 1.0, 0.5):
            within, between, nic = (
                Link(*(factor * cost for cost in link)) for link in (NDR.within, NDR.between, NDR.gate)
            )
            machine = on(16, 4, NDR._replace(within=within, between=between, nic=nic), 1e12)
            times.append(step_of(job, layout, machine).time().total)
        assert times == sorted(times, reverse=True), layout


def test_more_memory_never_means_fewer_layouts():
    job = TrainingJob(SMALL, 32)
    plans = [search(job, on(8, 4, memory_bytes=memory)) for memory in (1e5, 1e6, 3e6, 1e7, 1e9)]
    numbers = [plan.fitting for plan in plans]
    assert numbers == sorted(numbers)
    assert 0 == numbers[0] < numbers[1] < numbers[-1]
    assert len({plan.fitting + plan.too_large for plan in plans}) == 1
    bests = [plan.best[0].time.total for plan in plans[1:]]
    assert bests == sorted(bests, reverse=True)


PLAIN = {"recompute": "selective", "sequence_parallel": True}


def test_tensor_parallelism_stays_in_a_node():
    """The model needs it: the activations of one sample exceed a rank's memory."""
    job = TrainingJob(replace(LARGE, n_embd=8192, n_head=64, n_layer=16, block_size=32768), 64)
    machine, alone = on(64), PLAIN | {"sp": 1, "pp": 1}
    plan = best(job, machine, alone)
    assert 1 < plan.layout.tp <= 8
    with pytest.raises(ValueError, match=r"none of \d+ layouts of 64 ranks fits into 72\.0 GB a rank; the nearest, "):
        best(job, machine, alone | {"tp": 1, "sequence_parallel": False})


def test_over_slow_links_pipelines_or_replicas_win():
    job, machine = TrainingJob(replace(LARGE, n_layer=16), 64, dtype="bfloat16", master_weights=True), on(16, 8, SLOW)
    plans = search(job, machine, PLAIN, number=3).best
    assert all(planned.layout.tp <= 8 for planned in plans)
    assert all(planned.layout.dp * planned.layout.pp > 1 for planned in plans)
    assert plans[0].time.total < best(job, machine, PLAIN | {"tp": 16}).time.total / 2


def test_hundreds_of_ranks_are_planned():
    job = TrainingJob(replace(LARGE, n_layer=48), 1024, dtype="bfloat16", master_weights=True)
    layout = best(job, on(256), PLAIN).layout
    assert layout.dp * layout.pp * layout.sp * layout.tp == 256


# Command line


def test_why_a_layout_is_slower():
    usage = Memory(4e9, 4e9, 8e9, 1e9, 0, 0)
    first = PlannedLayout(ParallelLayout(dp=4), usage, Time(1.0, 0, 0, 0, 0, 0, 0.25, 0))
    other = PlannedLayout(ParallelLayout(dp=2, tp=2), usage, Time(1.0, 0.5, 0, 0, 0, 0.25, 0, 0))
    assert slower(other, first) == "40.0% slower: 500.0 ms more for sums between tp ranks"
    assert re.sub(" +", " ", row(other, 7000, 0.4)) == " 1.8 s 4.0k 40.0% 17.0 GB 14.3% 28.6% compute dp 2 tp 2"
    result = SearchResult([first], 1, 1, [(ParallelLayout(), usage)], Counter({"why": 3}))
    assert "  3: why" in [*misfits(on(4), result)]
    assert command(other) == (
        "--dp 2 --pp 1 --sp 1 --tp 2 --zero_stage 0 --zero_group all --recompute none --micro_batch_size 1 "
        "--num_micro_batches 1"
    )


def test_utilization_is_of_the_peak():
    """A step of 6 operations for each weight of a matrix and token, and 12 for each score, beside four ranks' peaks."""
    job, machine = TrainingJob(SMALL, 8), on(4, flops_per_s=1e12)
    matrices = SMALL.n_layer * 11 * SMALL.n_embd**2 + SMALL.vocab_size * SMALL.n_embd
    flops = 8 * SMALL.block_size * (6 * matrices + 12 * SMALL.n_layer * SMALL.block_size * SMALL.n_embd)
    assert utilization(job, machine, 0.5) == pytest.approx(flops / 2e12)
    assert utilization(job, machine._replace(roofline=Roofline(2e12, 1e12, 0.5, 0.5, 0.5)), 0.5) == pytest.approx(
        flops / 4e12
    )


def test_gradients_of_fewer_bytes_take_less_time():
    times = [
        step_of(TrainingJob(SMALL, 2, "bfloat16", grad_dtype=grad_dtype), ParallelLayout(dp=2), on(2, 1)).time().dp
        for grad_dtype in (None, "bfloat16")
    ]
    assert times[1] < times[0]


def test_without_mpi_and_torch():
    code = (
        "import sys; sys.modules['mpi4py'] = sys.modules['torch'] = None; "
        "from parallelism.planner.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ["--config", "configs/small.toml", "--hosts", "8", "--gpus", "8"]
    run = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "8 x 8 ranks: InfiniBand NDR" in run.stdout
    assert "max_iters, eval_interval, lr do not affect the plan" in run.stdout
    assert re.search(r"\n +\d.* dp \d+", run.stdout)
    assert "\nmpirun -n 64 python -m training --config configs/small.toml --device cuda --dp" in run.stdout
    assert "the command below names no hosts: pass --hostfile" in run.stdout


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--hosts 0", "argument --hosts: '0' must be a whole number from 1 to 131072 ranks; see --help"),
        ("--hosts 999999999999", "'999999999999' must be a whole number from 1 to 131072 ranks"),
        ("--hosts 99999 --gpus 99999", "--hosts 99999 x --gpus 99999 means 9999800001 ranks: use 131072 at most"),
        ("--tp 3", "no layout of 8 ranks: none has tp=3: use axes whose product divides the ranks, and for ep "),
        (
            "--sequence_parallel --tp 1",
            "no layout of 8 ranks: sequence_parallel shards sequences over tp ranks, but tp=1",
        ),
        ("--sp_mode ulysses --sp 1", "sp_mode=ulysses has no effect with sp=1: omit it, or set sp to 2 or more"),
        ("--sp_mode ulysses --gpus 1", "no layout of 1 ranks: sp_mode=ulysses has no effect with sp=1: omit it, or"),
        ("--zero_group node --zero_stage 0", "zero_group=node has no effect without zero_stage: omit it, or set zero"),
        ("--schedule zb_v --pp 1", "schedule=zb_v has no effect with pp=1: omit it, or set pp to 2 or more"),
        ("--expert_capacity 2", "expert_capacity=2.0 has no effect without num_experts: omit it, or set num_experts"),
        ("--measure --efficiency 0.9", "--efficiency 0.9 has no effect with --measure: omit it, or pass --tflops"),
        ("--tp 8", "no layout of 8 ranks: n_head=4 and n_kv_head=4 must both be divisible by tp=8"),
        ("--pp 8", "no layout of 8 ranks: n_layer=4 is fewer than 8 stages"),
        ("--global_batch_size 3 --dp 8", "no layout of 8 ranks: global_batch_size=3 is not divisible by dp=8"),
        ("--micro_batch_size 0", "micro_batch_size=0 must be from 1 to 1000000 samples"),
        ("--fabric 100gbe", "has no accelerator: pass --accelerator, --tflops and --memory, or --measure"),
        ("--tflops 0", "argument --tflops: '0' must be a number above 0 and at most 1000000 TFLOP/s"),
        ("--efficiency 1.5", "argument --efficiency: '1.5' must be a number above 0 and at most 1"),
        ("--master_weights", "master_weights are kept beside 16-bit parameters, but dtype=float32: use bfloat16"),
        ("--within 1 0", "--within 1 0: 0 must be above 0 and at most 1000000000 GB/s"),
        ("--zero_stage 4", "invalid choice"),
        ("--n_embd 190", "n_embd=190 is not divisible by n_head=4"),
        ("--config nowhere.toml", "nowhere.toml: can't be read"),
        ("--schedule zb_v --virtual_stages 3 --pp 2", "schedule and virtual_stages are incompatible"),
        ("--number 0", "argument --number: '0' must be a whole number from 1 to 1000"),
        ("--bucket_mb 0", "bucket_mb=0.0 must be above 0 and at most 65536 MiB"),
        ("--bucket_mb nan", "bucket_mb=nan must be above 0"),
        ("--n_layer 99999999999", "n_layer=99999999999 must be from 1 to 1000"),
        ("--memory nan", "argument --memory: 'nan' must be a number above 0"),
    ],
)
def test_bad_input(capsys, flags, why):
    assert main(flags.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert why in err
    assert err.count("\n") == 1


def test_bad_files(capsys, tmp_path):
    for line, why in (
        ("zero_stage = 7", "zero_stage=7 is unknown: use 0, 1, 2, 3"),
        ("schedule = 'best'", "schedule='best' is unknown: use naive, gpipe, "),
        ("tp = 'two'", "tp='two' must be of type int"),
        ("[model]\nn_layer = 3", "job.toml: [model] is a table, but settings are not grouped in tables: remove its"),
        ("bucket_mb = nan", "job.toml: bucket_mb=nan must be above 0"),
    ):
        (tmp_path / "job.toml").write_text(line)
        assert main(["--config", str(tmp_path / "job.toml")]) == 2
        assert why in capsys.readouterr().err


def test_a_named_model_overrides_the_shape_of_a_file(tmp_path):
    """As in train.py, whose command line the planner prints."""
    (tmp_path / "job.toml").write_text("n_layer = 2\nn_head = 2\nn_embd = 64\nblock_size = 64\ndropout = 0.5\n")
    for flags, n_layer, n_embd in ((), 2, 64), (("--model", "gpt2"), 12, 768), (("--depth", "3"), 3, 192):
        arguments = ["--config", str(tmp_path / "job.toml"), *flags]
        model, config = parse_request(arguments, None).job.model, parse(Config, "", arguments)
        assert (model.n_layer, model.n_embd, model.dropout) == (n_layer, n_embd, 0.5)
        assert (config.n_layer, config.n_embd, config.block_size) == (n_layer, n_embd, model.block_size)


def test_what_a_file_says_of_layouts_stands(tmp_path):
    (tmp_path / "job.toml").write_text("tp = 2\nmicro_batch_size = 4\nnum_micro_batches = 3\nlr = 1.0")
    request = parse_request(["--config", str(tmp_path / "job.toml"), "--pp", "1", "--hosts", "2"], None)
    assert request.fixed == {"pp": 1, "tp": 2}
    assert request.job.global_batch_size == 16 * 4 * 3
    assert parse_request(["--micro_batch_size", "4"], None).fixed == {"micro_batch_size": 4}


@pytest.mark.parametrize("command", re.findall(r"^python -m parallelism.planner (.*)", described, re.MULTILINE))
def test_commands_that_help_shows(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    host = "[[hosts]]\nname = '{}'\nranks = 1\ntflops = {}\nmemory = 8\n"
    (tmp_path / "cluster.toml").write_text(host.format("a", 1) + host.format("b", 0.5))
    assert main(shlex.split(command)) == 0
    assert re.search(r"\nmpirun -n \d+ python -m training .*--dp", capsys.readouterr().out)


def test_the_command_at_the_end_can_be_pasted(capsys, tmp_path):
    """train.py accepts it, and then has the planned settings and number of ranks."""
    file = tmp_path / "my job.toml"
    file.write_text("schedule = 'zb_v'\nsequence_parallel = true\nn_layer = 2\nglobal_batch_size = 24\nlr = 0.1\n")
    flags = ["--config", str(file), "--gpus", "2", "--tp", "1", "--n_embd", "64", "--bias", "--no-sequence_parallel"]
    assert main(flags) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    program = ["mpirun", "-n", "2", "python", "-m", "training"]
    assert words[: len(program)] == program
    config = parse(Config, "", words[len(program) :])
    assert (config.n_layer, config.n_embd, config.bias, config.lr, config.sequence_parallel) == (
        2,
        64,
        True,
        0.1,
        False,
    )
    inputs = config.checked(Topology.from_ids([0, 0]))
    assert inputs.batch_size == 24


@pytest.mark.parametrize(
    "flags", ["--zero_group node --gpus 1", "--schedule zb_v --gpus 2 --tp 2", "--sp_mode ulysses --gpus 2", "--pp 1"]
)
def test_what_is_planned_has_an_effect_in_training(flags, capsys):
    assert main(["--n_layer", "2", *flags.split()]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    parse(Config, "", command[6:]).checked(Topology.from_ids([0] * int(command[2])))


@pytest.mark.parametrize(
    ("flags", "hosts", "expected"),
    [
        ("--model gpt2", [], {"device": "cuda", "vocab_size": 50257, "data": []}),
        ("--model gpt2 --data 'my text' b", [], {"device": "cuda", "vocab_size": None, "data": ["my text", "b"]}),
        ("--vocab_size 300 --device cuda:1", [], {"device": "cuda:1", "vocab_size": 300}),
        ("--fabric 100gbe --tflops 1 --memory 9 --gpus 8", [], {"device": "cpu", "vocab_size": None}),
        ("--hostfile 'my hosts'", ["--hostfile", "my hosts"], {"tokenizer": "bytes"}),
        ("--tokenizer t.json --val_data v", [], {"tokenizer": "t.json", "val_data": ["v"], "vocab_size": None}),
    ],
)
def test_the_command_has_what_it_was_planned_for(capsys, flags, hosts, expected):
    assert main(shlex.split(flags)) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    program = ["mpirun", *hosts, "-n", "8", "python", "-m", "training"]
    assert words[: len(program)] == program
    config = parse(Config, "", words[len(program) :])
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_does_not_fit_is_said(capsys):
    assert main(["--memory", "0.002", "--spare", "0"]) == 2
    _, err = capsys.readouterr()
    number = int(re.search(r"none of (\d+) layouts of 8 ranks fits into 2.0 MB a rank; the nearest, ", err)[1])
    assert "activations" in err
    assert main(["--memory", "0.01", "--spare", "0"]) == 0
    out, _ = capsys.readouterr()
    fit, miss = map(int, re.search(r"(\d+) layouts fit, (\d+) don't", out).groups())
    assert fit + miss == number
    assert fit > 0 < miss
    assert "of those that don't fit into 10.0 MB, the nearest:" in out
