"""Compare a training step without dropout, with torch's, and with ours, whose masks do not depend on the layout.

    OMP_NUM_THREADS=1 python benchmarks/dropout.py --output benchmarks/results/dropout.json

Forward and backward pass of a GPT on one rank; all ways alternate, and times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.result_files import output, table, write

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.numerics.dropout import BatchPosition
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import plan_of


def step_of(args: argparse.Namespace, dropout: float, ours: bool, comm: collectives.Communicator) -> Callable[[], None]:
    """Build a model; return a function that computes its loss and gradients."""
    shape = {"n_layer": args.n_layer, "n_head": args.n_head, "n_embd": args.n_embd, "block_size": args.block_size}
    model = Decoder(ModelConfig(vocab_size=256, dropout=dropout, bias=False, **shape))
    tokens = torch.randint(0, 256, (args.micro_batch_size, args.block_size))
    if ours:
        position = BatchPosition(1, torch.arange(args.micro_batch_size))
        parallelize(model, plan_of(model.config), comm, place=position)

    def step() -> None:
        model.zero_grad()
        _, loss = model(tokens, tokens)
        loss.backward()

    return step


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    for name, default in (("n_layer", 4), ("n_head", 4), ("n_embd", 192), ("block_size", 128), ("micro_batch_size", 8)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--repeats", type=positive, default=31)
    parser.add_argument("--output", type=output, default=Path("dropout.json"))
    return parser.parse_args()


def main() -> None:
    args, comm = arguments(), collectives.world()
    ways = {"none": (0.0, True), "torch's": (args.dropout, False), "ours": (args.dropout, True)}
    steps = {name: step_of(args, *way, comm) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in progress_bar(range(args.repeats + 1), "round", comm.rank):
        for name, step in steps.items():
            begin_s = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first one warms up
    results = {name: {"step_ms": 1e3 * s, "beside none": s / medians["none"]} for name, s in medians.items()}
    rows = [[name, f"{row['step_ms']:.1f}", f"{row['beside none']:.2f}"] for name, row in results.items()]
    print(table(["dropout", "step ms", "beside none"], rows))
    write(args.output, results, threads=torch.get_num_threads(), **vars(args))


if __name__ == "__main__":
    main()
