"""Compare our training of GPT-2 with 124M parameters on one device with a plain torch loop, in one run.

    python benchmarks/gpt2.py --device cuda --output gpt2.json

The plain loop is like nanoGPT's, in torch only: the whole model, autocast, fused AdamW, clipped gradients, batches from
pinned memory.  Both use the same weights and samples, compiled or not; their losses are compared.  They alternate,
some steps each, with the device synchronized before and after; results are medians over the turns.

Model FLOP/s are those of `models.decoder.flops_per_token`; they are compared with the rate of one large matrix product
of the same dtype, the median in the same run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.result_files import output, table, write

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.decoder import flops_per_token
from parallelism.numerics.precision import DTYPES, HALVES
from training.loop import step
from training.optim.learning_rate import learning_rate
from training.optim.optimizer import BETAS, decay_groups
from training.parallel.device import set_matrix_precision
from training.parallel.run import TrainingRun
from training.reports.pending import LateReport
from training.settings.config import Config
from training.settings.derived import make_model

FRACTION_GOAL = 0.45  # fraction of the matrix product's rate
VOCABULARY = 50304  # GPT-2's, padded to a multiple of 64
MATRIX_REPEATS = 10


class Ours:
    """A step of train.py on one rank."""

    def __init__(self, run: TrainingRun):
        self.run, self.inputs, self.iteration = run, run.inputs(), 0
        self.losses: list[float] = []
        self.report = LateReport(lambda metrics: self.losses.append(metrics.loss))

    def steps(self, number: int) -> float:
        """Run steps; return the last one's loss."""
        for _ in range(number):
            self.iteration += 1
            self.report.add(step(self.run, self.iteration, next(self.inputs)))
        self.report.flush()
        return self.losses[-1]


class Plain:
    """A step of a loop of torch alone.  Source: nanoGPT, train.py."""

    def __init__(self, run: TrainingRun):
        self.config, self.windows, self.iteration = run.config, run.windows, 0
        self.samples = run.samples.sample_indices(1)
        self.model = make_model(run.config, run.tokens.vocab_size).to(run.config.device)
        groups = decay_groups(self.model.parameters(), run.config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, run.config.lr, BETAS, fused=True)
        self.call: Any = torch.compile(self.model) if run.config.compile else self.model

    def steps(self, number: int) -> float:
        for _ in range(number):
            loss = self.step(next(self.samples))
        return float(loss)

    def step(self, indices: np.ndarray) -> torch.Tensor:
        config, self.iteration = self.config, self.iteration + 1
        tokens, targets = self.batch(indices)
        with self.autocast():
            loss = self.call(tokens, targets)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.iteration, config.lr, config.warmup_iters, config.max_iters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def autocast(self) -> Any:
        kind = self.config.device.partition(":")[0]
        half = self.config.dtype in HALVES
        return torch.autocast(kind, getattr(torch, self.config.dtype)) if half else nullcontext()

    def batch(self, indices: np.ndarray) -> Iterator[torch.Tensor]:
        for part in map(torch.from_numpy, self.windows.batch(indices)):
            yield part if self.config.device == "cpu" else part.pin_memory().to(self.config.device, non_blocking=True)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def steps_s(steps: Callable[[int], float], number: int, device: str) -> float:
    synchronize(device)
    begin = time.perf_counter()
    steps(number)
    synchronize(device)
    return (time.perf_counter() - begin) / number


def matrix_flops_per_s(length: int, dtype: torch.dtype, device: str) -> float:
    """Measure the FLOP/s of a square matrix product, by events on a device, by the clock on the CPU."""
    a, b = (torch.randn(length, length, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = [product_s(a, b, out) for _ in range(MATRIX_REPEATS + 2)]
    return 2 * length**3 / float(np.median(times[2:]))


def product_s(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> float:
    if not a.is_cuda:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.mm(a, b, out=out)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3  # milliseconds


def parse(size: int) -> argparse.Namespace:
    """Parse the command line.

    Raises: ValueError for invalid flags.
    """
    if size > 1:
        raise ValueError(f"this is of one rank, not of {size}: start it without mpirun")
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=[name for name in DTYPES if name != "float16"], default="bfloat16")
    parser.add_argument("--no_compile", action="store_true")
    parser.add_argument("--n_layer", type=positive, default=12)
    parser.add_argument("--n_head", type=positive, default=12)
    parser.add_argument("--n_embd", type=positive, default=768)
    parser.add_argument("--block_size", type=positive, default=1024)
    parser.add_argument("--vocab_size", type=positive, default=VOCABULARY, help="a multiple of 64, above 50257")
    parser.add_argument("--micro_batch_size", type=positive, default=32)
    parser.add_argument("--steps", type=positive, default=5, help="of a turn")
    parser.add_argument("--turns", type=positive, default=9)
    parser.add_argument("--matrix", type=positive, default=8192, help="rows of the matrices")
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    if args.vocab_size % 64 or args.vocab_size < VOCABULARY:
        raise ValueError(f"--vocab_size {args.vocab_size}: use a multiple of 64, {VOCABULARY} or above")
    return args


def config_of(args: argparse.Namespace, data: str) -> Config:
    names = "device", "dtype", "n_layer", "n_head", "n_embd", "block_size", "micro_batch_size"
    shape = {name: getattr(args, name) for name in names}
    steps = {"max_iters": args.steps * (args.turns + 1), "warmup_iters": 1, "lr": 6e-4}
    return Config(
        data=[data],
        token_dtype="uint16",
        vocab_size=args.vocab_size,
        out_dir="",
        compile=not args.no_compile,
        **steps,
        **shape,
    )


def make_data(args: argparse.Namespace, path: Path) -> None:
    """Make random tokens for some steps, with the largest token among them."""
    count = 8 * args.micro_batch_size * args.block_size
    tokens = np.random.default_rng(0).integers(args.vocab_size, size=count, dtype=np.uint16)
    tokens[0] = args.vocab_size - 1
    tokens.tofile(path)


def measure(run: TrainingRun, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure each contestant, after a turn that loads and compiles, and compares losses."""
    contestants = {"ours": Ours(run), "plain loop": Plain(run)}
    device, config = run.config.device, run.config
    losses = {name: one.steps(args.steps) for name, one in contestants.items()}
    rtol = 2e-2 if args.dtype in HALVES else 1e-4
    if not np.isclose(*losses.values(), rtol=rtol):
        raise SystemExit(f"losses differ after {args.steps} steps: {losses}")
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in progress_bar(range(args.turns), "turn"):
        for name, one in contestants.items():
            times[name].append(steps_s(one.steps, args.steps, device))
    rate = matrix_flops_per_s(args.matrix, getattr(torch, args.dtype), device)
    flops, num_tokens = flops_per_token(run.model.config, run.num_params), config.micro_batch_size * config.block_size
    return {name: figures(float(np.median(each)), num_tokens, flops, rate) for name, each in times.items()}


def figures(step_s: float, num_tokens: int, flops: int, rate: float) -> dict[str, float]:
    """Return the figures derived from a step's time, the FLOPs per token and the rate of matrix products.

    >>> figures(0.5, 1000, 10**9, 4e12)["fraction"]
    0.5
    """
    tokens_per_s = num_tokens / step_s
    flops_per_s = tokens_per_s * flops
    return {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": flops_per_s,
        "matrix_flops_per_s": rate,
        "fraction": flops_per_s / rate,
    }


def goals(results: dict[str, dict[str, float]]) -> list[str]:
    ours, plain = results["ours"], results["plain loop"]
    return [
        f"tokens/s {ours['tokens_per_s'] / plain['tokens_per_s']:.3f} times the plain loop's (goal: at least 1)",
        f"model FLOP/s {ours['fraction']:.1%} of the matrix rate (goal: at least {FRACTION_GOAL:.0%})",
    ]


def main() -> None:
    comm = collectives.world()
    with comm.agreed("gpt2"):
        args = parse(comm.size)
    set_matrix_precision(args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        make_data(args, Path(folder) / "tokens.bin")
        run = TrainingRun(config_of(args, f"{folder}/tokens.bin"), comm)
        results = measure(run, args)
    names = ["step, ms", "tokens/s", "model TFLOP/s", "matrix TFLOP/s", "fraction"]
    units = [1, 1, 1e12, 1e12, 1]
    rows = [[n, *(f"{v / unit:.3f}" for v, unit in zip(f.values(), units, strict=True))] for n, f in results.items()]
    print(table(["", *names], rows))
    print("\n".join(goals(results)))
    if args.output:
        kind = torch.cuda.get_device_name(run.config.device) if run.config.device != "cpu" else "cpu"
        write(args.output, results, **{**vars(args), "device": kind})


if __name__ == "__main__":
    main()
