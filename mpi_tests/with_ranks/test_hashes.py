"""The hash of a run's weights and states in every layout, and what differs between two runs."""

import itertools
import json
import re
from math import prod

import pytest
import torch

from collectives import Communicator, InputError
from collectives.job import system
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.trained import config, on
from parallelism.checkpoint import Checkpoint
from training import compare, loop
from training.loop import train
from training.parallel.run import TrainingRun

SHAPE = {"n_layer": 4, "n_head": 4, "hash_interval": 1, "num_micro_batches": 2, "eval_iters": 1, "sample_tokens": 1}
HALF = {"dtype": "bfloat16", "master_weights": True}
MODELS = {"dense": {}, "experts": {"num_experts": 4, "experts_per_token": 2}, "bfloat16": HALF}
LAYOUTS = {
    1: [("bfloat16", {})],
    2: [
        ("dense", {}),
        ("dense", {"tp": 2}),
        ("dense", {"sp": 2}),
        ("dense", {"pp": 2, "schedule": "interleaved"}),
        ("dense", {"zero_stage": 1}),
        ("bfloat16", {"zero_stage": 3}),
        ("experts", {"ep": 2}),
    ],
    4: [
        ("dense", {"dp": 2, "tp": 2, "zero_stage": 1}),
        ("dense", {"dp": 2, "pp": 2, "zero_stage": 3, "schedule": "interleaved"}),
        ("dense", {"tp": 4, "sequence_parallel": True}),
        ("dense", {"zero_stage": 2, "zero_group": "2"}),
        ("bfloat16", {"tp": 2, "pp": 2, "schedule": "zb_v"}),
        ("experts", {"ep": 2, "zero_stage": 2}),
    ],
    8: [
        ("dense", {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 2}),
        ("bfloat16", {"dp": 2, "sp": 2, "pp": 2, "zero_stage": 3, "schedule": "interleaved"}),
        ("experts", {"dp": 4, "ep": 2, "pp": 2, "zero_stage": 1}),
    ],
}


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


@pytest.fixture(scope="module")
def alone(mpi_comm):
    """Yield, by model, the hash of the initial weights on one rank, and its checkpoint of step 1."""
    comm = Communicator(mpi_comm)
    one, saved = comm.split(0 if comm.rank == 0 else None), {}
    with shared_folder(mpi_comm) as folder:
        for name, model in MODELS.items() if one else ():
            with TrainingRun(config(1, **SHAPE, **model), one) as run:
                initial = run.hashes.after(0)
            train(config(1, **SHAPE, **model, max_iters=1, checkpoint_dir=str(folder / name)), one)
            (path,) = (folder / name).glob("*-step-1")
            saved[name] = initial, path
        yield comm.broadcast_object(saved)
    if one:
        one.free()
    comm.free()


CASES = [(size, *case) for size, cases in LAYOUTS.items() for case in cases]


@pytest.mark.parametrize(("size", "model", "layout"), CASES, ids=str)
@pytest.mark.sizes(8)
def test_the_hash_is_that_of_one_rank_in_every_layout(comm, alone, folder, size, model, layout):
    """Of the initial weights, and of the weights and states of one rank's checkpoint."""
    initial, path = alone[model]
    ranks = comm.split(0 if comm.rank < size else None)
    if not ranks:
        return
    dp_size = size // prod(layout.get(axis, 1) for axis in ("tp", "pp", "sp"))
    settings = {**SHAPE, **MODELS[model], **layout, "checkpoint_dir": str(folder / "resumed")}
    with TrainingRun(config(dp_size, **settings), ranks) as run:
        assert run.hashes.after(0) == initial
        run.saving.config.resume = str(path)
        assert run.saving.resume() == 1
        loaded = run.hashes.after(1)
    assert loaded.hash == Checkpoint(path).index.whole["hash"] != initial.hash
    assert [*loaded.tensors] == [*initial.tensors]
    assert {kind for kinds in loaded.tensors.values() for kind in kinds} > {"parameter", "exp_avg", "step"}
    ranks.free()


def plant(monkeypatch, step, name, here=True):
    """Flip the lowest bit of element 5 of a parameter after a step, if `here`."""
    update, steps = loop.update, itertools.count(1)

    def update_and_flip(run, lr, loss):
        outcome = update(run, lr, loss)
        if next(steps) == step and here:
            run.masters.pieces[name].data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1)
        return outcome

    monkeypatch.setattr(loop, "update", update_and_flip)


NAME = "transformer.h.1.mlp.c_fc.weight"


@pytest.mark.parametrize("interval", [1, 3], ids=["each step saved", "a later one saved"])
@pytest.mark.sizes(2)
def test_one_planted_bit_is_named(comm, folder, monkeypatch, interval):
    """The step, the parameter, and, in the checkpoint of that step, the element with both values."""
    for name in ("a", "b"):
        saving = {"checkpoint_dir": str(folder / f"saved-{name}"), "checkpoint_interval": interval}
        if name == "b":
            plant(monkeypatch, 2, NAME)
        on(comm, **SHAPE, **saving, checkpoints_kept=9, out_dir=str(folder / name))
    runs = [compare.HashedRun(folder / name) for name in ("a", "b")]
    lines = compare.compare(*runs)
    assert lines[0] == "step 2 differs; step 1 is equal"
    assert lines[1].startswith(f"{NAME} is the first parameter that differs, in parameter; 1 of ")
    at = 2 if interval == 1 else 3
    values = r"element \[(\d+), (\d+)\] is (\S+) \(0x(\w{8})\) and (\S+) \(0x(\w{8})\); ([\d,]+) of 4,096 differ"
    match = re.fullmatch(rf"parameter of {NAME} in the checkpoints of step {at}: {values}", lines[2])
    row, column, *words, count = match.groups()
    bits = [int(word, 16) for word in words[1::2]]
    floats = [torch.tensor(number, dtype=torch.int32).view(torch.float32).item() for number in bits]
    assert [float(number) for number in words[::2]] == pytest.approx(floats, rel=1e-8)
    if interval == 1:
        assert (row, column, count, bits[0] ^ bits[1]) == ("0", "5", "1", 1)
    unchanged = [json.loads((folder / name / "hashes.jsonl").read_text().splitlines()[0]) for name in ("a", "b")]
    assert unchanged[0] == unchanged[1]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
@pytest.mark.sizes(2)
def test_a_replica_that_differs_ends_the_run_in_that_step(comm, monkeypatch, layout):
    name = "transformer.h.1.ln_2.weight"
    plant(monkeypatch, 3, name, here=comm.rank == 1)
    with pytest.raises(
        InputError, match=f"^step 3: parameter of {name} should be the same .* rank 0 and .* rank 1: resume"
    ):
        on(comm, **SHAPE, **layout)


@pytest.mark.sizes(1, 2)
def test_checkpoints_are_hashed_too_and_a_resumed_run_repeats_the_hashes(comm, folder, monkeypatch, capsys):
    """It resumes from step 2 of 6 on another kind of CPU, which it says and marks, and continues bit for bit."""
    settings = {**SHAPE, "hash_interval": 3, "checkpoint_interval": 2, "checkpoint_dir": str(folder / "saved")}
    settings |= {"max_iters": 6, "out_dir": str(folder / "out")}
    records = on(comm, **settings).records
    hashes = {record["iter"]: record["hash"] for record in records if "hash" in record}
    assert [*hashes] == [2, 3, 4, 6]
    (path,) = (folder / "saved").glob("*-step-2")
    whole = Checkpoint(path).index.whole
    assert whole["hash"] == hashes[2]
    assert whole["conditions"] == {
        "cpu": f"{system.processor()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "micro_batch_size": 12 // comm.size,
    }
    comm.barrier()
    monkeypatch.setattr(system, "processor", lambda: "8086")
    capsys.readouterr()
    resumed = on(comm, **settings, resume=str(path)).records
    cpu = f"8086 ({torch.backends.cpu.get_cpu_capability()})"
    assert f"resumed with cpu {cpu}, before {whole['conditions']['cpu']}: " in capsys.readouterr().out
    assert [record.get("resumed_with") for record in resumed] == [{"cpu": cpu}, *[None] * (len(resumed) - 1)]
    assert {record["iter"]: record["hash"] for record in resumed if "hash" in record} == {
        step: hashes[step] for step in (3, 4, 6)
    }
    lines = [json.loads(line) for line in (folder / "out" / "hashes.jsonl").read_text().splitlines()]
    assert [(line["step"], line["hash"]) for line in lines] == [(step, hashes[step]) for step in (2, 3, 4, 6, 3, 4, 6)]
    assert all(next(iter(line["tensors"])) == "transformer.wte.weight" for line in lines)
