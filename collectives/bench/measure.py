"""Times algorithms, and their peers, over sizes, dtypes, ops and kinds of memory."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from collectives import algorithms, select
from collectives.bench.bound import bound_s, bus_factor, shared_device_bound_s
from collectives.bench.flags import ALL, PEERS
from collectives.bench.peers import peer_call
from collectives.bench.timing import samples, stretched
from collectives.bench.trial import IN_PLACE, Setting, Trial, element_counts, places
from collectives.communicator import Communicator
from collectives.cost import Network
from collectives.errors import InputError

NOISE = 0.03  # of a time


@dataclass(frozen=True)
class Result:
    """A row: what one contestant took, the slowest rank's seconds in each iteration."""

    setting: Setting
    size: int
    name: str
    algorithm: str  # that auto took, else the name
    count: int
    in_place: bool
    samples_s: np.ndarray
    model_s: float | None = None
    bound_s: float | None = None
    wrong: int | None = None

    @property
    def nbytes(self) -> int:
        return self.count * self.setting.dtype.itemsize

    @cached_property
    def median_s(self) -> float:
        return float(np.median(self.samples_s))

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.samples_s, 99))

    @property
    def cv_percent(self) -> float:
        return 100 * float(self.samples_s.std() / self.samples_s.mean())

    @property
    def algbw_gbps(self) -> float:
        return 1e-9 * self.nbytes / self.median_s

    @property
    def busbw_gbps(self) -> float:
        return self.algbw_gbps * bus_factor(self.setting.collective, self.size)

    @property
    def bound_percent(self) -> float | None:
        return None if self.bound_s is None else 100 * self.bound_s / self.median_s


class Contestant(NamedTuple):
    """Something to be timed; peers have no algorithm of ours."""

    name: str
    algorithm: str
    trial: Trial
    run: Callable[[], Any]
    free: Callable[[], None]


def results(
    comm: Communicator, flags: Namespace, network: Network, say: Callable[[str], None]
) -> Iterator[list[Result]]:
    """Measure what the flags say, the rows of one size after the other, and say which peers can't.  Collective."""
    for setting in flags.settings:
        names = names_of(setting.collective, comm.size, flags)
        for count in element_counts(setting.collective, comm.size, flags.sizes, setting.dtype) if names else ():
            yield rows(comm, setting, count, names, flags, network, say)


def names_of(collective: str, size: int, flags: Namespace) -> list[str]:
    """Those asked for that there are on so many ranks, then peers."""
    known = algorithms.names(collective, size)
    asked = list(flags.algorithms)
    if ALL in asked:
        asked += known if flags.tune else [*known, "mpi"]
    return list(dict.fromkeys(name for name in ("auto", *known, *PEERS) if name in (*asked, *flags.peers)))


def action(contestant: Contestant, handicap: float) -> Callable[[], Any]:
    """What is timed; peers, which show what the machine does, have no handicap."""
    if handicap == 1 or contestant.name in PEERS:
        return contestant.run
    return stretched(contestant.run, handicap)


def rows(
    comm: Communicator,
    setting: Setting,
    count: int,
    names: Sequence[str],
    flags: Namespace,
    network: Network,
    say: Callable[[str], None],
) -> list[Result]:
    """Time the contestants of one size, in turns, and check what they give.  Collective."""
    both = (setting.collective in IN_PLACE,) if flags.tune else places(setting.collective)
    trials = [Trial(comm, setting.collective, count, setting.memory, in_place, setting) for in_place in both]
    contestants = [one for name in names for one in able(comm, trials, name, flags, say)]
    times = samples(comm, [action(one, flags.handicap) for one in contestants], flags.repeats, flags.warmups)
    wrong = num_wrong(comm, contestants, flags.check)
    for one in contestants:
        one.free()
    moved = setting.collective, trials[0].nbytes
    if setting.device == "cpu":
        bound = bound_s(*moved, comm.topology.nodes, network)
    else:  # of which the rates of the host say nothing
        bound = shared_device_bound_s(*moved, comm.size, flags.device_copy_s_per_byte)
    return [
        Result(
            setting, comm.size, one.name, one.algorithm, count, one.trial.in_place, times[:, i],
            model_s(comm, one, network), bound, wrong[i] if flags.check else None,
        )
        for i, one in enumerate(contestants)
    ]  # fmt: skip


def able(
    comm: Communicator, trials: Sequence[Trial], name: str, flags: Namespace, say: Callable[[str], None]
) -> list[Contestant]:
    """The contestants of a name, which may not work in all places; under `all`, or for a peer, in none.  Collective.

    Raises: InputError where an algorithm was asked for by name.
    """
    made, refusal = [], ""
    for trial in trials:
        try:
            made.append(contestant(comm, trial, name))
        except InputError as error:
            if name in flags.algorithms and name not in PEERS:
                raise
            refusal = refusal or str(error)
    if name in PEERS and not made:
        say(f"# {name} does no {trials[0].collective} of {trials[0].dtype}: {refusal}")
    return made


def contestant(comm: Communicator, trial: Trial, name: str) -> Contestant:
    if name in PEERS:
        return Contestant(name, name, trial, synchronized(peer_call(comm, trial, name), trial), lambda: None)
    plan = comm.plan(trial.collective, trial.x, algorithm=name, **trial.arguments)
    return Contestant(name, plan.name.split()[1], trial, synchronized(plan, trial), plan.free)


def synchronized(call: Callable[[], Any], trial: Trial) -> Callable[[], Any]:
    """A call that ends when a device has done its work."""
    if not trial.device.is_async:
        return call

    def run() -> None:
        call()
        trial.device.begin()  # after the caller's stream
        trial.device.synchronize()

    return run


def num_wrong(comm: Communicator, contestants: Sequence[Contestant], times: int) -> list[int]:
    """Wrong elements of all ranks, in so many runs of each.  Collective."""
    wrong = np.zeros(len(contestants), np.int64)
    for i, one in enumerate(contestants):
        for _ in range(times):
            one.trial.fill()
            comm.barrier()
            one.run()
            wrong[i] += one.trial.num_wrong()
    return comm.all_reduce(wrong).tolist()


def model_s(comm: Communicator, one: Contestant, network: Network) -> float | None:
    """What the cost model says; None of peers and devices."""
    setting = one.trial.setting
    if one.algorithm in PEERS or setting.device != "cpu":
        return None
    row, topology = algorithms.find(setting.collective, one.algorithm), comm.topology
    nbytes, groups = one.trial.nbytes, topology.groups
    return select.ranking(nbytes, (row,), comm.size, topology.nodes, network, groups, setting.memory)[0][1]


def fastest(measured: Sequence[Result]) -> str:
    """The fastest algorithm of ours, the registry's first of those that noise may tell apart; empty for none."""
    ours = {row.name: row.median_s for row in measured if row.name not in ("auto", *PEERS)}
    return next((name for name in ours if ours[name] <= (1 + NOISE) * min(ours.values())), "")
