"""Pack trees for a graph of links, and compare their time with the bound and with the named algorithms.

python -m collectives.graphs examples/links/torus_4x4.toml all_gather
python -m collectives.graphs examples/links/slow_nic.toml all_reduce --bytes 64M
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from collectives.graphs.bound import COLLECTIVES, bound_s_per_byte
from collectives.graphs.graph import LinkGraph
from collectives.graphs.links_file import read_links
from collectives.graphs.named import is_one_switch, named_times
from collectives.graphs.packed import packed
from collectives.job.errors import INTERRUPTED
from collectives.job.settings import Parser, Range, num_bytes, size_in_words

ROOT = Range(0, 1 << 17)
AS_GOOD = 0.95  # of the bound; packed trees reach hardly more


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser().parse_args(arguments)
        if not flags.bytes:
            raise ValueError("--bytes 0 leaves nothing to send: use at least 1")
        graph = read_links(flags.links)
        if flags.root >= graph.size:
            raise ValueError(f"--root {flags.root} is out of range: there are ranks 0 to {graph.size - 1}")
        for line in report(graph, flags):
            print(line, flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def parser() -> Parser:
    parser = Parser("python -m collectives.graphs", __doc__)
    add = parser.add_argument
    add("links", metavar="LINKS.toml", help="file with the vertices and the links")
    add("collective", nargs="?", default="all_gather", choices=COLLECTIVES, help="default: all_gather")
    add("--bytes", type=num_bytes, default="1G", help="length of the vector, as in 8, 64K, 1M (default: 1G)")
    add("--root", type=ROOT.whole, default=0, help="root of a broadcast (default: 0)")
    return parser


def report(graph: LinkGraph, flags: argparse.Namespace) -> Iterator[str]:
    """Yield the lines to print."""
    bound = flags.bytes * bound_s_per_byte(graph, flags.collective, flags.root)
    yield (
        f"{flags.collective} of {size_in_words(flags.bytes)} bytes on {graph.size} ranks, "
        f"{len(graph.switches)} switches, {len(graph.links)} links"
    )
    yield f"{'':34} {'us':>12} {'GB/s':>9} {'of bound':>9}"
    yield row("bound by cuts", bound, bound, flags.bytes)
    if flags.collective == "all_reduce":
        names = ("reduce_scatter", "all_gather")
        apart = flags.bytes * sum(bound_s_per_byte(graph, name) for name in names)
        yield row("  reduce_scatter, then all_gather", apart, bound, flags.bytes)
    best, *_ = named_times(graph, flags.collective, flags.bytes, flags.root)
    yield row(f"best named algorithm: {best.name}"[:34], best.seconds, bound, flags.bytes)
    if is_one_switch(graph) and best.seconds < bound / AS_GOOD:
        yield f"a switch with equal links is all there is: {best.name!r} is as good as packed trees"
        return
    schedule = packed(graph, flags.collective, flags.root, nbytes=flags.bytes)
    yield row("packed trees", schedule.seconds(flags.bytes), bound, flags.bytes)
    yield f"{schedule.num_chunks} chunks in {schedule.num_rounds} rounds"


def row(name: str, seconds: float, bound: float, nbytes: int) -> str:
    return f"{name:34} {seconds * 1e6:12,.1f} {nbytes / seconds / 1e9:9.2f} {bound / seconds:9.1%}"


if __name__ == "__main__":
    sys.exit(main())
