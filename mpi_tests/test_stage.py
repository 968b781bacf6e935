"""Stages played in one process, by every schedule, against the plain model: loss and every gradient."""

import random
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from models.gpt import GPT, GPTConfig
from mpi_tests.test_gpt import random_tokens, randomized
from parallelism.dropout import Place
from parallelism.partition import balance
from parallelism.pipeline_schedule import registry
from parallelism.pipeline_schedule.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from parallelism.plan import gpt2_plan, parallelize
from parallelism.stage import Batch, cut, gpt2_layers, loss_weights

SEQ = 6
CONFIG = GPTConfig(vocab_size=29, block_size=8, n_layer=8, n_head=4, n_embd=16, bias=True, n_kv_head=2)
DROPPING = replace(CONFIG, n_layer=9, dropout=0.2)
IGNORED = -100


def batch_of(num_samples):
    """Samples of several documents, some of whose targets don't count: other numbers in each sample."""
    targets = random_tokens(num_samples, SEQ, seed=1)
    targets[torch.arange(SEQ) < torch.arange(num_samples)[:, None] % SEQ] = IGNORED
    documents = (torch.arange(SEQ) >= torch.arange(num_samples)[:, None] % 5 + 1).long()
    return Batch(random_tokens(num_samples, SEQ), targets, torch.arange(SEQ), documents, torch.arange(num_samples))


def micro_batches(batch, number):
    tokens, targets, documents, samples = (x.chunk(number) for x in (batch[0], batch[1], batch[3], batch[4]))
    return [Batch(tokens[i], targets[i], batch.positions, documents[i], samples[i]) for i in range(number)]


def needs(action, num_stages):
    """What must be done before an action: each inner tuple is one thing, or another that does as well."""
    stage, kind, micro_batch = action
    before = [] if kind == FORWARD else [(Action(stage, INPUTS if kind == WEIGHTS else FORWARD, micro_batch),)]
    if kind == FORWARD and stage:
        before.append((Action(stage - 1, FORWARD, micro_batch),))
    if kind in (BACKWARD, INPUTS) and stage + 1 < num_stages:
        before.append((Action(stage + 1, BACKWARD, micro_batch), Action(stage + 1, INPUTS, micro_batch)))
    return before


def merged(schedule, seed=0):
    """All actions, with their ranks, in an order drawn of those in which they can be done."""
    draw, done = random.Random(seed), set()
    ahead = {rank: list(order) for rank, order in enumerate(schedule.orders) if order}
    while ahead:
        ready = [
            rank
            for rank, order in ahead.items()
            if all(done.intersection(either) for either in needs(order[0], schedule.num_stages))
        ]
        rank = draw.choice(ready)
        done.add(ahead[rank][0])
        yield rank, ahead[rank].pop(0)
        if not ahead[rank]:
            del ahead[rank]


class Players:
    """The ranks of a schedule, each with its stages of a model of its own."""

    def __init__(self, make, schedule, place=None):
        self.schedule, self.place, self.stages = schedule, place, {}
        self.models = [make() for _ in schedule.orders]
        splits = any(action.kind == INPUTS for order in schedule.orders for action in order)
        for rank, model in enumerate(self.models):
            layers = gpt2_layers(model)
            parts = balance([layer.cost for layer in layers], schedule.num_stages)
            own = {stage: parts[stage] for stage in schedule.stages(rank)}
            self.stages |= cut(model, layers, own, self.prepare, splits)

    def prepare(self, batch):
        if self.place:
            self.place.samples = batch.samples

    def play(self, batches):
        weights = loss_weights(batches, IGNORED)
        last, loss, passed = self.schedule.num_stages - 1, 0.0, {}
        for rank, (number, kind, micro_batch) in merged(self.schedule):
            stage = self.stages[number]
            if kind == FORWARD:
                y = stage.forward(micro_batch, passed.pop((number, micro_batch), None), batches[micro_batch])
                passed[number + 1, micro_batch] = y
                loss += weights[micro_batch] * float(y) if number == last else 0.0
            elif kind == WEIGHTS:
                stage.backward_weights(micro_batch)
            else:
                given = (
                    passed.pop((number + 1, micro_batch))
                    if number < last
                    else torch.tensor(weights[micro_batch], dtype=torch.float64)
                )
                act = stage.backward if kind == BACKWARD else stage.backward_inputs
                passed[number, micro_batch] = act(micro_batch, given)
            alive = sum(self.stages[own].num_alive for own in self.schedule.stages(rank))
            assert alive <= self.schedule.peaks[rank]
        assert not any(stage.num_alive for stage in self.stages.values())
        return loss

    def gradients(self):
        """By the whole model's names; of the tied head and embedding, the sum over the ranks."""
        found = {}
        for model in self.models:
            for name, p in model.named_parameters():
                name = name.replace("lm_head", "transformer.wte")
                found[name] = found[name] + p.grad if name in found else p.grad
        return found


class Alone:
    """As much of a communicator as dropout by place needs, where ranks share nothing."""

    rank, size = 0, 1

    def agreed(self, name):
        return nullcontext()


def model_of(config, place=None):
    """A plain GPT, or with dropout one that draws by place."""
    model = randomized(config)
    if place:
        parallelize(model, gpt2_plan(config.vocab_size, config.n_head, config.n_kv_head), Alone(), place=place)
    return model


def whole_batch(model, batch):
    """Loss and gradients of all micro-batches at once."""
    _, loss = model(batch.tokens, batch.targets, batch.positions, batch.documents)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@cache
def dropping_results(config, num_samples):
    place, batch = Place(seed=3), batch_of(num_samples)
    place.samples = batch.samples
    return whole_batch(model_of(config, place), batch)


def close(got, wanted, rtol):
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))


def check_results(players, batches, wanted, rtol):
    loss, gradients = players.play(batches), players.gradients()
    assert loss == pytest.approx(wanted[0], rel=rtol)
    assert gradients.keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        close(gradients[name].to(gradient.dtype), gradient, rtol)


each_schedule = pytest.mark.parametrize("name", registry.names())


@each_schedule
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 2])
def test_loss_and_every_gradient_are_the_whole_batchs(name, num_ranks, more):
    """Micro-batches fewer than, as many as and more than ranks; grouped heads, biases, dropout, documents."""
    num_micro_batches = max(1, num_ranks + more)
    schedule, place = registry.make(name, num_ranks, num_micro_batches), Place(seed=3)
    config = replace(DROPPING, n_layer=max(9, schedule.num_stages))
    players = Players(lambda: model_of(config, place), schedule, place)
    batch = batch_of(2 * num_micro_batches)
    check_results(
        players, micro_batches(batch, num_micro_batches), dropping_results(config, 2 * num_micro_batches), 1e-10
    )


@each_schedule
def test_float32_is_the_plain_model(name):
    batch = batch_of(10)
    players = Players(lambda: model_of(CONFIG).float(), registry.make(name, 4, 5))
    check_results(players, micro_batches(batch, 5), whole_batch(model_of(CONFIG), batch), 1e-5)


def cut_at(model, schedule, rank):
    layers = gpt2_layers(model)
    parts = balance([layer.cost for layer in layers], schedule.num_stages)
    return cut(model, layers, {stage: parts[stage] for stage in schedule.stages(rank)})


def names(model, **options):
    return [name for name, _ in model.named_parameters(**options)]


def test_a_cut_model_has_its_stages_parameters_alone():
    whole, schedule = randomized(CONFIG), registry.make("1f1b", 3, 1)
    held = []
    for rank in range(3):
        model = randomized(CONFIG)
        cut_at(model, schedule, rank)
        assert set(model.state_dict()) == set(names(model))
        for name, p in model.named_parameters():
            assert torch.equal(p, whole.get_parameter(name))
        held += names(model)
        positions = whole.transformer.wpe.weight.numel() if rank == 0 else 0
        assert model.num_params() == sum(p.numel() for p in model.parameters()) - positions
    assert held[-1] == "lm_head.weight"  # tied to the first rank's wte.weight
    assert held[:-1] == names(whole)
    assert whole.num_params() == GPT(CONFIG).num_params()


def test_tied_parameters_on_one_rank_stay_one():
    model, schedule = randomized(CONFIG), registry.make("zb_v", 4, 1)
    stages = cut_at(model, schedule, 0)
    assert [*stages] == [0, 7]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in names(model)
    assert "lm_head.weight" in names(model, remove_duplicate=False)


def test_another_ranks_module_says_so():
    model = randomized(CONFIG)
    cut_at(model, registry.make("1f1b", 2, 1), 1)
    with pytest.raises(RuntimeError, match=r"transformer\.wte is of another stage, on another rank"):
        model(batch_of(2).tokens)


def test_evaluation_keeps_nothing():
    place, batch = Place(), batch_of(2)
    players = Players(lambda: model_of(DROPPING, place), registry.make("1f1b", 3, 1), place)
    plain, x = model_of(DROPPING, place).eval(), None
    for model in players.models:
        model.eval()
    with torch.no_grad():
        for number in range(3):
            x = players.stages[number].forward(0, x, batch)
            assert not x.requires_grad
            assert players.stages[number].num_alive == 0
        _, wanted = plain(batch.tokens, batch.targets, batch.positions, batch.documents)
    assert torch.equal(x, wanted)


def test_activations_go_with_the_backward_pass():
    """With the part for inputs the whole graph does; what the other part needs, test_deferred counts."""
    refs = []

    class Saved:
        def __init__(self, x):
            self.x = x
            refs.append(weakref.ref(self))

    schedule, batch = registry.make("zb_h1", 1, 1), batch_of(2)
    stage = Players(lambda: randomized(CONFIG), schedule).stages[0]
    with saved_tensors_hooks(Saved, lambda saved: saved.x):
        y = stage.forward(0, None, batch)
    assert sum(ref() is not None for ref in refs) > 10 * CONFIG.n_layer
    stage.backward_inputs(0, torch.ones_like(y))
    assert not any(ref() for ref in refs)
    assert stage.num_alive == 1
    stage.backward_weights(0)
    assert stage.num_alive == 0


def test_gradients_of_stages_stay_in_place():
    """As views of one array, to which passes of all kinds add."""
    schedule, batch = registry.make("zb_v", 2, 3), batch_of(6)
    players = Players(lambda: randomized(CONFIG), schedule)
    arrays = []
    for model in players.models:
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        begin = 0
        for p in model.parameters():
            p.grad = flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()
        arrays.append(flat)
    check_results(players, micro_batches(batch, 3), whole_batch(randomized(CONFIG), batch), 1e-10)
    for model, flat in zip(players.models, arrays, strict=True):
        assert torch.equal(flat, torch.cat([p.grad.flatten() for p in model.parameters()]))


def test_micro_batches_without_targets():
    """They have no part in the loss, whose weights go by the numbers of targets."""
    batch = batch_of(6)
    batch.targets[2:4] = IGNORED
    batches = micro_batches(batch, 3)
    count = (batch.targets != IGNORED).sum(1).tolist()
    assert loss_weights(batches, IGNORED) == [sum(count[:2]) / sum(count), 0, sum(count[4:]) / sum(count)]
    assert loss_weights(batches[1:2], IGNORED) == [0]
    assert loss_weights(batches, IGNORED, lambda counts: counts + torch.tensor([0, 6, 0]))[1] == 6 / (6 + sum(count))
    players = Players(lambda: randomized(CONFIG), registry.make("1f1b", 2, 3))
    check_results(players, batches, whole_batch(randomized(CONFIG), batch), 1e-10)


def test_a_sequence_must_fit():
    stage = Players(lambda: randomized(CONFIG), registry.make("1f1b", 2, 1)).stages[0]
    tokens = random_tokens(1, 9)
    with pytest.raises(ValueError, match="a sequence of 9 tokens: pass 1 to block_size=8"):
        stage.forward(0, None, Batch(tokens, tokens))


def test_layers():
    layers = gpt2_layers(randomized(replace(CONFIG, n_layer=3)))
    assert [layer.name for layer in layers] == ["embedding, block 0", "block 1", "block 2, head"]
    [only] = gpt2_layers(randomized(replace(CONFIG, n_layer=1)))
    assert only.name == "embedding, block 0, head"
