"""Verdict on the ranks of a run, from every rank's times of the latest steps: who is slow, and why.

A rank is compared with the ranks of the same pipeline stage, step by step, so that what slows all of them does not
count; a stage's only rank is compared with its own past.  CPU time beside the clock's tells a rank that computes slowly
from one that does not get its core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from training.reports.finding import HealthChange, HealthFinding

WINDOW = 20  # steps on which a verdict depends
FEW, HALF, MOST = WINDOW // 4, WINDOW // 2, 3 * WINDOW // 4  # of these steps
TOGETHER = 5  # steps that are exchanged, and judged, at once
FIRST = 3  # steps of a run that do not count, as plans are bound in them
LINKS_AGAIN = 60  # steps between measurements of links while one is slow

# What begins a finding, if most steps reach it, and what ends it, if most do not.
SLOWER = 1.2, 1.15  # time of computing, as a multiple of the others'
ALL_SLOWER = 1.5, 1.25  # the same of all ranks, as a multiple of their past
LOADED = 1.33, 1.18  # cores that a host's ranks can have, as a multiple of what they get
LATE = 0.1, 0.05  # wait for input, as a fraction of a step
LASTING_S = 2.0  # for which a rank computes slower: cores of a virtual machine do so for a second now and then
TYPICALLY_SLOWER = 1.33  # time of computing, as a multiple of the others', in the middle of the steps
GROWN = 1.3  # waits that all ranks have, as a multiple of their past
MATTERS = 0.05  # what a slow rank costs, as a fraction of a step


class StepSeconds(NamedTuple):
    """A rank's step, in seconds: its own computing, the thread's CPU time in that, waits for other ranks and for input.

    `passes` is the part of computing in the passes of micro-batches, and `whole` all of the step, with its input.
    """

    computing: float
    cpu: float
    waiting: float
    input: float
    whole: float
    passes: float


WHOLE = StepSeconds._fields.index("whole")


class Judge:
    """Compares the ranks of a run, whose hosts, pipeline stages and hosts' numbers of cores are given.

    A rank that computes slower is named once it has done so for `lasting_s`, by the times of the steps.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int], cores: Sequence[int], lasting_s: float = LASTING_S):
        self.lasting_s, self.now_s = lasting_s, 0.0
        self.slower_since_s: dict[int, float] = {}  # by rank
        self.hosts, self.ranks_of = hosts, groups(hosts)
        self.stages = [*groups(stages).values()]
        self.alone = [rank for ranks in self.stages for rank in ranks if len(ranks) == 1]  # without others of its stage
        self.cores = {host: min(1.0, cores[ranks[0]] / len(ranks)) for host, ranks in self.ranks_of.items()}
        self.times: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.steps: deque[int] = deque(maxlen=WINDOW)
        self.num_steps = 0
        self.best: Best | None = None
        self.links: Sequence[HealthFinding] = []  # as of the latest measurement
        self.links_step = 0
        self.wants_links = False  # to have links measured before the next step
        self.current: dict[Any, HealthFinding] = {}

    def take(self, last: int, times: np.ndarray) -> list[HealthChange]:
        """Take the `StepSeconds` of each rank in the steps up to `last`; return the findings that begin or end.

        A step with a NaN does not count.  Shapes: `times` is (steps, ranks, fields).
        """
        for step, of_ranks in enumerate(times, last + 1 - len(times)):
            self.num_steps += 1
            self.now_s += float(np.nanmax(of_ranks[:, WHOLE], initial=0))
            if self.num_steps > FIRST and np.isfinite(of_ranks).all():
                self.times.append(of_ranks)
                self.steps.append(step)
        return self.judge(last) if len(self.times) == WINDOW else []

    def typical(self) -> list[StepSeconds]:
        """Return each rank's times in the middle of the latest steps; nothing if there are too few steps."""
        return [StepSeconds(*row) for row in middle(np.stack(self.times)).tolist()] if len(self.times) == WINDOW else []

    def take_links(self, step: int, links: Sequence[HealthFinding]) -> list[HealthChange]:
        """Take what a measurement of the links has found; return the findings that begin or end."""
        self.wants_links, self.links_step, self.links = False, step, links
        others = [each for each in self.current.values() if each.kind != "link"]
        return self.settle(step, [*others, *links])

    def judge(self, step: int) -> list[HealthChange]:
        now = Latest(np.stack(self.times))
        self.best = self.best or Best(now)
        findings = [*self.loaded_hosts(now)]
        findings += self.slow_ranks(now, {rank for each in findings for rank in each.ranks})
        findings += self.late_inputs(now)
        if not findings:
            findings += self.all_slower(now)
        grown_s = now.waiting_s - self.best.waiting_s
        have_grown = grown_s > max((GROWN - 1) * self.best.waiting_s, LATE[0] * now.whole_s)
        is_due = step - self.links_step >= (LINKS_AGAIN if self.links else WINDOW)
        may_be_slow = not self.links_step or (is_due and bool(have_grown or self.links))
        # Messages of a rank that does not get its core are slow as well.
        self.wants_links = len(self.ranks_of) > 1 and not findings and may_be_slow
        self.best.take(now)
        return self.settle(step, [*findings, *self.links])

    def settle(self, step: int, findings: Sequence[HealthFinding]) -> list[HealthChange]:
        """Make these the current findings; return the changes."""
        before, self.current = self.current, {each.key: self.current.get(each.key, each) for each in findings}
        ended = [HealthChange(step, each, False) for key, each in before.items() if key not in self.current]
        return ended + [HealthChange(step, each, True) for key, each in self.current.items() if key not in before]

    def reaching(self, values: np.ndarray, bounds: tuple[float, float], keys: Sequence[Any]) -> list[int]:
        """Return the columns of steps' ascending values with which a finding begins, or, if it is current, lasts."""
        is_current = np.array([key in self.current for key in keys])
        return np.flatnonzero(np.where(is_current, values[MOST] >= bounds[1], values[FEW] >= bounds[0])).tolist()

    def loaded_hosts(self, now: Latest) -> Iterator[HealthFinding]:
        """Yield hosts none of whose ranks, of several, gets its core."""
        several = {host: ranks for host, ranks in self.ranks_of.items() if len(ranks) > 1}
        if not several:
            return
        lack = np.stack([self.cores[host] / now.core[:, ranks].max(1) for host, ranks in several.items()], 1)
        keys = [(True, "", tuple(ranks)) for ranks in several.values()]
        for index in self.reaching(np.sort(lack, 0), LOADED, keys):
            (host, ranks), core = [*several.items()][index], middle(now.core)
            what = f"the {len(ranks)} ranks of {host}"
            words = f"{what} get {np.mean(core[ranks]):.0%} of a core each: other processes use them, or a limit holds"
            yield HealthFinding("load", tuple(ranks), words, f"{what} get their cores again")

    def slow_ranks(self, now: Latest, loaded: set[int]) -> Iterator[HealthFinding]:
        """Yield ranks that compute slower than others; on loaded hosts only those that use more CPU time, too.

        Where ranks share cores, the clock shows less of what a slow one needs than its CPU time does.
        """
        clock, cpu = self.beside(now, "computing"), self.beside(now, "cpu")
        slow_s = now.step_s @ (np.maximum(clock, cpu) >= SLOWER[0])  # of the latest steps, by rank
        by_clock, by_cpu = np.sort(clock, 0), np.sort(cpu, 0)
        keys = [(True, "", (rank,)) for rank in range(len(self.hosts))]
        slower = self.reaching(np.maximum(by_clock, by_cpu), SLOWER, keys)
        self.slower_since_s = {rank: self.slower_since_s.get(rank, self.now_s - slow_s[rank]) for rank in slower}
        for rank in slower:
            ratio, cpu_ratio = by_clock[HALF, rank], by_cpu[HALF, rank]
            kind = "slow" if cpu_ratio - 1 > (ratio - 1) / 2 else "load"
            is_lasting = self.now_s - self.slower_since_s[rank] >= self.lasting_s
            is_new = is_lasting and max(ratio, cpu_ratio) >= TYPICALLY_SLOWER
            costs = (1 - 1 / ratio) * middle(now.computing)[rank] >= MATTERS * now.whole_s
            if (keys[rank] in self.current or is_new) and costs and (kind == "slow" or rank not in loaded):
                who, core = f"rank {rank} ({self.hosts[rank]})", middle(now.core)[rank]
                others = "before" if rank in self.alone else f"the median of {WINDOW} steps"
                words = f"{who} computes {ratio:.1f} times as long as {others}; it gets {core:.0%} of a core"
                yield HealthFinding(kind, (rank,), words, f"{who} computes as fast as the others again")

    def beside(self, now: Latest, what: str) -> np.ndarray:
        """Return each rank's time in each step as a multiple of the lower median of its stage's in the same step.

        Without others, it is a multiple of its own past, beside that of the ranks of other stages.
        """
        times = getattr(now, what)
        ratios = np.empty_like(times)
        for ranks in self.stages:
            ratios[:, ranks] = beside(times[:, ranks])
        if self.alone:
            ratios[:, self.alone] = beside(times / getattr(self.best, what))[:, self.alone]
        return ratios

    def late_inputs(self, now: Latest) -> Iterator[HealthFinding]:
        keys = [(False, "input", (rank,)) for rank in range(len(self.hosts))]
        for rank in self.reaching(np.sort(now.input, 0) / now.whole_s, LATE, keys):
            who, wait_ms = f"rank {rank} ({self.hosts[rank]})", middle(now.input)[rank] * 1e3
            words = f"{who} waits {wait_ms:.0f} ms for its input in a step of {now.whole_s * 1e3:.0f} ms"
            yield HealthFinding("input", (rank,), words, f"{who} gets its input in time again")

    def all_slower(self, now: Latest) -> Iterator[HealthFinding]:
        """Yield a finding if most ranks compute slower than in their past."""
        assert self.best
        ranks = tuple(range(len(self.hosts)))
        ratios = np.sort(lower_median(now.computing / self.best.computing), 0)
        if self.reaching(ratios, ALL_SLOWER, [(False, "all", ranks)]):
            words = f"all ranks compute {ratios[HALF, 0]:.1f} times as long as before step {self.steps[0]}"
            core = f"they get {middle(now.core).mean():.0%} of a core, {self.best.core.mean():.0%} before"
            yield HealthFinding("all", ranks, f"{words}; {core}", "all ranks compute as fast as before again")


class Latest:
    """The latest steps: arrays of (steps, ranks), and the middle of all ranks'.

    `core` is the fraction of a core that a rank gets when it computes, and `waiting_s` is of the rank that waits least.
    """

    def __init__(self, times: np.ndarray):
        self.computing, self.cpu, waiting, self.input, whole, _ = np.moveaxis(times, 2, 0)
        self.core = self.cpu / self.computing
        self.step_s = whole.max(1)
        self.whole_s, self.waiting_s = float(middle(whole).max()), float(middle(waiting.min(1)))


class Best:
    """The least of each rank's times so far, in the middle of the steps, and the most of its core."""

    def __init__(self, now: Latest):
        self.computing, self.cpu, self.core = middle(now.computing), middle(now.cpu), middle(now.core)
        self.waiting_s = now.waiting_s

    def take(self, now: Latest) -> None:
        new = Best(now)
        self.computing, self.cpu = np.minimum(self.computing, new.computing), np.minimum(self.cpu, new.cpu)
        self.core, self.waiting_s = np.maximum(self.core, new.core), min(self.waiting_s, new.waiting_s)


def beside(times: np.ndarray) -> np.ndarray:
    """Return each rank's time as a multiple of the lower median of the ranks, step by step.

    >>> beside(np.array([[1.0, 3.0], [8.0, 4.0]]))
    array([[1., 3.],
           [2., 1.]])
    """
    return np.asarray(times / lower_median(times))


def lower_median(times: np.ndarray) -> np.ndarray:
    """Return the median of the ranks, step by step, of an even number the lower of the two in the middle."""
    middle_rank = (times.shape[1] - 1) // 2
    return np.sort(times, 1)[:, middle_rank : middle_rank + 1]


def middle(times: np.ndarray) -> np.ndarray:
    """Return the times in the middle of the steps."""
    return np.asarray(np.sort(times, 0)[len(times) // 2])


def groups(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks with each key.

    >>> groups(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    return {key: [rank for rank, each in enumerate(keys) if each == key] for key in dict.fromkeys(keys)}
