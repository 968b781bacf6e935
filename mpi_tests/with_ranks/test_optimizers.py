"""SGD and Muon in every layout, compared with torch's in one process, in float64, so that rounding hides no error."""

import re

import numpy as np
import pytest
import torch

from collectives import InputError
from models.config import ModelConfig
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.models import llama
from mpi_tests.helpers.plain_muon import PlainMuon
from mpi_tests.helpers.trained import SMALL, alone, by_torch, check_bits, on
from training.optim.make import rows_of
from training.optim.optimizer import decay_groups

MUON = {"optimizer": "muon", "muon_lr": 0.05}
SGD = {"optimizer": "sgd", "momentum": 0.8}
HALF = SMALL.max_iters // 2


def plain_muon(model):
    return PlainMuon(model, MUON["muon_lr"] / SMALL.lr)


def plain_sgd(model):
    return torch.optim.SGD(decay_groups(model.parameters(), 0.1), momentum=SGD["momentum"])


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def check(outcome, expected, tolerance=1e-10):
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=0, atol=tolerance)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weight, rtol=0, atol=tolerance, err_msg=name)


LAYOUTS = {
    "dp": {},
    "tp 2, sp 2": {"tp": 2, "sp": 2, "sequence_parallel": True},
    "stage 1, tp 2": {"zero_stage": 1, "tp": 2},
    "stage 1 in groups": {"zero_stage": 1, "zero_group": "2"},
    "stage 2, pp 2": {"zero_stage": 2, "pp": 2, "num_micro_batches": 2},
    "stage 3, tp 2": {"zero_stage": 3, "tp": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(4)
def test_muon_is_that_of_one_process(comm, layout):
    outcome = on(comm, **MUON, **layout, dtype="float64")
    check(outcome, by_torch(comm, plain_muon, dtype="float64"))
    assert not np.allclose(outcome.losses, by_torch(comm).losses, rtol=1e-4)


@pytest.mark.sizes(1, 2)
def test_muon_in_float32(comm):
    check(on(comm, **MUON, zero_stage=1), by_torch(comm, plain_muon), 1e-5)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"zero_stage": 2, "pp": 2, "num_micro_batches": 2}, {"zero_stage": 3}])
@pytest.mark.sizes(4)
def test_sgd_is_that_of_one_process(comm, layout):
    check(on(comm, **SGD, **layout, dtype="float64"), by_torch(comm, plain_sgd, dtype="float64"))


@pytest.mark.sizes(2)
def test_zero_trains_the_bits_of_data_parallelism_with_muon(comm):
    expected = on(comm, **MUON)
    for zero_stage in (1, 2, 3):
        check_bits(on(comm, **MUON, zero_stage=zero_stage).weights, expected.weights)


@pytest.mark.sizes(4)
def test_experts_are_made_orthogonal_one_by_one(comm):
    mixture = {"num_experts": 4, "dtype": "float64", **MUON}
    check(on(comm, ep=2, tp=2, zero_stage=1, **mixture), alone(comm, num_micro_batches=2, **mixture))


@pytest.mark.sizes(4)
def test_a_llamas_gate_is_made_orthogonal_apart(comm):
    settings = {"model": "llama-tiny", "dtype": "float64", **MUON}
    check(on(comm, tp=2, zero_stage=1, **settings), alone(comm, num_micro_batches=2, **settings))
    shape = llama()
    assert rows_of("transformer.h.0.mlp.c_fc.weight", shape) == (1, 1)  # of the gate and of the gated projection
    assert rows_of("transformer.h.0.attn.c_attn.weight", shape) == (4, 4, 4)
    assert rows_of("transformer.h.0.mlp.c_fc.weight", ModelConfig()) == (1,)


@pytest.mark.parametrize("optimizer", [MUON, SGD], ids=["muon", "sgd"])
@pytest.mark.sizes(4)
def test_a_checkpoint_has_the_optimizers_states(comm, folder, optimizer):
    """A resumed run is equal, bit for bit in the same layout, up to rounding in others; another optimizer raises."""
    layout = {"tp": 2, "zero_stage": 1, **optimizer}
    whole = on(comm, **layout, checkpoint_dir=str(folder), checkpoint_interval=HALF)
    (path,) = folder.glob(f"*-step-{HALF}")
    resuming = {"checkpoint_dir": str(folder), "resume": str(path), "checkpoints_kept": 9}
    check_bits(on(comm, **layout, **resuming).weights, whole.weights)
    other = on(comm, zero_stage=3, **optimizer, **resuming)
    check(other, whole._replace(records=whole.records[-len(other.records) :]), 1e-5)
    words = f"{path}: optimizer was {optimizer['optimizer']}, but is adamw: resume with the same"
    with pytest.raises(InputError, match=re.escape(words)):
        on(comm, **resuming)


@pytest.mark.sizes(2)
def test_steps_that_are_skipped_leave_muons_weights_and_states(comm, monkeypatch):
    """The first steps overflow as the loss scale is too large; after it has decreased, training is as without them."""
    settings = {"dtype": "float16", "master_weights": True, "zero_stage": 1, "non_finite": "skip"}
    outcome = on(comm, **MUON, **settings)
    np.testing.assert_allclose(outcome.losses, by_torch(comm, plain_muon).losses, rtol=3e-3)
