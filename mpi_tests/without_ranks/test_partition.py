"""Stages balanced by cost, compared with all possible cuts; counted and measured costs."""

import random
import re
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import ModelConfig
from models.mixture import routers
from mpi_tests.helpers.models import random_tokens, randomized
from parallelism.pipeline import layer_times as measure
from parallelism.pipeline.balance import balance
from parallelism.pipeline.stage import Batch, Layer
from training.parallel.decoder import layers_of

CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=3, n_head=4, n_embd=16, n_kv_head=2, bias=True)
ALONE = SimpleNamespace(all_reduce=lambda x, op: x)  # the communicator of one rank
BATCH = Batch(random_tokens(2, 8), random_tokens(2, 8, seed=1))


def every_cut(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [range(begin, end) for begin, end in pairwise((0, *inner, num_layers))]


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_no_cut_has_a_cheaper_dearest_stage_nor_a_more_even_one_as_cheap(num_layers):
    draw = random.Random(num_layers)
    for num_stages in range(1, num_layers + 1):
        for costs in ([1] * num_layers, [draw.randint(0, 5) for _ in range(num_layers)]):
            for speeds in ([1] * num_stages, [draw.choice((0.25, 0.5, 1)) for _ in range(num_stages)]):

                def price(parts, costs=costs, speeds=speeds):
                    times = [sum(costs[i] for i in part) / speed for part, speed in zip(parts, speeds, strict=True)]
                    return max(times), sum(x * x for x in times)

                parts = balance(costs, num_stages, speeds)
                assert price(parts) == min(map(price, every_cut(num_layers, num_stages)))
                assert min(speeds) < 1 or parts == balance(costs, num_stages)


def test_measured_costs_are_no_integers():
    """Rounding of sums must not make the best cut exceed the limit."""
    draw = random.Random(0)
    costs = [draw.random() for _ in range(40)]
    for num_stages in range(1, 41):
        parts = balance(costs, num_stages)
        assert len(parts) == num_stages
        assert [layer for part in parts for layer in part] == [*range(40)]


@pytest.mark.parametrize("num_stages", [0, 5])
def test_more_stages_than_layers(num_stages):
    message = f"4 layers can be cut into 1 to 4 stages, not {num_stages}"
    with pytest.raises(ValueError, match=re.escape(message)):
        balance([1, 2, 3, 4], num_stages)


def test_another_number_of_speeds():
    with pytest.raises(ValueError, match="2 speeds for 3 stages: pass one for each"):
        balance([1, 2, 3, 4], 3, [1, 0.5])
    with pytest.raises(ValueError, match="a speed of 0: pass speeds above 0"):
        balance([1, 2, 3, 4], 3, [1, 0, 0.5])


def flops(layers, batch):
    """Return torch's count of the FLOPs of each layer's forward pass on a batch."""
    x, flops_by_layer = None, []
    for layer in layers:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            x = layer.run(x, batch)
        flops_by_layer.append(counter.get_total_flops())
    return flops_by_layer


@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_counted_costs_are_those_that_torch_counts(n_kv_head):
    config = replace(CONFIG, n_kv_head=n_kv_head)
    layers = layers_of(randomized(config))
    assert [layer.cost * BATCH.tokens.numel() for layer in layers] == flops(layers, BATCH)


class Clock:
    """A clock that only layers advance."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def layer(self, forward, backward):
        def run(x, batch):
            self.now += forward
            y = x + 1 if x is not None else torch.ones(2, requires_grad=True)
            if y.requires_grad:
                y.register_hook(lambda _: setattr(self, "now", self.now + backward))
            return y

        return Layer("", (), run, 0)


def test_measured_costs(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    layers = [clock.layer(1, 2), clock.layer(3, 5)]
    assert measure.measure(torch.nn.Module(), layers, BATCH, ALONE).tolist() == [[1, 2, 0], [3, 5, 0]]


def test_measured_costs_are_as_the_least_and_add_up_to_the_mean(monkeypatch):
    """The second layer's passes take three times as long now and then, as where a rank has a part of a core."""
    repeats = np.array([[[1.0, 1, 2]] * 4, [[2.0, 2, 0]] * 2 + [[6.0, 6, 0]] * 2])
    monkeypatch.setattr(measure, "sweep", lambda *arguments: repeats)
    times = measure.measure(torch.nn.Module(), [], BATCH, ALONE)
    np.testing.assert_allclose(times, 1.5 * np.array([[1, 1, 2], [2, 2, 0]]))


def test_measuring_leaves_gradients_and_buffers_alone():
    model = randomized(replace(CONFIG, num_experts=4, experts_per_token=2))
    loads = [router.loads.clone() for _, router in routers(model)]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {p: p.grad for p in model.parameters()}
    times = measure.measure(model, layers_of(model), BATCH, ALONE)
    assert len(times) == CONFIG.n_layer + 1
    assert (times > 0).all()
    assert len(loads) == CONFIG.n_layer
    for (_, router), load in zip(routers(model), loads, strict=True):
        assert torch.equal(router.loads, load)
    for p in model.parameters():
        assert p.grad is before[p]
        assert (p.grad == 1).all()
