"""How rows changed from one benchmark to the next, and how much of that is noise.

A change is the logarithm of the ratio of two medians.  Its noise is estimated from the two documents alone: within a
run, from the medians of blocks of consecutive samples, which follow each other's ups and downs; from run to run, from
what neighbours in size of one algorithm differ by.  Changes of many sizes are averaged, with outliers clipped (Huber
1964).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

from collectives.bench.document import Group, Row

MARGIN = math.log(1.05)  # below which a change is of no interest
BLOCKS = 8  # of a row's samples
CLIP = 2.0  # standard deviations
PRIOR, PRIOR_ROWS = 0.15, 4  # from run to run, as far as the documents have too few rows to tell
ENOUGH = 8  # rows or groups to judge others by
BANDS = ("B", "KiB", "MiB", "GiB")  # of sizes, small to large

Words = tuple[str, str, str]  # collective, algorithm, and the rest


class Change(NamedTuple):
    """How some rows changed: logarithms of after / before."""

    words: Words
    num_rows: int
    log: float
    error: float  # standard
    verdict: str = ""

    def judged(self, doubt: float) -> "Change":
        """With a verdict, where the chance of a wrong one is `doubt`."""
        beyond = abs(self.log) - NormalDist().inv_cdf(1 - doubt / 2) * self.error - MARGIN
        return self._replace(verdict="" if beyond <= 0 else "slower" if self.log > 0 else "faster")


class Samples(NamedTuple):
    """Rows of both documents, by ascending size within a group."""

    groups: Sequence[Group]
    nbytes: np.ndarray
    logs: np.ndarray
    errors: np.ndarray  # standard, of each row's change
    shared_errors: np.ndarray  # of what is known of the machine, the same for many rows

    def less(self, change: Change, at: Sequence[bool]) -> "Samples":
        logs = np.where(at, self.logs - change.log, self.logs)
        return self._replace(logs=logs, shared_errors=np.where(at, change.error, self.shared_errors))

    def collective_at(self, place: int) -> Words:
        return self.groups[place].collective, "", ""

    def band_at(self, place: int) -> Words:
        thousands = (max(1, int(self.nbytes[place])).bit_length() - 1) // 10
        return self.groups[place].collective, "", BANDS[min(thousands, len(BANDS) - 1)]


def changes(pairs: Iterable[tuple[Row, Row]]) -> Samples:
    pairs = sorted(pairs, key=lambda pair: (repr(pair[0].group), pair[0].nbytes))
    groups, nbytes = [row.group for row, _ in pairs], np.array([row.nbytes for row, _ in pairs])
    logs = np.array([log_median(new) - log_median(old) for old, new in pairs])
    variances = np.array([variance(old) + variance(new) for old, new in pairs])
    neighbours = np.array([a == b for a, b in pairwise(groups)], bool)
    run_to_run = jitter(np.diff(logs)[neighbours], (variances[1:] + variances[:-1])[neighbours])
    return Samples(groups, nbytes, logs, np.sqrt(variances + run_to_run**2), np.zeros(len(logs)))


def log_median(row: Row) -> float:
    return math.log(median(row.samples_us))


def variance(row: Row) -> float:
    """Of the logarithm of a row's median, from the medians of blocks; none where samples are too few."""
    samples = row.samples_us
    blocks = min(BLOCKS, len(samples) // 3)
    if blocks < 2:
        return 0.0
    bounds = [len(samples) * block // blocks for block in range(blocks + 1)]
    return float(np.var([math.log(median(samples[a:b])) for a, b in pairwise(bounds)], ddof=1)) / blocks


def jitter(differences: np.ndarray, variances: np.ndarray) -> float:
    """The standard deviation from run to run that explains how neighbours differ, beyond the variances given."""
    candidates = np.linspace(0.001, 1, 1000)
    measured = 0.0
    if len(differences):
        scaled = np.abs(differences) / np.sqrt(variances + 2 * candidates[:, None] ** 2)
        fits = np.median(scaled, axis=1) <= NormalDist().inv_cdf(0.75)
        measured = candidates[np.argmax(fits)] if fits.any() else candidates[-1]
    weight = PRIOR_ROWS / (PRIOR_ROWS + len(differences))
    return math.sqrt(weight * PRIOR**2 + (1 - weight) * measured**2)


def mean(samples: Samples, places: Sequence[int], words: Words, spread: float = 1.0) -> Change:
    """The mean change of rows, by the inverse of their variances and with outliers clipped."""
    logs, errors = samples.logs[places], samples.errors[places]
    center = np.median(logs)
    clipped = center + np.clip(logs - center, -CLIP * errors, CLIP * errors)
    weights = errors**-2
    own, shared = spread / math.sqrt(weights.sum()), np.average(samples.shared_errors[places], weights=weights)
    return Change(words, len(places), float(np.average(clipped, weights=weights)), math.hypot(own, shared))


def spread_of(samples: Samples, places: Sequence[int]) -> float:
    """How many times farther apart algorithms, or sizes, are than their rows' noise explains.

    A burst of noise hits what is measured one after the other: the sizes of an algorithm, or all at one size.
    """
    by_size = defaultdict(list)
    for place in places:
        by_size[samples.groups[place].collective, samples.nbytes[place]].append(place)
    by_group = [rows for words, rows in split(samples, places) if words[1]]
    return max(overdispersion(samples, parts) for parts in (by_group, list(by_size.values())))


def overdispersion(samples: Samples, parts: Sequence[Sequence[int]]) -> float:
    """The scale of the parts' mean changes in their standard errors, at least 1; few parts tell little.

    They are seen from the middle of their collective, which may have changed as a whole.
    """
    means = [mean(samples, rows, samples.collective_at(rows[0])) for rows in parts]
    logs = defaultdict(list)
    for part in means:
        logs[part.words].append(part.log)
    center = {words: np.median(each) for words, each in logs.items()}
    off = np.median([abs(part.log - center[part.words]) / part.error for part in means]) / NormalDist().inv_cdf(0.75)
    weight = ENOUGH / (ENOUGH + len(means))
    return math.sqrt(max(1.0, weight + (1 - weight) * off**2))


def split(samples: Samples, places: Iterable[int]) -> list[tuple[Words, list[int]]]:
    """Rows by collective, and by group."""
    whole = grouped(places, samples.collective_at)
    return sorted([*whole, *grouped(places, lambda place: words_of(samples.groups[place]))])


def grouped(places: Iterable[int], words_at: Callable[[int], Words]) -> list[tuple[Words, list[int]]]:
    parts = defaultdict(list)
    for place in places:
        parts[words_at(place)].append(place)
    return sorted(parts.items())


def words_of(group: Group) -> Words:
    root = f"root {group.root}" if group.root else ""
    rest = (group.memory, group.device, group.dtype, group.op or "", root, "in place" if group.in_place else "")
    return group.collective, group.name, " ".join(filter(None, rest))
