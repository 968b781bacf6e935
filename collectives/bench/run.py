"""A run of the benchmark on the ranks of a job."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.bench import constants, html, peers, report
from collectives.bench.report import Document, Row
from collectives.bench.trial import PEERS, Trial, element_counts, places
from collectives.communicator import Communicator
from collectives.job import system
from collectives.job.errors import InputError
from collectives.job.progress_bar import progress_bar, show
from collectives.job.settings import size_in_words
from collectives.runtime.choose import auto
from collectives.runtime.plan import Plan, Step
from collectives.runtime.progress import Waitable
from collectives.schedule import draw
from collectives.schedule.cost import Network
from collectives.schedule.draw import Bar, Diagram, MessageLine
from collectives.schedule.events import simulate
from collectives.schedule.moves import Send
from collectives.schedule.spec import COLLECTIVES, Chunks

LINK_REPEATS = 10
WIDTH = 80  # of a terminal
CHECKED_ARRAYS = 6  # in and out of place, and to fill and compare them
DIRECT = -1  # instead of a round's number: a program of several rounds, in shared memory


class Contestant(NamedTuple):
    """A call to be timed; peers have no algorithm of ours."""

    name: str
    algorithm: str
    trial: Trial
    call: constants.Action  # on a device it may still run after it returns
    free: Callable[[], None]

    @property
    def run(self) -> constants.Action:
        return with_device_sync(self.call, self.trial)


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
    speeds = fill(report.describe(network, comm.topology.nodes), WIDTH, subsequent_indent="# ")
    print(*missing.values(), speeds, sep="\n", flush=True)
    document = report.conditions(comm, started, network, flags.device, timed_as(flags))
    rows = measured(comm, flags, network, missing, document)
    print(report.footer(rows))
    if flags.tune:
        print(f"algorithm='auto' follows {flags.tune} under COLLECTIVES_TUNING={flags.tune}")
    average = report.average_gbps(rows)
    if flags.min_bw is not None and average < flags.min_bw:
        print(f"# FAILED: {average:.4f} GB/s is below --min-bw {flags.min_bw:g}")
        return 1
    return int(any(row["wrong"] for row in rows))


def measured(comm: Communicator, flags: Namespace, network: Network, missing: Any, document: Document) -> list[Row]:
    """Measure and print, and write the files after each size, as an interrupt leaves no time.  Collective."""
    sizes: list[list[Row]] = []
    document["results"] = []
    for rows in results(comm, flags, network, missing):
        if not sizes or any(sizes[-1][0][name] != rows[0][name] for name in ("collective", "memory", "in_place")):
            show(*report.heading(rows[0], document["times"], flags.wide))
        show(*report.lines(rows, flags.wide))
        sizes.append(rows)
        document["results"] += rows
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
    planned = [
        (workload, in_place, count)
        for workload in flags.workloads
        for in_place in ((COLLECTIVES[workload.collective].in_place,) if flags.tune else places(workload.collective))
        for count in element_counts(workload, comm.size, flags.sizes)
    ]
    for workload, in_place, count in progress_bar(planned, "size", comm.rank):
        trial = Trial(comm, workload, count, in_place)
        names = [name for name in flags.names[trial.collective] if name not in missing]
        if contestants := [one for name in names if (one := able(comm, trial, name, flags, say))]:
            yield measure(comm, contestants, flags, network)


def measure(comm: Communicator, contestants: Sequence[Contestant], flags: Namespace, network: Network) -> list[Row]:
    """Time the contestants of one measurement, in turns, and check their results.  Collective."""
    times = samples_s(comm, contestants, flags)
    wrong = num_wrong(comm, contestants, flags.check)
    for one in contestants:
        one.free()
    rows, nodes = [], comm.topology.nodes
    for i, one in enumerate(contestants):
        (collective, memory, device, *_), nbytes, model_s, bound_s = one.trial.workload, one.trial.nbytes, None, None
        if device == "cpu":  # the host's rates do not apply to devices
            bound_s = constants.bound_s(collective, nbytes, nodes, network)
            if one.name not in PEERS:
                row = algorithms.find(collective, one.algorithm)
                model_s = auto.ranking(nbytes, (row,), nodes, network, memory)[0][1]
        rows.append(row_of(one, times[:, i], model_s, bound_s, wrong[i] if flags.check else None))
    return rows


def samples_s(comm: Communicator, contestants: Sequence[Contestant], flags: Namespace) -> np.ndarray:
    """Measure seconds of a call, by repeat and contestant.  Collective."""
    trial = contestants[0].trial
    calls = [one.call if flags.agg_iters == 1 else grouped(comm, one, flags.agg_iters) for one in contestants]
    in_a_row = 1 if flags.blocking else flags.iters
    constants.samples(comm, [with_device_sync(call, trial) for call in calls], 0, flags.warmup_iters)
    actions = [with_device_sync(repeated(call, in_a_row) if in_a_row > 1 else call, trial) for call in calls]
    times = constants.samples(comm, actions, flags.iters // in_a_row, 0, flags.average)
    return times / (in_a_row * flags.agg_iters)


def timed_as(flags: Namespace) -> str:
    """Describe the times, as in "medians of 20 calls, slowest rank"."""
    calls = "calls" if flags.agg_iters == 1 else f"groups of {flags.agg_iters} calls"
    words = f"medians of {flags.iters} {calls}" if flags.blocking else f"means of {flags.iters} {calls} in a row"
    return f"{words}, {flags.average}"


def repeated(call: constants.Action, times: int) -> constants.Action:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def grouped(comm: Communicator, one: Contestant, times: int) -> constants.Action:
    """Return so many calls that start together; a peer's run one after the other."""
    if one.name in PEERS:
        return repeated(one.call, times)
    trial = one.trial
    arrays = () if trial.spec.gives is Chunks.NONE else (trial.x,)
    call = partial(getattr(comm, trial.collective), *arrays, algorithm=one.name, **trial.arguments)

    def run() -> None:
        with comm.group():
            for _ in range(times):
                call()

    return run


def row_of(
    one: Contestant, samples_s: np.ndarray, model_s: float | None, bound_s: float | None, wrong: int | None
) -> Row:
    """Compute a contestant's row from the slowest rank's seconds in each iteration."""
    trial, (collective, memory, device, dtype, op, root) = one.trial, one.trial.workload
    median_s = float(np.median(samples_s))
    algbw_gbps = 1e-9 * trial.nbytes / median_s
    numbers = {
        "min_us": samples_s.min() * 1e6,
        "median_us": median_s * 1e6,
        "p99_us": np.percentile(samples_s, 99) * 1e6,
        "cv_percent": 100 * samples_s.std() / samples_s.mean(),
        "algbw_gbps": algbw_gbps,
        "busbw_gbps": algbw_gbps * report.bus_factor(collective, trial.size),
        "model_us": None if model_s is None else model_s * 1e6,
        "bound_percent": None if bound_s is None else 100 * bound_s / median_s,
    }
    return {
        "collective": collective,
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
        **{name: None if number is None else round(float(number), 6) for name, number in numbers.items()},
        "wrong": wrong,
    }


def able(
    comm: Communicator, trial: Trial, name: str, flags: Namespace, say: Callable[[str], None]
) -> Contestant | None:
    """Bind the contestant of a name; under `all`, or for a peer, it may not work in this place.

    Collective.  Raises: InputError for an algorithm that was requested by name.
    """
    try:
        return contestant(comm, trial, name)
    except InputError as error:
        if name in flags.algorithms and name not in PEERS:
            raise
        if name in PEERS:
            place = "in place" if trial.in_place else "out of place"
            say(f"# {name} does no {trial.collective} of {trial.dtype} {place}: {error}")
    return None


def contestant(comm: Communicator, trial: Trial, name: str) -> Contestant:
    if name in PEERS:
        return Contestant(name, name, trial, peers.peer_call(comm, trial, name), lambda: None)
    plan = comm.plan(trial.collective, trial.x, algorithm=name, **trial.arguments)
    return Contestant(name, plan.name.split()[1], trial, plan, plan.free)


def with_device_sync(call: Callable[[], Any], trial: Trial) -> Callable[[], Any]:
    """Make a call end when a device has done its work."""
    if not trial.device.is_async:
        return call

    def run() -> None:
        call()
        trial.device.begin()  # after the caller's stream
        trial.device.synchronize()

    return run


def num_wrong(comm: Communicator, contestants: Sequence[Contestant], times: int) -> list[int]:
    """Count wrong elements of all ranks, in so many runs of each.  Collective."""
    wrong = np.zeros(len(contestants), np.int64)
    for i, one in enumerate(contestants):
        for _ in range(times):
            one.trial.fill()
            comm.barrier()
            one.run()
            wrong[i] += one.trial.num_wrong()
    return comm.all_reduce(wrong).tolist()


def write(comm: Communicator, flags: Namespace, document: Document, network: Network, sizes: list[list[Row]]) -> None:
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
