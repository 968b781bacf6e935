"""Simulate a pipeline in one process, each rank with stages of its own model copy, and compare with the whole batch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

from models.config import ModelConfig
from mpi_tests.helpers.models import close, random_tokens, randomized
from parallelism.numerics.dropout import BatchPosition
from parallelism.pipeline.balance import balance
from parallelism.pipeline.stage import Batch, cut, within
from parallelism.step.actions import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import layers_of, plan_of

CONFIG = ModelConfig(vocab_size=29, block_size=8, n_layer=8, n_head=4, n_embd=16, bias=True, n_kv_head=2)
DROPPING = replace(CONFIG, n_layer=9, dropout=0.2)
IGNORED = -100


def loss_weights(batches, ignored, sum_up=torch.clone):
    """Return each micro-batch's weight in the mean loss: its share of the targets that are not `ignored`.

    With sequence parallelism, `sum_up` adds up the counts of all ranks.
    """
    counts = sum_up(torch.stack([(batch.targets != ignored).sum() for batch in batches])).tolist()
    return [count / max(1, sum(counts)) for count in counts]


def batch_of(num_samples, seq=6):
    """Return samples of several documents with ignored targets, a different number in each sample."""
    positions, samples = torch.arange(seq), torch.arange(num_samples)
    targets = random_tokens(num_samples, seq, seed=1)
    targets[positions < samples[:, None] % seq] = IGNORED
    documents = (positions >= samples[:, None] % 5 + 1).long()
    return Batch(random_tokens(num_samples, seq), targets, positions, documents, samples)


def micro_batches(batch, number):
    tokens, targets, documents, samples = (x.chunk(number) for x in (batch[0], batch[1], batch[3], batch[4]))
    return [Batch(tokens[i], targets[i], batch.positions, documents[i], samples[i]) for i in range(number)]


def needs(action, num_stages):
    """Return the prerequisites of an action: each inner tuple lists alternatives."""
    stage, kind, micro_batch = action
    before = [] if kind == FORWARD else [(Action(stage, INPUTS if kind == WEIGHTS else FORWARD, micro_batch),)]
    if kind == FORWARD and stage:
        before.append((Action(stage - 1, FORWARD, micro_batch),))
    if kind in (BACKWARD, INPUTS) and stage + 1 < num_stages:
        before.append((Action(stage + 1, BACKWARD, micro_batch), Action(stage + 1, INPUTS, micro_batch)))
    return before


def merged(schedule, seed=0):
    """Return all actions with their ranks, in a random order that respects their dependencies."""
    draw, actions = random.Random(seed), set()
    ahead = {rank: list(order) for rank, order in enumerate(schedule.orders) if order}
    while ahead:
        ready = [
            rank
            for rank, order in ahead.items()
            if all(actions.intersection(either) for either in needs(order[0], schedule.num_stages))
        ]
        rank = draw.choice(ready)
        actions.add(ahead[rank][0])
        yield rank, ahead[rank].pop(0)
        if not ahead[rank]:
            del ahead[rank]


class Players:
    """The simulated ranks of a schedule, each with its stages of a separate model."""

    def __init__(self, make, schedule, position=None):
        self.schedule, self.position, self.stages = schedule, position, {}
        self.models = [make() for _ in schedule.orders]
        splits = any(action.kind == INPUTS for order in schedule.orders for action in order)
        for rank, model in enumerate(self.models):
            layers = [within(self.set_samples, layer) for layer in layers_of(model)]
            parts = balance([layer.cost for layer in layers], schedule.num_stages)
            own = {stage: parts[stage] for stage in schedule.stages(rank)}
            self.stages |= cut(model, layers, own, splits=splits)

    def set_samples(self, batch):
        if self.position:
            self.position.samples = batch.samples
        return nullcontext()

    def play(self, batches, sum_up=torch.clone):
        """Run the schedule and return the loss; check that no rank exceeds the schedule's peak of live activations."""
        weights = loss_weights(batches, IGNORED, sum_up)
        last, loss, messages = self.schedule.num_stages - 1, 0.0, {}
        for rank, (number, kind, micro_batch) in merged(self.schedule):
            stage = self.stages[number]
            if kind == FORWARD:
                y = stage.forward(micro_batch, messages.pop((number, micro_batch), None), batches[micro_batch])
                if number == last:
                    loss += weights[micro_batch] * float(y)
                    y = y.new_tensor(weights[micro_batch])
                messages[number + 1, micro_batch] = y
            elif kind == WEIGHTS:
                stage.backward_weights(micro_batch)
            else:
                act = stage.backward if kind == BACKWARD else stage.backward_inputs
                messages[number, micro_batch] = act(micro_batch, messages.pop((number + 1, micro_batch)))
            alive = sum(self.stages[own].num_alive for own in self.schedule.stages(rank))
            assert alive <= self.schedule.peaks[rank]
        assert not any(stage.num_alive for stage in self.stages.values())
        return loss

    def gradients(self):
        """Return the gradients by the whole model's names; the tied head's and embedding's are summed."""
        sums = {}
        for model in self.models:
            for name, p in model.named_parameters():
                name = name.replace("lm_head", "transformer.wte")
                sums[name] = sums[name] + p.grad if name in sums else p.grad
        return sums


class Alone:
    """The part of a single-rank communicator that dropout by position and the reading of checkpoints need."""

    rank, size = 0, 1

    def agreed(self, name):
        return nullcontext()

    def broadcast_object(self, value):
        return value


ALONE = Alone()


def model_of(config, position=None, tp=ALONE, sp=None, sequence=False):
    """Make a GPT, parallelized and with dropout by position; without `position`, a plain one."""
    model = randomized(config)
    if position:
        parallelize(model, plan_of(config), tp, sp, sequence, position)
    return model


def whole_batch(model, batch):
    """Return the loss and the gradients of all micro-batches at once."""
    _, loss = model(batch.tokens, batch.targets, batch.positions, batch.documents)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@cache
def dropping_results(config, num_samples):
    position, batch = BatchPosition(seed=3), batch_of(num_samples)
    position.samples = batch.samples
    return whole_batch(model_of(config, position), batch)


def check_results(players, batches, expected, rtol):
    loss, gradients = players.play(batches), players.gradients()
    assert loss == pytest.approx(expected[0], rel=rtol)
    assert gradients.keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        close(gradients[name].to(gradient.dtype), gradient, rtol)
