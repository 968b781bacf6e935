"""Adapters in every layout: losses, validations and merged weights as those of plain torch in one process."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from collectives import InputError
from mpi_tests.helpers.chat import Tuned, check_tuned, config, tuned_by_torch, tuned_on, tuning_folder
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.ranks import from_first
from training.loop import train
from training.parallel.run import TrainingRun

ADAPTERS = {"lora_rank": 3, "lora_alpha": 5.0}
SOME = {"lora_rank": 2, "lora_targets": ("q_proj", "v_proj", "down_proj")}


@pytest.fixture(scope="module")
def folder(mpi_comm):
    with tuning_folder(mpi_comm) as folder:
        yield folder


LAYOUTS = {
    "one rank": (1, {}),
    "tp 2": (2, {"tp": 2}),
    "tp 2, sequence-parallel, dp 2": (4, {"tp": 2, "sequence_parallel": True, "zero_stage": 1}),
    "sp 2, accumulated": (2, {"sp": 2, "num_micro_batches": 2}),
    "pp 2, dp 2, stage 2": (4, {"pp": 2, "num_micro_batches": 2, "zero_stage": 2}),
    "pp 2, zb_h1, tp 2": (4, {"pp": 2, "tp": 2, "num_micro_batches": 4, "schedule": "zb_h1"}),
    "stage 3, recomputed": (4, {"zero_stage": 3, "recompute": "full"}),
    "stage 3, tp 2": (4, {"zero_stage": 3, "tp": 2}),
    "reproducible": (2, {"sp": 2, "sequence_parts": 4, "reproducible": True}),
}


@pytest.mark.parametrize("adapters", [ADAPTERS, SOME], ids=["all layers", "some"])
@pytest.mark.parametrize(("size", "layout"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(4)
def test_losses_and_merged_weights_are_those_of_one_process(comm, folder, size, layout, adapters):
    expected, _ = from_first(comm.mpi, lambda: tuned_by_torch(folder, **adapters))
    part = comm.split(0 if comm.rank < size else None)
    if part:
        check_tuned(tuned_on(part, folder, **adapters, **layout), expected)
        part.free()


@pytest.mark.sizes(2)
def test_the_same_bits_in_every_layout(comm, folder):
    same = {"reproducible": True, "dtype": "float32", "micro_batch_size": 1, **ADAPTERS}
    alone = comm.split(comm.rank)
    for numerics, layouts in (({"tiles": 2}, [{"tp": 2}, {"zero_stage": 3}]), ({"sequence_parts": 4}, [{"sp": 2}])):
        expected = tuned_on(alone, folder, **same, **numerics, num_micro_batches=4)
        for layout in layouts:
            dp = 2 if "zero_stage" in layout else 1
            tuned = tuned_on(comm, folder, **same, **numerics, **layout, num_micro_batches=4 // dp)
            assert tuned.losses == expected.losses
            assert all(torch.equal(tuned.weights[name], weight) for name, weight in expected.weights.items())
    alone.free()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.sizes(2)
def test_only_adapters_have_gradients_and_states(comm, folder, zero_stage):
    with TrainingRun(config(folder, 2, zero_stage=zero_stage, **ADAPTERS), comm) as run:
        every = {name: parameter.numel() for name, parameter in run.model.named_parameters()}
        own = {name for name in every if ".lora." in name}
        pieces = run.masters.pieces
        assert own >= pieces.keys()
        assert set().union(*comm.all_gather_object([*pieces])) == own
        held = sum(piece.numel() for piece in pieces.values())
        assert comm.all_gather_object(held)[0] <= sum(every[name] for name in own)
        assert run.replica.arrays[1].numel() < 2 * sum(every[name] for name in own) < sum(every.values()) / 4


@pytest.mark.sizes(2)
def test_a_run_resumes_in_another_layout(comm, folder):
    expected = tuned_on(comm, folder, tp=2, **ADAPTERS)
    with shared_folder(comm.mpi) as checkpoints:
        saved = {"checkpoint_dir": str(checkpoints), "checkpoint_interval": 1, **ADAPTERS}
        first = tuned_on(comm, folder, tp=2, max_iters=2, **saved)
        second = tuned_on(comm, folder, zero_stage=3, resume="auto", **saved)
        evaluated = {"eval_only": True, "resume": "auto", "checkpoint_dir": str(checkpoints)}
        _, records = train(config(folder, 2, **evaluated, **ADAPTERS), comm)
        assert records[-1]["val_loss"] == pytest.approx(expected.val_loss, rel=1e-6)
        with pytest.raises(InputError, match="lora_rank"):
            tuned_on(comm, folder, resume="auto", **saved | {"lora_rank": 2})
        other = checkpoints / "other"
        if comm.rank == 0:
            shutil.copytree(folder / "model", other)
            weights = load_file(other / "model.safetensors")
            save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors")
        comm.barrier()
        with pytest.raises(InputError, match=r"init_from's weights was \w+, but is \w+: resume with the same"):
            tuned_on(comm, folder, resume="auto", **saved | {"init_from": str(other)})
    check_tuned(Tuned(first.losses + second.losses, second.val_loss, second.weights), expected)


@pytest.mark.sizes(2)
def test_the_adapter_that_a_run_writes_is_read_by_another(comm, folder):
    with shared_folder(comm.mpi) as out:
        tuned = tuned_on(comm, folder, tp=2, out_dir=str(out), dtype="float32", **SOME)
        comm.barrier()
        tensors = load_file(out / "adapter" / "adapter_model.safetensors")
        assert len(tensors) == 2 * 2 * 3  # matrices, blocks, layers
        merged = load_file(out / "model.safetensors")
        assert all(torch.equal(merged[name], weight) for name, weight in tuned.weights.items())
        again = {"eval_only": True, "lora_from": str(out / "adapter"), "dtype": "float32"}
        _, records = train(config(folder, 2, **again), comm)
        assert records[-1]["val_loss"] == pytest.approx(tuned.val_loss, rel=1e-6)
        onward = tuned_on(comm, folder, max_iters=1, sp=2, **{**again, "eval_only": False})
        assert onward.losses[0] < tuned.losses[0]


@pytest.mark.sizes(2)
def test_unknown_layers_are_refused_on_every_rank(comm, folder):
    words = "lora_targets=query is not a linear layer of the blocks: use c_attn, c_fc, c_proj, "
    with pytest.raises(InputError, match=words):
        train(config(folder, 2, lora_rank=2, lora_targets=("query",)), comm)
