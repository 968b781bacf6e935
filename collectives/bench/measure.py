"""Times every algorithm of every collective, over sizes and kinds of memory."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from collectives import algorithms
from collectives.bench.timing import medians
from collectives.bench.trial import Trial, element_counts
from collectives.communicator import Communicator
from collectives.errors import InputError
from collectives.tuning import MEMORIES, Case

NOISE = 0.03  # of a time


class Result(NamedTuple):
    """Median seconds of the slowest rank, by algorithm."""

    case: Case
    nbytes: int
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The fastest algorithm of ours, the registry's first of those that noise may tell apart; empty for none."""
        ours = {name: seconds for name, seconds in self.seconds.items() if name != "mpi"}
        return next((name for name in ours if ours[name] <= (1 + NOISE) * min(ours.values())), "")


def results(comm: Communicator, flags: Namespace) -> Iterator[Result]:
    """Measure what the flags say, one case and size after the other.  Collective."""
    for collective in flags.collectives:
        names = algorithms_of(collective, comm.size, flags.algorithms)
        for memory in memories(collective) if names else ():
            case = Case(collective, memory, comm.size, len(comm.topology.nodes))
            for count in element_counts(collective, comm.size, sizes(flags.begin, flags.end, flags.factor)):
                trial = Trial(comm, collective, count, memory)
                yield Result(case, trial.nbytes, time_algorithms(comm, trial, names, flags))


def time_algorithms(comm: Communicator, trial: Trial, names: list[str], flags: Namespace) -> dict[str, float]:
    plans = {}
    for name in names:
        with suppress(InputError):  # ranks that don't reach each other's memory: all of them refuse
            plans[name] = comm.plan(trial.collective, trial.x, algorithm=name, **trial.arguments)
    seconds = medians(comm, list(plans.values()), flags.repeats, flags.warmups, trial.fill, trial.check)
    for plan in plans.values():
        plan.free()
    return dict(zip(plans, seconds, strict=True))


def algorithms_of(collective: str, size: int, asked: list[str] | None) -> list[str]:
    """Those asked for that there are on so many ranks; by default all but the MPI library's own."""
    known = algorithms.names(collective, size)
    return known if asked is None else [name for name in (*known, "mpi") if name in asked]


def memories(collective: str) -> tuple[str, ...]:
    return ("ordinary",) if collective == "barrier" else MEMORIES


def sizes(begin: int, end: int, factor: int) -> list[int]:
    """From `begin` to `end`, each `factor` times the one before.

    >>> sizes(8, 1000, 4)
    [8, 32, 128, 512]
    """
    ladder = [begin]
    while ladder[-1] * factor <= end:
        ladder.append(ladder[-1] * factor)
    return ladder
