"""Compare our tensor and sequence parallelism with torch's (DTensor plans) and DeepSpeed's (Ulysses), in one run.

    mpirun -n 2 python benchmarks/tensor_parallel.py --output benchmarks/results/tensor-parallel-openmpi-2.json

A step is the forward and the backward pass of one GPT on one batch, without an optimizer, and without the sums of
weight gradients over ranks that split a sequence, which belong to data parallelism.  The peers use gloo.  Before
anything is timed, every contestant's loss and gradients are compared with those of the plain model.

Contestants alternate, round by round, and so does the computation alone of each: the same step with collectives that
return at once.  Ours return the first result of their shape; the peers' use torch's "fake" process group.  Times are
medians of the slowest rank; exposed communication is the median of a round's step less its computation.

DeepSpeed is not among the project's dependencies: pip install deepspeed.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from helpers import tensor_parallel_peers
from helpers.contestants import Contestant
from helpers.result_files import output, table, write
from peers import MPI, start_torch
from torch import Tensor

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.buffers.tensor_collectives import TensorCollectives
from parallelism.placement import shards_of
from parallelism.sequence.sequence_parallel import SequenceParallel
from parallelism.sequence.token_shards import TokenShards
from parallelism.tensor.sharding_plan import parallelize
from training.parallel.decoder import plan_of
from training.settings.derived import checked

RTOL = 1e-4  # float32 sums differ in order


class Ours:
    """A GPT split over `tp` ranks, or with sequences split over `sp` ranks."""

    def __init__(
        self,
        model: Decoder,
        tp: Any,
        tokens: Tensor,
        targets: Tensor,
        sp: SequenceParallel | None = None,
        sequence=False,
    ):
        config = model.config
        parallelize(model, plan_of(config), tp, sp, sequence)
        self.model, self.sp = model, sp
        self.positions = sp.positions(tokens.shape[1]) if sp else None
        self.tokens, self.targets = (sp.own(x) if sp else x for x in (tokens, targets))

    def step(self) -> Tensor:
        _, loss = self.model(self.tokens, self.targets, self.positions)
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Return the rank's shards of gradients, or their means over the ranks that split sequences."""
        mean = tensor_parallel_peers.mean_over_ranks if self.sp else (lambda x: x)
        return {name: mean(p.grad) for name, p in self.model.named_parameters()}


class Over(NamedTuple):
    """A completed collective."""

    result: Tensor

    def wait(self) -> Tensor:
        return self.result


class Silence:
    """Context in which collectives return at once, with the first result of their shape."""

    def __init__(self):
        self.results: dict[tuple, Tensor] = {}
        self.run = TensorCollectives.run

    def result(self, exchange: TensorCollectives, collective: str, x: Tensor, **arguments: Any) -> Tensor:
        key = exchange, collective, x.shape, x.dtype, *arguments.values()
        if key not in self.results:
            self.results[key] = self.run(exchange, collective, x, **arguments)
        return self.results[key].detach()  # a new tensor, with no place in a graph

    @contextmanager
    def __call__(self) -> Iterator[None]:
        def run(exchange: TensorCollectives, *args: Any, **arguments: Any) -> Tensor:
            return self.result(exchange, *args, **arguments)

        def start(exchange: TensorCollectives, *args: Any, **arguments: Any) -> Over:
            return Over(self.result(exchange, *args, **arguments))

        with mock.patch.multiple(TensorCollectives, run=run, start=start):
            yield


class Contest:
    """All contestants, on one model and one batch."""

    def __init__(self, comm: collectives.Communicator, config: ModelConfig, batch: int):
        draws = torch.Generator().manual_seed(0)
        shape = batch, config.block_size
        self.batch = tuple(torch.randint(config.vocab_size, shape, generator=draws) for _ in range(2))
        self.comm, self.config = comm, config

    def tensor_parallel(self) -> dict[str, Contestant]:
        contestants = {}
        for name, sequence in (("tp", False), ("tp, sequence-parallel", True)):
            ours = Ours(self.model(), self.comm, *self.batch, sequence=sequence)
            contestants[f"{name}: ours"] = Contestant(ours, ours, Silence())
            theirs = [self.torch(group, sequence) for group in tensor_parallel_peers.groups()]
            contestants[f"{name}: torch"] = Contestant(*theirs)
        return contestants

    def sequence_parallel(self, with_deepspeed: bool) -> dict[str, Contestant]:
        contestants, alone = {}, self.comm.split(self.comm.rank)
        for mode in ("ring", "ulysses", "hybrid"):
            sp = SequenceParallel(self.comm, mode, "contiguous" if mode == "ulysses" else "zigzag")
            ours = Ours(self.model(), alone, *self.batch, sp)
            contestants[f"sp, {mode}: ours"] = Contestant(ours, ours, Silence())
        if with_deepspeed:
            theirs = [
                tensor_parallel_peers.DeepSpeedUlysses(self.model(), g, *self.batch)
                for g in tensor_parallel_peers.groups()
            ]
            contestants["sp, ulysses: DeepSpeed"] = Contestant(*theirs)
        return contestants

    def model(self) -> Decoder:
        return Decoder(self.config)

    def torch(self, group: Any, sequence: bool) -> tensor_parallel_peers.TorchTensorParallel:
        return tensor_parallel_peers.TorchTensorParallel(self.model(), group, sequence, *self.batch)

    def check(self, contestants: dict[str, Contestant]) -> None:
        """Compare loss and gradients with the plain model's.

        Raises: SystemExit with the difference.
        """
        plain = self.model()
        _, expected_loss = plain(*self.batch)
        expected_loss.backward()
        ours = dict(contestants["tp: ours"].talking.model.named_parameters())
        for name, contestant in contestants.items():
            same(f"{name}: the loss", contestant.talking.step(), expected_loss.detach())
            gradients = contestant.talking.gradients()
            for parameter, whole in plain.named_parameters():
                actual, expected = gradients[parameter], whole.grad
                if actual.shape != expected.shape:
                    expected = shards_of(ours[parameter])["tp"].local(expected, self.comm.rank, self.comm.size)
                same(f"{name}: the gradient of {parameter}", actual, expected)


def same(what: str, actual: Tensor, expected: Tensor) -> None:
    error = float((actual - expected).abs().max() / expected.abs().max())
    worst = MPI.COMM_WORLD.allreduce(error, MPI.MAX)
    if not worst < RTOL:
        sys.exit(f"{what} is off by {worst:.1e} of the plain model's" if MPI.COMM_WORLD.rank == 0 else 1)


def parse(size: int) -> tuple[argparse.Namespace, ModelConfig]:
    """Parse the flags; return them and the model's config.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=positive, default=4)
    parser.add_argument("--n_head", type=positive, default=8)
    parser.add_argument("--n_embd", type=positive, default=256)
    parser.add_argument("--vocab_size", type=positive, default=4096)
    parser.add_argument("--seq", type=positive, default=512, help="tokens of a sequence")
    parser.add_argument("--batch", type=positive, default=2, help="sequences of a step")
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    TokenShards(args.seq, size).check()
    if args.vocab_size % size:
        raise ValueError(f"--vocab_size {args.vocab_size} can't be split over {size} ranks by torch: use a multiple")
    shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return args, checked(ModelConfig(block_size=args.seq, **shape))


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("tensor_parallel"):
        args, config = parse(comm.size)
    start_torch(MPI.COMM_WORLD, "gloo", alone=True)
    contest = Contest(comm, config, args.batch)
    with_deepspeed = tensor_parallel_peers.start_deepspeed()
    if not with_deepspeed and comm.rank == 0:
        print("DeepSpeed is not here: ours have no peer in sequence parallelism (pip install deepspeed)")
    contestants = contest.tensor_parallel() | contest.sequence_parallel(with_deepspeed)
    contest.check(contestants)
    for _ in progress_bar(range(args.repeats + 1), "round", comm.rank):
        for contestant in contestants.values():
            contestant.round()
    figures = {name: c.figures(args.batch * args.seq) for name, c in contestants.items()}
    if comm.rank == 0:
        rows = [[name, *(f"{value:.1f}" for value in values.values())] for name, values in figures.items()]
        print(table(["", "tokens/s", "step, ms", "computing, ms", "exposed, ms"], rows))
        if args.output:
            write(args.output, figures, **vars(args))
    comm.barrier()


if __name__ == "__main__":
    main()
