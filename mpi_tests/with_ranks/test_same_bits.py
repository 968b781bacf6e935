"""Layouts that sum in the same order train the same weights bit for bit, with clipping, over 10 steps."""

from functools import cache

import pytest

from mpi_tests.helpers.trained import alone, check_bits, on
from parallelism.pipeline.schedule import registry
from parallelism.step.actions import WEIGHTS

STEPS = {"max_iters": 10, "eval_interval": 10, "grad_clip": 0.5, "n_layer": 4}
MICRO_BATCHES = {"num_micro_batches": 6, "micro_batch_size": 4}
WHOLE_BACKWARD = [
    name
    for name in registry.names()
    if all(action.kind != WEIGHTS for order in registry.make_schedule(name, 2, 6).orders for action in order)
]


replicated = cache(lambda comm: on(comm, **STEPS))


def check(outcome, expected):
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-12)  # the mean sums in another order
    check_bits(outcome.weights, expected.weights)


@pytest.mark.parametrize("name", WHOLE_BACKWARD)
@pytest.mark.sizes(2)
def test_pipelines_beside_accumulation(comm, name):
    """The tied embedding and head are on two ranks, or on one that accumulates gradients."""
    check(on(comm, pp=2, schedule=name, **STEPS, **MICRO_BATCHES), alone(comm, **STEPS, **MICRO_BATCHES))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.sizes(4)
def test_zero_beside_data_parallelism(comm, zero_stage):
    check(on(comm, zero_stage=zero_stage, **STEPS), replicated(comm))


@pytest.mark.sizes(2)
def test_data_parallelism_beside_accumulation_of_an_untied_model(comm):
    """Each gradient is one rank's or micro-batch's added to the other's; uses of tied weights are added up before."""
    untied = STEPS | {"model": "llama", "tied": False}
    check(on(comm, **untied), alone(comm, num_micro_batches=comm.size, **untied))
