"""train.py's training of mixtures over ep beside the other axes, against one rank's; checkpoints; refusals."""

import numpy as np
import pytest

from collectives import InputError
from mpi_tests.helpers.trained import on, on_first

MIXTURE = {"num_experts": 8, "dtype": "float64", "balance_loss": 0.1, "grad_clip": 0.5, "max_iters": 8}
LAYOUTS = {
    2: [{"ep": 2}, {"ep": 2, "zero_stage": 1}, {"ep": 2, "zero_stage": 3}, {"ep": 2, "expert_capacity": 0.7}],
    4: [
        {"ep": 2, "tp": 2},
        {"ep": 2, "zero_stage": 2},
        {"ep": 2, "pp": 2, "num_micro_batches": 2},
        {"ep": 2, "sp": 2, "balance_loss": 0.0},
        {"ep": 4, "recompute": "selective"},
    ],
    8: [
        {"ep": 2, "tp": 2, "zero_stage": 3, "sequence_parallel": True},
        {"ep": 2, "tp": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2, "schedule": "zb_h1"},
        {"ep": 4, "pp": 2, "zero_stage": 3, "num_micro_batches": 3, "recompute": "full"},
        {"ep": 4, "zero_stage": 1, "expert_capacity": 0.7},
    ],
}


def check_same(outcome, expected):
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-10)
    np.testing.assert_allclose([*outcome.validations.values()], [*expected.validations.values()], rtol=1e-10)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weight, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.sizes(2, 4, 8)
@pytest.mark.parametrize("number", range(5))
def test_losses_and_weights_are_those_of_one_rank(comm, number):
    if number >= len(LAYOUTS[comm.size]):
        pytest.skip("no further layout of so many ranks")
    layout = LAYOUTS[comm.size][number]
    model = {name: layout[name] for name in ("balance_loss", "expert_capacity") if name in layout}
    expected = on_first(comm, **{**MIXTURE, **model})
    check_same(on(comm, **{**MIXTURE, **layout}), expected)
    assert any(name.endswith("router.bias") and weight.any() for name, weight in expected.weights.items())


@pytest.mark.sizes(4)
def test_a_checkpoint_fits_another_layout_and_no_other_number_of_experts(mpi_comm, comm, tmp_path_factory):
    folder = mpi_comm.bcast(str(tmp_path_factory.mktemp("saved")) if comm.rank == 0 else None)
    saved = {**MIXTURE, "max_iters": 4, "checkpoint_dir": folder}
    before = on(comm, **saved, ep=2, tp=2)
    resumed = on(comm, **saved, resume="auto", ep=4, zero_stage=1)
    assert any(name.endswith("router.bias") and weight.any() for name, weight in before.weights.items())
    for name, weight in before.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight, err_msg=name)
    with pytest.raises(InputError, match=r"router\.weight"):
        on(comm, **{**saved, "num_experts": 4}, resume="auto", ep=2)


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("changes", "words"), [
    ({"num_experts": 3, "ep": 2}, "num_experts=3 can't be split over ep=2: use an ep of 1"),
    ({"num_experts": 4, "ep": 4}, "ep=4 must divide dp=2, which it lies in: use an ep of 1, 2"),
    ({"num_experts": 4, "ep": 2, "tp": 2}, "ep=2 must divide dp=1, which it lies in: use an ep of 1"),
    ({"num_experts": 0, "ep": 2}, "ep=2 divides the experts of a mixture: set num_experts to a multiple of 2, or ep=1"),
    ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token=3 is more than num_experts=2: use from 1 to 2"),
    ({"num_experts": 4, "sp": 2, "expert_capacity": 1.0}, "count the tokens of whole sequences, which sp=2 divides"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_on_all_ranks(comm, changes, words):
    with pytest.raises(InputError, match=words):
        on(comm, **changes)
