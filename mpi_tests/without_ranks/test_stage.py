"""Stages simulated in one process with every schedule, compared with the plain model: loss and every gradient."""

import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from models.decoder import Decoder
from mpi_tests.helpers.algorithm_costs import LARGEST
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.models import random_tokens, randomized, tensors_alive
from mpi_tests.helpers.played import (
    CONFIG,
    DROPPING,
    IGNORED,
    Players,
    batch_of,
    check_results,
    dropping_results,
    micro_batches,
    model_of,
    whole_batch,
)
from parallelism.numerics.dropout import BatchPosition
from parallelism.pipeline.balance import balance
from parallelism.pipeline.schedule import registry
from parallelism.pipeline.stage import Batch, cut
from training.parallel.decoder import layers_of

each_schedule = pytest.mark.parametrize("name", registry.names())


@each_schedule
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4] + [8] * (LARGEST >= 64))
@pytest.mark.parametrize("more", [-1, 2] + [0] * (LARGEST >= 64))
def test_loss_and_every_gradient_are_the_whole_batchs(name, num_ranks, more):
    """Micro-batches are fewer or more than ranks (`make proof`: as many); grouped heads, biases, dropout, documents."""
    num_micro_batches = max(1, num_ranks + more)
    schedule, position = registry.make_schedule(name, num_ranks, num_micro_batches), BatchPosition(seed=3)
    config = replace(DROPPING, n_layer=max(9, schedule.num_stages))
    players = Players(lambda: model_of(config, position), schedule, position)
    batch = batch_of(2 * num_micro_batches)
    check_results(
        players, micro_batches(batch, num_micro_batches), dropping_results(config, 2 * num_micro_batches), 1e-10
    )


@each_schedule
def test_float32_is_the_plain_model(name):
    batch = batch_of(10)
    players = Players(lambda: model_of(CONFIG).float(), registry.make_schedule(name, 4, 5))
    check_results(players, micro_batches(batch, 5), whole_batch(model_of(CONFIG), batch), 1e-5)


def cut_at(model, schedule, rank):
    layers = layers_of(model)
    parts = balance([layer.cost for layer in layers], schedule.num_stages)
    return cut(model, layers, {stage: parts[stage] for stage in schedule.stages(rank)})


def names(model, **options):
    return [name for name, _ in model.named_parameters(**options)]


def test_a_cut_model_has_its_stages_parameters_alone():
    whole, schedule = randomized(CONFIG), registry.make_schedule("1f1b", 3, 1)
    all_names = []
    for rank in range(3):
        model = randomized(CONFIG)
        cut_at(model, schedule, rank)
        assert set(model.state_dict()) == set(names(model))
        for name, p in model.named_parameters():
            assert torch.equal(p, whole.get_parameter(name))
        all_names += names(model)
        positions = whole.transformer.wpe.weight.numel() if rank == 0 else 0
        assert model.num_params() == sum(p.numel() for p in model.parameters()) - positions
    assert all_names[-1] == "lm_head.weight"  # tied to the first rank's wte.weight
    assert all_names[:-1] == names(whole)
    assert whole.num_params() == Decoder(CONFIG).num_params()


def test_tied_parameters_on_one_rank_stay_one():
    model, schedule = randomized(CONFIG), registry.make_schedule("zb_v", 4, 1)
    stages = cut_at(model, schedule, 0)
    assert [*stages] == [0, 7]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in names(model)
    assert "lm_head.weight" in names(model, remove_duplicate=False)


def test_another_ranks_module_says_so():
    model = randomized(CONFIG)
    cut_at(model, registry.make_schedule("1f1b", 2, 1), 1)
    with pytest.raises(RuntimeError, match=r"transformer\.wte is of another stage, on another rank"):
        model(batch_of(2).tokens)


def test_evaluation_keeps_nothing():
    position, batch = BatchPosition(), batch_of(2)
    players = Players(lambda: model_of(DROPPING, position), registry.make_schedule("1f1b", 3, 1), position)
    plain, x = model_of(DROPPING, position).eval(), None
    for model in players.models:
        model.eval()
    with torch.no_grad():
        for number in range(3):
            x = players.stages[number].forward(0, x, batch)
            assert not x.requires_grad
            assert players.stages[number].num_alive == 0
        _, expected = plain(batch.tokens, batch.targets, batch.positions, batch.documents)
    assert torch.equal(x, expected)


def test_activations_go_with_the_backward_pass():
    """Outputs are freed once sent, the graph with the input part; test_deferred.py counts the rest."""
    refs = []

    class Saved:
        def __init__(self, x):
            self.x = x
            refs.append(weakref.ref(self))

    stage = Players(lambda: randomized(CONFIG), registry.make_schedule("zb_h1", 2, 1)).stages[0]
    with saved_tensors_hooks(Saved, lambda saved: saved.x):
        y = stage.forward(0, None, batch_of(2))
    assert sum(ref() is not None for ref in refs) > 5 * CONFIG.n_layer
    gradient, address = torch.ones_like(y), y.untyped_storage().data_ptr()
    assert address in tensors_alive()
    del y
    assert address not in tensors_alive()
    stage.backward_inputs(0, gradient)
    assert not any(ref() for ref in refs)
    assert stage.num_alive == 1
    stage.backward_weights(0)
    assert stage.num_alive == 0


def test_gradients_of_stages_stay_in_place():
    """They are views of one array, to which all kinds of passes add."""
    schedule, batch = registry.make_schedule("zb_v", 2, 3), batch_of(6)
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
    """They do not count in the loss, whose weights are proportional to the numbers of targets."""
    batch = batch_of(6)
    batch.targets[2:4] = IGNORED
    batches = micro_batches(batch, 3)
    players = Players(lambda: randomized(CONFIG), registry.make_schedule("1f1b", 2, 3))
    check_results(players, batches, whole_batch(randomized(CONFIG), batch), 1e-10)


def test_a_sequence_must_fit():
    stage = Players(lambda: randomized(CONFIG), registry.make_schedule("1f1b", 2, 1)).stages[0]
    tokens = random_tokens(1, 9)
    with pytest.raises(ValueError, match="a sequence of 9 tokens: pass 1 to block_size=8"):
        stage.forward(0, None, Batch(tokens, tokens))


def test_layers():
    layers = layers_of(randomized(replace(CONFIG, n_layer=3)))
    assert [layer.name for layer in layers] == ["embedding, block 0", "block 1", "block 2", "head"]


def test_a_backward_pass_imports_no_sympy():
    """Torch imports it when a backward pass gets a gradient, which costs a second of each rank's first step."""
    code = (
        "import sys, torch; from parallelism.pipeline.stage import Layer, cut; "
        "model = torch.nn.Linear(2, 2); layer = Layer('all', ('',), lambda x, batch: model(batch), 1); "
        "stage = cut(model, [layer], {0: range(1)})[0]; stage.forward(0, None, torch.ones(1, 2)); "
        "stage.backward(0, torch.full((1, 2), 3.0)); print(model.bias.grad.tolist(), 'sympy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "[3.0, 3.0] False\n", run.stderr
