"""Measure every algorithm of every collective, and write what `algorithm="auto"` is to follow.

mpirun -n 4 python -m collectives.bench --tune tuning.json
COLLECTIVES_TUNING=tuning.json mpirun -n 4 python examples/sum.py
"""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from collectives import algorithms, environment
from collectives.bench import constants
from collectives.bench.flags import parse
from collectives.bench.measure import Result, results
from collectives.communicator import Communicator
from collectives.cost import Network, predict
from collectives.job import library_name
from collectives.topology import Topology
from collectives.tuning import Case, Tuning, limits, to_json

COLUMNS = "{:<15} {:<9} {:>10}  {:<20} {:>11} {:>11} {:>7} {}"


def main() -> None:
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w")  # other ranks are silent  # noqa: SIM115
    with comm.agreed():
        flags = parse(__doc__)
    with comm.agreed():
        if flags.tune and comm.rank == 0:
            refuse_unwritable(flags.tune)  # before minutes are spent
    network = constants.measure(comm, flags.repeats, flags.warmups)
    print(describe(network), flush=True)
    winners: dict[Case, list[tuple[int, str]]] = defaultdict(list)
    print(COLUMNS.format("collective", "memory", "bytes", "algorithm", "us", "model us", "GB/s", "").rstrip())
    for result in results(comm, flags):
        print("\n".join(lines(result, comm.topology, network)), flush=True)
        if result.fastest:
            winners[result.case].append((result.nbytes, result.fastest))
    if flags.tune:
        fastest = {case: limits(sizes) for case, sizes in winners.items()}
        write(comm, flags.tune, Tuning(network, str(flags.tune), fastest, surroundings(comm)))


def describe(network: Network) -> str:
    """The measured speeds, in words."""
    links = {"in a node": network.within, "between nodes": network.between}
    words = [f"{where} {link.alpha_s * 1e6:.1f} us + {gbps(link.beta_s_per_byte)}" for where, link in links.items()]
    rates = f"fold {gbps(network.gamma_s_per_byte)}, copy {gbps(network.copy_s_per_byte)}"
    return f"{network.cores} cores; a message {', '.join(words)}; {rates}"


def gbps(seconds_a_byte: float) -> str:
    return f"{1e-9 / seconds_a_byte:.1f} GB/s"


def lines(result: Result, topology: Topology, network: Network) -> Iterator[str]:
    """A line of the table for each algorithm: measured, as the model has it, and bytes of vector a second."""
    collective, memory, size, _ = result.case
    for name, seconds in result.seconds.items():
        model = "-"
        if name != "mpi":
            row = algorithms.find(collective, name)
            model = f"{predict(row, result.nbytes, size, topology.nodes, network=network) * 1e6:.1f}"
        measured = f"{seconds * 1e6:.1f}", model, f"{result.nbytes / seconds * 1e-9:.2f}"
        yield COLUMNS.format(
            collective, memory, result.nbytes, name, *measured, "<" * (name == result.fastest)
        ).rstrip()


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


def refuse_unwritable(path: Path) -> None:
    try:
        unfinished(path).touch()
        unfinished(path).unlink()
    except OSError as error:
        raise ValueError(f"--tune {path} can't be written ({error.strerror}): pass another path") from None


def unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def write(comm: Communicator, path: Path, tuning: Tuning) -> None:
    """Write the tuning file, in one go.  Collective."""
    with comm.agreed():
        if comm.rank == 0:
            unfinished(path).write_text(to_json(tuning))
            unfinished(path).replace(path)
    print(f"algorithm='auto' follows this under COLLECTIVES_TUNING={path}")


if __name__ == "__main__":
    main()
