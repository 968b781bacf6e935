"""Training in every layout compared with a plain torch loop: losses, validations and weights.

systems/test_end_to_end.py starts train.py as a user does.
"""

import errno
import gc
import json
import math
import os
import re
import shutil
import signal
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from collectives import Communicator, InputError
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.hugging_face import gpt2_logits
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.trained import (
    SMALL,
    VALIDATED,
    alone,
    by_torch,
    check_bits,
    check_same,
    config,
    on,
    on_first,
)
from parallelism.checkpoint.reading import sealed
from parallelism.checkpoint.stop import SIGNALS
from parallelism.mesh import Mesh
from parallelism.pipeline import layer_times
from parallelism.pipeline.pipeline_parallel import PipelineParallel
from parallelism.pipeline.schedule.search import search
from parallelism.planner import presets
from parallelism.planner.settings import parse
from training import loop
from training.loop import train
from training.parallel.decoder import FusedGate, FusedGELU, FusedHeads
from training.parallel.run import TrainingRun
from training.settings.config import Config
from training.weights import export
from training.weights.export import save_hugging_face
from training.weights.hf import load_hugging_face

LAST, HALF = SMALL.max_iters, SMALL.max_iters // 2


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


@pytest.mark.sizes(1, 2, 3, proof=(4, 8))
def test_losses_and_weights_are_those_of_one_process(comm):
    expected = by_torch(comm)
    check_same(on(comm), expected)
    assert expected.losses[-1] < expected.losses[0] - 0.5


LAYOUTS = {
    "tp 2, sp 2": {"tp": 2, "sp": 2},
    "sequence-parallel": {"tp": 2, "sp": 2, "sequence_parallel": True},
    "ulysses": {"sp": 2, "sp_mode": "ulysses", "num_micro_batches": 3},
    "hybrid": {"sp": 4, "sp_mode": "hybrid"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.sizes(4, proof=(8,))
def test_layers_and_sequences_may_be_split(comm, capsys, layout):
    check_same(on(comm, **layout), by_torch(comm))
    layers = f"layers over tp {layout['tp']}, " if "tp" in layout else ""
    assert f"\n{layers}sequences over sp {layout['sp']} by" in capsys.readouterr().out


@pytest.mark.sizes(2)
def test_layers_alone_may_be_split(comm, capsys):
    check_same(on(comm, tp=2), by_torch(comm))
    assert "\nlayers over tp 2\n" in capsys.readouterr().out


PIPELINES = {
    "pp 2, tp 2, sp 2": {"pp": 2, "tp": 2, "sp": 2, "sequence_parallel": True, "num_micro_batches": 4},
    "pp 2, sp 2, dp 2": {"pp": 2, "sp": 2, "num_micro_batches": 2, "schedule": "zb_h1", "recompute": "full"},
}
if IS_PROOF:
    PIPELINES["pp 2, tp 2, dp 2"] = {"pp": 2, "tp": 2, "dp": 2, "num_micro_batches": 3}


@pytest.mark.parametrize("layout", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.sizes(8)
def test_layers_may_be_shared_as_stages(comm, capsys, layout):
    outcome, text = on(comm, **layout), capsys.readouterr().out
    check_same(outcome, by_torch(comm))
    assert f"2 stages over pp 2 by {layout.get('schedule', '1f1b')}" in text
    assert all(0 < record["bubble"] < 1 for record in outcome.records if "loss" in record)
    assert "| bubble " in text


SHARING = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2, "num_micro_batches": 2, "zero_group": "2"},
    "stage 3, recomputed": {"zero_stage": 3, "recompute": "full"},
    "stage 3, tp 2": {"zero_stage": 3, "tp": 2, "dp": 2},
    "stage 1, pp 2": {"zero_stage": 1, "pp": 2, "dp": 2, "num_micro_batches": 2},
    "stage 2, pp 2": {"zero_stage": 2, "pp": 2, "dp": 2, "num_micro_batches": 3, "schedule": "zb_h1"},
    "stage 3, pp 2": {"zero_stage": 3, "pp": 2, "dp": 2, "num_micro_batches": 2, "recompute": "full"},
}


@pytest.mark.parametrize("layout", SHARING.values(), ids=SHARING)
@pytest.mark.sizes(4)
def test_ranks_may_share_states_gradients_and_parameters(comm, layout):
    check_same(on(comm, **layout), by_torch(comm))


@pytest.mark.sizes(2)
def test_micro_batches_are_gradient_accumulation(comm):
    check_same(on(comm, num_micro_batches=4), by_torch(comm))
    check_same(on(comm, micro_batch_size=4, global_batch_size=24), by_torch(comm))


@pytest.mark.sizes(4)
@pytest.mark.parametrize("settings", [{}, {"tp": 2, "zero_stage": 1}], ids=["all", "the rest"])
def test_the_planner_may_choose_the_layout(comm, capsys, settings):
    check_same(on(comm, layout="auto", **settings), by_torch(comm))
    lines = re.findall(r"^layout (.*) is the best for 4 ranks$", capsys.readouterr().out, re.MULTILINE)
    assert len(lines) == (comm.rank == 0)
    assert all(f"{name} {value}" in line for line in lines for name, value in settings.items())


@pytest.mark.sizes(4)
def test_documents_do_not_depend_on_the_layout(comm):
    lines = {"document_end": ord("\n")}
    expected = alone(comm, num_micro_batches=2, **lines)
    check_same(on(comm, sp=2, **lines), expected)
    assert not np.allclose(expected.losses, by_torch(comm).losses, rtol=1e-5)  # each document attends only to itself


@pytest.mark.sizes(8)
def test_dropout_does_not_depend_on_the_layout(comm):
    expected = alone(comm, num_micro_batches=2, dropout=0.2)
    check_same(on(comm, tp=2, sp=2, dropout=0.2), expected)
    assert not np.allclose(expected.losses, by_torch(comm).losses, rtol=1e-5)
    assert expected.losses != alone(comm, num_micro_batches=2, dropout=0.2, seed=8, max_iters=2).losses


@pytest.mark.sizes(3)
def test_the_same_layout_gives_the_same_bits_and_leaves_nothing_behind(comm, folder, capsys):
    """The exception is memory that the communicator caches."""
    saving = {"checkpoint_dir": str(folder)}
    first, text = on(comm, **saving), capsys.readouterr().out
    before = process_state(comm)
    second = on(comm, **saving)
    assert process_state(comm) == before
    assert (first.losses, first.validations) == (second.losses, second.validations)
    check_bits(second.weights, first.weights)
    if comm.rank > 0:  # the first may have a progress bar
        iterations = [line.split("|")[0].strip() for line in text.splitlines() if "grad norm" in line]
        assert iterations == [f"iter {i}/{LAST}" for i in range(1, LAST + 1)]
        assert text.count("val loss") == len(VALIDATED)
    fields = {"iter", "loss", "grad_norm", "lr", "tokens_per_s", "flops_per_s", "compute_ms", "comm_ms"}
    assert fields < first.records[0].keys()


def process_state(comm):
    """Return state that a run could leave in the process: communicators, shared memory, threads, signals, settings.

    The communicator's thread, its state after a first call, and tqdm's thread do not count.
    """
    comm.barrier()
    gc.collect()
    threads = {*threading.enumerate()} - {comm.context.progress.background.thread}
    keys = {block.window.key for block in comm.context.memory.of_host.blocks}
    return (
        len(comm.context.calls.record.communicators),
        sum(not block.free for block in comm.context.memory.of_host.blocks),
        {window.key for window in comm.context.windows.present} - keys,
        sorted(thread.name for thread in threads if thread.name != "tqdm_monitor"),
        [signal.getsignal(number) for number in SIGNALS],
        torch.get_float32_matmul_precision(),
    )


# --- checkpoints ---

GOING_ON = {
    "the same": (4, {"tp": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2}),
    "dp 4, stage 3": (4, {"zero_stage": 3}),
    "one process": (1, {"num_micro_batches": 2}),
    "pp 2, dp 2": (4, {"pp": 2, "dp": 2, "num_micro_batches": 2}),
    "pp 2, dp 2, stage 3": (4, {"pp": 2, "dp": 2, "zero_stage": 3, "num_micro_batches": 2}),
}


@pytest.fixture(scope="module")
def saved(mpi_comm):
    """Yield the folder with checkpoints of steps 2 and 4 of a run over tp and pp, and the final weights."""
    comm = Communicator(mpi_comm)
    with shared_folder(mpi_comm) as folder:
        saving = {"checkpoint_dir": str(folder), "checkpoint_interval": HALF}
        yield folder, on(comm, **GOING_ON["the same"][1], **saving).weights
    comm.free()


@pytest.fixture
def copied(comm, saved, folder):
    """Return a copy of the checkpoints."""
    path = folder / "checkpoints"
    if comm.rank == 0:
        shutil.copytree(saved[0], path)
    comm.barrier()
    return path


def checkpoint_of(folder, step):
    (path,) = folder.glob(f"*-step-{step}")
    return str(path)


@pytest.mark.parametrize("case", GOING_ON)
@pytest.mark.sizes(4)
def test_a_checkpoint_goes_on_in_any_layout(comm, saved, copied, case):
    """A resumed run equals the uninterrupted one; in the same layout, bit for bit."""
    size, layout = GOING_ON[case]
    saving = {"checkpoint_dir": str(copied), "resume": checkpoint_of(copied, HALF), "checkpoints_kept": 1}
    outcome = on_first(comm, size, **layout, **saving)
    assert [record["iter"] for record in outcome.records if "loss" in record] == [*range(HALF + 1, LAST + 1)]
    assert [path.name.partition("-")[2] for path in copied.glob("*step*")] == [f"step-{LAST}"]
    if case == "the same":
        check_bits(outcome.weights, saved[1])
    for name, expected in saved[1].items():
        np.testing.assert_allclose(outcome.weights[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


TOKENS = torch.randint(256, (3, SMALL.block_size), generator=torch.Generator().manual_seed(1))


def exported(comm, checkpoints):
    """Export the last checkpoint from one process that resumes it without further steps; return the logits."""
    first = comm.split(0 if comm.rank == 0 else None)
    if not first:
        return None
    gpt, records = train(config(1, checkpoint_dir=str(checkpoints), resume="auto"), first)
    first.free()
    assert not records
    save_hugging_face(gpt, checkpoints)
    return gpt.eval()(TOKENS)[0]


@pytest.mark.sizes(4)
@torch.no_grad()
def test_a_checkpoint_of_tp_pp_and_zero_has_the_logits_of_a_gpt2(comm, saved, copied):
    logits = exported(comm, copied)
    if comm.rank == 0:
        check_bits(load_file(copied / "model.safetensors"), saved[1])
        assert torch.equal(load_hugging_face(copied).eval()(TOKENS)[0], logits)
        tensors = {name: torch.from_numpy(array) for name, array in saved[1].items()}
        np.testing.assert_allclose(logits, gpt2_logits(tensors, TOKENS, SMALL.n_head), atol=1e-5)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.filterwarnings("default")
@pytest.mark.sizes(4)
@torch.no_grad()
def test_a_checkpoint_of_tp_pp_and_zero_becomes_a_gpt2_in_transformers(comm, copied):
    logits = exported(comm, copied)
    if comm.rank == 0:
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel.from_pretrained(copied).eval()
        torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.sizes(2)
def test_a_run_that_goes_on_has_the_loss_scale_and_all_ranks_weights(comm, folder):
    """At the end of both runs, the scale has been stable for all steps."""
    settings = {"zero_stage": 1, "dtype": "float16", "dropout": 0.1}
    saving = {"checkpoint_dir": str(folder), "checkpoint_interval": HALF}
    whole = on(comm, **settings, **saving)
    resumed = on(comm, **settings, **saving, resume=checkpoint_of(folder, HALF))
    check_bits(resumed.weights, whole.weights)
    comm.barrier()
    last = [json.loads((path / "index.json").read_text()) for path in folder.glob(f"*-step-{LAST}")]
    assert [index["index"]["whole"]["loss_scale"] for index in last] == [[2.0**16, LAST]] * 2


@pytest.mark.sizes(1, 2)
def test_what_a_run_cannot_go_on_from(comm, folder):
    on(comm, checkpoint_dir=str(folder), max_iters=1)
    before = process_state(comm)
    for changes, words in (
        ({"seed": 8}, "seed was 7, but is 8: resume with the same"),
        ({"n_embd": 16}, "n_embd was 32, but is 16: resume with the same"),
        ({"resume": str(folder)}, str(folder)),
        ({"checkpoint_dir": ""}, "resume=auto continues with checkpoints of its own: set checkpoint_dir"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            on(comm, **{"checkpoint_dir": str(folder), "resume": "auto", **changes})
    assert process_state(comm) == before
    with pytest.raises(InputError, match="loss_scale=None is none: resume from another checkpoint"):
        on(comm, checkpoint_dir=str(folder), resume=forged(comm, folder))
    assert (folder / "lock").read_text() == ""
    assert process_state(comm) == before


def forged(comm, folder):
    """Return a checkpoint that lacks a required part, with a valid checksum."""
    (path,) = folder.glob("*/index.json")
    if comm.rank == 0:
        values = json.loads(path.read_text())["index"]
        del values["whole"]["loss_scale"]
        path.write_text(sealed(values))
    comm.barrier()
    return str(path.parent)


@pytest.mark.sizes(1, 2)
def test_a_full_disk_of_out_dir_stops_no_checkpoint(comm, folder, monkeypatch, capsys):
    """The last checkpoint is complete before the loss is drawn, and the run ends with one error line."""
    finished, whole = folder / "saved" / "00001-step-1", []

    def full(*arguments, **more):
        whole.append(finished.exists())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("training.reports.jsonl.loss_figure", full)
    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(InputError, match="No space left on device"):
        on(comm, checkpoint_dir=str(finished.parent), out_dir=str(folder / "out"), max_iters=1)
    assert whole == [True, True] * (comm.rank == 0)
    assert ("loss.png can't be written (No space left on device)" in capsys.readouterr().out) == (comm.rank == 0)


FLIPS = {
    "dp, a weight": ({}, "parameter", "transformer.h.0.attn.c_attn.weight"),
    "dp, a state": ({}, "exp_avg", "transformer.h.1.ln_2.weight"),
    "dp, a master weight": ({"dtype": "bfloat16", "master_weights": True}, "parameter", "transformer.wpe.weight"),
    "tp, a replicated weight": ({"tp": 2}, "parameter", "transformer.h.0.ln_1.weight"),
    "sp": ({"sp": 2}, "parameter", "transformer.h.1.mlp.c_fc.weight"),
    "pp, a tied weight": ({"pp": 2, "num_micro_batches": 2}, "parameter", "transformer.wte.weight"),
}


@pytest.mark.parametrize(("layout", "kind", "name"), FLIPS.values(), ids=FLIPS)
@pytest.mark.sizes(2)
def test_replicas_that_differ_end_the_run(comm, folder, monkeypatch, layout, kind, name):
    """A bit of rank 1's flips after step 4; the previous checkpoint remains the newest."""
    step = loop.step

    def step_and_flip(run, iteration, batches):
        pending = step(run, iteration, batches)
        if iteration == 4 and comm.rank == 1:
            parts, pieces = run.saving.shards.parts, run.masters.pieces.items()
            (piece,) = (piece for local, piece in pieces if parts[local].name == name)
            tensor = piece if kind == "parameter" else run.optimizer.state[piece][kind]
            tensor.data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1 << 9)
        return pending

    monkeypatch.setattr(loop, "step", step_and_flip)
    words = refusal(comm, **layout, checkpoint_dir=str(folder), checkpoint_interval=2)
    pattern = (
        rf"{kind} of {name} should be the same .* its CRC-32 is [0-9a-f]{{8}} on rank 0 and [0-9a-f]{{8}} on rank 1: "
    )
    assert re.match(pattern, words)
    assert sorted(path.name for path in folder.iterdir()) == ["00001-step-2", "lock"]


# --- precision ---

HALVES = {
    "float16, dp 2": ("float16", {}),
    "bfloat16, pp 2": ("bfloat16", {"pp": 2, "num_micro_batches": 2}),
    "bfloat16, stage 1": ("bfloat16", {"zero_stage": 1}),
    "float16, stage 3": ("float16", {"zero_stage": 3}),
}


@pytest.mark.parametrize(("dtype", "layout"), HALVES.values(), ids=HALVES)
@pytest.mark.sizes(2)
def test_parameters_may_be_of_16_bits(comm, dtype, layout):
    wide = by_torch(comm).losses
    settings = {"dtype": dtype, "master_weights": True, "grad_dtype": dtype, "non_finite": "skip"}
    outcome = on(comm, **settings, **layout, recompute="selective")
    np.testing.assert_allclose(outcome.losses, wide, rtol=2e-3)
    assert not np.allclose(outcome.losses, wide, rtol=1e-5)
    assert all(weight.dtype == np.float32 for weight in outcome.weights.values())


@pytest.mark.sizes(2)
def test_a_checkpoint_of_master_weights_goes_on_in_any_precision(comm, folder):
    """In the same layout, equal bit for bit; training with float32 weights can resume from them, too."""
    half = {"dtype": "float16", "master_weights": True, "grad_dtype": "float16", "num_micro_batches": 2}
    saving = {"checkpoint_dir": str(folder / "whole"), "checkpoint_interval": HALF}
    whole = on(comm, **half, **saving, zero_stage=3)
    resume = checkpoint_of(folder / "whole", HALF)
    stages = {"pp": 2, "zero_stage": 1, "num_micro_batches": 2}
    for name, settings in (("same", half | {"zero_stage": 3}), ("float32", stages)):
        outcome = on(comm, **settings, checkpoint_dir=str(folder / name), resume=resume)
        assert [record["iter"] for record in outcome.records if "loss" in record] == [*range(HALF + 1, LAST + 1)]
        if name == "same":
            check_bits(outcome.weights, whole.weights)
        for key, expected in whole.weights.items():
            np.testing.assert_allclose(outcome.weights[key], expected, rtol=0, atol=0.01, err_msg=key)


@pytest.mark.sizes(2)
def test_a_loss_that_is_not_finite_stops_the_run(comm, monkeypatch):
    """The learning rate is higher than settings allow."""
    on(comm, max_iters=1)  # which leaves what a first run does
    monkeypatch.setattr("training.loop.learning_rate_of", lambda *arguments: 1e30)
    before = process_state(comm)
    words = r"^step \d: rank 0 has a (loss of nan|gradient of .* that is not finite): lower"
    with pytest.raises(InputError, match=words):
        on(comm)
    assert process_state(comm) == before


SPOILT = {
    "dp": {},
    "dp, 16 bits": {"dtype": "bfloat16", "master_weights": True},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "num_micro_batches": 2},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
}


@pytest.mark.parametrize("layout", SPOILT.values(), ids=SPOILT)
@pytest.mark.sizes(2)
def test_a_run_with_weights_that_are_not_finite_ends_on_all_ranks(comm, folder, monkeypatch, layout):
    """The update of step 3 spoils the weights, and later steps are skipped; the checkpoint before is resumed from."""
    rate, settings = loop.learning_rate_of, {"max_iters": 8, "non_finite": "skip", **layout}
    saving = {"checkpoint_dir": str(folder), "checkpoint_interval": 2}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "learning_rate_of", lambda config, i: math.inf if i == 3 else rate(config, i))
        words = [refusal(comm, **settings, max_skips=2), refusal(comm, **settings, **saving)]
    assert re.match(r"step 5: .* of max_skips=2 steps .* not finite, nor is transformer\.\S* of rank 0: ", words[0])
    assert re.match(r"(rank \d: )?parameter of transformer\.\S* is not finite, and no checkpoint was", words[1])
    assert sorted(path.name for path in folder.iterdir()) == ["00001-step-2", "lock"]
    assert (folder / "lock").read_text() == ""
    comm.barrier()
    resumed = on(comm, **settings, **saving, resume="auto")
    assert [record["iter"] for record in resumed.records if "loss" in record] == [*range(3, 9)]
    assert np.isfinite(resumed.losses).all()


def refusal(comm, **settings):
    """Return the reason for which a run ends, which is the same on all ranks."""
    with pytest.raises(InputError) as raised:
        on(comm, **settings)
    assert len(set(comm.all_gather_object(str(raised.value)))) == 1
    return str(raised.value)


@pytest.mark.sizes(2)
def test_no_weights_that_are_not_finite_are_written(comm, folder, monkeypatch):
    monkeypatch.setattr(loop, "learning_rate_of", lambda *arguments: math.inf)
    words = refusal(comm, max_iters=1, out_dir=str(folder / "out"))
    assert re.search(r"transformer\.\S* is not finite: no weights are written; lower the learning rate", words)
    comm.barrier()
    assert not [*folder.rglob("*.safetensors")]


# --- other settings of train.py ---


@pytest.mark.sizes(2)
def test_a_run_may_begin_with_an_exported_models_weights(comm, folder):
    gpt, records = train(config(2), comm)
    if comm.rank == 0:
        save_hugging_face(gpt, folder)
    comm.barrier()
    first = [record["loss"] for record in records if "loss" in record]
    second = on(comm, init_from=str(folder), max_iters=1, warmup_iters=1)
    assert second.losses[0] < first[0] - 0.5
    assert second.validations[1] < by_torch(comm).validations[VALIDATED[0]]
    without_shape = vars(config(1, tp=2, max_iters=1, warmup_iters=1))
    for name in (*presets.SET_BY_WEIGHTS, "block_size", "init_from"):
        del without_shape[name]
    _, records = train(Config(**without_shape, init_from=str(folder)), comm)
    assert records[0]["loss"] == pytest.approx(second.losses[0], rel=1e-5)


@pytest.mark.sizes(2)
def test_schedules_are_searched_from_measured_times_and_steps_traced(comm, folder, monkeypatch, capsys):
    """Rank 0 searches for all ranks."""
    trace, searches = folder / "trace.json", []
    monkeypatch.setattr("training.parallel.staged.search", lambda *args: searches.append(args) or search(*args))
    settings = {"schedule": "search", "virtual_stages": 2, "max_alive": 3, "balance": "measured", "profile": str(trace)}
    shape = {"n_layer": 4, "max_iters": 4, "num_micro_batches": 4}
    check_same(on(comm, pp=2, **shape, **settings), alone(comm, **shape))
    assert len(searches) == (comm.rank == 0)
    assert ("searching a schedule of 4 stages\n" in capsys.readouterr().out) == (comm.rank == 0)
    comm.barrier()
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    passes = [event["name"] for event in events if re.match(r"\d+[FBIW]\d+", event["name"])]
    assert len(passes) == 2 * len(set(passes)) >= 2 * 2 * 4 * 4  # 2 steps of 4 stages, there and back, 4 micro-batches
    assert (folder / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.sizes(2)
def test_stages_of_the_embedding_and_of_the_head_alone(comm, monkeypatch, zero_stage):
    """Two blocks, the embedding and the head are one layer each on four stages."""
    own, parts = PipelineParallel.__init__, []

    def recorded(pipeline, *args, **options):
        own(pipeline, *args, **options)
        parts.append(pipeline.parts)

    monkeypatch.setattr(PipelineParallel, "__init__", recorded)
    shape = {"n_layer": 2, "num_micro_batches": 4}
    layout = {"pp": 2, "schedule": "interleaved", "balance": "layers", "zero_stage": zero_stage}
    check_same(on(comm, **layout, **shape), alone(comm, **shape))
    assert parts[0] == {stage: range(stage, stage + 1) for stage in (comm.rank, comm.rank + 2)}


@pytest.mark.parametrize("schedule", ["1f1b", "search"])
@pytest.mark.sizes(2)
def test_a_slower_rank_of_a_pipeline_gets_fewer_layers(comm, monkeypatch, capsys, schedule):
    """Each rank measures the same time, but for rank 1, whose clock is four times as fast."""
    sweep, factor, parts = layer_times.sweep, 1 + 3 * comm.rank, []
    monkeypatch.setattr(layer_times, "sweep", lambda *args: 0 * sweep(*args) + 0.01 * factor)
    own = PipelineParallel.__init__

    def recorded(pipeline, *args, **options):
        own(pipeline, *args, **options)
        parts.append(sum(map(len, pipeline.parts.values())))

    monkeypatch.setattr(PipelineParallel, "__init__", recorded)
    shape = {"n_layer": 4, "num_micro_batches": 4}
    check_same(on(comm, pp=2, balance="measured", schedule=schedule, **shape), alone(comm, **shape))
    assert comm.all_gather_object(parts[0]) == [4, 1]
    printed = capsys.readouterr().out
    assert ("speeds of pp ranks: 1.00, 0.25\n" in printed) == (comm.rank == 0)
    predicted = re.search(r"passes of a step by schedule \w+ take (\d+) ms as predicted", printed)
    assert bool(predicted) == (comm.rank == 0 and schedule == "search")
    if predicted:  # 5 layers of 30 ms, 4 of them on the faster rank, for each of 4 micro-batches, or more
        assert 4 * 4 * 30 <= int(predicted[1]) <= (4 + 2) * 4 * 30


@pytest.mark.sizes(4)
def test_the_speeds_of_a_pipeline_are_those_of_its_slowest_replicas(comm):
    mesh = Mesh(comm, pp=2)
    seconds = {(0, 0): 1.0, (1, 0): 1.1, (0, 1): 2.0, (1, 1): 1.0}[mesh.coords["dp"], mesh.coords["pp"]]
    assert layer_times.speeds(seconds, mesh) == [1.0, 0.55]


@pytest.mark.sizes(2)
def test_bin_tokens_config_file_and_dtypes(comm, folder, capsys):
    file = folder / "small.toml"
    if comm.rank == 0:
        tokens = np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16)
        tokens.tofile(folder / "tokens.bin")
        file.write_text(
            f"data = ['{folder}/tokens.bin']\nn_layer = 1\nn_head = 2\nn_embd = 8\nblock_size = 8\nmax_iters = 9\n"
            "sample_tokens = 5\nmicro_batch_size = 4\nbias = true\nout_dir = ''\n"
        )
    comm.barrier()
    for dtype in ("bfloat16", "float64"):
        words = ["--config", str(file), "--max_iters", "4", "--dtype", dtype, "--peak_tflops", "1"]
        gpt, records = train(parse(Config, "", words), comm)
        assert len(records) == 5
        assert next(gpt.parameters()).dtype == (torch.float64 if dtype == "float64" else torch.float32)
        text = capsys.readouterr().out
        assert "iter 4/4" in text
        assert "MFU" in text
        assert "vocabulary 50257" in text
        if comm.rank == 0:
            assert len(text.splitlines()[-1].split()) == 16 + 5  # tokens of the prompt, and of the sample


FUSED = {"gpt2-tiny": {FusedGELU}, "llama-tiny": {FusedGate, FusedHeads}}


@pytest.mark.parametrize("model", FUSED)
@pytest.mark.sizes(2)
def test_elements_are_computed_in_one_pass(comm, model):
    with TrainingRun(config(1, model=model, tp=2), comm) as run:
        kinds = {
            type(module) for module in run.model.modules() if type(module).__module__ == "training.parallel.decoder"
        }
    assert kinds == FUSED[model]
