"""Compare dispatch and combine of tokens to experts with MPI_Alltoallv and gloo's all_to_all of the same tokens.

    mpirun -n 4 python benchmarks/experts.py --output experts.json
    python -m mpi_tests.rig run --hosts 4 --slots 2 --rate 1gbit -- python benchmarks/experts.py

A round sends tokens to the ranks of their experts, as rows grouped by expert, and returns each token's sum of rows.
The peers do it the usual way: a row per choice, packed by expert, an exchange of counts, and one exchange of rows each
way, reordered on both sides.  Contestants alternate; times are medians of the slowest rank.

Balanced choices are drawn uniformly.  With skew, the fullest rank is chosen four times as often as the others; the
measure is the time per row of the fullest rank, which limits the computation.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.result_files import output, table, write
from peers import MPI, start_torch
from torch import Tensor, distributed

import collectives
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, positive
from parallelism.experts.exchange import ExpertExchange

SKEW = 4  # times as many choices


class Ours:
    def __init__(self, comm: collectives.Communicator, num_experts: int):
        self.exchange, self.num_experts = ExpertExchange(comm), num_experts

    def __call__(self, x: Tensor, experts: Tensor) -> tuple[Tensor, int]:
        routing = self.exchange.route(experts, self.num_experts)
        rows = routing.dispatch(x)
        return routing.combine(rows), len(rows)


class AllToAll:
    """The usual way, by an exchange of equal counts and one of rows: `exchange(x, send_counts, recv_counts)`."""

    def __init__(self, size: int, num_experts: int, exchange: Callable[[Tensor, list[int], list[int]], Tensor]):
        self.size, self.num_experts, self.exchange = size, num_experts, exchange

    def __call__(self, x: Tensor, experts: Tensor) -> tuple[Tensor, int]:
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        counts = experts.flatten().bincount(minlength=self.num_experts)
        equal = [self.num_experts // self.size] * self.size
        arriving = self.exchange(counts[:, None], equal, equal).view(
            self.size, -1
        )  # of each rank, for each expert here
        sent, received = (part.sum(1).tolist() for part in (counts.view(self.size, -1), arriving))
        rows = self.exchange(x.index_select(0, tokens), sent, received)
        by_expert = torch.arange(arriving.shape[1]).repeat(self.size).repeat_interleave(arriving.flatten())
        regrouped = by_expert.argsort(stable=True)
        rows = rows.index_select(0, regrouped)  # as the experts compute on them
        back = torch.empty_like(rows).index_copy_(0, regrouped, rows)
        back = self.exchange(back, received, sent)
        return torch.zeros_like(x).index_add_(0, tokens, back), len(rows)


def alltoallv(x: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    """Exchange rows by MPI."""
    out, width = x.new_empty((sum(recv_counts), x.shape[1])), x.shape[1] * x.element_size()
    sent, received = (np.array(counts) * width for counts in (send_counts, recv_counts))
    buffers = [[part.numpy().view(np.uint8), n, MPI.BYTE] for part, n in ((x.contiguous(), sent), (out, received))]
    MPI.COMM_WORLD.Alltoallv(*buffers)
    return out


def gloo(x: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    """Exchange rows by torch.distributed."""
    out = x.new_empty((sum(recv_counts), x.shape[1]))
    distributed.all_to_all_single(out, x.contiguous(), recv_counts, send_counts)
    return out


def choices(args: argparse.Namespace, rank: int, size: int, skewed: bool) -> Tensor:
    """Return the choices of a rank's tokens, drawn without repetition.  Shapes: (tokens, choices)."""
    odds = torch.ones(args.num_experts)
    if skewed:
        odds[: args.num_experts // size] = SKEW
    generator = torch.Generator().manual_seed(rank)
    return odds.expand(args.tokens, -1).multinomial(args.experts_per_token, generator=generator)


def check(name: str, way: Any, x: Tensor, experts: Tensor) -> int:
    """Compare a round's sums with the tokens, and return the rows of the fullest rank.

    Raises: SystemExit if they differ.
    """
    sums, num_rows = way(x, experts)
    is_wrong = not torch.allclose(sums, x * experts.shape[1], rtol=1e-5)
    if MPI.COMM_WORLD.allreduce(is_wrong, MPI.MAX):
        sys.exit(f"{name}: the sums are not those of the tokens" if MPI.COMM_WORLD.rank == 0 else 1)
    return MPI.COMM_WORLD.allreduce(num_rows, MPI.MAX)


def round_s(way: Any, x: Tensor, experts: Tensor) -> float:
    """Return the slowest rank's seconds."""
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    way(x, experts)
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)


def parse(size: int) -> argparse.Namespace:
    """Parse the flags.

    Raises: ValueError for invalid flags.
    """
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=1024, help="of each rank")
    parser.add_argument("--n_embd", type=positive, default=512)
    parser.add_argument("--num_experts", type=positive, default=32)
    parser.add_argument("--experts_per_token", type=positive, default=8)
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    if args.num_experts % size:
        raise ValueError(f"--num_experts {args.num_experts} is not divisible by {size} ranks: use a multiple")
    if args.experts_per_token > args.num_experts:
        raise ValueError(f"--experts_per_token {args.experts_per_token}: use at most {args.num_experts}")
    return args


def main() -> None:
    torch.set_num_threads(1)
    comm = collectives.world()
    with comm.agreed("experts"):
        args = parse(comm.size)
    start_torch(MPI.COMM_WORLD, "gloo", alone=len(comm.topology.nodes) == 1)
    ways = {
        "ours": Ours(comm, args.num_experts),
        "MPI_Alltoallv": AllToAll(comm.size, args.num_experts, alltoallv),
        "gloo": AllToAll(comm.size, args.num_experts, gloo),
    }
    x = torch.randn((args.tokens, args.n_embd), generator=torch.Generator().manual_seed(comm.rank))
    figures: dict[str, dict[str, float]] = {}
    for kind in ("balanced", "skewed"):
        experts = choices(args, comm.rank, comm.size, kind == "skewed")
        most = {name: check(name, way, x, experts) for name, way in ways.items()}
        rounds = progress_bar(range(args.repeats + 1), "round", comm.rank)
        seconds = [[round_s(way, x, experts) for way in ways.values()] for _ in rounds]
        for name, median in zip(ways, np.median(seconds[1:], axis=0).tolist(), strict=True):
            values = {"ms": 1e3 * median, "rows": most[name], "us_per_row": 1e6 * median / most[name]}
            figures[f"{name}, {kind}"] = values
    if comm.rank == 0:
        rows = [[name, f"{v['ms']:.2f}", v["rows"], f"{v['us_per_row']:.3f}"] for name, v in figures.items()]
        print(table(["", "ms", "rows of the fullest rank", "us a row"], rows))
        if args.output:
            write(args.output, figures, **vars(args))
    comm.barrier()


if __name__ == "__main__":
    main()
