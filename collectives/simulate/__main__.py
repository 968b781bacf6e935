"""Predict how long each algorithm takes on a network of any size.  No MPI is needed.

python -m collectives.simulate all_reduce --topology ndr --ranks 65536
python -m collectives.simulate broadcast --topology 512x8 --between 2 25 --nic 0 100 --plot broadcast.png
python -m collectives.simulate all_reduce --topology 2x4 --algorithms ring -b 1M -e 1M --space-time ring.png
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice

from tqdm import tqdm

from collectives.algorithms import Algorithm
from collectives.cost import predict
from collectives.draw import refuse
from collectives.programs import Programs
from collectives.simulate.exact import Simulation
from collectives.simulate.flags import Job, job, parser
from collectives.simulate.pictures import save_space_time, save_times
from collectives.sizes import size_in_words

Times = dict[str, list[float]]  # seconds by algorithm, for each size


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        flags = parser(__doc__).parse_args(arguments)
        asked = job(flags)
        if flags.space_time and (len(asked.rows) > 1 or not asked.exact):
            raise ValueError("--space-time draws one algorithm, exactly: name it by --algorithms, on fewer ranks")
        for path in filter(None, (flags.plot, flags.space_time)):
            refuse(path)
        print(f"{flags.collective} on {asked.ranks} ranks of {len(asked.nodes)} nodes: {asked.words}")
        print(f"predicted {'exactly' if asked.exact else 'by round'}, in us; < is the fastest", flush=True)
        times = predicted(asked)
        print("\n".join(table(asked.sizes, times)))
        if flags.plot:
            save_times(flags.plot, f"{flags.collective}, {asked.ranks} ranks", asked.sizes, times)
        if flags.space_time:
            save_space_time(flags.space_time, asked.rows[0], asked.sizes[0], asked.nodes, asked.network, asked.root)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def predicted(asked: Job) -> Times:
    """Seconds of each algorithm at each size."""
    steps = tqdm(total=len(asked.rows) * len(asked.sizes), leave=False, disable=None)
    times: Times = {}
    with steps:
        for row in asked.rows:
            times[row.name] = []
            for seconds in islice(seconds_of(row, asked), len(asked.sizes)):
                times[row.name].append(seconds)
                steps.update()
    return times


def seconds_of(row: Algorithm, asked: Job) -> Iterator[float]:
    if asked.exact:
        simulation = Simulation(Programs(row, asked.nodes, asked.root), asked.network.cores)
        yield from (simulation.run(nbytes, asked.network).seconds for nbytes in asked.sizes)
    else:
        rest = asked.ranks, asked.nodes, asked.root, asked.network
        yield from (predict(row, nbytes, *rest) for nbytes in asked.sizes)


def table(sizes: Sequence[int], times: Times) -> Iterator[str]:
    """A line for each size, a column for each algorithm.

    >>> print("\\n".join(table([8, 1 << 20], {"ring": [3e-5, 4e-4], "binomial": [1e-5, 9e-4]})))
      bytes        ring    binomial
          8       30.0        10.0 <
         1M      400.0 <     900.0
    """
    widths = {name: max(11, len(name)) for name in times}
    yield "  bytes" + "".join(f" {name:>{width}}" for name, width in widths.items())
    for place, nbytes in enumerate(sizes):
        fastest = min(times, key=lambda name: times[name][place])
        cells = (f"{times[name][place] * 1e6:.1f}{' <' if name == fastest else '  '}" for name in times)
        line = "".join(f" {cell:>{width + 1}}" for cell, width in zip(cells, widths.values(), strict=True))
        yield f"{size_in_words(nbytes):>7}{line}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
