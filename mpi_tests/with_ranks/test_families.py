"""Every family of models in layouts drawn at random: the losses of one rank.

LAYOUTS of each are drawn.
"""

import json
import os
import random

import numpy as np
import pytest
import torch

from collectives import InputError
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.models import close, random_tokens, randomized
from mpi_tests.helpers.ranks import IS_PROOF
from mpi_tests.helpers.trained import alone, check_same, on
from parallelism.planner.presets import FAMILIES
from training.sample import split
from training.settings.config import Config
from training.settings.derived import model_config

RANKS, GLOBAL_BATCH, STEPS = 4, 8, 10
NUM_DRAWN = int(os.environ.get("LAYOUTS", "4" if IS_PROOF else "1"))
SIZES = {
    "n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 32, "n_hidden": 24, "block_size": 16, "dtype": "float64",
    "max_iters": STEPS, "eval_interval": STEPS, "eval_iters": 1, "bucket_mb": 0.01,
}  # fmt: skip
MORE = {
    "gpt2": {"bias": True, "dropout": 0.1},
    "llama": {"architecture": {"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "rope_factor": 2.0},
    "mistral": {"architecture": {"layers": "window", "window": 5}},
    "mixtral": {"num_experts": 4, "balance_loss": 0.1},
    "qwen2": {"architecture": {"layers": "full window", "window": 5}},
    "qwen3": {"architecture": {"head_dim": 6}},
    "qwen3_moe": {"architecture": {"head_dim": 6}, "num_experts": 8, "experts_per_token": 3, "optimizer": "muon"},
    "gemma3_text": {"architecture": {"head_dim": 6, "layers": "window full", "window": 7, "attention_scale": 0.3}},
    "smollm3": {},
}


def draw_layout(family, seed):
    """Draw a layout of 4 ranks that has an axis beside dp."""
    draw = random.Random(f"{family} {seed}")
    tp, sp, pp = draw.choice([(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1)])
    dp, has_experts = RANKS // (tp * sp * pp), "num_experts" in MORE[family]
    if has_experts and draw.random() < 0.5:
        tp, sp, pp, dp = (1, 1, 2, 2) if draw.random() < 0.5 else (2, 1, 1, 2)
    sp_mode = draw.choice(("ring", "ulysses")) if sp > 1 else "ring"
    return {
        "tp": tp,
        "sp": sp,
        "pp": pp,
        "ep": dp if has_experts else 1,
        "num_micro_batches": 2,
        "micro_batch_size": GLOBAL_BATCH // dp // 2,
        "zero_stage": draw.randrange(4),
        "recompute": draw.choice(("none", "selective", "full")),
        "schedule": draw.choice(("1f1b", "zb_h1")) if pp > 1 else "1f1b",
        "sequence_parallel": tp > 1 and draw.random() < 0.5,
        "sp_mode": sp_mode,
        "sp_order": draw.choice(("zigzag", "striped")) if sp > 1 and sp_mode == "ring" else "zigzag",
    }


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


def settings_of(family):
    own = {"model": family if family == "gpt2" else f"{family}-tiny", **SIZES, **MORE[family]}
    return own | ({"architecture": json.dumps(own["architecture"])} if "architecture" in own else {})


@pytest.mark.sizes(4)
def test_a_run_goes_on_in_another_layout_with_the_same_architecture(comm, folder):
    own = settings_of("gemma3_text") | {"max_iters": 4, "eval_interval": 4}
    expected = alone(comm, num_micro_batches=2, **own)
    own["checkpoint_dir"] = str(folder)
    on(comm, tp=2, zero_stage=1, checkpoint_interval=2, **own)
    (path,) = folder.glob("*-step-2")
    check_same(on(comm, sp=2, resume=str(path), **own), expected._replace(records=expected.records[2:]))
    other = {**own, "architecture": own["architecture"].replace("7", "8")}
    with pytest.raises(InputError, match=r"architecture was .*, but is .*: resume with the same"):
        on(comm, sp=2, resume=str(path), **other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sizes(2)
def test_a_model_to_sample_from_may_be_split(comm, family):
    config = model_config(Config(**settings_of(family)), 29)
    whole, divided = randomized(config).eval(), randomized(config).eval()
    split(divided, comm)
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        close(divided(tokens)[0], whole(tokens)[0], rtol=1e-9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 2, "n_kv_head": 1}, "n_kv_head=1 is not divisible by tp=2: use a tp of 1, or n_kv_head=2"),
        ({"tp": 2, "reproducible": True, "tiles": 4}, "tiles=4 cut no sum over heads: omit tiles"),
        ({"reproducible": True, "sequence_parts": 4}, "sequence_parts=4 computes with 1 . weight in norms, which"),
    ],
)
@pytest.mark.sizes(2)
def test_what_ranks_cannot_divide_is_refused(comm, changes, words):
    with pytest.raises(InputError, match=words):
        on(comm, **settings_of("gemma3_text") | {"dtype": "float32", "micro_batch_size": 4, **changes})


def drawn(family):
    return [(family, draw_layout(family, seed)) for seed in range(NUM_DRAWN)]


def in_words(value):
    return value if isinstance(value, str) else " ".join(f"{name}{number}" for name, number in [*value.items()][:4])


@pytest.mark.parametrize(("family", "layout"), [each for family in FAMILIES for each in drawn(family)], ids=in_words)
@pytest.mark.sizes(RANKS)
def test_losses_are_those_of_one_rank(comm, family, layout):
    own = settings_of(family)
    if layout["sp"] > 1:
        own.pop("balance_loss", 0)  # of whole sequences
    own["document_end"] = ord("\n") if layout["zero_stage"] % 2 else None
    expected = alone(comm, num_micro_batches=2, micro_batch_size=GLOBAL_BATCH // 2, **own)
    outcome = on(comm, **own, **layout)
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=0, atol=1e-6)
    assert outcome.validations == pytest.approx(expected.validations, abs=1e-6)
    assert expected.losses[-1] < expected.losses[0]
