"""Predict how long each algorithm takes on a network of any size.  No MPI is needed.

python -m collectives.schedule.simulate all_reduce --topology ndr --ranks 65536
python -m collectives.schedule.simulate broadcast --topology 512x8 --between 2 25 --nic 0 100

With few ranks every message is simulated, with more every round is priced (`collectives.schedule.cost`).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from collectives import algorithms
from collectives.algorithms import Access, Algorithm
from collectives.job.errors import INTERRUPTED
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, Range, ladder, num_bytes, size_in_words
from collectives.schedule.cost import Nodes, predict
from collectives.schedule.events import simulate
from collectives.schedule.fabrics import FABRICS, RANKS, add_network_flags, topology, with_flags
from collectives.schedule.spec import COLLECTIVES

MOST_EXACT_RANKS = 4096  # a ring of these takes 33 million moves a size
EXACT_RANKS = 128  # up to which every rank is simulated, unless flags say otherwise
FACTOR = Range(2, 2**30)

Times = dict[str, list[float]]  # seconds by algorithm, for each size


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parse(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{flags.collective} on {flags.ranks} ranks of {len(flags.nodes)} nodes: {flags.words}")
    print(f"predicted {'exactly' if flags.exact else 'by round'}, in us; < is the fastest", flush=True)
    times: Times = {row.name: [] for row in flags.rows}
    status = 0
    try:
        predict_times(flags, times)
    except KeyboardInterrupt:
        status = INTERRUPTED
    print("\n".join(table(flags.sizes, times)), flush=True)
    if status:
        print("interrupted: entries marked - were not predicted", file=sys.stderr)
    return status


def parser() -> Parser:
    parser = Parser("python -m collectives.schedule.simulate", __doc__)
    add = parser.add_argument
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    add("collective", nargs="?", default="all_reduce", choices=[*COLLECTIVES], help="to simulate (default: all_reduce)")
    add("--ranks", type=RANKS.whole, metavar="N", help="number of ranks (default: those of the topology)")
    words = f"nodes x ranks, as 512x8; measured: these hosts as saved; {fabrics} (default: ndr)"
    add("--topology", default="ndr", help=words)
    add("--algorithms", nargs="+", metavar="NAME", help="simulate only these algorithms")
    add("-b", "--begin", type=num_bytes, default="8", help="smallest vector in bytes, as in 8, 64K, 1M (default: 8)")
    add("-e", "--end", type=num_bytes, default="256M", help="largest vector in bytes (default: 256M)")
    add("-f", "--factor", type=FACTOR.whole, default=8, help="factor between sizes (default: 8)")
    add("--root", type=RANKS._replace(least=0).whole, default=0, help="root of rooted collectives (default: 0)")
    add_network_flags(parser)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--exact", action="store_true", help=f"simulate every rank (default up to {EXACT_RANKS} ranks)")
    ways.add_argument("--by-round", action="store_true", help="let a round last as its slowest rank (default beyond)")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags, and add what follows from them: nodes, network, words, exact, rows, sizes.

    Raises: ValueError for invalid flags, with the remedy.
    """
    flags = parser().parse_args(arguments)
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    flags.nodes, network, flags.words = topology(flags.topology, flags.ranks)
    flags.network = with_flags(network, flags)
    flags.ranks = sum(map(len, flags.nodes))
    if not 0 <= flags.root < flags.ranks:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {flags.ranks - 1}")
    if flags.exact and flags.ranks > MOST_EXACT_RANKS:
        raise ValueError(f"--exact simulates every one of {flags.ranks} ranks, at most {MOST_EXACT_RANKS}: omit it")
    flags.exact = flags.exact or (flags.ranks <= EXACT_RANKS and not flags.by_round)
    flags.rows = choose_algorithms(flags.collective, flags.algorithms, flags.nodes)
    flags.sizes = ladder(flags.begin, flags.end, flags.factor) if COLLECTIVES[flags.collective].takes else (0,)
    return flags


def choose_algorithms(collective: str, names: Sequence[str] | None, nodes: Nodes) -> tuple[Algorithm, ...]:
    """Choose the algorithms that are named, else all that can run there."""
    size = sum(map(len, nodes))
    access = Access.DIRECT if len(nodes) == 1 else Access.INTRA_NODE if min(map(len, nodes)) > 1 else Access.MESSAGES
    if names is None:
        return tuple(row for row in algorithms.rows(collective, size) if row.access <= access)
    rows = tuple(algorithms.find(collective, name) for name in names)
    for row in rows:
        algorithms.check(row, size)
        if row.access > access:
            raise ValueError(f"algorithm {row.name!r} needs shared memory, which these {len(nodes)} nodes don't have")
    return rows


def predict_times(flags: argparse.Namespace, times: Times) -> None:
    """Predict the seconds of each algorithm at each size, and show progress."""
    nodes, network = flags.nodes, flags.network
    with progress_bar(len(flags.rows) * len(flags.sizes), "time") as bar:
        for row in flags.rows:
            for nbytes in flags.sizes:
                if flags.exact:
                    seconds = simulate(row, nbytes, nodes, network, flags.root).seconds
                else:
                    seconds = predict(row, nbytes, flags.ranks, nodes, flags.root, network)
                times[row.name].append(seconds)
                bar.update()


def table(sizes: Sequence[int], times: Times) -> Iterator[str]:
    """Format a line for each size, with a column for each algorithm, in which times may be missing at the end.

    >>> print("\\n".join(table([8, 1 << 20], {"ring": [3e-5, 4e-4], "binomial": [1e-5, 9e-4]})))
      bytes        ring    binomial
          8       30.0         10.0 <
         1M      400.0 <      900.0
    >>> print("\\n".join(table([8, 64], {"ring": [3e-5], "binomial": []})))
      bytes        ring    binomial
          8       30.0 <          -
         64          -            -
    """
    widths = {name: max(11, len(name)) for name in times}
    yield "  bytes" + "".join(f" {name:>{width}}" for name, width in widths.items())
    for i, nbytes in enumerate(sizes):
        seconds = {name: of_row[i] for name, of_row in times.items() if i < len(of_row)}
        fastest = min(seconds, key=seconds.__getitem__, default="")
        cells = (f"{seconds[name] * 1e6:.1f}" if name in seconds else "-" for name in times)
        cells = (f"{cell}{' <' if name == fastest else '  '}" for name, cell in zip(times, cells, strict=True))
        line = "".join(f" {cell:>{width + 1}}" for cell, width in zip(cells, widths.values(), strict=True))
        yield f"{size_in_words(nbytes):>7}{line}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
