"""Compare our data parallelism and ZeRO with torch's DDP and FSDP2 over gloo, in one run.

    mpirun -n 2 python benchmarks/zero.py --output benchmarks/results/zero-openmpi-2.json

A step is a forward and a backward pass of one GPT, with a different batch on each rank, and AdamW's update.  Before
anything is timed, the losses of each contestant's first steps are compared with those of one process that has all
batches.

"memory" is the peak increase of a process's memory during its first steps, since before the model was built: the mean
over the ranks, with a rank's part of shared memory, and without mapped files such as programs.  Contestants are
measured one after another.  Linux with glibc only.

Contestants then alternate, round by round, and so does the computation alone of each: a plain model's passes on every
rank at once, and the update of all of it or, if the update is sharded, of a rank's shard.  Times are medians of the
slowest rank; exposed communication is the median of a round's step less its computation alone.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from helpers import torch_data_parallel
from helpers.contestants import Contestant
from helpers.data_parallel_variants import Way, adamw, data_parallel, zero
from helpers.result_files import output, table, write
from memory import process_mib, settled_mib, shared_by_others_mib
from peers import MPI, start_torch
from torch import Tensor, nn

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.config import ModelConfig
from models.decoder import Decoder
from training.settings.derived import checked

RTOL = 1e-4  # float32 sums differ in order
NUM_CHECKED = 4  # steps


class Contest:
    """All contestants, on one model and one batch per rank."""

    def __init__(self, comm: collectives.Communicator, config: ModelConfig, batch: int):
        draws = torch.Generator().manual_seed(0)
        shape = comm.size, batch, config.block_size
        self.tokens, self.targets = (torch.randint(config.vocab_size, shape, generator=draws) for _ in range(2))
        self.comm, self.config = comm, config
        self.ways: dict[str, Callable[[Decoder], Way]] = {
            "DataParallel: ours": lambda gpt: data_parallel(gpt, comm),
            "DDP: torch": torch_data_parallel.ddp,
            **{f"ZeRO {stage}: ours": partial(zero, comm=comm, zero_stage=stage) for stage in (1, 2, 3)},
            "FSDP2: torch": torch_data_parallel.fsdp2,
        }

    def way(self, name: str) -> Way:
        """Construct a contestant, with this rank's batch.  Collective."""
        return self.with_batch(self.ways[name](Decoder(self.config)))

    def alone(self, name: str) -> Way:
        """Construct a contestant's computation without its communication."""
        shards_update = name.startswith(("ZeRO", "FSDP2"))
        return self.with_batch(Alone(Decoder(self.config), self.comm.size if shards_update else 1))

    def with_batch(self, way: Way) -> Way:
        way.batch = self.tokens[self.comm.rank], self.targets[self.comm.rank]
        return way

    def losses(self) -> list[float]:
        """Return the first steps' losses of one process that has all batches."""
        one = Alone(Decoder(self.config))
        one.batch = self.tokens.flatten(0, 1), self.targets.flatten(0, 1)
        return [float(train_step(one)) for _ in range(NUM_CHECKED)]

    def memory(self) -> dict[str, float]:
        """Return the MiB of each contestant."""
        expected = self.losses()
        return {name: self.memory_of(name, expected) for name in self.ways}

    def memory_of(self, name: str, expected: list[float]) -> float:
        """Measure the memory of first steps, and compare their losses with those of one process.

        Raises: SystemExit with the difference.
        """
        before = settled_mib() - uncounted_mib()
        way = self.way(name)
        settled_mib()
        losses = [MPI.COMM_WORLD.allreduce(float(train_step(way))) / self.comm.size for _ in expected]
        if not np.allclose(losses, expected, rtol=RTOL):
            message = f"{name}: losses are {losses}, those of one process {expected}"
            raise SystemExit(1 if self.comm.rank else message)
        return MPI.COMM_WORLD.allreduce(process_mib("VmHWM") - uncounted_mib() - before) / self.comm.size


def uncounted_mib() -> float:
    """Return the MiB of this process that belong to others or to files."""
    return shared_by_others_mib() + process_mib("RssFile")


def train_step(way: Way) -> Tensor:
    """Run a step from cleared gradients; return its loss."""
    way.model.zero_grad()
    return way.step()


class Alone(Way):
    """Computation of a step: the whole model's passes, and the update of one of `num_shards` shards."""

    def __init__(self, gpt: Decoder, num_shards: int = 1):
        self.num_shards = num_shards
        self.shards = {param: nn.Parameter(self.shard(param.data)) for param in gpt.parameters()}
        super().__init__(gpt, adamw(self.shards.values()), self.update_shard)

    def shard(self, x: Tensor) -> Tensor:
        return x.view(-1)[: -(-x.numel() // self.num_shards)]

    def update_shard(self) -> None:
        for param, own in self.shards.items():
            own.grad = self.shard(param.grad)
        self.optimizer.step()


def parse() -> tuple[argparse.Namespace, ModelConfig]:
    """Parse the flags; return them and the model's config."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=positive, default=6)
    parser.add_argument("--n_head", type=positive, default=5)
    parser.add_argument("--n_embd", type=positive, default=320)
    parser.add_argument("--vocab_size", type=positive, default=8192)
    parser.add_argument("--seq", type=positive, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=positive, default=1, help="sequences of a rank and step")
    parser.add_argument("--repeats", type=positive, default=21)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return args, checked(ModelConfig(block_size=args.seq, **shape))


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("zero"):
        args, config = parse()
    start_torch(MPI.COMM_WORLD, "gloo", alone=True)
    Contest(comm, replace(config, n_layer=1, n_embd=2 * config.n_head), args.batch).memory()  # warm-up
    contest = Contest(comm, config, args.batch)
    memory_mib = contest.memory()
    contestants = {name: Contestant(contest.way(name), contest.alone(name)) for name in contest.ways}
    for _ in progress_bar(range(args.repeats + 1), "round", comm.rank):
        for contestant in contestants.values():
            contestant.round()
    num_tokens = comm.size * args.batch * args.seq
    figures = {name: c.figures(num_tokens) | {"memory_mib": memory_mib[name]} for name, c in contestants.items()}
    if comm.rank == 0:
        rows = [[name, *(f"{value:.1f}" for value in values.values())] for name, values in figures.items()]
        print(table(["", "tokens/s", "step, ms", "computing, ms", "exposed, ms", "memory, MiB"], rows))
        if args.output:
            write(args.output, figures, **vars(args))
    comm.barrier()


if __name__ == "__main__":
    main()
