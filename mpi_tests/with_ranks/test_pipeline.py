"""Pipelines compared with the plain model on the whole batch: loss and every gradient."""

import math
import re
from contextlib import nullcontext
from functools import cache
from itertools import pairwise

import pytest
import torch

from models.config import ModelConfig
from models.decoder import CrossEntropy, Decoder
from mpi_tests.helpers.played import loss_weights
from mpi_tests.helpers.ranks import IS_PROOF
from parallelism.mesh import Mesh
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.dropout import BatchPosition
from parallelism.numerics.master_weights import MasterWeights
from parallelism.numerics.recomputation import recompute
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.stage import Batch, within
from parallelism.pipeline.trace import SpanRecorder
from parallelism.step.actions import WEIGHTS
from parallelism.step.events import Listener
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import layers_of, plan_of

CONFIG = ModelConfig(vocab_size=19, block_size=8, n_layer=16 if IS_PROOF else 8, n_head=2, n_embd=8, bias=True)
SEQ = 6
each_schedule = pytest.mark.parametrize("name", registry.names())


def batches_of(count, samples=2):
    """Return the micro-batches of a batch."""
    ids = torch.randint(CONFIG.vocab_size, (count * samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(count * samples).chunk(count)
    return [
        Batch(part[:, :-1], part[:, 1:].clone(), samples=of) for part, of in zip(ids.chunk(count), numbers, strict=True)
    ]


def together(batches):
    tokens, targets, _, _, samples, _ = zip(*batches, strict=True)
    return Batch(torch.cat(tokens), torch.cat(targets), samples=torch.cat(samples))


def plain_gradients(batches, dtype=torch.float64):
    """Return the plain model's loss and gradients on the whole batch."""
    model, batch = Decoder(CONFIG).to(dtype), together(batches)
    _, loss = model(batch.tokens, batch.targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


@cache
def plain_results(count, dtype=torch.float64):
    """Return the plain results of `count` micro-batches, cached, as no test modifies them."""
    return plain_gradients(batches_of(count), dtype)


def check(model, want, tolerance=1e-10):
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=tolerance, atol=tolerance * float(want[name].abs().max()))


@pytest.fixture
def piped(comm):
    """Yield a function that makes a model and its pipeline; free their communicators, as MPI may have few."""
    pipelines = []

    def make(name, count, dtype=torch.float64, model=None, context=nullcontext, **axes):
        model = model or Decoder(CONFIG).to(dtype)
        mesh = Mesh(comm, **(axes or {"pp": comm.size}))
        schedule = registry.make_schedule(name, mesh.pp.size, count)
        pp = PipelineParallel(model, [within(context, layer) for layer in layers_of(model)], schedule, mesh)
        pipelines.append((pp, mesh))
        return model, pp

    yield make
    for pp, mesh in pipelines:
        pp.free()
        mesh.free()


@each_schedule
@pytest.mark.sizes(1, 2, 3, proof=(4, 8))
def test_loss_and_gradients_of_the_plain_model(comm, piped, name):
    for count in sorted({1, comm.size, 2 * comm.size + 1}):
        batches = batches_of(count)
        want_loss, want = plain_results(count)
        model, pp = piped(name, count)
        for _ in range(2):  # no state of the first step may affect the second
            pp.zero_grad()
            loss = pp.step(batches).item()
            assert loss == (pytest.approx(want_loss, rel=1e-10) if pp.has_loss else 0)
            check(model, want)
        losses = pp.losses(batches[::-1])
        assert len(losses) == count
        assert sum(losses) == (pytest.approx(want_loss * count) if pp.has_loss else 0)


@each_schedule
@pytest.mark.sizes(4)
def test_loss_and_gradients_in_float32(comm, piped, name):
    batches = batches_of(4)
    want_loss, want = plain_results(4, torch.float32)
    model, pp = piped(name, 4, torch.float32)
    loss = pp.step(batches).item()
    assert loss == (pytest.approx(want_loss, rel=1e-5) if pp.has_loss else 0)
    check(model, want, 1e-5)


@each_schedule
@pytest.mark.sizes(3, 4)
def test_as_many_activations_are_alive_as_stated(comm, piped, name):
    count = 9
    _, pp = piped(name, count)
    stages, alive = pp.stages.values(), []
    for stage in stages:
        forward = stage.forward

        def counting_forward(*args, forward=forward):
            result = forward(*args)
            alive.append(sum(stage.num_alive for stage in stages))
            return result

        stage.forward = counting_forward
    batches = batches_of(count)
    pp.form(batches[0])
    alive.clear()
    pp.step(batches)
    assert max(alive) == pp.schedule.peaks[comm.rank]
    assert sum(stage.num_alive for stage in stages) == 0
    if name == "1f1b":
        assert max(alive) == comm.size - comm.rank
    if name in ("gpipe", "breadth_first"):
        assert max(alive) == count * len(stages)
    if name == "zb_v":
        assert max(alive) == 2 * comm.size


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
@pytest.mark.sizes(4, proof=(8,))
def test_data_parallel_ranks_beside(comm, piped, name):
    """Each dp rank has its own micro-batches, and all get the gradients of the whole batch."""
    batches = batches_of(comm.size)
    want_loss, want = plain_results(comm.size)
    model, pp = piped(name, 2, dp=comm.size // 2, pp=2)
    dp_rank = comm.rank // 2
    loss = pp.step(batches[2 * dp_rank : 2 * dp_rank + 2]).item()
    losses = comm.all_reduce(torch.tensor([loss / (comm.size // 2)], dtype=torch.float64))
    assert losses.item() == pytest.approx(want_loss, rel=1e-10)
    check(model, want)


@pytest.mark.sizes(2)
def test_the_norm_counts_tied_gradients_once(comm, piped):
    """The embedding's gradients, which are also the head's, exist on the first and on the last stage."""
    batches = batches_of(2)
    _, want = plain_gradients(batches)
    norms = {name: float(gradient.norm()) for name, gradient in want.items() if name != "lm_head.weight"}
    model, pp = piped("1f1b", 2)
    pp.step(batches)
    masters, mesh = MasterWeights(dict(model.named_parameters())), Mesh(comm, pp=2)
    masters.take_gradients()
    norm = GradientClip(math.inf, model, masters, mesh, [("transformer.wte.weight", "lm_head.weight")])()
    mesh.free()
    assert norms["transformer.wte.weight"] > 0.01 * math.hypot(*norms.values())
    assert norm.item() == pytest.approx(math.hypot(*norms.values()), rel=1e-10)


@pytest.mark.sizes(4)
def test_gradients_are_on_their_way_after_a_stages_last_backward_pass(comm, piped):
    """Of a rank's two stages, the later one's gradients are reduced while the earlier one still computes."""
    _, pp = piped("interleaved", 2, dp=2, pp=2)
    started = []
    for bucket in pp.replica.buckets:
        start = bucket.plan.start
        bucket.plan.start = lambda start=start: (started.append(pp.now), start())[1]
    pp.step(batches_of(2))
    order = [a for a in pp.schedule.orders[pp.comm.rank] if a.kind == "B"]
    last = {a.stage: a for a in order}
    assert set(started) == set(last.values())
    first_ended = min(last.values(), key=order.index)
    assert order.index(first_ended) < len(order) - 1  # further actions follow it


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.sizes(2)
def test_dropout_and_recomputation_do_not_depend_on_the_layout(comm, piped, name, recomputed):
    config = ModelConfig(vocab_size=19, block_size=8, n_layer=4, n_head=2, n_embd=8, dropout=0.3)
    alone = comm.split(comm.rank)

    def dropping():
        model, position = Decoder(config).double(), BatchPosition(seed=3)
        parallelize(model, plan_of(config), alone, place=position)
        return model, position

    batches = batches_of(3)
    plain, position = dropping()
    batch = together(batches)
    position.samples = batch.samples
    _, want = plain(batch.tokens, batch.targets)
    want.backward()
    model, position = dropping()
    if recomputed:
        for block in model.transformer.h:
            recompute(block, position)

    def set_samples(batch):
        position.samples = batch.samples
        return nullcontext()

    _, pp = piped(name, 3, model=model, context=set_samples)
    loss = pp.step(batches).item()
    assert loss == (pytest.approx(want.item(), rel=1e-10) if pp.has_loss else 0)
    check(model, {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)})


@pytest.mark.sizes(2)
def test_micro_batches_may_count_by_their_targets(comm, piped):
    batches = batches_of(3)
    batches[0].targets[:, 2:] = batches[1].targets[0] = CrossEntropy.ignored
    want_loss, want = plain_gradients(batches)
    model, pp = piped("1f1b", 3)
    loss = pp.step(batches, loss_weights(batches, CrossEntropy.ignored)).item()
    assert loss == (pytest.approx(want_loss, rel=1e-10) if pp.has_loss else 0)
    check(model, want)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
@pytest.mark.sizes(4)
def test_gradients_are_handed_over_with_their_micro_batches(comm, piped, name):
    """Each replica has its own numbers in the global batch, for every parameter with a gradient."""
    model, pp = piped(name, 2, dp=2, pp=2)
    first, numbers = 2 * (comm.rank // 2), {}
    listener = Listener()
    listener.gradient_ready = lambda parameter, number: numbers.setdefault(parameter, set()).add(number)
    with pp.notifying(listener):
        pp.step(batches_of(4)[first : first + 2])
    assert set(model.parameters()) <= numbers.keys()
    assert set(map(frozenset, numbers.values())) == {frozenset({first, first + 1})}


@pytest.mark.sizes(2)
def test_what_a_rank_does_is_recorded(comm, piped):
    _, pp = piped("zb_h1", 3)
    pp.form(batches_of(3)[0])
    recorder = SpanRecorder(comm.rank)
    with pp.notifying(recorder):
        pp.step(batches_of(3))
    spans = recorder.spans
    assert [span.what for span in spans if re.fullmatch(r"\d+[FBIW]\d+", span.what)] == [
        str(action) for action in pp.schedule.orders[comm.rank]
    ]
    assert {span.rank for span in spans} == {comm.rank}
    assert all(a.begin_s <= a.end_s <= b.begin_s for a, b in pairwise(spans))
    assert any(WEIGHTS in span.what for span in spans)
    assert 0 < pp.times.bubble(comm) < 1


@pytest.mark.sizes(2)
def test_what_does_not_fit(comm, piped):
    from collectives.job.errors import InputError

    model = Decoder(CONFIG)
    layers, mesh = CONFIG.n_layer + 1, Mesh(comm, pp=2)
    for ranks, stages, words in (
        (3, 3, "schedule 1f1b is for 3 ranks, but there are 2: make one for those"),
        (2, 32, f"{layers} layers can be cut into 1 to {layers} stages, not 32"),
    ):
        name, each = ("1f1b", None) if stages == ranks else ("interleaved", stages // ranks)
        schedule = registry.make_schedule(name, ranks, 4, each)
        with pytest.raises(InputError, match=words):
            PipelineParallel(model, layers_of(model), schedule, mesh)
    _, pp = piped("1f1b", 4)
    with pytest.raises(
        ValueError, match="3 micro-batches, but schedule 1f1b is for 4: pass as many, or make one for 3"
    ):
        pp.step(batches_of(3))
