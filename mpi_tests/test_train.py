"""train.py end to end, as its user starts it: against a plain torch loop, on every number of ranks."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from models.data import Windows, load_tokens, split
from models.gpt import GPT, GPTConfig
from models.hf import load_hugging_face, to_hugging_face
from models.optimizer import learning_rate
from mpi_tests.launch import ROOT, environment, find_mpirun, launch
from mpi_tests.test_hf import of_hugging_face
from parallelism.sampler import DistributedSampler
from training.config import Config

GLOBAL_BATCH = 24
SMALL = Config(
    n_layer=2, n_head=2, n_embd=32, block_size=16, max_iters=50, warmup_iters=5, eval_interval=25, lr=1e-3, seed=7,
    sample_tokens=20, bucket_mb=0.02,
)  # fmt: skip


def flags(config: Config) -> list[str]:
    given = {k: v for k, v in vars(config).items() if v != vars(Config())[k]}
    return [word for k, v in given.items() for word in ([f"--{k}"] if v is True else [f"--{k}", str(v)])]


def run(tmp_path: Path, num_ranks: int, name: str = "run", **changes) -> tuple[list[dict], dict[str, np.ndarray], str]:
    """Metrics, weights and output of `mpirun -n num_ranks python train.py`, at the global batch of this file."""
    out_dir = tmp_path / f"{name}-{num_ranks}"
    config = replace(SMALL, out_dir=str(out_dir), **{"micro_batch_size": GLOBAL_BATCH // num_ranks, **changes})
    ended = launch(num_ranks, "python", "train.py", *flags(config), timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return records, load_file(out_dir / "model.safetensors"), ended.stdout


def plain_training() -> tuple[list[float], dict[str, np.ndarray]]:
    """The same training without any of our parallel code: one process, whole batches, torch alone."""
    tokens = load_tokens([])
    ids, _ = split(tokens, SMALL.val_fraction, SMALL.block_size)
    windows = Windows(ids, SMALL.block_size, SMALL.seed)
    sampler = DistributedSampler(len(windows), GLOBAL_BATCH, 0, 1, seed=SMALL.seed)
    model = GPT(GPTConfig(256, SMALL.block_size, SMALL.n_layer, SMALL.n_head, SMALL.n_embd), seed=SMALL.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for iteration, share in zip(range(1, SMALL.max_iters + 1), sampler, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, SMALL.lr, SMALL.warmup_iters, SMALL.max_iters)
        inputs, targets = map(torch.from_numpy, windows.batch(share))
        optimizer.zero_grad()
        _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SMALL.grad_clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: t.numpy() for name, t in to_hugging_face(model).items()}


@pytest.fixture(scope="module")
def reference():
    return plain_training()


def losses(records: list[dict]) -> list[float]:
    return [r["loss"] for r in records if "loss" in r]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_losses_and_weights_are_those_of_one_process(tmp_path, reference, num_ranks):
    records, weights, _ = run(tmp_path, num_ranks)
    np.testing.assert_allclose(losses(records), reference[0], rtol=1e-5)
    assert reference[0][-1] < reference[0][0] - 1
    assert weights.keys() == reference[1].keys()
    for name, expected in reference[1].items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile makes programs for the CPU by g++")
def test_models_may_be_compiled(tmp_path, reference):
    few = 5
    records, _, _ = run(tmp_path, 2, "compiled", max_iters=few, compile=True, zero_stage=2)
    assert SMALL.warmup_iters >= few  # so that fewer iterations have the same learning rates
    np.testing.assert_allclose(losses(records), reference[0][:few], rtol=1e-5)


LAYOUTS = {
    "tp 2, sp 2, dp 2": {"tp": 2, "sp": 2, "dp": 2},
    "sequence-parallel": {"tp": 2, "sp": 2, "sequence_parallel": True},
    "ulysses": {"sp": 2, "sp_mode": "ulysses", "num_micro_batches": 3},
    "hybrid": {"sp": 4, "sp_mode": "hybrid"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layers_and_sequences_may_be_split(tmp_path, reference, layout):
    """On 8 ranks, the losses and the weights of one process."""
    dp = 8 // layout.get("tp", 1) // layout["sp"]
    micro_batch_size = GLOBAL_BATCH // dp // layout.get("num_micro_batches", 1)
    records, weights, text = run(tmp_path, 8, "split", **layout, micro_batch_size=micro_batch_size)
    np.testing.assert_allclose(losses(records), reference[0], rtol=1e-5)
    for name, expected in reference[1].items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
    assert f"layers over tp {layout.get('tp', 1)}, sequences over sp {layout['sp']} by" in text


PIPELINES = {
    "pp 2, tp 2, dp 2": {"pp": 2, "tp": 2, "dp": 2, "num_micro_batches": 3},
    "pp 2, tp 2, sp 2": {"pp": 2, "tp": 2, "sp": 2, "sequence_parallel": True, "num_micro_batches": 4},
    "pp 2, sp 2, dp 2": {"pp": 2, "sp": 2, "num_micro_batches": 2, "schedule": "zb_h1", "recompute": "full"},
}


@pytest.mark.parametrize("layout", PIPELINES.values(), ids=PIPELINES)
def test_layers_may_be_shared_as_stages(tmp_path, reference, layout):
    """On 8 ranks, the losses and the weights of one process."""
    dp = 8 // layout["pp"] // layout.get("tp", 1) // layout.get("sp", 1)
    micro_batch_size = GLOBAL_BATCH // dp // layout["num_micro_batches"]
    records, weights, text = run(tmp_path, 8, "pipeline", **layout, micro_batch_size=micro_batch_size)
    np.testing.assert_allclose(losses(records), reference[0], rtol=1e-5)
    for name, expected in reference[1].items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)
    assert f"2 stages over pp 2 by {layout.get('schedule', '1f1b')}" in text
    assert all(0 < r["bubble"] < 1 for r in records if "loss" in r)
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
def test_ranks_may_share_states_gradients_and_parameters(tmp_path, reference, layout):
    """On 4 ranks, the losses, validation and weights of one process."""
    dp = layout.get("dp", 4)
    micro_batch_size = GLOBAL_BATCH // dp // layout.get("num_micro_batches", 1)
    records, weights, _ = run(tmp_path, 4, "zero", **layout, micro_batch_size=micro_batch_size)
    np.testing.assert_allclose(losses(records), reference[0], rtol=1e-5)
    assert sum("val_loss" in record for record in records) == 2
    for name, expected in reference[1].items():
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


FEW = {"max_iters": 20, "eval_interval": 20}
GOING_ON = {
    "the same": (4, {"tp": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2}),
    "dp 4, stage 3": (4, {"zero_stage": 3}),
    "one process": (1, {"num_micro_batches": 2}),
    "pp 2, dp 2": (4, {"pp": 2, "dp": 2, "num_micro_batches": 2}),
    "pp 2, dp 2, stage 3": (4, {"pp": 2, "dp": 2, "zero_stage": 3, "num_micro_batches": 2}),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Checkpoints of a run over tp and pp that ends after 10 steps of 20."""
    folder = tmp_path_factory.mktemp("stopped")
    layout = {"tp": 2, "pp": 2, "zero_stage": 1, "num_micro_batches": 2, "micro_batch_size": GLOBAL_BATCH // 2}
    saving = {"checkpoint_dir": str(folder / "checkpoints"), "checkpoint_interval": 10}
    _, weights, _ = run(folder, 4, **layout, **saving, **FEW)
    return folder / "checkpoints", weights


@pytest.mark.parametrize("case", GOING_ON.values(), ids=GOING_ON)
def test_a_checkpoint_goes_on_in_any_layout(tmp_path, stopped, reference, case):
    """From step 10 on, as the run that was not stopped; in the same layout, bit for bit."""
    num_ranks, layout = case
    dp = num_ranks // layout.get("tp", 1) // layout.get("pp", 1)
    folder = shutil.copytree(stopped[0], tmp_path / "checkpoints")
    tenth, *_ = folder.glob("*step-10*")
    saving = {"checkpoint_dir": str(folder), "resume": str(tenth), "checkpoints_kept": 1}
    size = GLOBAL_BATCH // dp // layout.get("num_micro_batches", 1)
    records, weights, _ = run(tmp_path, num_ranks, **layout, **saving, micro_batch_size=size, **FEW)
    assert [r["iter"] for r in records if "loss" in r] == list(range(11, 21))
    assert [path.name.partition("-")[2] for path in folder.glob("*step*")] == ["step-20"]
    for name, expected in stopped[1].items():
        if case == GOING_ON["the same"]:
            assert np.array_equal(weights[name], expected), name
        np.testing.assert_allclose(weights[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def exported(stopped, tmp_path_factory):
    """The last checkpoint as a GPT-2 in Hugging Face's files: one process resumes it, with no step left to do."""
    folder = tmp_path_factory.mktemp("exported")
    saving = {"checkpoint_dir": str(shutil.copytree(stopped[0], folder / "checkpoints")), "resume": "auto"}
    records, weights, _ = run(folder, 1, **saving, **FEW)
    assert not losses(records)
    for name, expected in stopped[1].items():
        assert np.array_equal(weights[name], expected), name
    return folder / "run-1"


TOKENS = torch.randint(256, (3, SMALL.block_size), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_checkpoint_of_tp_pp_and_zero_has_the_logits_of_a_gpt2(exported):
    logits, _ = load_hugging_face(exported).eval()(TOKENS)
    tensors = {name: torch.from_numpy(array) for name, array in load_file(exported / "model.safetensors").items()}
    np.testing.assert_allclose(logits, of_hugging_face(tensors, TOKENS, SMALL.n_head), atol=1e-5)


@pytest.mark.filterwarnings("default")
@torch.no_grad()
def test_a_checkpoint_of_tp_pp_and_zero_becomes_a_gpt2_in_transformers(exported):
    transformers = pytest.importorskip("transformers")
    logits, _ = load_hugging_face(exported).eval()(TOKENS)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(exported).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=0, atol=1e-5)


def test_a_run_that_goes_on_has_the_loss_scale_and_all_ranks_weights(tmp_path):
    """The scale has been good for 20 steps when both end."""
    asked = {"zero_stage": 1, "dtype": "float16", "dropout": 0.1, "micro_batch_size": GLOBAL_BATCH // 2}
    folder = tmp_path / "checkpoints"
    saving = {"checkpoint_dir": str(folder), "checkpoint_interval": 10}
    _, weights, _ = run(tmp_path, 2, **asked, **saving, **FEW)
    tenth, *_ = folder.glob("*step-10*")
    _, resumed, _ = run(tmp_path, 2, "resumed", **asked, **saving, **FEW, resume=str(tenth))
    for name, expected in weights.items():
        assert np.array_equal(resumed[name], expected), name
    last = [json.loads((path / "index.json").read_text()) for path in folder.glob("*step-20*")]
    assert [index["index"]["whole"]["loss_scale"] for index in last] == [[2.0**16, 20]] * len(last)


def test_what_a_run_cannot_go_on_from(tmp_path, stopped):
    folder = str(shutil.copytree(stopped[0], tmp_path / "checkpoints"))
    (tmp_path / "other.txt").write_text("other words, many of them, " * 100)
    for changes, words in (
        ({"seed": 8}, "seed was 7, but is 8: resume with the same"),
        ({"n_embd": 16}, "transformer.wte.weight"),
        ({"resume": str(tmp_path)}, str(tmp_path)),
        ({"checkpoint_dir": ""}, "resume and checkpoint_interval are about checkpoints: set checkpoint_dir"),
    ):
        given = {"checkpoint_dir": folder, "resume": "auto", "out_dir": "", "micro_batch_size": GLOBAL_BATCH}
        ended = launch(1, "python", "train.py", *flags(replace(SMALL, **{**given, **changes})), timeout=60)
        assert ended.returncode != 0
        assert words in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr


def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path):
    given = {"checkpoint_dir": str(tmp_path / "checkpoints"), "out_dir": "", "micro_batch_size": 12}
    script = "import os, runpy, signal, sys, threading\nsys.argv = sys.argv[1:]\n"
    script += "threading.Timer(8, os.kill, (os.getpid(), signal.SIGUSR1)).start()\n"
    script += "runpy.run_path('train.py', run_name='__main__')\n"
    (tmp_path / "signalled.py").write_text(script)
    words = flags(replace(SMALL, **given, max_iters=10**6))
    ended = launch(2, "python", tmp_path / "signalled.py", "train.py", *words, timeout=100)
    assert ended.returncode == 0, ended.stderr
    step = int(re.search(r"SIGUSR1: the run ends with a checkpoint of step (\d+)", ended.stdout)[1])
    words = flags(replace(SMALL, **given, max_iters=step + 1, resume="auto"))
    assert f"iter {step + 1}/{step + 1} " in launch(2, "python", "train.py", *words, timeout=100).stdout


@pytest.mark.skipif(not os.environ.get("LARGEST"), reason="takes 3 minutes and 16 GiB: make proof")
def test_64_ranks_in_all_dimensions(tmp_path):
    shape = {"n_layer": 4, "max_iters": 10, "eval_interval": 10}
    axes = {"pp": 4, "dp": 4, "tp": 2, "sp": 2, "zero_stage": 1, "num_micro_batches": 3}
    alone, *_ = run(tmp_path, 1, **shape)
    config = replace(SMALL, **shape, **axes, out_dir=str(tmp_path / "many"), micro_batch_size=2)
    command = [find_mpirun(), "--hostfile", "hostfiles/local.txt", "-np", "64", "python", "train.py", *flags(config)]
    env = environment() | {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "many" / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(losses(records), losses(alone), rtol=1e-5)


def test_schedules_are_searched_from_measured_times_and_steps_traced(tmp_path, reference):
    trace = tmp_path / "trace.json"
    asked = {"schedule": "search", "virtual_stages": 2, "max_alive": 3, "balance": "measured", "trace": str(trace)}
    shape = {"n_layer": 4, "max_iters": 4, "eval_interval": 4, "num_micro_batches": 4}
    alone, *_ = run(tmp_path, 1, micro_batch_size=6, **shape)
    records, *_ = run(tmp_path, 2, pp=2, micro_batch_size=6, **shape, **asked)
    np.testing.assert_allclose(losses(records), losses(alone), rtol=1e-5)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    passes = [event["name"] for event in events if re.match(r"\d+[FBIW]\d+", event["name"])]
    assert len(passes) == len(set(passes)) >= 2 * 4 * 4  # each of 4 stages, forward and backward, 4 micro-batches
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


HALVES = {
    "float16, dp 2": ("float16", {}),
    "bfloat16, pp 2": ("bfloat16", {"pp": 2, "num_micro_batches": 2}),
    "bfloat16, stage 1": ("bfloat16", {"zero_stage": 1}),
    "float16, stage 3": ("float16", {"zero_stage": 3}),
}


FEWER = {"max_iters": 10, "eval_interval": 10, "micro_batch_size": 12}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The records of a few steps in float32."""
    return run(tmp_path_factory.mktemp("wide"), 2, **FEWER)[0]


@pytest.mark.parametrize(("dtype", "layout"), HALVES.values(), ids=HALVES)
def test_parameters_may_be_of_16_bits(tmp_path, wide, dtype, layout):
    asked = {"dtype": dtype, "master_weights": True, "grad_dtype": dtype, "non_finite": "skip"}
    records, weights, _ = run(tmp_path, 2, **FEWER, **asked, **layout, recompute="selective")
    np.testing.assert_allclose(losses(records), losses(wide), rtol=2e-3)
    assert losses(records) != losses(wide)
    assert all(weight.dtype == np.float32 for weight in weights.values())


def test_a_checkpoint_of_master_weights_goes_on_in_any_precision(tmp_path):
    """Bit for bit in the same layout; float32 weights alone go on from them, too."""
    half = {"dtype": "float16", "master_weights": True, "grad_dtype": "float16"}
    saving = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_interval": 5}
    few = {"max_iters": 10, "eval_interval": 10, "micro_batch_size": 6, "num_micro_batches": 2}
    _, weights, _ = run(tmp_path, 2, "whole", **half, **few, **saving, zero_stage=3)
    fifth, *_ = (tmp_path / "kept").glob("*step-5*")
    stages = {"pp": 2, "zero_stage": 1, "micro_batch_size": 12}
    for name, asked in (("same", half | {"zero_stage": 3}), ("float32", stages)):
        saving = {"checkpoint_dir": str(tmp_path / name), "resume": str(fifth)}
        records, got, _ = run(tmp_path, 2, name, **few | asked | saving)
        assert [r["iter"] for r in records if "loss" in r] == list(range(6, 11))
        for key, expected in weights.items():
            if name == "same":
                assert np.array_equal(got[key], expected), key
            np.testing.assert_allclose(got[key], expected, rtol=0, atol=0.01, err_msg=key)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = replace(SMALL, lr=1e30, warmup_iters=1, out_dir="", micro_batch_size=12)
    ended = launch(2, "python", "train.py", *flags(config), timeout=60)
    assert ended.returncode != 0
    assert re.search(
        r"error: step \d: rank 0 has a (loss of nan|gradient of .* that is not finite): lower", ended.stderr
    )
    assert "Traceback" not in ended.stderr


def test_a_run_may_begin_with_an_exported_models_weights(tmp_path, reference):
    few = {"max_iters": 3, "eval_interval": 3, "micro_batch_size": 12}
    first, *_ = run(tmp_path, 2, "first", **few)
    second, *_ = run(tmp_path, 2, "second", **few, init_from=str(tmp_path / "first-2"))
    assert losses(second)[0] < losses(first)[0]
    validations = [[r["val_loss"] for r in records if "val_loss" in r] for records in (first, second)]
    assert validations[1][0] < validations[0][0]


def test_the_planner_may_choose_the_layout(tmp_path, reference):
    records, _, text = run(tmp_path, 4, layout="auto", micro_batch_size=6, max_iters=3, eval_interval=3)
    np.testing.assert_allclose(losses(records), reference[0][:3], rtol=1e-5)
    assert re.search(r"^layout .* is the best for 4 ranks$", text, re.MULTILINE)


def test_documents_do_not_depend_on_the_layout(tmp_path, reference):
    few = {"max_iters": 5, "eval_interval": 5, "micro_batch_size": 12, "document_end": ord("\n")}
    (alone, *_), (split, *_) = run(tmp_path, 1, **few, num_micro_batches=2), run(tmp_path, 4, **few, sp=2)
    np.testing.assert_allclose(losses(split), losses(alone), rtol=1e-5)
    assert not np.allclose(losses(alone), reference[0][:5], rtol=1e-5)  # as lines attend to themselves only


def test_dropout_does_not_depend_on_the_layout(tmp_path):
    few = {"max_iters": 5, "eval_interval": 5, "dropout": 0.2, "micro_batch_size": 12}
    (alone, *_), (split, *_) = run(tmp_path, 1, **few, num_micro_batches=2), run(tmp_path, 8, **few, tp=2, sp=2)
    np.testing.assert_allclose(losses(split), losses(alone), rtol=1e-5)
    assert losses(alone) != losses(run(tmp_path, 1, "other", **few, num_micro_batches=2, seed=8)[0])


def test_micro_batches_are_gradient_accumulation(tmp_path, reference):
    records, _, _ = run(tmp_path, 2, "micro", micro_batch_size=3, num_micro_batches=4)
    np.testing.assert_allclose(losses(records), reference[0], rtol=1e-5)
    records, _, _ = run(tmp_path, 2, "global", micro_batch_size=4, global_batch_size=GLOBAL_BATCH, max_iters=3)
    assert SMALL.warmup_iters > 3  # so that fewer iterations have the same learning rates
    np.testing.assert_allclose(losses(records), reference[0][:3], rtol=1e-5)


def test_the_same_layout_gives_the_same_bits_and_complete_files(tmp_path):
    first, second = run(tmp_path, 3, "first"), run(tmp_path, 3, "second")
    assert losses(first[0]) == losses(second[0])
    assert [r["val_loss"] for r in first[0] if "val_loss" in r] == [r["val_loss"] for r in second[0] if "val_loss" in r]
    assert all(np.array_equal(first[1][name], second[1][name]) for name in first[1])
    text = first[2]
    assert [line.split("|")[0].strip() for line in text.splitlines() if "grad norm" in line] == [
        f"iter {i}/50" for i in range(1, 51)
    ]
    assert text.count("val loss") == 2
    out_dir = tmp_path / "first-3"
    names = sorted(p.name for p in out_dir.iterdir())
    assert names == ["config.json", "loss.png", "metrics.jsonl", "model.safetensors"]
    assert (out_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = first[0][-2]
    assert {"iter", "loss", "grad_norm", "lr", "tokens_per_s", "flops_per_s", "compute_ms", "comm_ms"} < record.keys()
    validation = load_hugging_face(out_dir)
    tokens = load_tokens([])
    windows = Windows(split(tokens, 0.1, 16)[1], 16, None)
    with torch.no_grad():
        _, loss = validation(*map(torch.from_numpy, windows.batch(np.arange(len(windows)))))
    np.testing.assert_allclose(first[0][-1]["val_loss"], loss.item(), rtol=1e-5)


def test_bin_tokens_config_file_and_dtypes(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 300, 4000).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    config = tmp_path / "small.toml"
    config.write_text(
        f"# mpirun -n 2 python train.py --config small.toml\ndata = ['{tmp_path}/tokens.bin']\nn_layer = 1\n"
        "n_head = 2\nn_embd = 8\nblock_size = 8\nmax_iters = 9\nsample_tokens = 5\nmicro_batch_size = 4\nbias = true\n"
    )
    for dtype in ("bfloat16", "float64"):
        out_dir = tmp_path / dtype
        settings = ["--config", config, "--max_iters", 4, "--dtype", dtype, "--out_dir", out_dir, "--peak_tflops", 1]
        ended = launch(2, "python", "train.py", *settings)
        assert ended.returncode == 0, ended.stderr
        assert "iter 4/4" in ended.stdout
        assert "MFU" in ended.stdout
        assert "vocabulary 50257" in ended.stdout
        assert len(ended.stdout.splitlines()[-1].split()) == 16 + 5
    assert load_file(tmp_path / "float64" / "model.safetensors")["transformer.wpe.weight"].dtype == np.float64


def test_help_is_printed_once(tmp_path):
    ended = launch(2, "python", "train.py", "--help")
    assert ended.returncode == 0
    assert ended.stdout.count("usage: train.py") == 1
    assert "mpirun -n 2 python train.py" in ended.stdout


def test_a_progress_bar_is_for_terminals(tmp_path):
    command = [find_mpirun(), "-n", "2", sys.executable, "train.py", *flags(replace(SMALL, max_iters=3, out_dir=""))]
    screen, terminal = os.openpty()
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **ends) as run:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # how the end of a terminal reads
            while part := os.read(screen, 1 << 16):
                shown += part
        assert run.wait(60) == 0, shown.decode()
    assert b"3/3 [" in shown
    assert b"3/3 [" not in launch(*command[2:]).stdout.encode()
