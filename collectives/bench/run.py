"""A run of the benchmark on the ranks of a job."""

import itertools
import os
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from textwrap import fill
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.bench import constants, html, peers, report
from collectives.bench.benchmarks import BENCHMARKS
from collectives.bench.report import Document, Row
from collectives.bench.timing import Contestant, contestant, num_wrong, overlaps, samples_s, timed_as
from collectives.bench.trial import PEERS, Trial, Workload, element_counts, in_place_choices, trial_of
from collectives.communicator import Communicator
from collectives.job import system
from collectives.job.errors import InputError
from collectives.job.progress_bar import progress_bar, show
from collectives.job.settings import size_in_words
from collectives.runtime.choose import auto
from collectives.runtime.plan import Plan, Step
from collectives.runtime.progress import Waitable
from collectives.schedule import draw
from collectives.schedule.draw import Bar, Diagram, MessageLine
from collectives.schedule.events import simulate
from collectives.schedule.moves import Send
from collectives.schedule.network import Network

LINK_REPEATS = 10
WIDTH = 80  # of a terminal
MOST_LINES = 1000  # in files of an endless run: the last ones
CHECKED_ARRAYS = 6  # in and out of place, and to fill and compare them
DIRECT = -1  # instead of a round's number: a program of several rounds, in shared memory


def run(comm: Communicator, flags: Namespace) -> int:
    """Measure, print and write as the flags demand; return the exit status.  Collective."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    if comm.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # other ranks are silent  # noqa: SIM115
    refuse_too_large(comm, flags)
    peers.take_device(comm, flags.device)
    network = constants.measure(comm, min(flags.iters, LINK_REPEATS), min(flags.warmup_iters, 2))
    if flags.space_time:
        draw_space_time(comm, flags, network)
        return 0
    missing = peers.start(comm, flags)
    memory = [peak_memory_mib(comm)]
    speeds = fill(report.describe(network, comm.topology.nodes), WIDTH, subsequent_indent="# ")
    print(*missing.values(), speeds, sep="\n", flush=True)
    document = report.conditions(comm, started, network, flags.device, timed_as(flags))
    rows = measured(comm, flags, network, missing, document)
    memory.append(peak_memory_mib(comm))
    print(report.footer(rows))
    if flags.memory_report:
        print("# Host memory of the largest process: {:.0f} MiB before the first size, {:.0f} at most".format(*memory))
    if flags.tune:
        print(f"algorithm='auto' follows {flags.tune} under COLLECTIVES_TUNING={flags.tune}")
    average = report.average_gbps(rows)
    if flags.min_bw is not None and average < flags.min_bw:
        print(f"# FAILED: {average:.4f} GB/s is below --min-bw {flags.min_bw:g}")
        return 1
    return int(any(row["wrong"] for row in rows))


def measured(comm: Communicator, flags: Namespace, network: Network, missing: Any, document: Document) -> list[Row]:
    """Measure and print, and write the files after each size, as an interrupt leaves no time.  Collective."""
    sizes: deque[list[Row]] = deque(maxlen=None if flags.run_cycles else MOST_LINES)
    document["results"] = []
    for rows in results(comm, flags, network, missing):
        if not sizes or any(sizes[-1][0][name] != rows[0][name] for name in ("collective", "memory")):
            show(*report.heading(rows, document["times"], flags))
        show(*report.lines(rows, flags))
        sizes.append(rows)
        document["results"] = [row for of_size in sizes for row in of_size]
        write(comm, flags, document, network, sizes)
    if not sizes:
        write(comm, flags, document, network, sizes)
    return document["results"]


def refuse_too_large(comm: Communicator, flags: Namespace) -> None:
    """Raise InputError on every rank if a node lacks memory for arrays, and an algorithm's copies.  Collective."""
    ranks, vectors = max(map(len, comm.topology.nodes)), 2 * max(map(len, flags.names.values())) + CHECKED_ARRAYS
    with comm.agreed():
        free = system.available_memory_bytes() // (vectors * ranks)
        if flags.device == "cpu" and flags.end > free:
            words = f"{vectors} vectors for each of a node's {ranks} ranks don't fit into its memory"
            raise ValueError(f"--end {size_in_words(flags.end)}: {words}: use --end {free >> 10}K at most")


def results(comm: Communicator, flags: Namespace, network: Network, missing: Any) -> Iterator[list[Row]]:
    """Make one measurement after the other, and name the peers that can't take part.  Collective."""
    say = cache(show)  # prints each line once
    steps = planned(comm.size, flags)
    for workload, count, cycle in progress_bar(list(steps) if flags.run_cycles else steps, "size", comm.rank):
        rows = []
        own = (BENCHMARKS[workload.collective].spec.in_place,)
        for in_place in own if flags.tune else in_place_choices(workload.collective):
            trial = trial_of(comm, workload, count, in_place, flags.unalign)
            names = [name for name in flags.names[workload.collective] if name not in missing]
            contestants = [one for name in names if (one := able(comm, trial, name, flags, say))]
            rows += measure(comm, contestants, flags, network) if contestants else []
        if rows:
            ended = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            yield [row | {"cycle": cycle, "ended": ended} for row in rows]


def planned(size: int, flags: Namespace) -> Iterator[tuple[Workload, int, int]]:
    """Yield each measurement's workload, number of elements and cycle."""
    for workload in flags.workloads:
        for cycle in range(flags.run_cycles) if flags.run_cycles else itertools.count():
            for count in element_counts(workload, size, flags.sizes):
                yield workload, count, cycle


def measure(comm: Communicator, contestants: Sequence[Contestant], flags: Namespace, network: Network) -> list[Row]:
    """Time the contestants of one measurement, in turns, and check their results.  Collective."""
    calls_s, samples = samples_s(comm, contestants, flags)
    more = overlaps(comm, contestants, calls_s, flags) if contestants[0].start else [{} for _ in contestants]
    wrong = num_wrong(comm, contestants, flags.check)
    for one in contestants:
        one.free()
    rows, nodes = [], comm.topology.nodes
    for i, one in enumerate(contestants):
        trial, model_s, bound_s = one.trial, None, None
        is_modelled = not (trial.benchmark.messages or trial.benchmark.is_uneven)
        if trial.workload.device == "cpu" and is_modelled:  # the host's rates do not apply to devices
            bound_s = constants.bound_s(trial.collective, trial.nbytes, nodes, network)
            if one.name not in PEERS:
                row = algorithms.find(trial.collective, one.algorithm)
                model_s = auto.ranking(trial.nbytes, (row,), nodes, network, trial.workload.memory)[0][1]
        num = wrong[i] if flags.check else None
        rows.append(row_of(one, calls_s[i], samples[:, i], model_s, bound_s, num, flags.per_iter_skip) | more[i])
    return rows


def row_of(
    one: Contestant,
    call_s: float,
    samples_s: np.ndarray,
    model_s: float | None,
    bound_s: float | None,
    wrong: int | None,
    skip: int = 0,
) -> Row:
    """Compute a contestant's row from the seconds of a call, and of each timed run, of which statistics `skip` some."""
    trial, (name, memory, device, dtype, op, root) = one.trial, one.trial.workload
    algbw_gbps, factor, counted = 1e-9 * trial.nbytes / call_s, report.bus_factor(name, trial.size), samples_s[skip:]
    numbers = {
        "min_us": counted.min() * 1e6,
        "median_us": call_s * 1e6,
        "p99_us": np.percentile(counted, 99, method="inverted_cdf") * 1e6,  # one of the runs, as in nccl-tests
        "max_us": counted.max() * 1e6,
        "cv_percent": 100 * counted.std() / counted.mean(),
        "algbw_gbps": algbw_gbps,
        "busbw_gbps": algbw_gbps * factor,
        "model_us": None if model_s is None else model_s * 1e6,
        "bound_percent": None if bound_s is None else 100 * bound_s / call_s,
    }
    if trial.benchmark.messages:
        numbers["messages_per_s"] = factor / call_s
    return {
        "collective": name,
        "name": one.name,
        "algorithm": one.algorithm,
        "memory": memory,
        "device": device,
        "dtype": str(dtype),
        "op": op if trial.spec.reduces else None,
        "root": root if trial.spec.rooted else None,
        "bytes": trial.nbytes,
        "count": trial.count,
        "in_place": trial.in_place,
        "samples_us": (samples_s * 1e6).round(3).tolist(),
        **{name: None if number is None else float(f"{number:.9g}") for name, number in numbers.items()},
        "wrong": wrong,
    }


def able(
    comm: Communicator, trial: Trial, name: str, flags: Namespace, say: Callable[[str], None]
) -> Contestant | None:
    """Bind the contestant of a name; under `all`, or for a peer, it may not support this mode.

    Collective.  Raises: InputError for an algorithm that was requested by name.
    """
    try:
        return contestant(comm, trial, name, flags.window_size)
    except InputError as error:
        if name in flags.algorithms and name not in PEERS:
            raise
        if name in PEERS:
            mode = "in place" if trial.in_place else "out of place"
            say(f"# {name} does no {trial.workload.collective} of {trial.dtype} {mode}: {error}")
    return None


def peak_memory_mib(comm: Communicator) -> float:
    """Return the largest resident memory of all ranks until now.  Collective."""
    return float(comm.all_reduce(np.array([system.peak_memory_bytes() / (1 << 20)]), op="max")[0])


def write(
    comm: Communicator, flags: Namespace, document: Document, network: Network, sizes: Iterable[list[Row]]
) -> None:
    """Write the requested files, each in one go.  Collective."""
    with comm.agreed():
        if comm.rank:
            return
        if flags.json:
            system.write(flags.json, report.to_json(document))
        if flags.html:
            system.write(flags.html, html.report({"this run": document}))
        if flags.tune:
            around = document["environment"]
            system.write(flags.tune, auto.to_json(report.tuning(comm, around, network, str(flags.tune), sizes)))


class TimedStep:
    """A step of a plan that notes when it begins and ends."""

    def __init__(self, step: Step):
        self.step, self.span = step, (0.0, 0.0)
        self.label = step.number if step.moves else DIRECT

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def run(self, device: Any) -> Iterator[Waitable]:
        begin = time.perf_counter()
        yield from self.step.run(device)
        self.span = begin, time.perf_counter()


def draw_space_time(comm: Communicator, flags: Namespace, network: Network) -> None:
    """Draw the run of median length beside the planned one.  Collective."""
    (workload,) = flags.workloads
    trial = Trial(comm, workload, element_counts(workload, comm.size, flags.sizes)[0])
    plan = comm.plan(trial.collective, trial.x, algorithm=flags.names[trial.collective][0], **trial.arguments)
    row = algorithms.find(trial.collective, plan.name.split()[1])
    seconds, spans = median_run(comm, plan, trial, flags.iters)
    if comm.rank == 0:
        title = f"{row.collective} {row.name}, {size_in_words(trial.nbytes)}"
        planned = simulate(row, trial.nbytes, comm.topology.nodes, network, workload.root)
        left = Diagram(f"{title}: planned, {planned.seconds * 1e6:.0f} us", comm.size, planned.bars, planned.lines)
        words = f"happened, {seconds * 1e6:.0f} us"
        right = run_diagram(row, f"{title}: {words}", comm, workload.root, spans)
        draw.save(draw.figure([left, right]), flags.space_time)
        print(f"{left.title}; {words}; drawn in {flags.space_time}")


def median_run(comm: Communicator, plan: Plan, trial: Trial, repeats: int) -> tuple[float, list[Any]]:
    """Measure the run of median length: its seconds, and each rank's rounds, as number, begin and end.  Collective.

    Clocks count from the moment in which a rank leaves the barrier before the run.
    """
    barrier = comm.plan("barrier")
    steps = [TimedStep(step) for step in plan.rounds]
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
    return float(slowest[median]), comm.mpi.allgather(runs[1 + median])


def run_diagram(row: Algorithm, title: str, comm: Communicator, root: int, spans: Sequence[Any]) -> Diagram:
    """Diagram a measured run, with the messages of the schedule in each round."""
    rounds = [(rank, *span) for rank, of_rank in enumerate(spans) for span in of_rank]
    bars = [Bar(rank, begin, end, "work" if number == DIRECT else "wait") for rank, number, begin, end in rounds]
    at = {(rank, number): (begin, end) for rank, number, begin, end in rounds if number != DIRECT}
    lines = []
    for (rank, number), (begin, _) in at.items():
        moves = row.rounds(rank, comm.size, root, comm.topology.nodes)[number]
        for dest in {move.to for move in moves if isinstance(move, Send)}:
            ready, end = at[dest, number]
            lines.append(MessageLine(rank, dest, max(begin, ready), end))
    return Diagram(title, comm.size, bars, lines)
