"""Training in each precision compared with float32, and the handling of gradients that overflow."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from models.decoder import Decoder
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.training import (
    CONFIG,
    MODES,
    STEPS,
    UNSKIPPED,
    Training,
    samples,
)
from parallelism.buffers.arena import Arena, line_length
from parallelism.buffers.gradients import own_gradient
from parallelism.numerics.master_weights import MasterWeights

BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}  # on the difference of losses, in nats
each_mode = pytest.mark.parametrize("precision", MODES.values(), ids=MODES)


@pytest.fixture(scope="module")
def plain():
    """Return the losses of plain torch in one process in float32."""
    model, losses = Decoder(CONFIG), []
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        optimizer.zero_grad()
        _, loss = model(*samples(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def bound(precision):
    return BOUNDS["bfloat16" if precision.grad_dtype == "bfloat16" else precision.dtype]


def check_losses(training, plain):
    losses = [training.step(step) for step in range(STEPS)]
    assert plain[-1] < plain[0] - 0.5
    np.testing.assert_allclose(losses, plain, rtol=0, atol=bound(training.precision))
    assert not training.warnings


def same_on_all(comm, x):
    every = comm.all_gather(x)
    return all(torch.equal(part, x) for part in every.chunk(comm.size))


@each_mode
@pytest.mark.sizes(2, proof=(1, 4))
def test_losses_follow_those_of_float32(comm, plain, precision):
    training = Training(comm, precision)
    check_losses(training, plain)
    assert training.scale.state() == (1, 0) or precision.dtype == "float16"
    assert same_on_all(training.mesh.dp, training.weights())
    assert same_on_all(training.mesh.dp, training.model.replica.arena.parameters)
    training.free()


LAYOUTS = [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2, "schedule": "zb_h1"}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "float16, gradients too"])
@pytest.mark.sizes(4)
def test_split_layers_and_stages(comm, plain, name, layout):
    training = Training(comm, MODES[name], **layout)
    check_losses(training, plain)
    training.free()


SHARING = [
    ("float32 sent as bfloat16", {"zero_stage": 1}),
    ("float32 sent as bfloat16", {"zero_stage": 3}),
    ("bfloat16 by autocast", {"zero_stage": 2}),
    ("float16 by autocast", {"zero_stage": 3}),
    ("bfloat16", {"zero_stage": 1}),
    ("bfloat16, gradients too", {"zero_stage": 2}),
    ("float16", {"zero_stage": 2}),
    ("float16, gradients too", {"zero_stage": 3}),
    ("float16, gradients too", {"pp": 2, "zero_stage": 1, "schedule": "zb_h1"}),
    ("bfloat16, gradients too", {"pp": 2, "zero_stage": 3}),
]
if IS_PROOF:
    SHARING += [
        ("bfloat16", {"pp": 2, "zero_stage": 1}),
        ("float16", {"pp": 2, "zero_stage": 2, "schedule": "zb_h1"}),
        ("float32 sent as bfloat16", {"pp": 2, "zero_stage": 3}),
    ]


@pytest.mark.parametrize(("name", "layout"), SHARING, ids=str)
@pytest.mark.sizes(4)
def test_zero_in_each_precision(comm, plain, name, layout):
    training = Training(comm, MODES[name], **layout)
    check_losses(training, plain)
    assert (training.masters.weights is not None) == MODES[name].master_weights
    training.free()


OVERFLOWING = [("float16 by autocast", 0), ("float16", 0), ("float16, gradients too", 0)]

OVERFLOWING += [("float16 by autocast", 1), ("float16", 2), ("float16, gradients too", 3)]


@pytest.mark.parametrize(("name", "zero_stage"), OVERFLOWING)
@pytest.mark.sizes(1, 4)
def test_an_overflow_on_one_rank_skips_the_step_on_all(comm, name, zero_stage):
    training = Training(comm, MODES[name], zero_stage=zero_stage)
    before = training.weights()
    weight, last = training.gpt.transformer.h[1].mlp.c_fc.weight, comm.size - 1
    hook = weight.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    if comm.rank != last:
        hook.remove()
    training.step(0)
    assert torch.equal(training.weights(), before)
    assert training.scale.state() == (UNSKIPPED / 2, 0)
    assert training.warnings == [
        f"step 0: rank {last} has a gradient of transformer.h.1.mlp.c_fc.weight that is not finite; skipped, "
        f"the loss scale is {UNSKIPPED / 2:g} now"
    ]
    hook.remove()
    training.step(1)
    assert not torch.equal(training.weights(), before)
    assert (*training.scale.state(), len(training.warnings)) == (UNSKIPPED / 2, 1, 1)
    if zero_stage == 0:
        assert same_on_all(comm, training.weights())
    training.free()


@pytest.mark.sizes(2)
def test_a_loss_scale_that_is_too_high_falls_until_gradients_are_numbers(comm, plain):
    training = Training(comm, MODES["float16, gradients too"], scale=2.0**24)
    training.scale.load(2.0**24, 0)
    losses = [training.step(step) for step in range(15)]
    skipped = len(training.warnings)
    assert 3 < skipped < 15
    assert training.scale.state()[0] == 2.0 ** (24 - skipped)
    assert losses[-1] < plain[0] - 0.5


@pytest.mark.sizes(1)
def test_masters_keep_updates_that_16_bits_lose(comm):
    """The test adds 1e-4 to 1 a hundred times; the next bfloat16 after 1 is 1 + 2^-7."""
    weights = torch.ones(3, dtype=torch.bfloat16)
    module = nn.ParameterList([torch.ones(3)])
    arena = Arena(module, comm, **MODES["bfloat16, gradients too"].arena_dtypes)
    masters = MasterWeights.of(module, arena)
    optimizer = torch.optim.SGD(masters.pieces.values(), lr=1e-4)
    for _ in range(100):
        weights += 1e-4
        arena.gradients[:] = -1
        masters.take_gradients()
        optimizer.step()
        masters.give_parameters()
    assert weights.tolist() == [1, 1, 1]
    torch.testing.assert_close(masters.pieces["0"].detach(), torch.full((3,), 1.01), rtol=1e-5, atol=0)
    assert module[0].tolist() == torch.full((3,), 1.01).bfloat16().tolist() == [1 + 2**-7] * 3


@pytest.mark.sizes(1)
def test_gradients_in_float32_keep_what_16_bits_lose(comm):
    for name, expected in (("bfloat16", 256 + 1), ("bfloat16, gradients too", 256)):
        module = nn.ParameterList([torch.ones(3)])
        arena = Arena(module, comm, **MODES[name].arena_dtypes)
        (256 * module[0]).sum().backward()
        module[0].sum().backward()
        assert arena.gradients[:3].tolist() == [expected] * 3


@pytest.mark.sizes(1)
def test_masters_begin_as_the_weights_before_they_were_rounded(comm):
    plain, model = Decoder(CONFIG), Decoder(CONFIG)
    arena = Arena(model, comm, **MODES["bfloat16"].arena_dtypes)
    masters = MasterWeights.of(model, arena)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(masters.pieces[name], expected)
        assert torch.equal(param, expected.bfloat16())
    with masters.exact(model):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, expected)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


@pytest.mark.sizes(1)
def test_float32_weights_are_their_own_masters(comm):
    model = Decoder(CONFIG)
    model.lm_head.requires_grad_(False)
    arena = Arena(model, comm)
    masters = MasterWeights.of(model, arena)
    assert masters.pieces["transformer.wpe.weight"] is model.transformer.wpe.weight
    assert "transformer.wte.weight" not in masters.pieces
    arena.gradients[:] = 8
    masters.take_gradients(torch.tensor(0.25))
    assert all((piece.grad == 2).all() for piece in masters.pieces.values())
    assert (arena.gradients[arena.slices["transformer.wpe.weight"]] == 2).all()


def pieces_of(arena, own):
    """Yield each parameter's part of an arena slice: its name, its values before rounding, and its elements."""
    pieces, spans = {}, {}
    for name, span in arena.slices.items():
        start, stop = max(span.start, own.start), min(span.stop, own.stop)
        if start < stop:
            pieces[name] = nn.Parameter(arena.parameters[start:stop][None])
            own_gradient(pieces[name], arena.gradients[start:stop][None])
            spans[name] = slice(start - span.start, stop - span.start)
    return pieces, arena.originals, spans


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16, gradients too"])
@pytest.mark.sizes(2, 3)
def test_masters_of_pieces_are_those_of_the_whole(comm, name):
    """Each rank updates a part of the arena that begins and ends within parameters, and all ranks gather all parts.

    Parts have whole cache lines, as the fused optimizer rounds differently in incomplete vectors of the CPU.
    """
    whole, parted = Decoder(CONFIG), Decoder(CONFIG)
    arenas = [Arena(model, comm, **MODES[name].arena_dtypes) for model in (whole, parted)]
    parameters = arenas[1].parameters
    line = line_length(parameters.dtype)
    cuts = [len(parameters) // line * rank // comm.size * line for rank in range(comm.size + 1)]
    own = slice(cuts[comm.rank], cuts[comm.rank + 1])
    masters = [MasterWeights.of(whole, arenas[0]), MasterWeights(*pieces_of(arenas[1], own))]
    optimizers = [torch.optim.AdamW(each.pieces.values(), lr=1e-2, fused=True) for each in masters]
    for step in range(3):
        for model, arena, each, optimizer in zip((whole, parted), arenas, masters, optimizers, strict=True):
            model(*samples(step))[1].backward()
            each.take_gradients()
            optimizer.step()
            each.give_parameters()
            arena.zero_grad()
        counts = [end - begin for begin, end in pairwise(cuts)]
        comm.all_gather(parameters[own].clone(), out=parameters, counts=counts)
        assert torch.equal(parameters, arenas[0].parameters)
