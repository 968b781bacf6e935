"""Training on a device: its losses compared with the CPU's, those of layouts with one rank's, and its speed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mpi_tests.gpu_check.child import BadEndError, CannotRunError
from mpi_tests.gpu_check.memories import knows
from mpi_tests.gpu_check.mixes import MIXES, RANKS, RTOL, SMALL
from mpi_tests.gpu_check.rows import FAILED, SKIPPED, Row, Setting, verdict
from mpi_tests.gpu_check.started import lines_on_ranks, on_ranks

ITERATIONS, FEW = 20, 3
SILENT_S = 100.0  # of a job that trains, unless it compiles models: longer than any run takes, with our kernels
OUT_OF_TIME = "no time is left: choose it by --mixes, or allow more --seconds"
TINY = "--n_layer 1 --n_head 2 --n_embd 16 --block_size 8 --micro_batch_size 2 --steps 2 --turns 2 --matrix 64"

Result = dict[str, Any]  # of a run: its mix, and either its losses and norm, or a verdict and why there are none


def need(setting: Setting) -> None:
    """Raise CannotRunError if this torch does not support the device."""
    if not knows(setting.device):
        raise CannotRunError("this torch sees no CUDA device")


def check(setting: Setting) -> Iterator[Row]:
    """Compare the losses of one rank with those on the CPU, and those of layouts with one rank's."""
    need(setting)
    iterations = FEW if setting.is_small else ITERATIONS
    names = setting.mixes or (SMALL if setting.is_small else tuple(MIXES))
    alike = {MIXES[name].settings: name for name in names}  # for one rank these are all the runs
    alone = {MIXES[run["mix"]].settings: run for run in runs(setting, 1, setting.device, [*alike.values()], iterations)}
    if not setting.is_small:
        (on_cpu,) = runs(setting, 1, "cpu", ["dp"], iterations)
        (on_device,) = [alone[""]] if "" in alone else runs(setting, 1, setting.device, ["dp"], iterations)
        yield compared("training, one rank", "the CPU's losses", on_device, on_cpu, RTOL)
    for run in runs(setting, RANKS, setting.device, names, iterations):
        mix = MIXES[run["mix"]]
        words = " ".join(filter(None, [mix.settings, mix.layout])) or f"dp {mix.dp}"
        yield compared(f"training, {run['mix']}: {words}", "one rank's losses", run, alone[mix.settings], mix.rtol)


def runs(setting: Setting, size: int, device: str, names: Sequence[str], iterations: int) -> Iterator[Result]:
    """Train on so many ranks; mixes that compile the model have a job of their own, which is silent for longer."""
    for compiles, alike in groupby(names, lambda name: size > 1 and MIXES[name].is_compiled):
        yield from job(setting, size, device, [*alike], iterations, None if compiles else SILENT_S)


def job(
    setting: Setting, size: int, device: str, names: list[str], iterations: int, silent_s: float | None
) -> Iterator[Result]:
    """Train all mixes in one job, or, after one that ends the job, the rest in another one."""
    while names and setting.left_s > 1:
        words = "-m", "mpi_tests.gpu_check.layouts", device, iterations, *names
        try:
            for line in lines_on_ranks(setting, size, *words, silent_s=silent_s):
                if line.startswith('{"mix"'):
                    run = json.loads(line)
                    names.remove(run["mix"])
                    yield run if "losses" in run else run | {"verdict": FAILED}
        except BadEndError as error:
            if setting.left_s > 1:
                yield {"mix": names.pop(0), "refused": str(error), "verdict": error.verdict}
    yield from ({"mix": name, "refused": OUT_OF_TIME, "verdict": SKIPPED} for name in names)


def compared(check: str, goal: str, run: Result, reference: Result, rtol: float) -> Row:
    goal = f"{goal} within {rtol:g}"
    for one, whose in ((run, ""), (reference, "nothing to compare with: ")):
        if "losses" not in one:
            return Row(check, goal, f"{whose}{one['refused']}", one["verdict"] if one is run else SKIPPED)
    worst = {what: worst_of(run[what], reference[what]) for what in ("losses", "norm")}
    text = f"within {worst['losses']:.1e} of {len(run['losses'])} losses, and {worst['norm']:.1e} of the first norm"
    return Row(check, goal, text, verdict(max(worst.values()) < rtol))


def worst_of(measured: list[float], expected: list[float]) -> float:
    """Return the largest relative difference."""
    return float(np.max(np.abs(np.array(measured) / expected - 1)))


def speed(setting: Setting) -> list[Row]:
    """Measure GPT-2 124M by benchmarks/gpt2.py."""
    need(setting)
    words = [*TINY.split(), "--no_compile"] if setting.is_small else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.json"
        on_ranks(setting, 1, "benchmarks/gpt2.py", "--device", setting.device, "--output", path, *words)
        ours, plain = json.loads(path.read_text())["results"].values()
    ratio, fraction = ours["tokens_per_s"] / plain["tokens_per_s"], ours["fraction"]
    text = f"{ratio:.3f} times: {ours['tokens_per_s']:,.0f} and {plain['tokens_per_s']:,.0f} tokens/s"
    rates = f"{fraction:.1%}: {ours['model_flops_per_s'] / 1e12:.1f} of {ours['matrix_flops_per_s'] / 1e12:.1f} TFLOP/s"
    return [
        Row("GPT-2 124M, one rank", "tokens/s at least the plain loop's", text, setting.speed(ratio >= 1)),
        Row("GPT-2 124M, one rank", "at least 45% of the matrix rate", rates, setting.speed(fraction >= 0.45)),
    ]
