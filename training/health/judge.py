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

from training.health.finding import Change, Finding

WINDOW = 20  # steps on which a verdict depends
EVERY = 5  # steps between verdicts
FIRST = 3  # steps of a run that do not count, as plans are bound in them
LINKS_AGAIN = 60  # steps between measurements of links while one is slow

# What begins a finding, and what ends it.
SLOWER = 1.35, 1.2  # time of computing, as a multiple of the others'
ALL_SLOWER = 1.5, 1.25  # the same of all ranks, as a multiple of their past
LOADED = 0.75, 0.85  # fraction of a core that each rank of a host gets, of what it can get; below
LATE = 0.1, 0.05  # wait for input, as a fraction of a step
GROWN = 2.0  # waits that all ranks have, as a multiple of their past
MATTERS = 0.05  # what a slow rank costs, as a fraction of a step


class StepSeconds(NamedTuple):
    """A rank's step, in seconds: its own computing, the thread's CPU time in that, waits for other ranks, and all of it.

    The wait for `input` comes before the step, and belongs to it.
    """

    computing: float
    cpu: float
    waiting: float
    input: float
    whole: float


class Judge:
    """Compares the ranks of a run, whose hosts, pipeline stages and hosts' numbers of cores are given."""

    def __init__(self, hosts: Sequence[str], stages: Sequence[int], cores: Sequence[int]):
        self.hosts, self.ranks_of = hosts, groups(hosts)
        self.stages = [np.array(ranks) for ranks in groups(stages).values()]
        self.cores = {host: min(1.0, cores[ranks[0]] / len(ranks)) for host, ranks in self.ranks_of.items()}
        self.times: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.steps: deque[int] = deque(maxlen=WINDOW)
        self.num_steps = 0
        self.best: Best | None = None
        self.links: Sequence[Finding] = []  # as of the latest measurement
        self.links_step = 0
        self.wants_links = False  # to have links measured before the next step
        self.current: dict[Any, Finding] = {}

    def take(self, step: int, times: np.ndarray) -> list[Change]:
        """Take the `StepSeconds` of every rank, in rows; return the findings that begin or end.

        A step with a NaN does not count.
        """
        self.num_steps += 1
        if self.num_steps <= FIRST or not np.isfinite(times).all():
            return []
        self.times.append(times)
        self.steps.append(step)
        return self.judge(step) if len(self.times) == WINDOW and self.num_steps % EVERY == 0 else []

    def take_links(self, step: int, links: Sequence[Finding]) -> list[Change]:
        """Take what a measurement of the links has found; return the findings that begin or end."""
        self.wants_links, self.links_step, self.links = False, step, links
        others = [each for each in self.current.values() if each.kind != "link"]
        return self.settle(step, [*others, *links])

    def judge(self, step: int) -> list[Change]:
        medians = Medians(np.stack(self.times), self.stages)
        first, self.best = self.best is None, self.best or Best(medians)
        findings = [*self.loaded_hosts(medians)]
        findings += self.slow_ranks(medians, {rank for each in findings for rank in each.ranks})
        findings += self.late_inputs(medians)
        if not findings:
            findings += self.all_slower(medians)
        grown_s = medians.waiting_s - self.best.waiting_s
        is_slow = not findings and grown_s > max((GROWN - 1) * self.best.waiting_s, LATE[0] * medians.whole_s)
        is_due = step - self.links_step >= (LINKS_AGAIN if self.links else WINDOW)
        self.wants_links = len(self.ranks_of) > 1 and (first or (is_due and bool(is_slow or self.links)))
        self.best.take(medians)
        return self.settle(step, [*findings, *self.links])

    def settle(self, step: int, findings: Sequence[Finding]) -> list[Change]:
        """Make these the current findings; return the changes."""
        before, self.current = self.current, {each.key: self.current.get(each.key, each) for each in findings}
        ended = [Change(step, each, False) for key, each in before.items() if key not in self.current]
        return ended + [Change(step, each, True) for key, each in self.current.items() if key not in before]

    def bound(self, bounds: tuple[float, float], *key: Any) -> float:
        """Return the bound for a finding to begin, or, if it is current, to last."""
        return bounds[key in self.current]

    def loaded_hosts(self, m: Medians) -> Iterator[Finding]:
        """Yield hosts none of whose ranks, of several, gets its core."""
        for host, its in self.ranks_of.items():
            ranks, cores = tuple(its), m.core[its]
            if len(ranks) > 1 and cores.max() < self.cores[host] * self.bound(LOADED, True, "", ranks):
                what = f"the {len(ranks)} ranks of {host}"
                words = f"{what} get {np.median(cores):.0%} of a core each: other processes use them"
                yield Finding("load", ranks, words, f"{what} get their cores again")

    def slow_ranks(self, m: Medians, loaded: set[int]) -> Iterator[Finding]:
        """Yield ranks that compute slower than others; on loaded hosts only those that use more CPU time, too."""
        by_clock, by_cpu = self.ratios(m, "computing"), self.ratios(m, "cpu")
        costs = (1 - 1 / np.maximum(by_clock, 1)) * m.computing / m.whole_s
        for rank, ratio in enumerate(by_clock):
            kind = "slow" if by_cpu[rank] - 1 > (ratio - 1) / 2 else "load"
            if ratio < self.bound(SLOWER, True, "", (rank,)) or costs[rank] < MATTERS:
                continue
            if kind == "slow" or rank not in loaded:
                who, beside = f"rank {rank} ({self.hosts[rank]})", f"the median of {WINDOW} steps"
                if rank in self.alone:
                    beside = "before"
                words = f"{who} computes {ratio:.1f} times as long as {beside}; it gets {m.core[rank]:.0%} of a core"
                yield Finding(kind, (rank,), words, f"{who} computes as fast as the others again")

    def ratios(self, m: Medians, what: str) -> np.ndarray:
        """Return each rank's time as a multiple of that of its stage's others, or, without these, of its own past."""
        past = getattr(m, what) / getattr(self.best, what)
        past /= lower_median(past)
        beside: np.ndarray = m.beside[what].copy()
        beside[self.alone] = past[self.alone]
        return beside

    @property
    def alone(self) -> list[int]:
        """The ranks whose stage has no other."""
        return [int(ranks[0]) for ranks in self.stages if len(ranks) == 1]

    def late_inputs(self, m: Medians) -> Iterator[Finding]:
        late = [r for r, s in enumerate(m.input) if s >= m.whole_s * self.bound(LATE, False, "input", (r,))]
        for rank in late:
            who = f"rank {rank} ({self.hosts[rank]})"
            words = f"{who} waits {m.input[rank] * 1e3:.0f} ms for its input in a step of {m.whole_s * 1e3:.0f} ms"
            yield Finding("input", (rank,), words, f"{who} gets its input in time again")

    def all_slower(self, m: Medians) -> Iterator[Finding]:
        """Yield a finding if most ranks compute slower than in their past."""
        assert self.best
        ranks = tuple(range(len(self.hosts)))
        ratio = lower_median(m.computing / self.best.computing)
        if ratio >= self.bound(ALL_SLOWER, False, "all", ranks):
            words = f"all ranks compute {ratio:.1f} times as long as before step {self.steps[0]}"
            core = f"they get {np.median(m.core):.0%} of a core, {np.median(self.best.core):.0%} before"
            yield Finding("all", ranks, f"{words}; {core}", "all ranks compute as fast as before again")


class Medians:
    """Medians of the latest steps: arrays of each rank's, and numbers of all ranks'.

    `beside` has ratios to the lower median of the same stage in the same step, and `core` the fraction of a core that
    the rank gets when it computes.
    """

    def __init__(self, times: np.ndarray, stages: Sequence[np.ndarray]):
        every = StepSeconds(*np.moveaxis(times, 2, 0))  # (steps, ranks) each
        self.computing, self.cpu, _, self.input, whole = np.median(times, 0).T
        self.whole_s = float(np.median(whole))
        self.waiting_s = float(np.median(np.min(every.waiting, 1)))  # of the rank that waits least
        self.core = np.median(np.divide(every.cpu, every.computing), 0)
        self.beside = {"computing": beside(every.computing, stages), "cpu": beside(every.cpu, stages)}


class Best:
    """The least times of each rank so far, and the largest fraction of a core."""

    def __init__(self, m: Medians):
        self.computing, self.cpu, self.core, self.waiting_s = m.computing, m.cpu, m.core, m.waiting_s

    def take(self, m: Medians) -> None:
        self.computing, self.cpu = np.minimum(self.computing, m.computing), np.minimum(self.cpu, m.cpu)
        self.core, self.waiting_s = np.maximum(self.core, m.core), min(self.waiting_s, m.waiting_s)


def beside(times: Any, stages: Sequence[np.ndarray]) -> np.ndarray:
    """Return each rank's median multiple of the lower median of its stage, step by step.

    >>> beside(np.array([[1.0, 3.0, 1.0], [2.0, 4.0, 8.0], [1.0, 2.0, 2.0]]), [np.array([0, 1]), np.array([2])])
    array([1., 2., 1.])
    """
    ratios = np.empty_like(times)
    for ranks in stages:
        ratios[:, ranks] = times[:, ranks] / lower_median(times[:, ranks])[:, None]
    return np.asarray(np.median(ratios, 0))


def lower_median(x: np.ndarray) -> Any:
    """Return the median of the last axis, of an even number the lower of the two in the middle."""
    return np.sort(x, -1)[..., (x.shape[-1] - 1) // 2]


def groups(keys: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the ranks with each key.

    >>> groups(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    return {key: [rank for rank, each in enumerate(keys) if each == key] for key in dict.fromkeys(keys)}
