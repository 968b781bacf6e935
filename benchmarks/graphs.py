"""Pack trees for graphs of links, prove the schedules, and time them in simulation beside the bound and the named ones.

python benchmarks/graphs.py --output graphs.json
python benchmarks/graphs.py --links examples/links/ring.toml --collectives all_gather
"""

import time
from pathlib import Path

from helpers.result_files import output, table, write

from collectives.graphs import named_times, packed, read_links
from collectives.graphs.bound import COLLECTIVES
from collectives.job.progress_bar import progress_bar
from collectives.job.settings import Parser, num_bytes
from collectives.schedule.proof import check

LINKS = sorted((Path(__file__).resolve().parents[1] / "examples" / "links").glob("*.toml"))
TITLES = ["graph, ranks, collective", "bound", "packed", "of bound", "best named", "its GB/s", "seconds to pack"]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", type=Path, default=LINKS, metavar="FILE", help="default: examples/links")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--bytes", type=num_bytes, default="1G", help="length of the vector (default: 1G)")
    parser.add_argument("--output", type=output, help="write the numbers as JSON")
    args = parser.parse_args()
    rows = []
    with progress_bar(len(args.links) * len(args.collectives), "schedule") as bar:
        for path in args.links:
            graph = read_links(path)
            for collective in args.collectives:
                begin_s = time.process_time()
                schedule = packed(graph, collective, nbytes=args.bytes)
                seconds = time.process_time() - begin_s
                root = {"root": 0} if collective == "broadcast" else {}
                check(collective, schedule, graph.size, num_chunks=schedule.num_chunks, **root)
                best, *_ = named_times(graph, collective, args.bytes)
                name = f"{path.stem}, {graph.size}, {collective}"
                speeds = [1e-9 / schedule.bound_s_per_byte, 1e-9 * args.bytes / schedule.seconds(args.bytes)]
                speed = f"{1e-9 * args.bytes / best.seconds:.2f}"
                of_bound = f"{speeds[1] / speeds[0]:.1%}"
                rows.append([name, *(f"{each:.2f}" for each in speeds), of_bound, best.name, speed, f"{seconds:.1f}"])
                bar.update()
    print("GB/s: bytes of the vector by the time; CPU seconds to pack and choose the schedule")
    print(table(TITLES, rows))
    if args.output:
        write(args.output, [dict(zip(TITLES, row, strict=True)) for row in rows], bytes=args.bytes)


if __name__ == "__main__":
    main()
