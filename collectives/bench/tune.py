"""The tuning file: which algorithm was the fastest at each size."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import environment
from collectives.bench.measure import Result, fastest
from collectives.communicator import Communicator
from collectives.cost import Network
from collectives.job import library_name
from collectives.tuning import Case, Tuning, limits

COLUMNS = "{:<15} {:<9} {:>10}  {:<20} {:>11} {:>11} {:>7} {}"
HEADING = COLUMNS.format("collective", "memory", "bytes", "algorithm", "us", "model us", "GB/s", "").rstrip()


def lines(rows: Sequence[Result]) -> Iterator[str]:
    """A line for each algorithm of a size: measured, as the model has it, and bytes of vector a second."""
    best = fastest(rows)
    for row in rows:
        model = "-" if row.model_s is None else f"{row.model_s * 1e6:.1f}"
        measured = f"{row.median_s * 1e6:.1f}", model, f"{row.algbw_gbps:.2f}"
        case = row.setting.collective, row.setting.memory, row.nbytes, row.name
        yield COLUMNS.format(*case, *measured, "<" * (row.name == best)).rstrip()


def tuned(comm: Communicator, network: Network, source: str, sizes: Sequence[Sequence[Result]]) -> Tuning:
    """What `auto` is to follow, of the rows of each size.  Collective."""
    winners: dict[Case, list[tuple[int, str]]] = defaultdict(list)
    for rows in sizes:
        if best := fastest(rows):
            setting = rows[0].setting
            case = Case(setting.collective, setting.memory, comm.size, len(comm.topology.nodes))
            winners[case].append((rows[0].nbytes, best))
    return Tuning(network, source, {case: limits(found) for case, found in winners.items()}, surroundings(comm))


def surroundings(comm: Communicator) -> dict[str, Any]:
    """What was measured, for the record."""
    cores = comm.all_gather(np.array([environment.cores()])).tolist()
    nodes = comm.topology.nodes
    return {
        "mpi": library_name(MPI),
        "ranks": comm.size,
        "nodes": [len(node) for node in nodes],
        "cores": [cores[node[0]] for node in nodes],
    }
