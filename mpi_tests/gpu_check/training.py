"""train.py on a device: its losses compared with the CPU's, those of layouts with one rank's, and its speed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpi_tests.gpu_check.child import CannotRunError
from mpi_tests.gpu_check.memories import knows
from mpi_tests.gpu_check.rows import Row, Setting, verdict
from mpi_tests.gpu_check.started import on_ranks

RTOL = 1e-3  # of losses: float32 sums in another order diverge over the updates
MODEL = "--n_layer 4 --n_head 4 --n_embd 64 --block_size 32 --warmup_iters 5 --sample_tokens 4"
BATCH = 8


class Mix(NamedTuple):
    """Flags of a layout of 4 ranks, and its division of the batch: over dp, then into micro-batches."""

    words: str
    dp: int = 1
    num_micro_batches: int = 1


ALONE = Mix("")
MIXES = {
    "dp 4": Mix("", dp=4),
    "tp 4": Mix("--tp 4"),
    "tp 2, sequence-parallel, sp 2 by ulysses": Mix("--tp 2 --sequence_parallel --sp 2 --sp_mode ulysses"),
    "dp 2, sp 2 by a ring": Mix("--sp 2", dp=2),
    "pp 2, tp 2": Mix("--pp 2 --tp 2", num_micro_batches=2),
    "pp 4 by zb_h1": Mix("--pp 4 --schedule zb_h1", num_micro_batches=4),
    "ZeRO 1": Mix("--zero_stage 1", dp=4),
    "ZeRO 2": Mix("--zero_stage 2", dp=4),
    "ZeRO 3": Mix("--zero_stage 3", dp=4),
    "pp 2, ZeRO 3, stages by times measured": Mix("--pp 2 --zero_stage 3 --balance measured", 2, 2),
}
SMALL_MIXES = {"tp 2": Mix("--tp 2")}  # layouts of 2 ranks
TINY = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2 --steps 2 --turns 2 --matrix 64"


def need(setting: Setting) -> None:
    """Raise CannotRunError if this torch does not support the device."""
    if not knows(setting.device):
        raise CannotRunError("this torch sees no CUDA device")


def check(setting: Setting) -> Iterator[Row]:
    """Compare the losses of one rank with those on the CPU, and those of layouts of 4 ranks with those of one rank."""
    need(setting)
    ranks, mixes = (2, SMALL_MIXES) if setting.is_small else (4, MIXES)
    alone = losses(setting, setting.device)
    yield row(f"{len(alone)} iterations, one rank", "the CPU's losses", alone, losses(setting, "cpu"))
    for name, mix in mixes.items():
        yield row(f"training, {name}", "one rank's losses", losses(setting, setting.device, ranks, mix), alone)


def row(check: str, goal: str, measured: np.ndarray, expected: np.ndarray) -> Row:
    worst = float(np.max(np.abs(measured / expected - 1)))
    return Row(check, f"{goal} within {RTOL:g}", f"within {worst:.1e} of {len(expected)} losses", verdict(worst < RTOL))


@cache  # with --device cpu, the CPU's losses are those of the device
def losses(setting: Setting, device: str, ranks: int = 1, mix: Mix = ALONE) -> np.ndarray:
    """Return the losses of a training run by iteration; every layout trains on the same batches."""
    size, iterations = BATCH // mix.dp // mix.num_micro_batches, 3 if setting.is_small else 50
    with tempfile.TemporaryDirectory() as folder:
        flags: list[Any] = ["--device", device, "--out_dir", folder, "--max_iters", iterations, *MODEL.split()]
        flags += ["--micro_batch_size", size, "--num_micro_batches", mix.num_micro_batches, *mix.words.split()]
        on_ranks(setting, ranks, "train.py", *flags)
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return np.array([record["loss"] for record in records if "loss" in record])


def speed(setting: Setting) -> list[Row]:
    """Measure GPT-2 124M by benchmarks/gpt2.py."""
    need(setting)
    words = [*TINY.split(), "--no_compile"] if setting.is_small else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.json"
        on_ranks(setting, 1, "benchmarks/gpt2.py", "--device", setting.device, "--output", path, *words)
        ours, plain = json.loads(path.read_text())["results"].values()
    ratio, share = ours["tokens_per_s"] / plain["tokens_per_s"], ours["share"]
    text = f"{ratio:.3f} times: {ours['tokens_per_s']:,.0f} and {plain['tokens_per_s']:,.0f} tokens/s"
    rates = f"{share:.1%}: {ours['model_flops_per_s'] / 1e12:.1f} of {ours['matrix_flops_per_s'] / 1e12:.1f} TFLOP/s"
    return [
        Row("GPT-2 124M, one rank", "tokens/s at least the plain loop's", text, setting.speed(ratio >= 1)),
        Row("GPT-2 124M, one rank", "at least 45% of the matrix rate", rates, setting.speed(share >= 0.45)),
    ]
