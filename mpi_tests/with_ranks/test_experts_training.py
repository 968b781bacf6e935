"""train.py's training of mixtures over ep and the other axes, compared with plain torch; checkpoints; errors."""

import random
from contextlib import closing

import numpy as np
import pytest

from collectives import Communicator, InputError
from mpi_tests.helpers.models import close
from mpi_tests.helpers.ranks import IS_PROOF, from_first
from mpi_tests.helpers.trained import by_torch, config, on, plain_steps
from parallelism.pipeline.schedule import registry
from parallelism.placement import shards_of
from training.loop import step
from training.parallel.run import TrainingRun
from training.settings.derived import make_model

MIXTURE = {"num_experts": 8, "dtype": "float64", "balance_loss": 0.1, "grad_clip": 0.5}
LAYOUTS = {
    2: [{"ep": 2}, {"ep": 2, "zero_stage": 1}, {"ep": 2, "zero_stage": 3}, {"ep": 2, "expert_capacity": 0.7}],
    4: [{"ep": 2, "sp": 2, "balance_loss": 0.0}],
    8: [],
}
if IS_PROOF:
    LAYOUTS[4] += [
        {"ep": 2, "tp": 2},
        {"ep": 2, "zero_stage": 2},
        {"ep": 2, "pp": 2, "num_micro_batches": 2},
        {"ep": 4, "recompute": "selective"},
    ]
    LAYOUTS[8] += [
        {"ep": 2, "tp": 2, "zero_stage": 3, "sequence_parallel": True},
        {"ep": 2, "tp": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2, "schedule": "zb_h1"},
        {"ep": 4, "pp": 2, "zero_stage": 3, "num_micro_batches": 3, "recompute": "full"},
        {"ep": 4, "zero_stage": 1, "expert_capacity": 0.7},
    ]
SEED, EXACT_STEPS = 937, 3  # seed of the random layouts; number of steps whose gradients are compared
NUM_DRAWN, NUM_STEPS = (12, 50) if IS_PROOF else (1, EXACT_STEPS)


def check_same(outcome, expected):
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-10)
    np.testing.assert_allclose([*outcome.validations.values()], [*expected.validations.values()], rtol=1e-10)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weight, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.sizes(2, 4, proof=(8,))
@pytest.mark.parametrize("number", range(max(map(len, LAYOUTS.values()))))
def test_losses_and_weights_are_those_of_the_plain_mixture(comm, number):
    if number >= len(LAYOUTS[comm.size]):
        pytest.skip("no other layout for this number of ranks")
    layout = LAYOUTS[comm.size][number]
    model = {name: layout[name] for name in ("balance_loss", "expert_capacity") if name in layout}
    expected = by_torch(comm, **{**MIXTURE, **model})
    check_same(on(comm, **{**MIXTURE, **layout}), expected)
    assert any(name.endswith("router.bias") and weight.any() for name, weight in expected.weights.items())


def draw_run(number):
    """Draw a run on 8 ranks: a random layout, schedule, mixture, and number of simulated hosts."""
    draw = random.Random(SEED + number)
    pp, tp = draw.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
    dp = 8 // (pp * tp)
    settings = {
        "n_layer": 2 * pp,
        "n_head": 4,
        "pp": pp,
        "tp": tp,
        "ep": draw.choice([size for size in (2, 4, 8) if dp % size == 0]),
        "sequence_parallel": tp > 1 and draw.random() < 0.5,
        "zero_stage": draw.randrange(4),
        "num_micro_batches": pp * draw.choice([1, 3]),
        "schedule": draw.choice(registry.names()) if pp > 1 else "1f1b",
        "experts_per_token": draw.choice([1, 2, 3]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "expert_capacity": draw.choice([None, 0.7]),
        "balance_loss": draw.choice([0.0, 0.1]),
    }
    return config(dp, **{**MIXTURE, **settings, "max_iters": NUM_STEPS}), draw.choice(["1x8", "2x4", "4x2"])


def plain(mpi_comm, settings):
    """Return the plain mixture's loss of each step and its gradients of the first steps.  Collective."""

    def steps():
        for number, each in enumerate(plain_steps(settings, make_model(settings, 256))):
            yield each if number < EXACT_STEPS else each._replace(gradients={})

    return from_first(mpi_comm, lambda: [*steps()])


@pytest.mark.sizes(8)
@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_losses_and_all_gradients_are_the_plain_mixtures_in_layouts_drawn_at_random(mpi_comm, monkeypatch, number):
    settings, hosts = draw_run(number)
    expected = plain(mpi_comm, settings)
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", hosts)
    comm = Communicator(mpi_comm)
    losses = []
    with TrainingRun(settings, comm) as run, closing(run.inputs()) as inputs:
        clip, shard = run.clip, run.replica.shard

        def checked_clip():
            pieces, step = run.masters.pieces, expected[len(losses)]
            for name, piece in pieces.items() if step.gradients else ():
                whole = step.gradients[name]
                for axis, placement in shards_of(piece).items():
                    whole = placement.local(whole, run.mesh.coords[axis], run.mesh.shape[axis])
                close(piece.grad.flatten(), whole.flatten()[run.masters.spans[name]])
            return clip()

        checked_clip.exposed_s = 0.0
        run.clip = checked_clip
        numel = sum(piece.numel() for piece in run.masters.pieces.values())
        every = shard.all_reduce(np.array([numel]))[0] if shard else numel
        assert every == sum(p.numel() for p in run.model.parameters())  # no gradient is missing
        for iteration, (batches, _) in enumerate(zip(inputs, expected, strict=False), 1):
            losses.append(step(run, iteration, batches).metrics().loss)
    np.testing.assert_allclose(losses[:EXACT_STEPS], [step.loss for step in expected[:EXACT_STEPS]], rtol=1e-10)
    np.testing.assert_allclose(losses, [step.loss for step in expected], rtol=1e-5)
    comm.free()


@pytest.mark.sizes(4)
def test_a_checkpoint_fits_another_layout_and_no_other_number_of_experts(mpi_comm, comm, tmp_path_factory):
    folder = mpi_comm.bcast(str(tmp_path_factory.mktemp("saved")) if comm.rank == 0 else None)
    saved = {**MIXTURE, "max_iters": 2, "checkpoint_dir": folder}
    before = on(comm, **saved, ep=2, tp=2)
    resumed = on(comm, **saved, resume="auto", ep=4, zero_stage=1)
    assert any(name.endswith("router.bias") and weight.any() for name, weight in before.weights.items())
    for name, weight in before.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight, err_msg=name)
    with pytest.raises(InputError, match="num_experts was 8, but is 4: resume with the same"):
        on(comm, **{**saved, "num_experts": 4}, resume="auto", ep=2)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("changes", "words"), [
    ({"num_experts": 3, "ep": 2}, "num_experts=3 is not divisible by ep=2: use an ep of 1"),
    ({"num_experts": 4, "ep": 4}, "ep=4 must divide dp=2, within which it lies: use an ep of 1, 2"),
    ({"num_experts": 4, "ep": 2, "tp": 2}, "ep=2 must divide dp=1, within which it lies: use an ep of 1"),
    ({"num_experts": 0, "ep": 2}, "ep=2 divides the experts of a mixture: set num_experts to a multiple of 2, or ep=1"),
    ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 is more than num_experts=2: use from 1 to 2"),
    ({"num_experts": 4, "sp": 2, "expert_capacity": 1.0}, "count the tokens of whole sequences, which sp=2 splits"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_on_all_ranks(comm, changes, words):
    with pytest.raises(InputError, match=words):
        on(comm, **changes)
