"""ZeRO in pipelines: training over stages and replicas equals training of the plain model in one process."""

from functools import cache, partial
from itertools import cycle, pairwise, product
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.helpers.zero_bytes import with_counters
from models.config import ModelConfig
from models.decoder import Decoder
from mpi_tests.helpers.ranks import IS_PROOF, from_first
from parallelism import Batch, GradientClip, Mesh, PipelineParallel, ShardGroups, parallelize, recompute
from parallelism.checkpoint import Checkpoints, make_states, model_parts, state_parts
from parallelism.numerics.dropout import BatchPosition
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.schedule.price import Costs
from parallelism.pipeline.schedule.search import search
from parallelism.placement import fill, wholes
from parallelism.planner import ParallelLayout, TrainingJob
from parallelism.planner.memory import memory, model_shards
from parallelism.step.events import SHARED
from training.parallel.decoder import layers_of, plan_of

CONFIG = ModelConfig(vocab_size=19, block_size=8, n_layer=8, n_head=2, n_embd=8, bias=True)
STEPS, COUNT, SAMPLES = 2, 4, 2  # steps, micro-batches per rank, samples per micro-batch
CLIP = 0.3
TIED = [("transformer.wte.weight", "lm_head.weight")]
FROZEN = {
    "none": (),
    "some": ("transformer.wpe.weight", "transformer.h.1", "transformer.h.2.mlp.c_fc.weight", "transformer.ln_f"),
    "tied": ("transformer.wte.weight", "transformer.h.7.attn"),
    "a stage": ("transformer.w", *(f"transformer.h.{number}" for number in range(5))),
}

each_stage = pytest.mark.parametrize("zero_stage", [2, 3])


def adamw(params):
    params = list(params)
    matrices, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def sgd(params):
    return torch.optim.SGD([{"params": list(params)}], lr=0.1, momentum=0.9, weight_decay=0.01)


def make_model(dtype, frozen, seed=0):
    model = Decoder(CONFIG, seed).to(dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(FROZEN[frozen] or ("none",)))
    return model


def tokens(step, count):
    """Return the tokens of `count` samples."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(CONFIG.vocab_size, (count, CONFIG.block_size + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@cache
def plain_training(num_replicas, dtype, frozen, make):
    """Return the plain model's losses, norms and parameters, trained on whole batches with plain torch."""
    model = make_model(dtype, frozen)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss = model(*tokens(step, num_replicas * COUNT * SAMPLES))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


@cache
def schedule_of(name):
    if name == "searched":
        return search(2, COUNT, 2, Costs((1.0, 1.0, 1.0, 2.0), 1.2, 0.7, 0.1), 6)
    return registry.make_schedule(name, 2, COUNT)


class Run:
    """Training of a model in pipeline stages, whose replicas are sharded by ZeRO."""

    def __init__(self, mesh, zero_stage, schedule, dtype, frozen, group, make, recomputed):
        self.mesh, self.dtype, self.frozen, self.make = mesh, dtype, frozen, make
        self.model = make_model(dtype, frozen, seed=mesh.dp.rank)  # dp rank 0's parameters are broadcast
        parallelize(self.model, plan_of(CONFIG), mesh.tp)
        for block in self.model.transformer.h if recomputed else ():
            recompute(block, BatchPosition())
        arguments = self.model, layers_of(self.model), schedule_of(schedule), mesh
        self.pp = PipelineParallel(*arguments, make_optimizer=make, zero_group=group, zero_stage=zero_stage)
        self.zero = self.pp.replica

    def batches(self, step):
        inputs, targets = (x.chunk(self.mesh.dp.size)[self.mesh.dp.rank] for x in tokens(step, self.num_samples))
        return [Batch(*pair) for pair in zip(inputs.chunk(COUNT), targets.chunk(COUNT), strict=True)]

    @property
    def num_samples(self):
        return self.mesh.dp.size * COUNT * SAMPLES

    def train(self):
        """Train; return the losses of all samples, and the norms."""
        losses, norms = np.zeros(STEPS), []
        clip = GradientClip(CLIP, self.model, self.zero.masters, self.mesh, TIED)
        for step in range(STEPS):
            losses[step] = self.pp.step(self.batches(step)) / self.mesh.dp.size
            norms.append(clip().item())
            self.zero.update()
            self.pp.zero_grad()
        return self.mesh.along("dp", "pp").all_reduce(losses), norms

    def state(self):
        """Yield the shards for a checkpoint of this run."""
        parts = model_parts(self.model, self.mesh, TIED)
        masters = self.zero.masters
        for name, piece in masters.pieces.items():
            part = parts[name].within(masters.spans[name], piece)
            yield part
            yield from state_parts(part, self.zero.optimizer.state[piece])

    def parameters(self):
        with self.zero.whole():
            return {name: p.clone() for name, p in wholes(self.model, self.mesh).items()}


@pytest.fixture
def started(comm):
    """Yield a function that starts runs; free their communicators."""
    runs = []

    def start(
        zero_stage, schedule="1f1b", dtype=torch.float64, frozen="none", group="all", make=adamw, recomputed=False, tp=1
    ):
        mesh = Mesh(comm, pp=2, tp=tp)
        runs.append(Run(mesh, zero_stage, schedule, dtype, frozen, group, make, recomputed))
        return runs[-1]

    yield start
    for run in runs:
        run.pp.free()
        run.mesh.free()


def check(run, tolerance=1e-10):
    plain = partial(plain_training, run.mesh.dp.size, run.dtype, run.frozen, run.make)
    want_losses, want_norms, want = from_first(run.mesh.comm.mpi, plain)
    losses, norms = run.train()
    np.testing.assert_allclose(losses, want_losses, rtol=tolerance)
    np.testing.assert_allclose(norms, want_norms, rtol=tolerance)
    for name, p in run.parameters().items():
        torch.testing.assert_close(p, want[name], rtol=0, atol=tolerance * float(want[name].abs().max()), msg=name)


SCHEDULES = [*registry.names(), "searched"]
EVERY = [*product(SCHEDULES, [2, 3])] if IS_PROOF else [*zip(SCHEDULES, cycle([2, 3]), strict=False)]  # a stage each


@pytest.mark.parametrize(("schedule", "zero_stage"), EVERY)
@pytest.mark.sizes(4)
def test_every_schedule_trains_as_one_process(started, schedule, zero_stage):
    check(started(zero_stage, schedule))


SPLIT = [("zb_v", 3)]
if IS_PROOF:
    SPLIT = [*product(["1f1b", "interleaved", "zb_h1", "zb_v"], [2, 3])]


@pytest.mark.parametrize(("schedule", "zero_stage"), SPLIT)
@pytest.mark.sizes(8)
def test_layers_are_split_and_recomputed(started, schedule, zero_stage):
    """The mesh is 2 x 2 x 2: pp, dp and tp."""
    check(started(zero_stage, schedule, tp=2, recomputed=True))


@pytest.mark.parametrize(
    ("frozen", "schedule", "zero_stage"),
    [
        ("some", "interleaved", 2),
        ("some", "interleaved", 3),
        ("tied", "zb_v", 1),
        ("tied", "zb_v", 3),
        ("a stage", "1f1b", 1),
        ("a stage", "1f1b", 3),
        ("a stage", "zb_h1", 2),
    ],
)
@pytest.mark.sizes(4)
def test_frozen_parameters_stay(started, frozen, schedule, zero_stage):
    check(started(zero_stage, schedule, frozen=frozen))


@each_stage
@pytest.mark.sizes(8)
def test_groups_share_and_replicate_across(started, zero_stage):
    """Four replicas form two groups; in float32."""
    check(started(zero_stage, "zb_h1", torch.float32, group=2, make=sgd), tolerance=1e-6)


@each_stage
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.sizes(4)
def test_a_rank_never_has_more_than_it_needs(started, schedule, zero_stage):
    """Limits are one layer's gradients, and the embedding's and norm's; two layers' parameters, and tied ones."""
    run = started(zero_stage, schedule)
    params = list(run.model.parameters())
    layer = sum(p.numel() for p in Decoder(CONFIG).transformer.h[0].parameters())
    rest = 2 * sum(p.numel() for name, p in run.model.named_parameters() if ".h." not in name)
    whole = sum(p.numel() for p in params)
    gradients, present = [], []

    def look(*_):
        gradients.append(sum(p.numel() for p in params if p.grad is not None))
        present.append(sum(p.numel() for p in params if p.untyped_storage().nbytes() > p.itemsize))

    for p in params:
        p.register_hook(look)
    ready = run.zero.gradient_ready
    run.zero.gradient_ready = lambda *event: (ready(*event), look())
    run.train()
    norms = 4 * 4 * CONFIG.n_embd
    assert layer / 2 < max(gradients) <= layer + rest + norms < 0.6 * whole
    assert max(present) <= (2 * layer + rest if zero_stage == 3 else whole)
    assert 2 * layer + rest < 0.8 * whole
    assert all(p.grad is None for p in params)
    assert all(array.nbytes < 0.6 * whole * 8 for array in run.zero.arrays[zero_stage == 2 :])
    assert all(p.isnan().all() for p in params) == (zero_stage == 3)


@each_stage
@pytest.mark.sizes(4)
def test_validation_may_have_batches_that_differ_between_replicas(started, zero_stage):
    run = started(zero_stage)
    run.train()
    batch = run.batches(0)[0]
    first = Batch(batch.tokens[:1], batch.targets[:1])
    batches = [batch, first if run.mesh.dp.rank else batch]
    losses = run.pp.losses(batches)
    whole = make_model(run.dtype, "none")
    whole.load_state_dict(gathered(run))
    want = [whole(each.tokens, each.targets)[1].item() for each in batches]
    assert losses == (pytest.approx(want, rel=1e-10) if run.pp.has_loss else [0, 0])


def gathered(run):
    """Gather the parameters of all stages."""
    model = make_model(run.dtype, "none")
    fill(model, run.parameters(), run.mesh.pp)
    return model.state_dict()


@each_stage
@pytest.mark.sizes(4)
def test_bytes_are_sent_for_each_micro_batch(started, monkeypatch, zero_stage):
    """Gradients take m Psi, parameters Psi in stage 2 and 2 m Psi in stage 3, less layers that are still gathered."""
    counters = []

    def counting_groups(*groups):
        ranks, more = with_counters(ShardGroups.of(*groups))
        counters.extend(more)
        return ranks

    monkeypatch.setattr("parallelism.pipeline.pipeline_parallel.ShardGroups", SimpleNamespace(of=counting_groups))
    run = started(zero_stage, "gpipe")
    run.train()
    (counter,) = counters
    chunks = sum(p.numel() for p in run.model.parameters()) * 8 / 2
    lines = 64 * len(list(run.model.parameters()))
    counter.nbytes = 0
    run.pp.step(run.batches(0))
    run.zero.update()
    passes = COUNT + (1 if zero_stage == 2 else 2 * COUNT)
    assert counter.nbytes == pytest.approx(passes * chunks, rel=0.05, abs=passes * lines)


@each_stage
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.sizes(4)
def test_the_planner_counts_what_a_rank_holds(started, schedule, zero_stage):
    """The prediction is of the rank with the most; that of working memory is an upper bound."""
    run = started(zero_stage, schedule)
    layout = ParallelLayout(dp=2, pp=2, schedule=schedule, virtual_stages=len(run.pp.parts), zero_stage=zero_stage)
    layout = layout._replace(num_micro_batches=COUNT, micro_batch_size=SAMPLES)
    job = TrainingJob(CONFIG, run.num_samples, dtype="float64")
    prediction = memory(job, layout, model_shards(job, layout), owners=2)
    working = sum(buffer.tensor.nbytes for buffer in run.zero.working)
    if zero_stage == 3:
        slots = {layer.slot for layer in run.zero.layers.values()}
        working += sum(slot.tensor.nbytes for slot in slots)
    bytes_in_use = np.array([array.nbytes for array in run.zero.arrays] + [working], float)
    bytes_in_use = run.mesh.comm.all_reduce(bytes_in_use, op="max")
    np.testing.assert_allclose(bytes_in_use[:2], [prediction.parameters, prediction.gradients], rtol=0.1)
    assert prediction.buffers / 2.5 < bytes_in_use[2] <= prediction.buffers


@pytest.mark.sizes(4)
def test_a_checkpoint_goes_on_in_another_layout(comm, started):
    """It goes from stage 3 on 2 x 2 ranks of pp and dp to stage 2 with another schedule, and to 2 x 2 of pp and tp."""
    first = started(3, "1f1b")
    first.train()
    with TemporaryDirectory() as own:
        folder = comm.all_gather_object(own)[0]
        checkpoints = Checkpoints(folder, comm)
        checkpoints.save(1, first.state(), {})
        checkpoints.wait()
        others = [started(2, "zb_v"), started(3, "interleaved", tp=2)]
        for run in others:
            make_states(run.zero.optimizer)
            checkpoints.load(run.state(), checkpoints.newest())
            run.zero.gather()
        checkpoints.close()
        comm.barrier()
    want = gathered(first)
    for run in others:
        for name, p in gathered(run).items():
            assert torch.equal(p, want[name]), name
    first.train()
    others[0].train()
    want = gathered(first)
    for name, p in gathered(others[0]).items():
        torch.testing.assert_close(p, want[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1"])
@pytest.mark.sizes(4)
def test_the_next_layer_is_on_its_way(started, schedule):
    """It is gathered ahead within an action and across actions, unless it uses the buffer of the computing layer."""
    run = started(3, schedule)
    layers, events = {number: layer for number, layer in run.zero.layers.items() if number != SHARED}, []

    def watched(number, layer, gather):
        def gathered():
            events.append((number, layer.slot.user is layer))
            gather()

        layer.gather = gathered

    for number, layer in layers.items():
        watched(number, layer, layer.gather)
    run.pp.step(run.batches(0))
    order = [*enumerate(run.pp.schedule.orders[run.mesh.pp.rank])]
    parts = [
        (i, list(run.pp.parts[stage])[:: 1 if kind == "F" else -1]) for i, (stage, kind, _) in order if kind != "W"
    ]
    uses = [(i, number) for i, part in parts for number in part]
    assert [number for number, _ in events] == [number for _, number in uses]
    free = [a == b or layers[a].slot is not layers[b].slot or j > i + 1 for (i, a), (j, b) in pairwise(uses)]
    assert [ahead for _, ahead in events] == [False, *free]
