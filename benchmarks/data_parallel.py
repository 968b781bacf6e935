"""Compare variants of data parallelism: bytes, memory and time of each to train the same GPT.

    mpirun -n 4 python benchmarks/data_parallel.py --output ways.json --picture ways.png

Every rank computes a part of a batch.  A parameter server gathers all gradients, updates the parameters and broadcasts
them; an all-reduce at the end needs no server; in buckets it overlaps with the backward pass; a hierarchical one runs
within groups and across them; ZeRO's stages shard optimizer states, gradients and parameters.  Before anything is
timed, the parameters after two steps are compared with those of plain training on the whole batch.

All communicate by messages, as between machines.  "busiest" is the largest number of bytes that a rank sends and
receives in a step, counted from the schedules; formulas are in `benchmarks/helpers/zero_bytes.py`.  ZeRO stage 3
keeps the last two blocks from the forward to the backward pass, and so sends less than its formula.  "out of a group"
counts the bytes that leave one half of the ranks, as if that were a node.

"held" are parameters, gradients and optimizer states between steps, "peak" is the largest increase of a rank's memory
since before the model was built; both for the rank with most.  Linux with glibc only.

Contestants alternate, round by round, and so does the computation alone of each: the same step with collectives that
return at once.  Times are medians of the slowest rank; exposed communication is a round's step less its computation.
"""

import argparse
import math
import os
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from helpers.contestants import Contestant
from helpers.data_parallel_picture import picture
from helpers.data_parallel_variants import WAYS, Kind, Way, adamw
from helpers.result_files import output, table, write
from helpers.traffic import MessageCommunicator, Traffic
from memory import LIBC, M_MMAP_THRESHOLD, MIB, process_mib, settled_mib
from peers import MPI
from torch import Tensor

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from collectives.schedule import draw
from models.config import ModelConfig
from models.decoder import Decoder
from parallelism.data.buckets import num_bytes
from parallelism.data.loop import TrainedModule
from training.settings.derived import checked

RTOL = 1e-3  # relative to the change by training, as float32 sums differ in order
CHECKED = 2  # steps
TITLES = {
    "busiest_mib": "busiest, MiB",
    "busiest_formula_mib": "formula",
    "out_of_group_mib": "out of a group",
    "held_mib": "held, MiB",
    "held_formula_mib": "formula",
    "peak_mib": "peak",
    "step_ms": "step, ms",
    "computing_ms": "computing",
    "exposed_ms": "exposed",
}


class Entry:
    """One way on this rank: checked and measured on construction, then timed.  Collective."""

    def __init__(self, name: str, kind: Kind, contest: "Contest"):
        self.kind, self.contest = kind, contest
        self.comm, before = MessageCommunicator(contest.comm), settled_mib()
        self.gpt = Decoder(contest.config)
        self.way: Way = kind.make(self.gpt, self.comm, contest.bucket_mb)
        self.way.batch = contest.own_batch()
        settled_mib()
        for _ in range(CHECKED):
            self.way.model.zero_grad()
            self.comm.traffic = Traffic()
            self.way.step()
        self.traffic, self.peak_mib = self.comm.traffic, process_mib("VmHWM") - before
        contest.check(name, self.parameters())
        self.contestant = Contestant(self.way, self.way, self.comm.silence)

    def parameters(self) -> dict[str, Tensor]:
        with self.way.model.replica.whole() if isinstance(self.way.model, TrainedModule) else nullcontext():
            return {name: p.detach().clone() for name, p in self.gpt.named_parameters()}

    def figures(self) -> dict[str, Any]:
        """Return the figures of the busiest rank, or of the one with the most memory.  Collective."""
        comm, num_params = self.contest.comm, self.contest.num_params
        groups = np.zeros(comm.size)
        groups[self.comm.group[0]] = self.traffic.beyond
        nbytes = self.way.held()
        mine = np.array([self.traffic.through, nbytes.total, *nbytes, self.peak_mib * MIB])
        through, total, parameters, gradients, states, peak = comm.all_reduce(mine, op="max") / MIB
        mib = {
            "busiest_mib": through,
            "busiest_formula_mib": self.kind.through(4 * num_params, comm.size) / MIB,
            "out_of_group_mib": comm.all_reduce(groups).max() / MIB,
            "held_mib": total,
            "held_formula_mib": self.kind.held(num_params, comm.size).total / MIB,
            "parameters_mib": parameters,
            "gradients_mib": gradients,
            "states_mib": states,
            "peak_mib": peak,
        }
        return {name: float(value) for name, value in mib.items()} | self.contestant.figures(self.contest.num_tokens)


class Contest:
    """All ways, on one model and one batch."""

    def __init__(self, comm: collectives.Communicator, args: argparse.Namespace, config: ModelConfig):
        self.comm, self.config, self.bucket_mb = comm, config, args.bucket_mb
        draws, shape = torch.Generator().manual_seed(0), (comm.size * args.batch, config.block_size)
        self.batch = tuple(torch.randint(config.vocab_size, shape, generator=draws) for _ in range(2))
        self.num_tokens = self.batch[0].numel()
        self.start = {name: p.detach().clone() for name, p in Decoder(config).named_parameters()}
        self.wanted = self.plain()
        self.num_params = sum(p.numel() for p in self.wanted.values())

    def own_batch(self) -> tuple[Tensor, ...]:
        """Return the rank's samples."""
        return tuple(x.chunk(self.comm.size)[self.comm.rank] for x in self.batch)

    def plain(self) -> dict[str, Tensor]:
        """Return the parameters after training on the whole batch."""
        gpt = Decoder(self.config)
        optimizer = adamw(gpt.parameters())
        for _ in range(CHECKED):
            gpt.zero_grad()
            gpt(*self.batch)[1].backward()
            optimizer.step()
        return {name: p.detach() for name, p in gpt.named_parameters()}

    def check(self, way: str, parameters: dict[str, Tensor]) -> None:
        """Compare the parameters with those of plain training.  Collective.

        Raises: SystemExit with the difference.
        """
        errors = [(off(actual, self.wanted[name], self.start[name]), name) for name, actual in parameters.items()]
        worst, name = max(MPI.COMM_WORLD.allgather(max(errors)))
        if not worst < RTOL:
            message = f"{way}: {name} is off by {worst:.1e} of what plain training has changed"
            sys.exit(1 if self.comm.rank else message)


def off(actual: Tensor, expected: Tensor, start: Tensor) -> float:
    return float(((actual - expected).abs().max() / (expected - start).abs().max()).nan_to_num(nan=math.inf))


def parse(size: int) -> tuple[argparse.Namespace, ModelConfig]:
    """Parse the flags; return them and the model's config.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--n_layer", type=positive, default=8)
    parser.add_argument("--n_head", type=positive, default=4)
    parser.add_argument("--n_embd", type=positive, default=192)
    parser.add_argument("--vocab_size", type=positive, default=256)
    parser.add_argument("--seq", type=positive, default=64, help="tokens of a sequence")
    parser.add_argument("--batch", type=positive, default=1, help="sequences of a rank and step")
    parser.add_argument("--bucket_mb", type=float, default=2.0, help="MiB of gradients that are reduced together")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    parser.add_argument("--picture", type=output, help="draw them as PNG")
    args = parser.parse_args()
    if size % 2:
        raise ValueError(f"{size} ranks don't make two groups: start an even number, as with mpirun -n 4")
    num_bytes(args.bucket_mb)
    if args.picture:
        draw.refuse(str(args.picture), "--picture ")
    shape = {name: getattr(args, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    return args, checked(ModelConfig(block_size=args.seq, **shape))


def main() -> None:
    torch.set_num_threads(1)
    if MPI.COMM_WORLD.size % 2 == 0:
        os.environ["COLLECTIVES_FAKE_NODES"] = f"2x{MPI.COMM_WORLD.size // 2}"
    comm = collectives.world()
    with comm.agreed("data_parallel"):
        args, config = parse(comm.size)
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # return freed memory immediately
    contest = Contest(comm, args, config)
    entries = {name: Entry(name, kind, contest) for name, kind in WAYS.items()}
    for _ in progress_bar(range(args.repeats + 1), "round", comm.rank):
        for entry in entries.values():
            entry.contestant.round()
    figures = {name: entry.figures() for name, entry in entries.items()}
    if comm.rank == 0:
        rows = [[name, *(f"{values[column]:.1f}" for column in TITLES)] for name, values in figures.items()]
        print(table(["", *TITLES.values()], rows))
        if args.output:
            write(args.output, figures, **vars(args))
        if args.picture:
            draw.save(picture(figures), str(args.picture))


if __name__ == "__main__":
    main()
