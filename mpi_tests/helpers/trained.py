"""The outcome of train.py's training in any layout, and that of plain torch in one process."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from collectives import Communicator
from models.decoder import Decoder
from models.mixture import balance, routers
from mpi_tests.helpers.ranks import from_first
from parallelism.data.sampler import DistributedSampler
from training.data.tokens import TokenWindows, load_tokens, split
from training.loop import train
from training.optim.learning_rate import learning_rate
from training.reports.facts import RunFacts
from training.settings.config import Config
from training.settings.derived import make_model
from training.weights.export import to_hugging_face

GLOBAL_BATCH = 24
TEXT = Path(__file__).parents[2] / "LICENSE"  # the default text would be another with each version of Python
SMALL = Config(
    data=[str(TEXT)], val_fraction=0.1, n_layer=2, n_head=2, n_embd=32, block_size=16, max_iters=4, warmup_iters=2,
    eval_interval=3, lr=1e-2, seed=7, sample_tokens=4, bucket_mb=0.02, out_dir="",
)  # fmt: skip
VALIDATED = 3, 4  # the steps with validation: every eval_interval steps, and the last one


class Outcome(NamedTuple):
    records: list[dict]
    weights: dict[str, np.ndarray]  # by Hugging Face's parameter names

    @property
    def losses(self):
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def validations(self):
        return {record["iter"]: record["val_loss"] for record in self.records if "val_loss" in record}


def config(dp_size: int, **changes) -> Config:
    """Return this file's config with changes, with the same global batch size for any `dp_size`."""
    micro_batch_size = GLOBAL_BATCH // dp_size // changes.get("num_micro_batches", 1)
    warmup_iters = min(SMALL.warmup_iters, changes.get("max_iters", SMALL.max_iters))
    return replace(SMALL, **{"micro_batch_size": micro_batch_size, "warmup_iters": warmup_iters, **changes})


def facts(first: int = 1, vocab_size: int = 64, **settings) -> RunFacts:
    """Return what the sinks of a run on one rank know."""
    return RunFacts(
        Config(**settings), data="text", num_tokens=9, vocab_size=vocab_size, family="GPT", num_params=8, batch_size=4,
        num_micro_batches=1, lengths={"dp": 1, "pp": 1, "sp": 1, "tp": 1}, attention="", schedule="", num_stages=1,
        source="", first=first, out_dir="", conditions={}, conditions_before={}, surroundings={}, peak=None,
        profiler=SimpleNamespace(steps=[], planned=None, happened=[]),
    )  # fmt: skip


def on(comm, **changes) -> Outcome:
    """Train on the ranks of `comm`; dp has the ranks that the axes in `changes` leave.  Collective."""
    inner = [changes.get(axis, 1) for axis in ("pp", "sp", "tp")]
    gpt, records = train(config(comm.size // prod(inner), **changes), comm)
    return Outcome(records, numpy_of(gpt))


def on_first(comm, size=1, **changes) -> Outcome:
    """Train on the first ranks of `comm` only; return the outcome on all.  Collective."""
    part = comm.split(0 if comm.rank < size else None)
    outcome = None
    if part:
        outcome = on(part, **changes)
        part.free()
    return from_first(comm.mpi, lambda: outcome)


@cache
def one_rank(**changes) -> Outcome:
    from mpi4py import MPI  # here, because a run without ranks does without MPI

    with Communicator(MPI.COMM_SELF) as comm:
        return on(comm, **changes)


def alone(comm, **changes) -> Outcome:
    """Return the outcome of training on one rank, with no files, as tests of other sizes share it.  Collective."""
    return from_first(comm.mpi, partial(one_rank, **changes))


def flags(config: Config) -> list[str]:
    overrides = {k: v for k, v in vars(config).items() if v != vars(Config())[k]}
    words = {k: [] if v is True else v if isinstance(v, list) else [str(v)] for k, v in overrides.items()}
    return [word for name, values in words.items() for word in (f"--{name}", *values)]


def left_in(out_dir: Path) -> Outcome:
    """Return the outcome recorded in a run's files."""
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(records, load_file(out_dir / "model.safetensors"))


def numpy_of(gpt: Decoder) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in to_hugging_face(gpt).items()}


def plain_adamw(model: Decoder) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def by_torch(comm, make_optimizer=plain_adamw, **changes) -> Outcome:
    """Return the expected outcome, from training with plain torch on one rank.  Collective."""
    return from_first(comm.mpi, partial(plain_training, make_optimizer, **changes))


class PlainStep(NamedTuple):
    loss: float
    gradients: dict[str, torch.Tensor]  # by name, before clipping; tied parameters under each of their names


def plain_steps(config: Config, model: Decoder, make_optimizer=plain_adamw) -> Iterator[PlainStep]:
    """Train without our parallel code: one process, whole batches, plain torch."""
    train_ids, _ = split(load_tokens(config.data), config.val_fraction, config.block_size)
    windows = TokenWindows(train_ids, config.block_size, config.seed)
    sampler = DistributedSampler(len(windows), GLOBAL_BATCH, 0, 1, seed=config.seed)
    optimizer = make_optimizer(model)
    for iteration, indices in zip(range(1, config.max_iters + 1), sampler, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, config.lr, config.warmup_iters, config.max_iters)
        model.zero_grad()
        loss = loss_of(model, windows, indices)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters(remove_duplicate=False)}
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        balance([router for _, router in routers(model)])
        yield PlainStep(loss.item(), gradients)


@cache
def plain_training(make_optimizer=plain_adamw, **changes) -> Outcome:
    """Return the outcome of training `SMALL` with some changes."""
    config = replace(SMALL, **changes)
    model = make_model(config, 256)
    _, val_ids = split(load_tokens(config.data), config.val_fraction, config.block_size)
    records = []
    for iteration, step in enumerate(plain_steps(config, model, make_optimizer), 1):
        records.append({"iter": iteration, "loss": step.loss})
        if iteration == config.max_iters or iteration % config.eval_interval == 0:
            records.append({"iter": iteration, "val_loss": validation(model.eval(), val_ids)})
            model.train()
    return Outcome(records, numpy_of(model))


@torch.no_grad()
def validation(model: Decoder, ids: np.ndarray) -> float:
    windows = TokenWindows(ids, SMALL.block_size, None)
    return loss_of(model, windows, np.arange(len(windows))).item()


def loss_of(model: Decoder, windows: TokenWindows, indices: np.ndarray) -> torch.Tensor:
    return model(*map(torch.from_numpy, windows.batch(indices)))[1]


def check_same(outcome: Outcome, expected: Outcome) -> None:
    """Check losses, validations and weights up to rounding, which depends on the order of sums."""
    np.testing.assert_allclose(outcome.losses, expected.losses, rtol=1e-5)
    assert outcome.validations.keys() == expected.validations.keys()
    np.testing.assert_allclose([*outcome.validations.values()], [*expected.validations.values()], rtol=1e-5)
    assert outcome.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(outcome.weights[name], weight, rtol=1e-4, atol=1e-4, err_msg=name)


def check_bits(weights: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(weights[name], weight), name
