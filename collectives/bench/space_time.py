"""Draw a collective as it is planned and as it happened, side by side.

mpirun -n 4 python -m collectives.bench.space_time all_reduce --algorithm ring -b 1M --output ring.png
"""

if __name__ == "__main__":  # ahead of what imports MPI
    from collectives import job

    job.begin()

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import collectives
from collectives import algorithms, draw
from collectives.algorithms import Algorithm
from collectives.bench import constants
from collectives.bench.flags import RUNS
from collectives.bench.trial import Trial, element_counts
from collectives.communicator import Communicator
from collectives.draw import Bar, Diagram, Line
from collectives.plan import Plan, Step, Waitable
from collectives.schedule import Send
from collectives.settings import Parser
from collectives.simulate.pictures import planned
from collectives.sizes import num_bytes, size_in_words

MEASURED = 5  # times that the links are tried
DIRECT = -1  # for the number of a round: a program of several, in shared memory


class Timed:
    """A step that notes when it begins and ends."""

    def __init__(self, step: Step):
        self.step, self.span = step, (0.0, 0.0)
        self.label = step.number if step.moves else DIRECT

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def run(self, device: Any) -> Iterator[Waitable]:
        begin = time.perf_counter()
        yield from self.step.run(device)
        self.span = begin, time.perf_counter()


def main() -> None:
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w")  # other ranks are silent  # noqa: SIM115
    with comm.agreed():
        flags = parse(comm.size)
        draw.refuse(flags.output)
    row = algorithms.find(flags.collective, flags.algorithm)
    count = next(iter(element_counts(flags.collective, comm.size, [flags.bytes])))
    trial = Trial(comm, flags.collective, count, "symmetric")
    plan = comm.plan(trial.collective, trial.x, algorithm=flags.algorithm, **trial.arguments)
    network = constants.measure(comm, MEASURED, 1)
    seconds, spans = typical(comm, plan, trial, flags.repeats)
    if comm.rank == 0:
        expected = planned(row, trial.nbytes, comm.topology.nodes, network)
        draw.save(draw.figure([expected, happened(row, trial.nbytes, comm, seconds, spans)]), flags.output)
        print(f"{expected.title}; happened: {seconds * 1e6:.0f} us; drawn in {flags.output}")


def parse(size: int) -> argparse.Namespace:
    """The flags.

    Raises: ValueError for what makes no sense, with the remedy.
    """
    parser = Parser("python -m collectives.bench.space_time", description=__doc__)
    parser.add_argument("collective", choices=list(dict.fromkeys(row.collective for row in algorithms.REGISTRY)))
    parser.add_argument("--algorithm", required=True, metavar="NAME")
    parser.add_argument("-b", "--bytes", type=num_bytes, default="1M", help="the vector, as in 64K (1M)")
    parser.add_argument("-n", "--repeats", type=RUNS.whole, default=11, help="of which the median is drawn (11)")
    parser.add_argument("-o", "--output", default="space_time.png", metavar="FILE", help="(space_time.png)")
    flags = parser.parse_args()
    algorithms.find(flags.collective, flags.algorithm).check(size)
    return flags


def typical(comm: Communicator, plan: Plan, trial: Trial, repeats: int) -> tuple[float, np.ndarray]:
    """The run of median length: its seconds, and each rank's rounds, as rank, number, begin and end.  Collective.

    Clocks count from the moment in which a rank leaves the barrier before the run.
    """
    barrier = comm.plan("barrier")
    steps = [Timed(step) for step in plan.rounds]
    plan.rounds = steps
    runs, lengths = [], []
    for _ in range(repeats + 1):
        trial.fill()
        barrier()
        zero = time.perf_counter()
        plan.begin()
        plan.wait()
        lengths.append(time.perf_counter() - zero)
        runs.append([(step.label, step.span[0] - zero, step.span[1] - zero) for step in steps])
    slowest = comm.all_reduce(np.array(lengths[1:]), op="max")  # the first one warms up
    median = int(np.argsort(slowest)[len(slowest) // 2])
    return float(slowest[median]), gathered(comm, runs[1 + median])


def gathered(comm: Communicator, mine: Sequence[tuple[int, float, float]]) -> np.ndarray:
    """Rows of all ranks, which may have different numbers of them, with the rank in front.  Collective."""
    rows = np.array([(comm.rank, *row) for row in mine], np.float64).reshape(-1, 4)
    counts = np.zeros(comm.size, np.int64)
    counts[comm.rank] = rows.size
    comm.all_reduce(counts)
    return comm.all_gather(rows.ravel(), counts=counts.tolist()).reshape(-1, 4)


def happened(row: Algorithm, nbytes: int, comm: Communicator, seconds: float, spans: np.ndarray) -> Diagram:
    """What was measured, with the messages that the schedule has in each round."""
    rows = [(int(rank), int(number), begin, end) for rank, number, begin, end in spans.tolist()]
    bars = [Bar(rank, begin, end, "work" if number == DIRECT else "wait") for rank, number, begin, end in rows]
    at = {(rank, number): (begin, end) for rank, number, begin, end in rows if number != DIRECT}
    schedules = [row.rounds(rank, comm.size, 0, comm.topology.groups) for rank in range(comm.size)]
    lines = []
    for (rank, number), (begin, _) in at.items():
        for to in {move.to for move in schedules[rank][number] if isinstance(move, Send)}:
            their_begin, end = at[to, number]
            lines.append(Line(rank, to, max(begin, their_begin), end))
    title = f"{row.collective} {row.name}, {size_in_words(nbytes)}: happened, {seconds * 1e6:.0f} us"
    return Diagram(title, comm.size, bars, lines)


if __name__ == "__main__":
    main()
