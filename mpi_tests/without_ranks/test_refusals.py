"""All error messages of train.py for settings that a rank checks by itself, before it communicates.

with_ranks/test_refusals.py checks that all ranks raise together, systems/test_bad_input.py the output for a user.
"""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from collectives.algorithms.groups import Topology
from collectives.job.settings import value_type
from models.config import ModelConfig
from parallelism.planner.settings import parse
from training.parallel.device import own_device
from training.reports.out_dir import own_out_dir
from training.settings.config import Config
from training.settings.layout import fixed_by, job_of
from training.settings.paths import prepare_folders
from training.weights.export import hugging_face_config

SMALL = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--block_size", 8, "--max_iters", 2]
TWO_BLOCKS = ["--n_layer", 2]
NOWHERE = "(No such file or directory)"
HUGGING_FACE = hugging_face_config(ModelConfig())
FILES = {
    "empty.txt": b"",
    "latin.txt": "abc\u00e9def".encode("latin-1"),
    "short.txt": b"too short",
    "words.txt": b"some words " * 20,
    "missing.csv": b"0F0,0B0\n1F0",
    "other.csv": b"0F0,0B0",
    "bad.toml": b"learning_rate = 1",
    "type.toml": b"n_layer = 'two'",
    "broken.toml": b"n_layer =",
    "bytes.toml": b"n_layer = \xff",
    "deep.toml": b"n_layer = " + b"[" * 5000,
    "stage.toml": b"zero_stage = 7",
    "layout.toml": b"layout = 'foo'",
    "recompute.toml": b"recompute = 'foo'",
    "data.toml": b"data = [1]",
    "nan.toml": b"lr = nan",
    "table.toml": b"[model]\nn_layer = 2",
    "list/config.json": b"[]",
    "broken/config.json": b"{",
    "words/config.json": json.dumps(HUGGING_FACE | {"n_layer": "two"}).encode(),
    "gpt2/config.json": json.dumps(HUGGING_FACE).encode(),
    "negative/config.json": json.dumps(HUGGING_FACE | {"n_embd": -1}).encode(),
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def begin(words, nodes=(0, 0)):
    """Run rank 0's checks of flags before it computes or communicates; `nodes` are those of the ranks."""
    topology = Topology.from_ids(nodes)
    config = parse(Config, "", [str(word) for word in words])
    config = replace(config, device=own_device(config.device, SimpleNamespace(rank=0, topology=topology)))
    inputs = config.checked(topology)
    prepare_folders(config, rank=0)
    return inputs


def refusal(folder, flags, nodes=(0, 0)):
    """Return the error message; check that no file was written."""
    before = sorted(folder.rglob("*"))
    out_dir = [] if "--out_dir" in flags else ["--out_dir", folder / "out"]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        begin([str(word).format(tmp=folder) for word in [*SMALL, *out_dir, *flags]], nodes)
    assert sorted(folder.rglob("*")) == before
    return str(caught.value)


def test_what_fits_is_made_on_every_rank(folder):
    flags = ["--pp", 2, *TWO_BLOCKS, "--num_micro_batches", 3, "--micro_batch_size", 2, "--out_dir", folder / "new/out"]
    inputs = begin([*SMALL, *flags], nodes=(0, 0, 1, 1))
    assert (inputs.num_micro_batches, inputs.batch_size, inputs.tokens.vocab_size) == ([3, 3], 12, 256)
    assert (inputs.schedule.name, inputs.schedule.num_stages, inputs.model.config.n_layer) == ("1f1b", 2, 2)
    assert len(inputs.windows.ids) + len(inputs.val_windows.ids) == len(inputs.tokens.ids)
    assert list((folder / "new").rglob("*")) == [folder / "new/out"]


COMMAND_LINES = [
    (["--lr", "fast"], "argument --lr: invalid float value: 'fast'; see --help"),
    (["--learning_rate", 1], "unrecognized arguments: --learning_rate 1; see --help"),
    (["--micro-batchsize", 4], "unrecognized arguments: --micro-batchsize 4 (nearest: --micro_batch_size); see --help"),
    (["--eps", 0], "eps=0.0 must be above 0 and below 1"),
    (["--sp_mode", "rings"], "argument --sp_mode: invalid choice: 'rings'"),
    (["--config", "{tmp}/bad.toml"], "bad.toml: learning_rate is not a setting; there are data, "),
    (["--config", "{tmp}/type.toml"], "type.toml: n_layer='two' must be of type int"),
    (["--config", "{tmp}/broken.toml"], "broken.toml: not TOML: Invalid value (at end of document)"),
    (["--config", "{tmp}/none.toml"], "none.toml: can't be read (No such file or directory); check the path"),
    (["--config", "/dev/zero"], "/dev/zero: no such settings file; check the path"),
    (["--config", "{tmp}/bytes.toml"], "bytes.toml: not TOML: 'utf-8' codec can't decode byte 0xff"),
    (["--config", "{tmp}/deep.toml"], "deep.toml: not TOML: "),
    (["--config", "{tmp}/stage.toml"], "stage.toml: zero_stage=7 is unknown: use 0, 1, 2, 3"),
    (["--config", "{tmp}/layout.toml"], "layout.toml: layout='foo' is unknown: use given, auto"),
    (["--config", "{tmp}/recompute.toml"], "recompute.toml: recompute='foo' is unknown: use none, full, selective"),
    (["--config", "{tmp}/data.toml"], "data.toml: data=[1] must be of type list of str"),
    (["--config", "{tmp}/nan.toml"], "nan.toml: lr=nan must be above 0 and at most 100"),
    (
        ["--config", "{tmp}/table.toml"],
        "table.toml: [model] is a table, but settings are not grouped in tables: remove",
    ),
    (["--foo\nbar"], "unrecognized arguments: --foo bar; see --help"),
    (["--out_dir", "a\nb"], r"out_dir='a\nb' has characters that are not text: remove them"),
]
DATA = [
    (["--data", "no-such-file.txt"], "no-such-file.txt: no such file; check the path"),
    (["--data", "{tmp}/empty.txt"], "empty.txt: empty; pass a file with text in it"),
    (["--data", "{tmp}/latin.txt"], "latin.txt: byte 3 is not UTF-8; convert it"),
    (["--data", "{tmp}/short.txt"], "too few for block_size=8; pass a longer text"),
    (["--data", "{tmp}/words.txt", "--block_size", 64], "are too few for block_size=64; use block_size=21 or less"),
    (
        ["--data", "{tmp}/words.txt", "--micro_batch_size", 16],
        "num_samples=23 is below batch_size=32: use a smaller batch",
    ),
    (["--val_fraction", 1], "val_fraction=1.0 must be above 0 and below 1"),
    (["--seed", -1], f"seed=-1 must be from 0 to {2**63 - 1}"),
    (["--init_from", "{tmp}"], "config.json: no such file; pass a folder with a model of Hugging Face"),
    (
        ["--init_from", "{tmp}/list"],
        "list/config.json: a list, but an object of settings is expected; get the file again",
    ),
    (["--init_from", "{tmp}/broken"], "broken/config.json: not JSON (Expecting property name"),
    (["--init_from", "{tmp}/words"], "words/config.json: n_layer='two' must be of type int"),
    (["--init_from", "{tmp}/negative"], "negative/config.json: n_embd=-1 must be from 1 to 1048576"),
    (["--document_end", 999], "document_end=999 is not a token of Python language reference: use one from 0 to 255"),
    (
        ["--data", "{tmp}/words.txt", "--text_field", "body"],
        "text_field=body is that of JSON or Parquet files, and there are none: omit it",
    ),
    (["--tokenizer", "nope"], "tokenizer=nope: no such file; pass bytes, a tokenizer.json, or a .tiktoken file"),
    (["--data", "/dev/zero"], "/dev/zero: not a regular file; pass one that every rank can read"),
]
SETTINGS = [
    (["--max_iters", 0], "max_iters=0 must be from 1 to 1000000000"),
    (["--micro_batch_size", 0], "micro_batch_size=0 must be from 1 to 1000000 samples"),
    (["--bucket_mb", 0], "bucket_mb=0.0 must be above 0 and at most 65536 MiB"),
    (["--n_embd", 9, "--n_head", 2], "n_embd=9 is not divisible by n_head=2: use 8 or 10"),
    (["--n_head", 4, "--n_kv_head", 3], "n_head=4 is not divisible by n_kv_head=3: use one of 1, 2, 4"),
    (["--dropout", 1], "dropout=1.0 must be at least 0 and below 1"),
    (["--master_weights"], "master_weights are kept beside 16-bit parameters, but dtype=float32: use bfloat16 or"),
    (["--grad_dtype", "float16"], "grad_dtype=float16 beside dtype=float32, master_weights=False: use float32 or"),
    (
        ["--n_layer", 1000, "--n_embd", 1 << 20, "--val_fraction", 0.5],
        "n_layer=1000 and n_embd=1048576 make 13,194,141,908,336,640 parameters, 105553.1 TB for 2 ",
    ),
    (["--device", "tpu"], "device 'tpu' is unknown: use 'cpu', 'cuda'"),
    (["--checkpoint_interval", -1], "checkpoint_interval=-1 must be from 0 to 1000000000"),
    (
        ["--checkpoint_interval", 1],
        "checkpoint_interval=1 has no effect without checkpoint_dir: omit it, or set checkpoint_dir",
    ),
    (
        ["--checkpoints_kept", 1],
        "checkpoints_kept=1 has no effect without checkpoint_dir: omit it, or set checkpoint_dir",
    ),
    (["--resume", "auto"], "resume=auto continues with checkpoints of its own: set checkpoint_dir"),
    (["--eval_only"], "eval_only evaluates existing weights: set resume or init_from"),
    (["--eval_only", "--resume", "auto"], "resume=auto continues with checkpoints of its own: set checkpoint_dir"),
    (["--optimizer", "adam"], "argument --optimizer: invalid choice: 'adam' (choose from "),
    (["--momentum", 0.9], "momentum=0.9 has no effect with optimizer=adamw: omit it, or set optimizer to sgd or muon"),
    (["--muon_lr", 0.5], "muon_lr=0.5 has no effect with optimizer=adamw: omit it, or set optimizer to muon"),
    (
        ["--optimizer", "sgd", "--beta2", 0.5],
        "beta2=0.5 has no effect with optimizer=sgd: omit it, or set optimizer to ",
    ),
    (["--max_skips", 5], "max_skips=5 has no effect with non_finite=stop: omit it, or set non_finite to skip"),
    (["--max_skips", 0, "--non_finite", "skip"], "max_skips=0 must be from 1 to 1000000000"),
    (["--tensorboard", "/dev/null/x"], "tensorboard=/dev/null/x: Not a directory: use another folder"),
    (
        ["--eval_only", "--resume", "auto", "--init_from", "{tmp}/gpt2", "--checkpoint_dir", "out"],
        "eval_only evaluates either resume=auto or init_from=",
    ),
    (["--momentum", 1, "--optimizer", "sgd"], "momentum=1.0 must be at least 0 and below 1"),
    (["--min_lr", 1, "--lr", 0.5], "min_lr=1.0 must be at most lr=0.5, from which it falls"),
    (
        ["--lr_schedule", "constant", "--lr_decay_iters", 5],
        "lr_decay_iters=5 has no effect with lr_schedule=constant: omit it, or set lr_schedule to ",
    ),
    (
        ["--lr_schedule", "wsd", "--lr_decay_iters", 5],
        "and lr_decay_iters=5 are more than max_iters=2 with lr_schedule=wsd: use fewer of one",
    ),
    (
        ["--warmup_iters", 3],
        "warmup_iters=3 is longer than the run of max_iters=2 steps, which would never reach lr=0.003: use at most 2",
    ),
    (["--tiles", 8], "tiles=8 has no effect without reproducible: omit it, or set reproducible"),
    (
        ["--reproducible", "--compile"],
        "compile chooses kernels by shapes, which reproducible rules out: omit one of the",
    ),
    (["--reproducible", "--grad_dtype", "bfloat16"], "grad_dtype=bfloat16 rounds sums of ranks, which reproducible"),
    (
        ["--reproducible", "--tp", 2],
        "reproducible with tp=2 needs a fixed number of tiles, also without tp: ",
    ),
    (
        ["--reproducible", "--tp", 2, "--tiles", 6],
        "tiles=6 and tp=2 must be powers of two, of which tp divides tiles: use 8",
    ),
    (["--reproducible", "--tiles", 16], "block_size=8 is not divisible by tiles=16: use 16, or fewer tiles"),
    (
        ["--reproducible", "--block_size", 512, "--tiles", 512],
        "vocab_size=256 is not divisible by tiles=512: use 512, or fewer tiles",
    ),
    (
        ["--reproducible", "--tp", 2, "--tiles", 8, "--n_embd", 32, "--n_head", 4],
        "in_features=32 leaves each of tp=2 ranks fewer than the 32 columns that the same bits need: use at least",
    ),
    (
        ["--reproducible", "--micro_batch_size", 3, "--global_batch_size", 13],
        "global_batch_size=13 is not at least ",
    ),
    (
        ["--on_corruption", "redo"],
        "on_corruption=redo has no effect without check_interval: omit it, or set check_interval",
    ),
    (
        ["--check_interval", 10, "--on_corruption", "leave_out"],
        "on_corruption=leave_out needs a job that continues without a rank, and its checkpoints: start it by ",
    ),
    (
        ["--balance_load"],
        "balance_load=True has no effect without reproducible: omit it, or set reproducible",
    ),
    (
        ["--reproducible", "--balance_load", "--num_micro_batches", 4, "--pp", 2],
        "balance_load has no effect with dp=1: omit it, or use more dp ranks or smaller micro-batches",
    ),
    (["--balance", "measured"], "balance=measured has no effect with pp=1: omit it, or set pp to 2 or more"),
    (["--balance_loss", 0.1], "balance_loss=0.1 has no effect without num_experts: omit it, or set num_experts"),
    (["--expert_capacity", 1], "expert_capacity=1.0 has no effect without num_experts: omit it, or set num_experts"),
    (["--experts_per_token", 1], "experts_per_token=1 has no effect without num_experts: omit it, or set num_experts"),
    (["--zero_group", "node"], "zero_group=node has no effect without zero_stage: omit it, or set zero_stage to 1, 2"),
    (["--sp_mode", "ulysses"], "sp_mode=ulysses has no effect with sp=1: omit it, or set sp to 2 or more"),
    (["--sp_order", "striped"], "sp_order=striped has no effect with sp=1: omit it, or set sp to 2 or more"),
    (["--sp_heads", 1], "sp_heads=1 has no effect with sp=1: omit it, or set sp to 2 or more"),
    (
        ["--sp", 2, "--sp_mode", "ulysses", "--sp_order", "striped"],
        "sp_order=striped has no effect with sp_mode=ulysses: omit it, or set sp_mode to ring or hybrid",
    ),
    (["--virtual_stages", 2], "virtual_stages=2 has no effect with pp=1: omit it, or set pp to 2 or more"),
    (["--schedule", "search"], "schedule=search has no effect with pp=1: omit it, or set pp to 2 or more"),
    (
        ["--model", "llama-tiny", "--rope_original_length", 8],
        "rope_original_length=8 has no effect with rope_factor=1.0: omit it, or set rope_factor above 1",
    ),
    (
        ["--val_data", "{tmp}/words.txt", "--val_fraction", 0.2],
        "words.txt']: omit it, or omit val_data",
    ),
    (
        ["--val_data", "{tmp}/words.txt", "{tmp}/short.txt", "--block_size", 16],
        "/short.txt: 9 tokens are too few to validate on with block_size=16: use less, or omit the file",
    ),
    (
        ["--eval_only", "--init_from", "{tmp}/gpt2", "--report", "x"],
        "report=x has no effect with eval_only=True: omit it, or set eval_only to false",
    ),
    (
        ["--eval_only", "--init_from", "{tmp}/gpt2", "--profile", "x.json"],
        "profile=x.json has no effect with eval_only=True: omit it, or set eval_only to false",
    ),
    (
        ["--eval_only", "--init_from", "{tmp}/gpt2", "--times_interval", 2],
        "times_interval=2 has no effect with eval_only=True: omit it, or set eval_only to false",
    ),
    (
        ["--warmup_iters", 5, "--max_iters", 9, "--lr_decay_iters", 5],
        "warmup_iters=5 must be below lr_decay_iters=5, by which the learning rate has fallen",
    ),
]
LAYOUTS = [
    (["--dp", 3], "mesh dp=3 x pp=1 x sp=1 x tp=1 makes 3 ranks, but mpirun started 2: change the axes, or start"),
    (
        ["--tp", 3],
        "pp=1 x sp=1 x tp=3 = 3 does not divide the 2 ranks of this job: use lengths whose product is one of 1, 2",
    ),
    (
        ["--global_batch_size", 32, "--num_micro_batches", 3],
        "global_batch_size=32 differs from the 48 samples of num_micro_batches=3 on dp=2 ranks: omit one of the two",
    ),
    (
        ["--sequence_parallel"],
        "sequence_parallel shards sequences over tp ranks, but tp=1: use a larger tp, or omit it",
    ),
    (
        ["--global_batch_size", 32, "--num_micro_batches", 1],
        "global_batch_size=32 differs from the 16 samples of num_micro_batches=1 on dp=2 ranks: omit one of the two",
    ),
    (["--sp", 2, "--sp_heads", 3], "sp_heads=3 is for sp_mode hybrid, not ring: omit it, or use hybrid"),
    (["--tp", 0], "tp=0 must be from 1 to 131072 ranks"),
    (
        ["--global_batch_size", 5, "--micro_batch_size", 2],
        "global_batch_size=5 is not divisible by dp=2 ranks in "
        "micro-batches of 2: use a multiple of 4, such as 4, or another micro_batch_size",
    ),
    (["--tp", 2], "n_head=1 is not divisible by tp=2: use a tp of 1, or n_head=2"),
    (
        ["--tp", 2, "--n_head", 2, "--n_kv_head", 1],
        "n_kv_head=1 is not divisible by tp=2: use a tp of 1, or n_kv_head=2",
    ),
    (["--sp", 2, "--block_size", 6], "a sequence of 6 tokens can't be split over sp=2 ranks in zigzag order: use"),
    (["--sp", 2, "--sp_mode", "ulysses"], "transformer.h.0.attn.attend: 1 query heads can't be exchanged by 2 ranks"),
    (["--sp", 2, "--sp_mode", "hybrid", "--sp_heads", 3], "sp=2 ranks can't be divided in groups of 3"),
    (
        ["--tp", 2, "--n_head", 2, "--sequence_parallel", "--block_size", 7],
        "block_size=7 leaves 1 of a rank's 7 tokens over from tp=2 with --sequence_parallel: use a multiple of 2",
    ),
    (
        ["--sp", 2, "--reproducible"],
        "reproducible with sp=2 needs sequence_parts, the same on any number of ranks: use a multiple of 4, or sp=1",
    ),
    (
        ["--reproducible", "--sequence_parts", 4, "--tiles", 8],
        "tiles=8 with sequence_parts=4 computes tiles of all of a rank's tokens, which reproducible rules out: omit",
    ),
    (["--sequence_parts", 2], "sequence_parts=2 has no effect without reproducible: omit it, or set reproducible"),
    (
        ["--sp", 2, "--reproducible", "--sequence_parts", 6],
        "sequence_parts=6 must be a multiple of 4 for sp=2 ranks in zigzag order: use 4",
    ),
    (["--reproducible", "--sequence_parts", 3], "sequence_parts=3 must divide block_size=8: use 2"),
    (
        ["--sp", 2, "--reproducible", "--sequence_parts", 8, "--sp_order", "striped"],
        "sp_order=striped gives no rank consecutive tokens, as the 8 sequence_parts are: use zigzag or contiguous",
    ),
    (
        ["--reproducible", "--sequence_parts", 8, "--num_experts", 4],
        "num_experts=4 with tiles or sequence_parts adds up products of experts by rank, which reproducible rules",
    ),
    (["--zero_stage", 1, "--zero_group", 3], "zero_group 3 does not divide 2 ranks: use all, node, or one of 1, 2"),
    (["--zero_stage", 1, "--zero_group", "rack"], "zero_group rack does not divide 2 ranks: use all, node, or one"),
]
PIPELINES = [
    (["--n_layer", 1], "pp=2 with schedule=1f1b makes 2 stages of n_layer=1 blocks: use at most 1 stages, or more"),
    (["--schedule", "fifo"], "schedule='fifo' is neither a file nor one of naive, gpipe, 1f1b, "),
    (["--virtual_stages", 2], "schedule '1f1b' takes 1 stages a rank, not 2: for 2, use interleaved"),
    (["--schedule", "{tmp}/missing.csv"], "missing.csv, line 2, behind the last cell: "),
    (["--schedule", "{tmp}/other.csv"], "other.csv is for pp=1 and num_micro_batches=1, not for 2 and 1: use those"),
    (["--max_alive", 2], "max_alive=2 has no effect with schedule=1f1b: omit it, or set schedule to search"),
    (["--schedule", "search", "--max_alive", 0], "max_alive=0 must be from 1 to 1000000000"),
    (
        ["--profile", "{tmp}/none/trace.json"],
        f"/none/trace.json can't be written {NOWHERE}: pass a path in an existing, writable folder",
    ),
    (
        ["--profile", "/proc/trace.json"],
        f"profile=/proc/trace.json can't be written {NOWHERE}: pass a path in an existing, ",
    ),
    (["--profile", "{tmp}"], " can't be written (not a regular file): pass a path in an existing, writable folder"),
]


def cases(*groups):
    """Name each case by its flags."""
    rows = [row for group in groups for row in group]
    words = [[Path(str(word)).name.lstrip("-") or "{tmp}" for word in flags] for flags, _ in rows]
    return [pytest.param(*row, id=" ".join(word)) for row, word in zip(rows, words, strict=True)]


@pytest.mark.parametrize(("flags", "message"), cases(COMMAND_LINES, DATA, SETTINGS, LAYOUTS))
def test_settings(folder, flags, message):
    assert message in refusal(folder, flags)


@pytest.mark.parametrize(("flags", "message"), cases(PIPELINES))
def test_settings_of_pipelines(folder, flags, message):
    assert message in refusal(folder, ["--pp", 2, *TWO_BLOCKS, *flags])


def test_sequences_of_sp_ranks_that_tp_ranks_share(folder):
    flags = ["--sp", 2, "--tp", 4, "--n_head", 4, "--n_embd", 16, "--sequence_parallel", "--block_size", 12]
    message = "block_size=12 leaves 2 of a rank's 6 tokens over from tp=4 with --sequence_parallel: use a multiple of 8"
    assert refusal(folder, flags, nodes=[0] * 8) == message


@pytest.mark.parametrize(
    ("flags", "nodes", "lengths"),
    [
        ([], (0, 0, 1), "2, 1"),
        (["--sp", 2], (0, 0, 0, 1), "3, 1"),
        (["--tp", 2, "--n_head", 2], (0, 0, 0, 0, 1, 1), "2, 1"),
        (["--pp", 2, *TWO_BLOCKS], (0, 0, 0, 0, 1, 1), "2, 1"),
    ],
    ids=["dp", "dp and sp", "dp of tp", "dp of pp"],
)
def test_nodes_of_different_lengths_as_groups(folder, flags, nodes, lengths):
    """The groups are the nodes' parts of ranks with the same part of the model."""
    flags = ["--zero_stage", 1, "--zero_group", "node", *flags]
    message = f"zero_group node: nodes have {lengths} ranks: start as many on each, or use all"
    assert refusal(folder, flags, nodes) == message
    begin([*SMALL, *flags, "--out_dir", ""], nodes=(0, 0, 1, 1))


def test_a_device_that_is_not_there(folder):
    if cuda_is_available():
        pytest.skip("this machine has a CUDA device")
    assert "device 'cuda'" in refusal(folder, ["--device", "cuda"])


def cuda_is_available():
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


@pytest.mark.parametrize("name", ["out_dir", "checkpoint_dir"])
@pytest.mark.parametrize(
    ("path", "why"), [("empty.txt/out", "Not a directory"), ("empty.txt", "not a folder")], ids=["within", "at"]
)
def test_a_folder_where_a_file_is(folder, name, path, why):
    flags = ["--out_dir", "", f"--{name}", f"{{tmp}}/{path}"]
    assert refusal(folder, flags) == f"{name} {folder}/{path} can't be written ({why}): pass another --{name}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_an_out_dir_without_permission(folder):
    folder.chmod(0o500)
    assert "can't be written (Permission denied): pass another --out_dir" in refusal(folder, [])


def test_only_rank_0_looks_where_the_run_writes(folder):
    config = Config(pp=2, n_layer=2, out_dir=f"{folder}/empty.txt/out", profile=f"{folder}/none/trace.json")
    config.checked(Topology.from_ids([0, 0]), rank=1)
    prepare_folders(config, rank=1)


def test_a_run_writes_where_no_other_has(tmp_path, monkeypatch):
    """A run writes to the given folder or to a new numbered one; a resumed run to that of the previous one."""
    monkeypatch.chdir(tmp_path)

    def run(requested, before=""):
        folder = Path(own_out_dir(requested, before))
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").touch()
        return str(folder)

    assert [run("out"), run("out"), run("out/"), run("other")] == ["out", "out-2", "out-3", "other"]
    assert [run("out", "out"), run("out", "out-2"), run("other", "out-2")] == ["out", "out-2", "other-2"]
    Path("out-4").mkdir()  # another run has just created it
    assert [run("out", "gone"), run("."), run(".")] == ["out-5", ".", f"{tmp_path}-2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": ["no-such-file.txt"]}, "no-such-file.txt: no such file; check the path"),
        ({"n_embd": 9, "n_head": 2}, "n_embd=9 is not divisible by n_head=2: use 8 or 10"),
        ({"grad_dtype": "float8"}, "grad_dtype=float8 beside dtype=float32"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be from 1 to"),
        ({"global_batch_size": 8, "num_micro_batches": 3}, "global_batch_size=8 differs from the 48 samples of num_mi"),
    ],
    ids=["data", "n_embd", "grad_dtype", "micro_batch_size", "num_micro_batches"],
)
def test_what_no_layout_fits(settings, message):
    """test_planner.py has settings that fit some layout."""
    with pytest.raises(ValueError, match=message):
        job_of(Config(layout="auto", **settings), world_size=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "search"}, "schedule=search can't be planned by layout=auto: use naive, gpipe, 1f1b, "),
        ({"zero_group": "2"}, "zero_group=2 can't be planned by layout=auto: use all, node, or omit layout"),
    ],
    ids=["schedule", "zero_group"],
)
def test_what_no_planned_layout_has(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        fixed_by(Config(layout="auto", **settings))


def test_one_of_two_sizes_of_a_batch_in_a_file_is_overridden(tmp_path):
    """Each determines the other, so a flag of one replaces the other in the file."""
    (tmp_path / "job.toml").write_text("global_batch_size = 480\nnum_micro_batches = 30")
    for name, other in (("global_batch_size", "num_micro_batches"), ("num_micro_batches", "global_batch_size")):
        config = parse(Config, "", ["--config", str(tmp_path / "job.toml"), f"--{name}=6"])
        assert (getattr(config, name), getattr(config, other)) == (6, getattr(Config(), other))


NUMBERS = [field for field in fields(Config) if value_type(get_type_hints(Config)[field.name]) in (int, float)]


@pytest.mark.parametrize("field", [field for field in NUMBERS if "choices" not in field.metadata], ids=lambda f: f.name)
def test_every_number_has_ends(field, tmp_path):
    """Flags, files and Python code refuse a value outside its range, with the value and the range."""
    values = field.metadata["range"]
    for number in (values.least - 1, values.most * 2 + 1, float("nan")):
        file = tmp_path / "job.toml"
        file.write_text(f"{field.name} = {number}")
        ways = (
            lambda number=number: Config(**{field.name: number}),
            lambda file=file: parse(Config, "", ["--config", str(file)]),
            lambda number=number: parse(Config, "", [f"--{field.name}={number}"]),
        )
        for way in ways:
            with pytest.raises(ValueError, match=f"{field.name}.* (must be |invalid int value)") as caught:
                way()
            assert str(number) in str(caught.value)
            assert "\n" not in str(caught.value)
