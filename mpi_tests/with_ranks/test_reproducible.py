"""With --reproducible, weights, losses and norms have the same bits in all layouts.

LAYOUTS of them are drawn, of STEPS steps.
"""

import os
import random
import time

import numpy as np
import pytest
import torch

from collectives import Communicator, InputError
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.trained import GLOBAL_BATCH, alone, by_torch, check_bits, on, on_first
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.data.averaging import Averaging
from parallelism.mesh import Mesh
from parallelism.numerics.exact import HEADROOM_BITS, ExactSums
from parallelism.pipeline.schedule import registry
from parallelism.tensor.tiles import sum_over_ranks, tree_sum
from parallelism.zero.gradients import ReducedGradients
from training.health.monitor import Health

STEPS = int(os.environ.get("STEPS", "3"))
NUM_DRAWN = int(os.environ.get("LAYOUTS", "8"))
SETTINGS = {
    "reproducible": True, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, "n_layer": 2, "max_iters": STEPS,
    "eval_interval": STEPS, "eval_iters": 1, "grad_clip": 0.5, "dropout": 0.1, "hash_interval": STEPS,
}  # fmt: skip
SEVERAL_STAGES = {"n_layer": 4}
SPLIT = {"n_embd": 128, "n_head": 4, "tiles": 4, "dropout": 0.0}
LLAMA = {"model": "llama", "n_kv_head": 1, "n_hidden": 128, "dropout": 0.0}
ODD = {"n_layer": 1, "n_embd": 144, "block_size": 4, "micro_batch_size": 12, "dropout": 0.1}
EXPERTS = {"num_experts": 4, "balance_loss": 0.01}
MUON = {"optimizer": "muon"}
SGD = {"optimizer": "sgd"}
BFLOAT16 = {"dtype": "bfloat16", "master_weights": True}


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def on_one_rank(comm, **changes):
    return alone(comm, **{**SETTINGS, **changes})


def check(comm, layout, **changes):
    """Check that a layout has the bits of one rank."""
    check_outcome(on(comm, **{**SETTINGS, **changes, **layout}), on_one_rank(comm, **changes))


def check_outcome(outcome, expected):
    for name in ("loss", "grad_norm", "hash"):  # of weights and states
        ours, theirs = (
            [
                str(record[name]) for record in each.records if name in record
            ]  # text, as the norm of a skipped step is NaN
            for each in (outcome, expected)
        )
        assert ours == theirs, name
    check_bits(outcome.weights, expected.weights)


@pytest.mark.sizes(2)
def test_gradients_are_those_of_plain_torch(comm):
    steps = {"max_iters": 5, "eval_interval": 5, "dropout": 0.0, "grad_clip": 1.0, "n_layer": 2}
    outcome, expected = on_one_rank(comm, **steps), by_torch(comm, max_iters=5)
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-5)


@pytest.mark.parametrize("layout", [{}, {"zero_stage": 1}, {"zero_stage": 2, "recompute": "full"}, {"zero_stage": 3}])
@pytest.mark.sizes(3)
def test_data_parallelism_and_zero(comm, layout):
    check(comm, layout)


@pytest.mark.sizes(3)
def test_ranks_with_one_micro_batch_each(comm):
    """The tied embedding has two gradients in one backward pass."""
    check(comm, {}, micro_batch_size=GLOBAL_BATCH // comm.size)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.sizes(5)
def test_ranks_have_different_numbers_of_micro_batches(comm, zero_stage):
    check(comm, {"zero_stage": zero_stage})


@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 1},
        {"pp": 2, "schedule": "zb_h1", "zero_stage": 2},
        {"tp": 2, **SPLIT},
        *[{}, {"pp": 2}, {"zero_stage": 2}] * IS_PROOF,
    ],
)
@pytest.mark.sizes(4)
def test_micro_batches_move_between_replicas_in_the_middle_of_a_run(comm, layout, monkeypatch):
    """All but one of each to the last replica, and then to the first."""
    replicas, rest = divmod(comm.size, layout.get("pp", 1) * layout.get("tp", 1))
    if rest or replicas == 1:
        return
    total, moved = GLOBAL_BATCH // 2, []

    def better_numbers(health):
        step = len(moved) + 1
        moved.append(step)
        if step % 2 == 0:
            return None
        fewest = [1] * (replicas - 1) + [total - replicas + 1]
        health.numbers = fewest if step == 1 else fewest[::-1]
        return health.numbers

    monkeypatch.setattr(Health, "better_numbers", better_numbers)
    outcome = on(comm, **{**SETTINGS, **layout, "balance_load": True})
    assert len(moved) == STEPS
    changes = {name: value for name, value in layout.items() if name in SPLIT}
    check_outcome(outcome, on_one_rank(comm, **changes))


@pytest.mark.sizes(2)
def test_what_cannot_move_between_replicas_is_refused(comm):
    for changes, words in (
        ({"zero_stage": 3}, "balance_load makes unequal numbers of micro-batches, but zero_stage=3 needs equally many"),
        ({"micro_batch_size": GLOBAL_BATCH // 2}, "balance_load has no effect with 2 micro-batches on dp=2 ranks: "),
    ):
        with pytest.raises(InputError, match=words):
            on(comm, **{**SETTINGS, "balance_load": True, **changes})


@pytest.mark.sizes(4)
def test_several_stages_a_rank_cannot_move(comm):
    words = "balance_load needs a schedule of one stage a rank, not schedule=interleaved: use 1f1b"
    with pytest.raises(InputError, match=words):
        on(comm, **{**SETTINGS, **SEVERAL_STAGES, "balance_load": True, "pp": 2, "schedule": "interleaved"})


@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "zb_v", "zero_stage": 3},
        {"schedule": "zb_h1", "zero_stage": 2},
        {"schedule": "interleaved", "zero_stage": 1, "recompute": "selective"},
    ],
)
@pytest.mark.sizes(4)
def test_pipelines_with_split_backward_passes_and_several_stages(comm, layout):
    """The tied embedding and head are on one rank or on two."""
    check(comm, {"pp": 2, **layout}, **SEVERAL_STAGES)


@pytest.mark.parametrize("changes", [LLAMA, BFLOAT16, {"dtype": "float16"}, EXPERTS, SGD, MUON], ids=str)
@pytest.mark.sizes(4)
def test_other_models_dtypes_and_optimizers(comm, changes):
    check(comm, {"pp": 2, "zero_stage": 2, "schedule": "zb_h1"}, **changes)


@pytest.mark.sizes(2, 4)
def test_tensor_parallelism_in_tiles(comm):
    check(comm, {"tp": comm.size}, **SPLIT)


@pytest.mark.sizes(2, 4)
def test_sequence_parallel_mode_in_tiles(comm):
    check(comm, {"tp": comm.size, "sequence_parallel": True}, **{**SPLIT, **ODD})


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.sizes(2, proof=(4,))
def test_tensor_parallelism_in_tiles_of_bfloat16(comm, sequence):
    check(comm, {"tp": comm.size, "sequence_parallel": sequence}, **SPLIT, **BFLOAT16)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence-parallel"])
@pytest.mark.sizes(4)
def test_tensor_parallelism_in_tiles_with_zero(comm, sequence):
    check(comm, {"tp": 2, "zero_stage": 3, "sequence_parallel": sequence}, **SPLIT)


@pytest.mark.parametrize("mode", [{}, {"sequence_parallel": True, "schedule": "zb_h1", "zero_stage": 2}], ids=str)
@pytest.mark.sizes(4)
def test_tensor_parallelism_of_a_llama_in_tiles_and_stages(comm, mode):
    """A key and value head is split in tiles, too."""
    check(comm, {"tp": 2, "pp": 2, **mode}, **{**SPLIT, **LLAMA, "n_kv_head": 2})


@pytest.mark.sizes(4)
def test_a_run_resumes_in_another_layout(comm, folder):
    """The second part ends as if it were the first's; the quanta come from the checkpoint."""
    saved = {"checkpoint_dir": str(folder / "saved"), "checkpoint_interval": 2}
    on(comm, **{**SETTINGS, "max_iters": 2, "lr_decay_iters": STEPS}, zero_stage=1, **saved)
    outcome = on(comm, **{**SETTINGS, "lr_decay_iters": STEPS}, pp=2, zero_stage=3, resume="auto", **saved)
    expected = on_one_rank(comm, lr_decay_iters=STEPS)
    check_bits(outcome.weights, expected.weights)
    assert outcome.losses == expected.losses[2:]
    with pytest.raises(InputError, match="micro_batch_size was 2, but is 3: resume with the same"):
        on(comm, **{**SETTINGS, "micro_batch_size": 3}, resume="auto", **saved)


@pytest.mark.parametrize(
    "algorithm", ["rabenseifner", "two_shot", "hierarchical_direct", *["ring", "hierarchical"] * IS_PROOF]
)
@pytest.mark.sizes(4)
def test_every_algorithm_sums_the_same(mpi_comm, monkeypatch, algorithm):
    """For hierarchical ones, the ranks simulate two nodes."""
    monkeypatch.setenv("COLLECTIVES_FAKE_NODES", "2x2" if "hierarchical" in algorithm else "1x4")
    comm, plan, ran = Communicator(mpi_comm), Communicator.plan, set()

    def by_algorithm(self, collective, *arguments, **options):
        if collective == "all_reduce" and self.size > 1:
            options["algorithm"] = algorithm
            ran.add(algorithm)
        return plan(self, collective, *arguments, **options)

    monkeypatch.setattr(Communicator, "plan", by_algorithm)
    check(comm, {})
    assert ran == {algorithm}
    comm.free()


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "zero_stage": 2, "schedule": "zb_h1"}], ids=str)
@pytest.mark.sizes(4)
def test_ranks_that_come_late_change_nothing(comm, monkeypatch, layout):
    for replica in (Averaging, ReducedGradients):

        def late(self, *event, ready=replica.gradient_ready):
            time.sleep(0.01 * (random.random() < 0.1))
            ready(self, *event)

        monkeypatch.setattr(replica, "gradient_ready", late)
    check(comm, layout)


@pytest.mark.parametrize("number", range(NUM_DRAWN // 8))
@pytest.mark.sizes(3, 6, 8, proof=(1, 2, 4, 5, 7))
def test_layouts_drawn_at_random(comm, number):
    check(comm, drawn(comm.size, random.Random(8 * number + comm.size)), **SEVERAL_STAGES)


@pytest.mark.parametrize("number", range(NUM_DRAWN * 20 // 64 if NUM_DRAWN > 8 else 1))
@pytest.mark.parametrize("changes", [BFLOAT16, LLAMA, SGD], ids=str)
@pytest.mark.sizes(8)
def test_layouts_of_other_kinds_drawn_at_random(comm, changes, number):
    """Ranks are drawn, too: the first of them train."""
    draw = random.Random(number)
    size, changes = draw.randint(2, comm.size), {**SEVERAL_STAGES, **changes}
    outcome = on_first(comm, size, **{**SETTINGS, **changes, **drawn(size, draw)})
    check_outcome(outcome, on_one_rank(comm, **changes))


def drawn(size: int, draw: random.Random) -> dict:
    pp = draw.choice([n for n in (1, 2, 4) if size % n == 0])
    layout = {"pp": pp, "zero_stage": draw.randrange(4), "recompute": draw.choice(("none", "full", "selective"))}
    dp = size // pp
    if GLOBAL_BATCH // 2 % dp:
        layout["zero_stage"] %= 2
    elif dp % 2 == 0 and layout["zero_stage"] and draw.random() < 0.5:
        layout["zero_group"] = "2"
    if pp > 1 and GLOBAL_BATCH // 2 % dp == 0:
        names = [name for name in registry.names() if possible(name, pp, GLOBAL_BATCH // 2 // dp)]
        layout["schedule"] = draw.choice(names)
    return layout


def possible(name: str, pp: int, num_micro_batches: int) -> bool:
    try:
        return registry.make_schedule(name, pp, num_micro_batches).num_stages <= 4
    except ValueError:
        return False


def exact_sums(comm, gradient: float) -> tuple[ExactSums, torch.Tensor]:
    """Return the sums of a parameter whose only gradient has been this one, and the parameter."""
    param, mesh = torch.nn.Parameter(torch.zeros(3)), Mesh(comm)
    exact = ExactSums({"p": param}, mesh)
    for _ in range(2):
        add(exact, param, gradient)
        exact.fits()
    return exact, param


def add(exact: ExactSums, param: torch.Tensor, *gradients: float) -> None:
    exact.begin()
    param.rounding.total = torch.zeros(3, dtype=torch.int64)
    for gradient in gradients:
        param.rounding.add(torch.full((3,), gradient))


@pytest.mark.sizes(1, 2)
def test_a_gradient_that_outgrows_its_quantum_is_computed_again(comm):
    """It does on one rank, and all of them know."""
    exact, param = exact_sums(comm, 0.75)
    least = 2.0 ** (exact.exponents.item() + exact.bits)
    assert least == 2.0**HEADROOM_BITS
    add(exact, param, least if comm.rank == 0 else 0.75)
    assert exact.fits()
    add(exact, param, 2.0**12 * least if comm.rank == 0 else 0.75)
    assert not exact.fits()
    assert param.rounding.floats(torch.float32).isnan().all()
    add(exact, param, 2.0**12 * least if comm.rank == 0 else 0.75)
    assert exact.fits()
    assert param.rounding.floats(torch.float32)[0] == (2.0**12 * least if comm.rank == 0 else 0.75)


@pytest.mark.parametrize("state", [None, {}, {"q": 1}, {"p": 1.5}, {"p": 5000}], ids=str)
@pytest.mark.sizes(1)
def test_exponents_that_are_not_those_of_the_model(comm, state):
    exact, _ = exact_sums(comm, 0.75)
    with pytest.raises(ValueError, match=r"^exponents=.* are not those of the model's 1 gradients$"):
        exact.load(state)
    exact.load(exact.state())


@pytest.mark.sizes(1, 2, 4)
def test_a_sum_along_the_tree_of_ranks(comm):
    """The length is no multiple of the ranks."""
    every = [torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    result = sum_over_ranks(every[comm.rank].clone(), TensorCollectives(comm))
    assert torch.equal(result, tree_sum(each.clone() for each in every))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.sizes(1, 2)
def test_a_gradient_that_is_not_finite_is_not_computed_again(comm, value):
    exact, param = exact_sums(comm, 0.75)
    before = exact.state()
    add(exact, param, value if comm.rank == 0 else 0.5, 0.5)
    assert exact.fits()
    assert exact.state() == before
    assert exact.take(torch.device("cpu"))[1].tolist() == [comm.rank != 0]
    assert param.rounding.floats(torch.float32).isnan().all()
