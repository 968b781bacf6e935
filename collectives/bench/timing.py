"""Contestants of a measurement, and their times."""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.bench import constants, overlap, peers
from collectives.bench.trial import BLOCKING, EACH, PEERS, RANK_TIMES, MessageTrial, Trial
from collectives.communicator import Communicator
from collectives.schedule.spec import Chunks


class Contestant(NamedTuple):
    """A call to be timed; peers have no algorithm of ours."""

    name: str
    algorithm: str
    trial: Trial
    call: constants.Action  # on a device it may still run after it returns
    free: Callable[[], None]
    start: Callable[[], constants.Action] | None = None  # of a non-blocking call; returns its wait
    num_messages: int = 1  # one after the other in the call, whose time is divided by it

    @property
    def run(self) -> constants.Action:
        return with_device_sync(self.call, self.trial)


def contestant(comm: Communicator, trial: Trial, name: str, window: int = 1) -> Contestant:
    """Bind the contestant of a name to a trial's arrays.  Collective."""
    start: Callable[[], constants.Action] | None
    if isinstance(trial, MessageTrial):
        call = peers.message_call(comm, trial, name, window)
        num_messages = 2 if trial.messages.reply == "vector" else window if trial.messages.is_windowed else 1
        return Contestant(name, name if name in PEERS else "messages", trial, call, no_action, None, num_messages)
    if name in PEERS:
        algorithm, call, free = name, peers.peer_call(comm, trial, name), no_action
        start = peers.start_of(comm, trial, call) if trial.benchmark.overlaps else None
    else:
        plan = comm.plan(trial.collective, trial.x, algorithm=name, **trial.arguments)
        algorithm, call, free = plan.name.split()[1], plan, plan.free
        start = (lambda: plan.start().wait) if trial.benchmark.overlaps else None
    return Contestant(name, algorithm, trial, overlap.waited(start) if start else call, free, start)


def no_action() -> None:
    pass


def samples_s(comm: Communicator, contestants: Sequence[Contestant], flags: Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Measure seconds of a call: by contestant, and by timed run and contestant.  Collective."""
    trial = contestants[0].trial
    calls = [one.call if flags.agg_iters == 1 else grouped(comm, one, flags.agg_iters) for one in contestants]
    calls_of_run = flags.agg_iters * np.array([one.num_messages for one in contestants])
    synced = [with_device_sync(call, trial) for call in calls]
    constants.samples(comm, synced, 0, flags.warmup_iters)
    if flags.blocking == EACH:
        samples = constants.samples(comm, synced, flags.iters, 0, flags.average) / calls_of_run
        return np.median(samples, axis=0), samples
    barrier = comm.plan("barrier")
    runs = {0: calls, 1: [in_turn(call, barrier) for call in synced], 2: synced}[flags.blocking]
    noted = [InARow(run, flags.iters) for run in runs]
    rows = noted if flags.per_iter_timing else [in_turn(*[run] * flags.iters) for run in runs]
    seconds = constants.samples(comm, [with_device_sync(row, trial) for row in rows], 1, 0, flags.average)
    barrier.free()
    calls_s = seconds / flags.iters / calls_of_run
    if not flags.per_iter_timing:
        return calls_s[0], calls_s
    lengths, op = np.stack([np.diff(row.times) for row in noted], axis=1), RANK_TIMES[flags.average]
    return calls_s[0], (comm.all_reduce(lengths, op=op) if op else comm.broadcast(lengths)) / calls_of_run


class InARow:
    """So many runs, one after the other, with the time at which each ends."""

    def __init__(self, run: constants.Action, times: int):
        self.run, self.times = run, [0.0] * (times + 1)

    def __call__(self) -> None:
        times, run, clock = self.times, self.run, time.perf_counter
        times[0] = clock()
        for i in range(1, len(times)):
            run()
            times[i] = clock()


def in_turn(*actions: constants.Action) -> constants.Action:
    def run() -> None:
        for action in actions:
            action()

    return run


def timed_as(flags: Namespace) -> str:
    """Describe the times, as in "medians of 20 calls, slowest rank"."""
    calls = "calls" if flags.agg_iters == 1 else f"groups of {flags.agg_iters} calls"
    if flags.blocking == EACH:
        return f"medians of {flags.iters} {calls}, {flags.average}"
    return f"means of {flags.iters} {calls} {BLOCKING[flags.blocking]}, {flags.average}"


def grouped(comm: Communicator, one: Contestant, times: int) -> constants.Action:
    """Return so many calls that start together; those of peers, messages and non-blocking ones, one after the other."""
    trial = one.trial
    if one.name in PEERS or one.start or isinstance(trial, MessageTrial):
        return in_turn(*[one.call] * times)
    arrays = () if trial.spec.gives is Chunks.NONE else (trial.x,)
    call = partial(getattr(comm, trial.collective), *arrays, algorithm=one.name, **trial.arguments)

    def run() -> None:
        with comm.group():
            for _ in range(times):
                call()

    return run


def overlaps(
    comm: Communicator, contestants: Sequence[Contestant], calls_s: np.ndarray, flags: Namespace
) -> list[dict[str, float]]:
    """Measure computation that takes as long as each call, alone and while the call runs.  Collective."""
    works = [overlap.computation(seconds) for seconds in calls_s]
    both = [
        with_device_sync(overlap.during(one.start, work), one.trial)
        for one, work in zip(contestants, works, strict=True)
        if one.start
    ]
    times = constants.samples(comm, [*works, *both], flags.iters, flags.warmup_iters, flags.average)
    compute_s, overall_s = np.median(times, axis=0).reshape(2, -1)
    return [overlap.numbers(*seconds) for seconds in zip(calls_s, compute_s, overall_s, strict=True)]


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
