"""Our data parallelism and ZeRO beside torch's DDP and FSDP2 over gloo, in one run.

    mpirun -n 2 python benchmarks/sharing.py --output benchmarks/results/sharing-openmpi-2.json

A step is a forward and a backward pass of one GPT, each rank's on a batch of its own, and AdamW's update.  Before
anything is timed, the losses of each contestant's first steps are compared with those of one process that has all
batches.

"memory" is how much more a process has, at the highest moment of its first steps, than before the model was made; of
memory that ranks share, each is counted its part.  The contestants are there one after the other for this, and have
trained a small model before, so that what is loaded at first is not counted.  Linux with glibc only.

Contestants then take turns, round by round.  So does the computing alone: a plain model's passes on every rank at
once, and the update of the whole of it or, beside ways that share the update, of a rank's share.  Times are of the
slowest rank, and medians; exposed communication is the median of a round's step less its computing alone.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import sharing_peers
import torch
from document import output, table, write
from memory import LIBC, M_MMAP_THRESHOLD, of_others, of_process, settled
from peers import MPI, start_torch
from sharing_ways import Alone, Replicated, Shared, Way, make_optimizer
from torch import Tensor, distributed

import collectives
from collectives.bench.flags import Parser, positive
from models.gpt import GPT, GPTConfig

RTOL = 1e-4  # of float32's sums in another order
NUM_CHECKED = 4  # steps
REPLICATED = ("DataParallel", "DDP")
ALONE, ALONE_SHARED = "computing alone", "computing alone, update shared"
Batch = tuple[Tensor, Tensor]


class Contest:
    """All contestants, on one model and one batch a rank."""

    def __init__(self, comm: collectives.Communicator, config: GPTConfig, batch: int):
        draws = torch.Generator().manual_seed(0)
        shape = comm.size, batch, config.block_size
        self.tokens, self.targets = (torch.randint(config.vocab_size, shape, generator=draws) for _ in range(2))
        self.comm, self.config = comm, config

    def makers(self) -> dict[str, Callable[[], Way]]:
        ways: dict[str, Callable[[], Way]] = {
            "DataParallel: ours": lambda: Replicated(self.gpt(), self.comm),
            "DDP: torch": lambda: sharing_peers.ddp(self.gpt(), distributed.new_group(), make_optimizer),
        }
        ways |= {f"ZeRO {stage}: ours": partial(self.shared, stage) for stage in (1, 2, 3)}
        ways["FSDP2: torch"] = lambda: sharing_peers.fsdp2(self.gpt(), distributed.new_group(), make_optimizer)
        return ways

    def shared(self, zero_stage: int) -> Way:
        return Shared(self.gpt(), self.comm, zero_stage)

    def gpt(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.config)

    @property
    def batch(self) -> Batch:
        return self.tokens[self.comm.rank], self.targets[self.comm.rank]

    def losses(self) -> list[float]:
        """Of the first steps of one process."""
        one = Alone(self.gpt())
        whole = self.tokens.flatten(0, 1), self.targets.flatten(0, 1)
        return [float(one.step(*whole)) for _ in range(NUM_CHECKED)]

    def memory(self, name: str, make: Callable[[], Way], wanted: list[float]) -> float:
        """MiB of the rank that has most, in first steps that are compared with those of one process.

        Raises: SystemExit with what differs.
        """
        before = settled() - of_others()
        way = make()
        settled()
        losses = [MPI.COMM_WORLD.allreduce(float(way.step(*self.batch))) / self.comm.size for _ in wanted]
        if not np.allclose(losses, wanted, rtol=RTOL):
            message = f"{name}: losses are {losses}, those of one process {wanted}"
            raise SystemExit(1 if self.comm.rank else message)
        return MPI.COMM_WORLD.allreduce(of_process("VmHWM") - of_others() - before, MPI.MAX)


def memory(contest: Contest) -> dict[str, float]:
    """MiB of each contestant, where what is freed goes back at once."""
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    wanted = contest.losses()
    found = {name: contest.memory(name, make, wanted) for name, make in contest.makers().items()}
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # to where glibc raises it by itself
    return found


class Timing:
    """A contestant's seconds, round by round."""

    def __init__(self, way: Way):
        self.way = way
        self.seconds: list[float] = []

    def round(self, batch: Batch) -> None:
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        self.way.step(*batch)
        self.seconds.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))

    def ms(self, less: "Timing | None" = None) -> float:
        """The median of the rounds but the first."""
        taken = less.seconds if less else [0.0] * len(self.seconds)
        return 1e3 * median(own - other for own, other in list(zip(self.seconds, taken, strict=True))[1:])


def figures(timings: dict[str, Timing], memory_mib: dict[str, float], num_tokens: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, mib in memory_mib.items():
        alone = timings[ALONE if name.split(":")[0] in REPLICATED else ALONE_SHARED]
        step_ms = timings[name].ms()
        found[name] = {
            "tokens_per_s": 1e3 * num_tokens / step_ms,
            "step_ms": step_ms,
            "computing_ms": alone.ms(),
            "exposed_ms": timings[name].ms(less=alone),
            "memory_mib": mib,
        }
    return found


def parse() -> tuple[argparse.Namespace, GPTConfig]:
    """Flags, and the model."""
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
    return args, GPTConfig(block_size=args.seq, **shape)


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("sharing"):
        args, config = parse()
    start_torch(MPI.COMM_WORLD, "gloo", alone=True)
    contest = Contest(comm, config, args.batch)
    memory(Contest(comm, replace(config, n_layer=1, n_embd=2 * config.n_head), args.batch))
    memory_mib = memory(contest)
    timings = {ALONE: Timing(Alone(contest.gpt())), ALONE_SHARED: Timing(Alone(contest.gpt(), comm.size))}
    timings |= {name: Timing(make()) for name, make in contest.makers().items()}
    for _ in range(args.repeats + 1):
        for timing in timings.values():
            timing.round(contest.batch)
    if comm.rank == 0:
        results = figures(timings, memory_mib, comm.size * args.batch * args.seq)
        rows = [[name, *(f"{value:.1f}" for value in row.values())] for name, row in results.items()]
        print(table(["", "tokens/s", "step, ms", "computing, ms", "exposed, ms", "memory, MiB"], rows))
        if args.output:
            write(args.output, results, **vars(args))
    comm.barrier()


if __name__ == "__main__":
    main()
