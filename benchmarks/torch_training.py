"""Compare torch's DDP and FSDP2 over these collectives with gloo, in one run: step time and exposed communication.

    python benchmarks/torch_training.py --ranks 2 4 --out torch-training.md
    mpirun -n 2 python benchmarks/torch_training.py --output torch-training-2.json

The first command starts the second on these numbers of ranks, one job after another, and writes a table.  Times are
those of the slowest rank, medians of rounds in which the contestants alternate.  "exposed" is the step less one
without communication: DDP with a hook that omits the all_reduce, or for FSDP2 the plain model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.result_files import output, write
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from collectives.job.settings import Parser, positive
from models.config import ModelConfig
from models.decoder import Decoder, TransformerBlock

BACKENDS = ("collectives", "gloo")
GOAL = 0.35  # fraction of gloo's exposed communication
TITLES = ("ranks", "", "alone, ms", "collectives", "gloo", "exposed", "gloo's", "exposed, of gloo's")


@dataclass
class Times:
    """Milliseconds of a step without communication, and of one over each backend."""

    alone_ms: float
    collectives_ms: float
    gloo_ms: float
    collectives_exposed_ms: float
    gloo_exposed_ms: float

    @property
    def ratio(self) -> float:
        """Ratio of our exposed communication to gloo's.

        >>> Times(10, 12, 14, 1, 4).ratio
        0.25
        """
        return self.collectives_exposed_ms / self.gloo_exposed_ms


def main() -> None:
    args = parse()
    if args.ranks:
        text = table({ranks: start(ranks, sys.argv[1:]) for ranks in args.ranks})
        print(text)
        if args.out:
            args.out.write_text(text + "\n")
        return
    import collectives.torch_backend  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("collectives")
    results = compare(args)
    if dist.get_rank() == 0:
        print(table({dist.get_world_size(): results}), flush=True)
        if args.output:
            write(args.output, {name: asdict(times) for name, times in results.items()}, **vars(args))
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=positive, nargs="+", default=[], help="numbers of ranks to start jobs of")
    parser.add_argument("--out", type=output, help="write the table of these jobs as Markdown")
    parser.add_argument("--output", type=output, help="write the numbers of this job as JSON")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--n_layer", type=positive, default=4)
    parser.add_argument("--n_head", type=positive, default=4)
    parser.add_argument("--n_embd", type=positive, default=256)
    parser.add_argument("--seq", type=positive, default=128, help="tokens of a sequence")
    return parser.parse_args()


def start(ranks: int, words: list[str]) -> dict[str, Times]:
    """Run a job with the same flags, except for those of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = ["mpirun", "-n", str(ranks), sys.executable, __file__, *own(words), "--output", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads(path.read_text())["results"]
    return {name: Times(**times) for name, times in results.items()}


def own(words: list[str]) -> list[str]:
    """Return the flags without those of the table.

    >>> own(["--ranks", "2", "4", "--rounds", "3", "--out", "a.md"])
    ['--rounds', '3']
    """
    rest, flag = [], ""
    for word in words:
        flag = word if word.startswith("--") else flag
        rest += [word] * (flag not in ("--ranks", "--out"))
    return rest


def table(jobs: dict[int, dict[str, Times]]) -> str:
    """Format the times as Markdown.

    >>> print(table({2: {"DDP": Times(10, 12, 14, 1, 4)}}).splitlines()[-3])
    | 2 | DDP | 10.0 | 12.0 | 14.0 | 1.0 | 4.0 | 0.25 |
    """
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for ranks, results in jobs.items():
        for name, times in results.items():
            numbers = " | ".join(f"{milliseconds:.1f}" for milliseconds in asdict(times).values())
            lines.append(f"| {ranks} | {name} | {numbers} | {times.ratio:.2f} |")
    return "\n".join([*lines, "", f"The goal is at most {GOAL} of what gloo's communication takes that shows."])


def compare(args: argparse.Namespace) -> dict[str, Times]:
    """Train each model over each backend, in turn."""
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    config = ModelConfig(n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd, block_size=args.seq)
    results = {}
    for name, wrap, silent in (("DDP", wrap_ddp, silent_ddp), ("FSDP2", wrap_fsdp2, lambda model, _: model)):
        models = [silent(Decoder(config), groups["gloo"]), *(wrap(Decoder(config), group) for group in groups.values())]
        alone, *trainings = (Training(model, args.seq) for model in models)
        for _ in range(1 + args.rounds):
            for training in (alone, *trainings):
                training.step()
        seconds = [t.median_s() for t in (alone, *trainings)] + [t.median_s(less=alone) for t in trainings]
        results[name] = Times(*(1e3 * each for each in seconds))
    return results


def wrap_ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


def silent_ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    """Wrap a model in a DDP that omits the all_reduce, but not its copies to and from buckets."""
    ddp = wrap_ddp(model, group)
    ddp.register_comm_hook(None, leave_bucket)
    return ddp


def leave_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def wrap_fsdp2(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in [module for module in model.modules() if isinstance(module, TransformerBlock)]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Training:
    """Steps of one model, with the slowest rank's seconds of each."""

    def __init__(self, model: torch.nn.Module, seq: int):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        self.tokens = torch.randint(0, 256, (2, seq + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
        self.steps_s: list[float] = []

    def step(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        _, loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_s.append(slowest(time.perf_counter() - start))

    def median_s(self, less: "Training | None" = None) -> float:
        """Return the median of all steps but the first, minus the same round's time of another training."""
        others_s = less.steps_s if less else [0.0] * len(self.steps_s)
        return statistics.median(own - other for own, other in list(zip(self.steps_s, others_s, strict=True))[1:])


def slowest(time_s: float) -> float:
    times = torch.tensor([time_s], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.item()


if __name__ == "__main__":
    main()
