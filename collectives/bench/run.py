"""A run of the benchmark on the ranks of a job."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from errno import EISDIR
from functools import cache
from pathlib import Path

import collectives
from collectives import tuning
from collectives.bench import constants, openmpi_rules, peers, plots, report, tune, writing
from collectives.bench.device import measure_copies, take_device
from collectives.bench.flags import parse
from collectives.bench.measure import Result, results
from collectives.bench.room import refuse_too_large
from collectives.communicator import Communicator
from collectives.cost import Network

LINK_REPEATS = 10


def main() -> int:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    comm = collectives.world()
    if comm.rank:
        sys.stdout = open(os.devnull, "w")  # other ranks are silent  # noqa: SIM115
    with comm.agreed():
        flags = parse(comm.size)
        if comm.rank == 0:
            refuse_unwritable(flags)  # before minutes are spent
    refuse_too_large(comm, flags)
    take_device(comm, flags.device)
    flags.device_copy_s_per_byte = measure_copies(comm, flags)
    network = constants.measure(comm, min(flags.repeats, LINK_REPEATS), min(flags.warmups, 2))
    print(*peers.start(comm, flags), *report.describe(network, comm.topology.nodes), sep="\n", flush=True)
    sizes = measured(comm, flags, network)
    peers.stop()
    rows = [row for of_size in sizes for row in of_size]
    print("\n".join(report.footer(rows)))
    write(comm, flags, started, network, sizes)
    return verdict(flags, rows)


def measured(comm: Communicator, flags: Namespace, network: Network) -> list[list[Result]]:
    """All there is, and print it as it comes.  Collective."""
    sizes: list[list[Result]] = []
    if flags.tune:
        print(tune.HEADING)
    for rows in results(comm, flags, network, cache(print)):  # each line once
        if not rows:
            continue
        if not flags.tune and (not sizes or kind(sizes[-1]) != kind(rows)):
            print("\n".join(report.heading(rows[0])))
        print("\n".join((tune if flags.tune else report).lines(rows)), flush=True)
        sizes.append(rows)
    return sizes


def kind(rows: Sequence[Result]) -> tuple[str, str]:
    """What a table has one heading for."""
    return rows[0].setting.collective, rows[0].setting.memory


def refuse_unwritable(flags: Namespace) -> None:
    for flag in ("tune", "tune_openmpi", "json", "csv"):
        if path := getattr(flags, flag):
            try:
                if path.is_dir():
                    raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
                unfinished(path).touch()
                unfinished(path).unlink()
            except OSError as error:
                words = f"--{flag.replace('_', '-')} {path} can't be written ({error.strerror})"
                raise ValueError(f"{words}: pass another path") from None
    if flags.plots and flags.plots.exists() and not flags.plots.is_dir():
        raise ValueError(f"--plots {flags.plots} is no folder: pass another path")


def unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def write(comm: Communicator, flags: Namespace, started: str, network: Network, sizes: list[list[Result]]) -> None:
    """Write the files that were asked for, each in one go.  Collective."""
    rows = [row for of_size in sizes for row in of_size]
    texts: list[tuple[Path, Callable[[], str]]] = []
    if flags.json:
        data = writing.document(comm, started, network, rows, flags.device)
        texts.append((flags.json, lambda: writing.to_json(data)))
    if flags.csv:
        texts.append((flags.csv, lambda: writing.to_csv(rows)))
    if flags.tune:
        file = tune.tuned(comm, network, str(flags.tune), sizes)
        texts.append((flags.tune, lambda: tuning.to_json(file)))
    with comm.agreed():
        for path, text in texts if comm.rank == 0 else ():
            unfinished(path).write_text(text())
            unfinished(path).replace(path)
    if flags.tune:
        print(f"algorithm='auto' follows this under COLLECTIVES_TUNING={flags.tune}")
    with comm.agreed():
        if comm.rank == 0 and flags.tune_openmpi:
            openmpi_rules.report(flags.tune, flags.tune_openmpi)
        if comm.rank == 0 and flags.plots:
            plots.report(flags.plots, [str(flags.json)])


def verdict(flags: Namespace, rows: Sequence[Result]) -> int:
    """The exit status: 1 for wrong results, and too little bandwidth."""
    average = report.average_gbps(rows)
    if flags.min_bw is not None and average < flags.min_bw:
        print(f"# FAILED: {average:.4f} GB/s is below --min-bw {flags.min_bw:g}")
        return 1
    return int(any(row.wrong for row in rows))
