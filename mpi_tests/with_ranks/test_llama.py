"""A Llama parallelized by train.py, in random layouts, compared with the plain model."""

from __future__ import annotations

import math
import random
from contextlib import closing

import pytest
import torch

from models.decoder import Decoder
from mpi_tests.helpers.folders import shared_folder
from mpi_tests.helpers.launch import ROOT
from mpi_tests.helpers.models import close, random_tokens, randomized
from mpi_tests.helpers.ranks import IS_PROOF, from_first
from mpi_tests.helpers.trained import alone, check_same, on
from parallelism.data.sampler import DistributedSampler
from parallelism.planner.settings import parse
from training.data.tokens import TokenWindows, load_tokens, split
from training.loop import step, train
from training.parallel.run import TrainingRun
from training.sample import split as split_blocks
from training.settings.config import Config
from training.settings.derived import make_model, model_config
from training.weights.export import save_hugging_face
from training.weights.hf import load_hugging_face

RANKS, GLOBAL_BATCH = 8, 16
AXES = "dp", "tp", "sp", "pp", "zero_stage"
TINY = {
    "model": "llama-tiny", "n_layer": 4, "n_head": 8, "n_embd": 32, "n_hidden": 24, "rope_theta": 50.0,
    "rope_factor": 4.0, "rope_original_length": 40,
    "block_size": 16, "dtype": "float64", "val_fraction": 0.002, "out_dir": "", "max_iters": 1, "grad_clip": 0.0,
    "bucket_mb": 0.01, "document_end": ord("\n"),
}  # fmt: skip


def draw_layout(seed):
    """Draw a layout of 8 ranks in which at least two axes have several ranks."""
    draw = random.Random(seed)
    axes = {}
    while sum(size > 1 for size in axes.values()) < 2:
        tp, sp, pp = (draw.choice((1, 2, 4)) for _ in range(3))
        axes = {"dp": max(1, RANKS // (tp * sp * pp)), "tp": tp, "sp": sp, "pp": pp}
        if tp * sp * pp > RANKS or tp * sp > 4:
            axes = {}
    sp_mode = "hybrid" if axes["sp"] == 4 else draw.choice(("ring", "ulysses")) if axes["sp"] == 2 else "ring"
    has_ring = axes["sp"] > 1 and sp_mode != "ulysses"
    return axes | {
        "n_kv_head": draw.choice((4, 8)),
        "tied": draw.random() < 0.5,
        "num_micro_batches": 2,
        "micro_batch_size": GLOBAL_BATCH // 2 // axes["dp"],
        "zero_stage": draw.randrange(4),
        "recompute": draw.choice(("none", "selective", "full")),
        "schedule": draw.choice(("1f1b", "zb_h1", "gpipe")) if axes["pp"] > 1 else "1f1b",
        "sequence_parallel": axes["tp"] > 1 and draw.random() < 0.5,
        "sp_mode": sp_mode,
        "sp_order": draw.choice(("zigzag", "striped", "contiguous")) if has_ring else "zigzag",
    }


LAYOUTS = [draw_layout(seed) for seed in range(12 if IS_PROOF else 3)]


def plain_results(config):
    """Return the first step's loss and gradients on the whole batch in plain torch."""
    tokens = load_tokens([])
    windows = TokenWindows(split(tokens, config.val_fraction, config.block_size)[0], config.block_size, config.seed)
    sampler = DistributedSampler(len(windows), GLOBAL_BATCH, 0, 1, seed=config.seed)
    inputs, targets = map(torch.from_numpy, windows.batch(next(iter(sampler))))
    ends = (inputs == config.document_end).long()
    model = Decoder(model_config(config, tokens.vocab_size), config.seed).double()
    _, loss = model(inputs, targets, documents=ends.cumsum(1) - ends)  # documents end at `ends`
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{axis}{layout[axis]}" for axis in AXES))
@pytest.mark.sizes(RANKS)
def test_loss_and_every_gradient_are_the_plain_models(comm, layout):
    """The test's step subtracts the gradients from the weights, so that the change of the weights shows them."""
    config = Config(**TINY, **layout)
    with TrainingRun(config, comm) as run, closing(run.inputs()) as inputs:

        @torch.no_grad()
        def descend(skipped):
            for weight in run.masters.pieces.values():
                weight -= weight.grad

        run.optimizer.step = descend
        loss = step(run, 1, next(inputs)).metrics().loss
        after = dict(run.whole().named_parameters())
        before = dict(make_model(config, run.tokens.vocab_size).named_parameters())
    expected, gradients = from_first(comm.mpi, lambda: plain_results(config))
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    assert after.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(before[name] - after[name], gradient, rtol=1e-10)


@pytest.fixture
def folder(mpi_comm):
    with shared_folder(mpi_comm) as folder:
        yield folder


@pytest.mark.sizes(4)
def test_a_run_goes_on_in_another_layout(comm, folder):
    """The planner chooses the first layout."""
    llama = {"model": "llama-tiny", "n_kv_head": 1, "n_hidden": 64, "checkpoint_dir": str(folder)}
    expected = alone(comm, num_micro_batches=2, **llama | {"checkpoint_dir": ""})
    check_same(on(comm, layout="auto", checkpoint_interval=2, **llama), expected)
    (path,) = folder.glob("*-step-2")
    changes = {"zero_stage": 3, "sp": 2, "sp_mode": "ulysses", "resume": str(path)}
    resumed = on(comm, **llama, **changes)
    assert len(resumed.losses) == 2
    check_same(resumed, expected._replace(records=[record for record in expected.records if record["iter"] > 2]))


@pytest.mark.sizes(2)
def test_what_is_sampled_from_may_be_split(comm, folder):
    config = model_config(Config(**TINY, n_kv_head=4), 29)
    if comm.rank == 0:
        save_hugging_face(randomized(config), folder)
    comm.barrier()
    whole, divided = load_hugging_face(folder).eval(), load_hugging_face(folder).eval()
    split_blocks(divided, comm)
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        close(divided(tokens)[0], whole(tokens)[0], rtol=1e-5)


IN_SMALL = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 16 --vocab_size 256 --micro_batch_size 1 --max_iters 1"
IN_SMALL += " --warmup_iters 0 --global_batch_size 2 --val_fraction 0.0005 --sample_tokens 2 --out_dir="


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.stem)
@pytest.mark.sizes(2)
def test_files_of_settings_train(comm, path):
    config = parse(Config, "", ["--config", str(path), *IN_SMALL.split()])
    assert train(config, comm).records[-1]["val_loss"] == pytest.approx(
        math.log(256), rel=0.02
    )  # as if over all tokens


@pytest.mark.sizes(1)
def test_a_depth_is_announced(comm, capsys):
    train(
        parse(
            Config, "", ["--depth", "3", "--model", "llama-tiny", *IN_SMALL.replace("n_layer 1", "n_kv_head 1").split()]
        ),
        comm,
    )
    text = capsys.readouterr().out
    assert "Llama of " in text
    assert "\ndepth 3: n_layer 3, n_head 2, n_embd 16, lr 0.0012, batch 2\n" in text
