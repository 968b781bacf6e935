"""A folder with a tiny Llama that has a chat template, conversations, and tuning on these, also by plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from examples import tiny_chat
from mpi_tests.helpers.folders import shared_folder
from parallelism.data.sampler import DistributedSampler
from training.data.packing import training_windows
from training.loop import train
from training.lora.adapters import attach_adapters, merge
from training.settings.config import Config
from training.settings.derived import tokens_of
from training.weights.export import to_hugging_face
from training.weights.hf import load_hugging_face

BATCH, RATE, MOMENTUM = 4, 0.1, 0.9
SMALL: dict[str, Any] = {
    "dtype": "float64", "block_size": 64, "max_iters": 3, "seed": 5, "out_dir": "", "sample_tokens": 0,
    "optimizer": "sgd", "weight_decay": 0.0, "grad_clip": 0.0, "bucket_mb": 0.02,
    "lr": RATE, "lr_schedule": "constant", "warmup_iters": 0,
}  # fmt: skip

MARKED = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}"""


def chat_folder(folder: Path, template: str = tiny_chat.TEMPLATE) -> Path:
    """Write the model, its tokenizer and a template."""
    tiny_chat.write(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def uneven_rows(number: int = 20) -> list[dict]:
    """Return conversations whose answers differ much in length, so that means of means are not the mean."""
    pairs = [("ab"[: 1 + i % 2], "xy" * (1 + i * i % 17)) for i in range(number)]
    roles = "user", "assistant"
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in pairs
    ]


def loss_sum(model: torch.nn.Module, ids: torch.Tensor, is_answer: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of a conversation's answers, by a plain model, alone."""
    logits, _ = model(ids[None, :-1])
    return F.cross_entropy(logits[0][is_answer[1:]], ids[1:][is_answer[1:]], reduction="sum")


class Tuned(NamedTuple):
    """Result of tuning: the losses of the steps and of the validation, and the weights by Hugging Face's names."""

    losses: list[float]
    val_loss: float
    weights: dict[str, Tensor]


@contextmanager
def tuning_folder(mpi_comm) -> Iterator[Path]:
    """Write, on rank 0, a model and conversations to tune it on.  Collective."""
    with shared_folder(mpi_comm) as folder:
        if mpi_comm.rank == 0:
            chat_folder(folder / "model")
            write_rows(folder / "rows.jsonl", uneven_rows(40))
        mpi_comm.barrier()
        yield folder


def config(folder: Path, dp: int = 1, **changes: Any) -> Config:
    """Return settings of a tuning run with changes, with the same global batch for any number of dp ranks."""
    own = {"data": [str(folder / "rows.jsonl")], "init_from": str(folder / "model")}
    changes = {name: [*value] if isinstance(value, tuple) else value for name, value in changes.items()}
    size = BATCH // dp // changes.get("num_micro_batches", 1)
    return Config(**own | SMALL | {"micro_batch_size": size} | changes)


def tuned_on(comm, folder: Path, **changes: Any) -> Tuned:
    """Tune on the ranks of `comm`; dp has those that the axes in `changes` leave.  Collective."""
    dp = comm.size // prod(changes.get(axis, 1) for axis in ("pp", "sp", "tp"))
    model, records = train(config(folder, dp, **changes), comm)
    losses = [record["loss"] for record in records if "loss" in record]
    return Tuned(losses, records[-1]["val_loss"], to_hugging_face(model))


@cache
def tuned_by_torch(folder: Path, **changes: Any) -> tuple[Tuned, list[list[int]]]:
    """Tune a plain model on whole global batches; return also each batch's numbers of answers' tokens by sample."""
    settings = config(folder, **changes)
    model = load_hugging_face(settings.init_from).double()
    targets = attach_adapters(model, settings) if settings.lora_rank else []
    windows, val_windows = training_windows(tokens_of(settings), settings.val_fraction, 64, settings.seed)
    optimizer, losses, counts = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE, MOMENTUM),
        [],
        [],
    )

    def loss_of(windows: Any, indices: np.ndarray) -> Tensor:
        inputs, answers = map(torch.from_numpy, windows.batch(indices))
        documents = torch.from_numpy(windows.documents(indices, inputs.numpy(), None))
        counts.append((answers >= 0).sum(1).tolist())
        return model(inputs, answers, documents=documents)[1]

    for indices in islice(DistributedSampler(len(windows), BATCH, 0, 1, seed=settings.seed), settings.max_iters):
        loss = loss_of(windows, indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    val_loss = loss_of(val_windows, np.arange(len(val_windows))).item()
    merge(model, targets)
    return Tuned(losses, val_loss, to_hugging_face(model)), counts[:-1]


def check_tuned(tuned: Tuned, expected: Tuned) -> None:
    np.testing.assert_allclose(tuned.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(tuned.val_loss, expected.val_loss, rtol=1e-6)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(tuned.weights[name], weight, rtol=1e-6, atol=1e-9)
