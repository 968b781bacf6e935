"""Non-finite losses and gradients: all ranks name the first rank with one; the step is skipped, done or an error."""

import math
import re

import pytest
import torch

from collectives import InputError
from mpi_tests.helpers.training import MODES, Training
from parallelism.mesh import Mesh
from parallelism.numerics.clipping import GradientClip
from parallelism.numerics.master_weights import MasterWeights
from parallelism.numerics.non_finite import LossScale, StepGuard
from parallelism.step.deferred import WeightGradients

NAME = "transformer.h.1.attn.c_proj.weight"
EARLIER = "transformer.h.0.mlp.c_fc.weight"  # early in the forward pass: its gradient appears late


def spoil(training, name, value):
    """Put a value into one of this rank's gradients from now on."""

    def spoilt(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[3] = value
        return gradient

    params = dict(training.gpt.named_parameters())
    if name in params:
        params[name].register_hook(spoilt)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["float32", "bfloat16, gradients too"])
@pytest.mark.sizes(1, 3)
def test_the_first_rank_and_parameter_are_named_on_all(comm, mode, value):
    training = Training(comm, MODES[mode])
    for rank in {comm.size // 2, comm.size - 1}:
        if comm.rank == rank:
            spoil(training, NAME, value)
            spoil(training, EARLIER, value)
    before = training.weights()
    training.step(7)
    line = f"rank {comm.size // 2} has a gradient of {NAME} that is not finite"
    assert training.warnings == [f"step 7: {line}; skipped"]
    assert torch.equal(training.weights(), before)
    training.guard.policy = "stop"
    with pytest.raises(InputError, match=re.escape(f"step 8: {line}: lower the learning rate")):
        training.step(8)
    training.guard.policy = "ignore"
    training.step(9)
    assert not training.weights().isfinite().all()
    training.free()


@pytest.mark.parametrize("layout", [{"pp": 2, "dp": 2}, {"pp": 2, "tp": 2, "schedule": "zb_h1"}], ids=str)
@pytest.mark.sizes(4)
def test_gradients_of_stages(comm, layout):
    training = Training(comm, MODES["float32"], **layout)
    if comm.rank == 3:
        spoil(training, "transformer.h.1.ln_2.weight", math.nan)
    before = training.weights()
    training.step(1)
    assert training.warnings == [
        "step 1: rank 3 has a gradient of transformer.h.1.ln_2.weight that is not finite; skipped"
    ]
    assert torch.equal(training.weights(), before)
    training.free()


def spoil_product(monkeypatch, weight, value):
    """Put a value into a deferred weight gradient from now on, but not into the inputs' gradients."""
    defer = WeightGradients.defer

    def spoilt(self, parameter, bias, x, gradient):
        if parameter is weight:
            gradient = gradient.clone()
            gradient.view(-1)[3] = value
        defer(self, parameter, bias, x, gradient)

    monkeypatch.setattr(WeightGradients, "defer", spoilt)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bfloat16, gradients too"])
@pytest.mark.sizes(4)
def test_gradients_that_are_deferred(comm, monkeypatch, name, zero_stage):
    training = Training(comm, MODES[name], pp=2, schedule="zb_h1", zero_stage=zero_stage)
    if comm.rank == 3:
        weight = training.gpt.get_parameter(NAME)
        spoil_product(monkeypatch, weight, math.inf)
    before = training.weights()
    training.step(1)
    assert training.warnings == [f"step 1: rank 3 has a gradient of {NAME} that is not finite; skipped"]
    assert torch.equal(training.weights(), before)
    training.free()


class Monitor:
    """A monitor of one gradient, which is non-finite once."""

    name = ""

    def take(self, device):
        name, self.name = self.name, ""
        return ["first", name or "a.weight"], torch.tensor([True, not name])


def passes(guard, step, loss, norm):
    """Return whether the step may update the weights, from the device's flag and from the reported error."""
    loss, norm = (torch.tensor(x, dtype=torch.float64) for x in (loss, norm))
    verdict = guard.judge(loss, norm)
    guard.tell(step, verdict.names, verdict.numbers.tolist(), loss.item(), norm.item())
    return verdict.skipped == 0


@pytest.mark.sizes(1, 2, 3)
def test_losses_come_before_gradients_and_those_before_their_norm(comm):
    warnings, monitor, last = [], Monitor(), comm.size - 1
    guard = StepGuard(comm, "skip", monitor=monitor, say=warnings.append)
    assert passes(guard, 1, 0.5, 2.0)
    assert not warnings
    monitor.name = "a.weight" * (comm.rank == 0)
    assert not passes(guard, 2, math.nan if comm.rank == last else 1.0, math.inf)
    monitor.name = "a.weight" * (comm.rank == last)
    assert not passes(guard, 3, 1.0, 1.0)
    assert not passes(guard, 4, 1.0, math.inf)
    assert passes(guard, 5, 1.0, 1.0)
    assert warnings == [
        f"step 2: rank {last} has a loss of nan; skipped",
        f"step 3: rank {last} has a gradient of a.weight that is not finite; skipped",
        "step 4: the norm of the gradients is inf, but no rank's own gradients are to blame; skipped",
    ]


@pytest.mark.sizes(2, 3)
def test_skips_in_a_row_are_an_error_that_names_a_weight(comm):
    """A finite step begins the count anew."""
    weights, last = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}, comm.size - 1
    guard = StepGuard(comm, "skip", say=lambda line: None, max_skips=3, weights=lambda: weights)

    def skip(step):
        passes(guard, step, math.nan if comm.rank == 0 else 1.0, 1.0)

    for losses in "fff", "ff":
        for step in range(len(losses) - 1):
            skip(step)
        assert passes(guard, 4, 1.0, 1.0)
    skip(5)
    skip(6)
    line = "step 7: rank 0 has a loss of nan; losses or gradients of max_skips=3 steps in a row are not finite"
    with pytest.raises(InputError, match=f"^{line}, but all weights are: lower the learning rate, or raise max_skips"):
        skip(7)
    if comm.rank == last:
        weights["b"][1, 0] = math.inf
    with pytest.raises(InputError, match=f"max_skips=3 steps in a row .* nor is b of rank {last}: resume from"):
        skip(8)


@pytest.mark.sizes(2)
def test_skips_that_a_loss_scale_needs_do_not_count(comm):
    guard = StepGuard(comm, "skip", LossScale(4.0), say=lambda line: None, max_skips=1)
    for step in (1, 2):
        assert not passes(guard, step, 1.0, math.inf)
    with pytest.raises(InputError, match=r"^step 3: .* of max_skips=1 steps in a row are not finite, but"):
        passes(guard, 3, 1.0, math.inf)


@pytest.mark.sizes(2)
def test_a_loss_scale_is_blamed_while_it_can_fall(comm):
    warnings, scale, monitor = [], LossScale(4.0), Monitor()
    guard = StepGuard(comm, "stop", scale, monitor, warnings.append)
    for _ in range(2):
        monitor.name = "a.weight" * comm.rank
        assert not passes(guard, 1, 1.0, math.inf)
    assert [line.split("; ")[1] for line in warnings] == [f"skipped, the loss scale is {n} now" for n in (2, 1)]
    with pytest.raises(InputError, match="rank 0 has a loss of inf: lower the learning rate, or let such steps be"):
        passes(guard, 2, math.inf if comm.rank == 0 else 1.0, 1.0)
    monitor.name = "a.weight"
    with pytest.raises(InputError, match=r"rank 0 has a gradient of a\.weight"):
        passes(guard, 2, 1.0, math.nan)
    scale.load(2.0, 0)
    with pytest.raises(InputError, match="rank 1 has a loss of nan"):
        passes(guard, 3, math.nan if comm.rank else 1.0, 1.0)


@pytest.mark.sizes(2)
def test_steps_that_are_done_all_the_same(comm):
    """Steps are skipped while the loss scale can decrease; then they are done without a message."""
    warnings, scale, monitor = [], LossScale(2.0), Monitor()
    guard = StepGuard(comm, "ignore", scale, monitor, warnings.append)
    assert passes(guard, 1, math.nan, 1.0)
    scale.load(2.0, 0)
    assert not passes(guard, 2, 1.0, math.inf)
    assert passes(guard, 3, 1.0, math.inf)
    assert len(warnings) == 1
    assert StepGuard(comm, "ignore").judge(torch.ones(()), torch.ones(())).skipped is None


@pytest.mark.sizes(1)
def test_an_unknown_policy(comm):
    with pytest.raises(ValueError, match="non-finite policy 'halt' is unknown: use stop, skip, ignore"):
        StepGuard(comm, "halt")


@pytest.mark.sizes(1)
def test_norms_beyond_all_numbers_are_infinite(comm):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    clip = GradientClip(1.0, torch.nn.ParameterList([p]), MasterWeights({"0": p}), Mesh(comm))
    p.grad = torch.tensor([3e200, 4e200], dtype=torch.float64)  # whose squares are beyond all numbers, too
    assert clip() == pytest.approx(5e200)
    p.grad = torch.tensor([3e-320, 4e-320], dtype=torch.float64)
    assert clip() == pytest.approx(5e-320, rel=1e-2)
    p.grad = torch.full((2,), 1.7e308, dtype=torch.float64)
    assert clip() == math.inf
    assert not p.grad.any()
    p.grad = torch.tensor([1.0, math.nan], dtype=torch.float64)
    assert clip().isnan()
    assert p.grad[0] == 1
