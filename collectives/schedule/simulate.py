"""Predict how long each algorithm takes on a network of any size.  No MPI is needed.

python -m collectives.schedule.simulate all_reduce --topology ndr --ranks 65536
python -m collectives.schedule.simulate all_reduce --topology ndr --ranks 65536 --map
python -m collectives.schedule.simulate broadcast --topology 512x8 --between 2 25 --nic 0 100 --plot times.png
python -m collectives.schedule.simulate all_reduce --topology 4x32x8 --between 2 25 --nic 0 100 --tier 3 25 1600

With few ranks every message is simulated, with more every round is priced (`collectives.schedule.cost`).
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from collectives import algorithms
from collectives.algorithms import Access, Algorithm
from collectives.algorithms.own import is_own
from collectives.algorithms.own_proof import prove
from collectives.algorithms.variants import is_open
from collectives.job.errors import INTERRUPTED
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, Range, ladder, num_bytes
from collectives.job.system import write
from collectives.runtime.choose import network_file
from collectives.runtime.choose.auto import network_to_json
from collectives.schedule import draw, winners
from collectives.schedule.cost import predict_best
from collectives.schedule.events import simulate
from collectives.schedule.fabrics import (
    FABRICS,
    RANKS,
    add_network_flags,
    add_tier_flag,
    in_nodes,
    topology,
    with_flags,
    with_tiers,
)
from collectives.schedule.network import Nodes
from collectives.schedule.results import COLUMNS, Times, best_table, figure, rows_of, to_json, whole_table
from collectives.schedule.spec import COLLECTIVES

MOST_EXACT_RANKS = 4096  # a ring of these takes 33 million moves a size
EXACT_RANKS = 128  # up to which every rank is simulated, unless flags say otherwise
FACTOR = Range(2, 2**30)
STDOUT = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parse(arguments)
        if flags.describe:
            print(network_file.to_toml(flags.nodes, flags.network), end="")
            return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    nodes = f"{len(flags.nodes)} node{'s' * (len(flags.nodes) != 1)}"
    ranks = f"{flags.ranks} rank{'s' * (flags.ranks != 1)}"
    say(flags, f"{flags.collective} on {ranks} of {nodes}: {flags.words}")
    results: dict[int, Times] = {}  # by number of ranks
    status = 0
    try:
        (show_map if flags.map else show_times)(flags, results)
    except KeyboardInterrupt:
        status = INTERRUPTED
    write_results(flags, results)
    if status:
        missing = "larger numbers of ranks" if flags.map else "entries marked -"
        print(f"interrupted: {missing} were not predicted", file=sys.stderr)
    return status


def say(flags: argparse.Namespace, text: str) -> None:
    """Print lines of at most 100 columns, unless the results are printed as JSON."""
    if flags.json != STDOUT:
        lines = [textwrap.fill(line, COLUMNS) if len(line) > COLUMNS else line for line in text.splitlines()]
        print("\n".join(lines), flush=True)


def parser() -> Parser:
    parser = Parser("python -m collectives.schedule.simulate", __doc__)
    add = parser.add_argument
    fabrics = "; ".join(f"{name}: {fabric.words}" for name, fabric in FABRICS.items())
    add("collective", nargs="?", default="all_reduce", choices=[*COLLECTIVES], help="to simulate (default: all_reduce)")
    add("--ranks", type=RANKS.whole, metavar="N", help="number of ranks (default: those of the topology)")
    shapes = "nodes x ranks, as 512x8; pods x nodes x ranks, as 4x128x8, or more levels; a network in FILE.toml"
    words = f"{shapes}; measured: these hosts as saved; {fabrics} (default: ndr)"
    add("--topology", default="ndr", help=words)
    add("--algorithms", nargs="+", metavar="NAME", help="simulate only these algorithms")
    add("-b", "--begin", type=num_bytes, default="8", help="smallest vector in bytes, as in 8, 64K, 1M (default: 8)")
    add("-e", "--end", type=num_bytes, default="256M", help="largest vector in bytes (default: 256M)")
    add("-f", "--factor", type=FACTOR.whole, default=8, help="factor between sizes (default: 8)")
    add("--root", type=RANKS._replace(least=0).whole, default=0, help="root of rooted collectives (default: 0)")
    add_network_flags(parser)
    add_tier_flag(parser)
    add_output_flags(parser)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--exact", action="store_true", help=f"simulate every rank (default up to {EXACT_RANKS} ranks)")
    ways.add_argument("--by-round", action="store_true", help="let a round last as its slowest rank (default beyond)")
    return parser


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_mutually_exclusive_group()
    add = forms.add_argument
    best = Range(1, 100, unit="algorithms")
    add("--best", type=best.whole, default=3, metavar="N", help="show the N fastest algorithms (default: 3)")
    add("--all", action="store_true", help="show the times of all algorithms, a line for each")
    text = "show the fastest algorithm, by round, for each size and number of ranks from those of a node to --ranks"
    add("--map", action="store_true", help=text)
    add = parser.add_argument
    text = f"write all predictions as JSON to this file, or with {STDOUT} to stdout instead of the tables"
    add("-J", "--json", metavar="FILE", help=text)
    add("--plot", metavar="FILE.png", help="draw times and bus bandwidths over sizes, with names on the fastest")
    add("--describe", action="store_true", help="print the network as a FILE.toml for --topology, and nothing else")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags, and add what follows from them: nodes, network, words, exact, rows, sizes.

    Raises: ValueError for invalid flags, with the remedy.
    """
    flags = parser().parse_args(arguments)
    if flags.begin > flags.end:
        raise ValueError(f"--begin {flags.begin} is above --end {flags.end}: exchange them")
    flags.nodes, network, flags.words = topology(flags.topology, flags.ranks)
    flags.network = with_tiers(with_flags(network, flags), flags)
    flags.ranks = sum(map(len, flags.nodes))
    if not 0 <= flags.root < flags.ranks:
        raise ValueError(f"--root {flags.root}: there are ranks 0 to {flags.ranks - 1}")
    if flags.exact and flags.ranks > MOST_EXACT_RANKS:
        raise ValueError(f"--exact simulates every one of {flags.ranks} ranks, at most {MOST_EXACT_RANKS}: omit it")
    flags.rows = choose_algorithms(flags.collective, flags.algorithms, flags.nodes)
    flags.sizes = ladder(flags.begin, flags.end, flags.factor) if COLLECTIVES[flags.collective].takes else (0,)
    if flags.map:
        check_map(flags)
    flags.exact = flags.exact or (flags.ranks <= EXACT_RANKS and not flags.by_round)
    if flags.json not in (None, STDOUT):
        draw.refuse(flags.json, "--json ")
    if flags.plot is not None:
        draw.refuse_picture(flags.plot, "--plot ")
        if 0 in flags.sizes or flags.ranks == 1:
            raise ValueError(
                "--plot has logarithmic scales, without 0 bytes and without 1 rank, which takes 0 us: omit it"
            )
    return flags


def check_map(flags: argparse.Namespace) -> None:
    """Raise ValueError for flags with which there is no map."""
    smallest = len(flags.nodes[0])
    if flags.exact:
        raise ValueError("--map prices by round: omit --exact")
    if flags.plot is not None:
        raise ValueError("--plot draws the times of one number of ranks: omit --map")
    if flags.root >= smallest:
        raise ValueError(f"--root {flags.root}: the map begins at {smallest} ranks: use a root of 0 to {smallest - 1}")
    if len(flags.sizes) > winners.MOST_SIZES:
        raise ValueError(f"--factor {flags.factor} makes {len(flags.sizes)} sizes: use {winners.MOST_SIZES} at most")


def choose_algorithms(collective: str, names: Sequence[str] | None, nodes: Nodes) -> tuple[Algorithm, ...]:
    """Choose the algorithms that are named, else all that can run there."""
    size, access = sum(map(len, nodes)), access_of(nodes)
    if names is None:
        rows = [row for row in algorithms.rows(collective, size) if row.access <= access]
    else:
        rows = [algorithms.find(collective, name) for name in names]
        for row in rows:
            check_runs(row, nodes, access)
    if len(nodes) == 1:  # nothing to compose
        return tuple(rows)
    return tuple(variant for row in rows for variant in algorithms.variants_of(row))


def check_runs(row: Algorithm, nodes: Nodes, access: Access) -> None:
    """Raise ValueError for an algorithm that cannot run there, and for a wrong schedule of one's own."""
    size = sum(map(len, nodes))
    algorithms.check(row, size)
    if is_own(row) and size <= MOST_EXACT_RANKS:
        row = row._replace(access=prove(row.cut_into(1) if is_open(row) else row, size, 0, nodes).access)
    if row.access > access:
        raise ValueError(f"algorithm {row.name!r} needs shared memory, which these {len(nodes)} nodes don't have")


def access_of(nodes: Nodes) -> Access:
    if len(nodes) == 1:
        return Access.DIRECT
    return Access.INTRA_NODE if min(map(len, nodes)) > 1 else Access.MESSAGES


def show_times(flags: argparse.Namespace, results: dict[int, Times]) -> None:
    """Predict the times, and show them, also those of an interrupted prediction."""
    which = "" if flags.all else f"; the {min(flags.best, len(flags.rows))} fastest of {len(flags.rows)} algorithms"
    say(flags, f"predicted {'exactly' if flags.exact else 'by round'}{which}")
    times = results[flags.ranks] = {row.name: [] for row in flags.rows}
    try:
        predict_times(flags, times)
    finally:
        if flags.all:
            lines = whole_table(flags.sizes, times)
        else:
            lines = best_table(flags.collective, flags.ranks, flags.sizes, times, flags.best)
        say(flags, "\n".join(lines))


def predict_times(flags: argparse.Namespace, times: Times) -> None:
    """Predict the seconds of each algorithm at each size, and show progress."""
    nodes, network = flags.nodes, flags.network
    with progress_bar(len(flags.rows) * len(flags.sizes), "time") as bar:
        for row in flags.rows:
            for nbytes in flags.sizes:
                best, seconds = predict_best(row, nbytes, flags.ranks, nodes, flags.root, network)
                if flags.exact:
                    seconds = simulate(best, nbytes, nodes, network, flags.root).seconds
                times[row.name].append(seconds)
                bar.update()


def show_map(flags: argparse.Namespace, results: dict[int, Times]) -> None:
    """Predict the times by round for each number of ranks, and show each line of the map as soon as it is there."""
    length = len(flags.nodes[0])
    numbers, lines = winners.numbers_of_ranks(length, flags.ranks), winners.WinnerMap(flags.sizes)
    names = [row.name for row in flags.rows]

    def candidates(nodes: Nodes) -> list[Algorithm]:
        rows = choose_algorithms(flags.collective, None, nodes)
        return [row for row in rows if not flags.algorithms or row.name in names]

    def price(row: Algorithm, nbytes: int, nodes: Nodes) -> float:
        return predict_best(row, nbytes, sum(map(len, nodes)), nodes, flags.root, flags.network)[1]

    hopeless = f"what takes {winners.HOPELESS} times the least at all sizes for half the ranks"
    say(flags, f"predicted by round, without {hopeless}")
    say(flags, lines.head())
    of_ranks = winners.times_by_ranks(numbers, lambda n: in_nodes(n, length), flags.sizes, candidates, price)
    try:
        for ranks, times in of_ranks:
            results[ranks] = times
            say(flags, lines.row(ranks, times))
    finally:
        say(flags, "\n".join(lines.legend()))


def write_results(flags: argparse.Namespace, results: dict[int, Times]) -> None:
    """Write the JSON and the picture that flags ask for."""
    if flags.json is not None:
        rows = [row for n, times in results.items() for row in rows_of(flags.collective, n, flags.sizes, times)]
        text = to_json(conditions(flags), rows)
        if flags.json == STDOUT:
            sys.stdout.write(text)
        else:
            write(flags.json, text)
    if flags.plot is not None and any(results[flags.ranks].values()):
        draw.save(figure(flags.collective, flags.ranks, flags.sizes, results[flags.ranks], flags.best), flags.plot)


def conditions(flags: argparse.Namespace) -> dict[str, Any]:
    """Return what the results depend on."""
    return {
        "collective": flags.collective,
        "topology": flags.words,
        "nodes": len(flags.nodes),
        "ranks_per_node": max(map(len, flags.nodes)),
        "predicted": "exactly" if flags.exact and not flags.map else "by round",
        "network": network_to_json(flags.network),
    }


if __name__ == "__main__":
    sys.exit(main())
