"""Compare a step of train.py on one rank with plain torch loops, for a GPT-2 and a Llama.

    OMP_NUM_THREADS=1 python benchmarks/training_step.py --output benchmarks/results/training-step.json

"train.py" fetches its batch, computes, clips, updates and reads its numbers.  A plain loop does the same on a prepared
batch: "same kernels" with this project's fused passes and AdamW, "torch's" with torch's own.  All alternate in turns of
several steps, the first of which, with cold caches, do not count; times are medians, speeds those of train.py relative
to the others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from helpers.result_files import output, table, write

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.decoder import Decoder
from training.loop import step
from training.optim.optimizer import adamw, decay_groups
from training.parallel.decoder import fuse
from training.parallel.run import TrainingRun
from training.settings.config import Config
from training.settings.derived import make_model

BETAS = (0.9, 0.95)
WARM_UP, STEPS = 2, 8  # steps per turn


def train_py_step(run: TrainingRun) -> Callable[[], float]:
    """Return a function that runs the next step of a run and returns its loss."""
    steps = enumerate(run.inputs(), run.first)

    return lambda: step(run, *next(steps)).metrics().loss


def plain(model: Decoder, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable:
    def step() -> float:
        for param in model.parameters():
            param.grad = None
        loss = model(*batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def ways(config: Config, run: TrainingRun) -> dict[str, Callable[[], float]]:
    with closing(run.inputs()) as inputs:
        batch = next(inputs)[0]
    mine, torchs = (make_model(config, run.tokens.vocab_size) for _ in range(2))
    fuse(mine)
    groups = decay_groups(list(torchs.parameters()), config.weight_decay)
    own = adamw(list(mine.parameters()), config.lr, config.weight_decay, BETAS, config.eps)
    theirs = torch.optim.AdamW(groups, config.lr, BETAS, config.eps, fused=True)
    both = batch.tokens, batch.targets
    return {
        "train.py": train_py_step(run),
        "same kernels": plain(mine, own, both),
        "torch's": plain(torchs, theirs, both),
    }


def step_s(step: Callable[[], float]) -> float:
    begin_s = time.perf_counter()
    step()
    return time.perf_counter() - begin_s


def measure(config: Config, comm: collectives.Communicator, turns: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each way, and the relative speed of train.py."""
    with ExitStack() as stack:
        steps = ways(config, stack.enter_context(TrainingRun(config, comm)))
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in progress_bar(range(turns), "turn"):
            for name, step in steps.items():
                times[name] += [step_s(step) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: {"step_ms": 1e3 * s, "train.py beside it": s / medians["train.py"]} for name, s in medians.items()}


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    for name, default in (("n_layer", 4), ("n_head", 4), ("n_embd", 128), ("block_size", 128), ("micro_batch_size", 8)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--turns", type=positive, default=15)
    parser.add_argument("--output", type=output, default=Path("training-step.json"))
    return parser.parse_args()


def main() -> None:
    args, comm = arguments(), collectives.world()
    torch.set_num_threads(1)
    shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "micro_batch_size")}
    results, rows = {}, []
    for model in ("gpt2", "llama"):
        config = Config(model=model, max_iters=args.turns * (WARM_UP + STEPS), out_dir="", **shape)
        results[model] = measure(config, comm, args.turns)
        for name, row in results[model].items():
            rows.append([model, name, f"{row['step_ms']:.1f}", f"{row['train.py beside it']:.2f}"])
    print(table(["model", "loop", "step ms", "train.py beside it"], rows))
    write(args.output, results, **vars(args))


if __name__ == "__main__":
    main()
