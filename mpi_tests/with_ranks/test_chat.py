"""Tuning on conversations in every layout: the loss is the sum over all answers by their number, as in one process."""

import pytest
import torch

from mpi_tests.helpers.chat import check_tuned, tuned_by_torch, tuned_on, tuning_folder
from mpi_tests.helpers.ranks import from_first


@pytest.fixture(scope="module")
def folder(mpi_comm):
    with tuning_folder(mpi_comm) as folder:
        yield folder


LAYOUTS = {
    "dp 4": (4, {}),
    "accumulated": (2, {"num_micro_batches": 2}),
    "sp 2, dp 2": (4, {"sp": 2}),
    "ulysses": (2, {"sp": 2, "sp_mode": "ulysses", "num_micro_batches": 2}),
    "tp 2, dp 2": (4, {"tp": 2, "zero_stage": 1}),
    "tp 2, sequence-parallel": (2, {"tp": 2, "sequence_parallel": True, "num_micro_batches": 4}),
    "pp 2, dp 2": (4, {"pp": 2, "num_micro_batches": 2, "zero_stage": 2}),
    "pp 2, zb_h1, sp 2": (4, {"pp": 2, "sp": 2, "num_micro_batches": 4, "schedule": "zb_h1"}),
    "stage 3": (4, {"zero_stage": 3}),
    "reproducible": (4, {"sp": 2, "sequence_parts": 4, "reproducible": True}),
}


@pytest.mark.parametrize(("size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(4)
def test_the_loss_is_of_all_answers(comm, folder, size, layout):
    expected, counts = from_first(comm.mpi, lambda: tuned_by_torch(folder))
    assert all(max(numbers) > 1.3 * min(numbers) for numbers in counts)  # so that a mean of means is another
    part = comm.split(0 if comm.rank < size else None)
    if part:
        check_tuned(tuned_on(part, folder, **layout), expected)
        part.free()


@pytest.mark.sizes(2)
def test_the_same_bits_with_unequal_numbers_of_answers(comm, folder):
    """Gradients that are summed as integers have the same bits on any number of ranks and of micro-batches on each."""
    same = {"reproducible": True, "dtype": "float32", "sequence_parts": 4, "micro_batch_size": 1}
    alone = comm.split(comm.rank)
    expected = tuned_on(alone, folder, **same, num_micro_batches=4)
    alone.free()
    for layout in ({}, {"zero_stage": 2}, {"pp": 2}, {"sp": 2}):
        dp = 1 if "pp" in layout or "sp" in layout else 2
        tuned = tuned_on(comm, folder, **same, **layout, num_micro_batches=4 // dp)
        assert tuned.losses == expected.losses
        assert all(torch.equal(tuned.weights[name], weight) for name, weight in expected.weights.items())
