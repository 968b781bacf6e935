"""Validation only, validation on some batches, records of some steps, and the saved settings of a run."""

import json
import re

import numpy as np
import pytest
import torch

from collectives import InputError
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.trained import GLOBAL_BATCH, SMALL, config, loss_of, on
from parallelism.planner.settings import parse
from training.data.tokens import TokenWindows, load_tokens, split
from training.loop import train
from training.settings.config import Config
from training.weights.export import save_hugging_face


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


@torch.no_grad()
def plain_validation(gpt, num_batches=None):
    """Return the validation loss of a plain loop over samples at regular intervals."""
    _, ids = split(load_tokens(SMALL.data), SMALL.val_fraction, SMALL.block_size)
    windows = TokenWindows(ids, SMALL.block_size, None)
    count = num_batches * GLOBAL_BATCH if num_batches else len(windows)
    assert count <= len(windows)
    return np.mean([loss_of(gpt, windows, np.array([i * len(windows) // count])).item() for i in range(count)])


@pytest.mark.parametrize(("size", "layout"), [(4, {"tp": 2}), (4, {"pp": 2, "num_micro_batches": 2}), (3, {})])
@pytest.mark.sizes(4)
def test_some_batches_are_the_same_in_every_layout(comm, size, layout):
    part = comm.split(0 if comm.rank < size else None)
    if part:
        dp = size // layout.get("tp", 1) // layout.get("pp", 1)
        gpt, records = train(config(dp, max_iters=1, eval_iters=2, **layout), part)
        assert records[-1]["val_loss"] == pytest.approx(plain_validation(gpt, 2), rel=1e-5)
        assert records[-1]["val_loss"] != pytest.approx(plain_validation(gpt), rel=1e-5)
        part.free()


def evaluated(comm, **changes):
    gpt, records = train(config(comm.size, eval_only=True, **changes), comm)
    assert gpt is None
    (record,) = records
    return record


TRAINED = {"muon": {"optimizer": "muon", "zero_stage": 1}, "bfloat16": {"dtype": "bfloat16", "master_weights": True}}


@pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED)
@pytest.mark.sizes(2)
def test_validation_alone_is_of_what_was_saved_and_writes_nothing(comm, folder, capsys, trained):
    saved, exported = folder / "saved", folder / "exported"
    gpt, _ = train(config(1, **trained, tp=2, checkpoint_dir=str(saved)), comm)
    expected = plain_validation(gpt.float())
    if comm.rank == 0:
        save_hugging_face(gpt, exported)
    comm.barrier()
    (path,) = saved.glob("*-step-4")
    before = snapshot(folder)
    capsys.readouterr()
    newest = {"resume": "auto", "checkpoint_dir": str(saved)}
    for begin in ({"resume": str(path)}, newest, {"init_from": str(exported)}):
        record = evaluated(comm, out_dir=str(folder / "out"), zero_stage=3, **begin)
        assert record["val_loss"] == pytest.approx(expected, rel=1e-5)
        assert record["iter"] == (0 if "init_from" in begin else SMALL.max_iters)
        text = capsys.readouterr().out
        assert f"val loss {expected:.4f}" in text
        step = f", after step {SMALL.max_iters}" if "resume" in begin else ""
        assert f"\nweights of {path if 'resume' in begin else exported}{step}\n" in text
    comm.barrier()
    assert snapshot(folder) == before


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.sizes(2)
def test_validation_alone_needs_weights(comm, folder):
    with pytest.raises(InputError, match="eval_only evaluates existing weights: set resume or init_from"):
        evaluated(comm)
    with pytest.raises(InputError, match=re.escape(f"resume=auto: {folder} has no complete checkpoint")):
        evaluated(comm, resume="auto", checkpoint_dir=str(folder))


@pytest.mark.sizes(2)
def test_some_steps_are_recorded(comm):
    outcome, every = on(comm, log_interval=3, max_iters=5), on(comm, max_iters=5)
    assert [record["iter"] for record in outcome.records if "loss" in record] == [3, 5]
    assert outcome.losses == [every.losses[2], every.losses[4]]
    assert outcome.validations == every.validations


@pytest.mark.sizes(2)
def test_a_run_leaves_settings_that_repeat_it(comm, folder):
    settings = {"lr_schedule": "wsd", "lr_decay_iters": 2, "min_lr": 1e-5, "momentum": 0.9, "optimizer": "sgd"}
    first = on(comm, out_dir=str(folder / "out"), **settings)
    comm.barrier()
    again = parse(Config, "", ["--config", str(folder / "out" / "config.toml")])
    assert again == config(2, out_dir=str(folder / "out"), **settings)
    _, records = train(again, comm)
    assert [record["loss"] for record in records if "loss" in record] == first.losses
    comm.barrier()
    lines = (folder / "out-2" / "metrics.jsonl").read_text().splitlines()
    assert [record["loss"] for record in map(json.loads, lines) if "loss" in record] == first.losses
