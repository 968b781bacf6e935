"""Say what got slower, or faster, from one benchmark to the next, beyond the noise of both.

python -m collectives.bench --compare before.json after.json

Ends with 1 if something got slower, with 0 if nothing did, with 2 if the two cannot be compared.

A change is the logarithm of the ratio of two medians.  Its noise is estimated from the two documents alone: within a
run, from the medians of blocks of consecutive samples, which follow each other's ups and downs; from run to run, from
what neighbours in size of one algorithm differ by.  Changes of many sizes are averaged, with outliers clipped (Huber
1964), and called slower or faster when they are more than `MARGIN` with a chance of error of `DOUBT` over all that is
asked (Bonferroni).  The other libraries' own collectives (mpi, gloo, nccl) are no part of the build: if they moved,
so did the machine, and all else is taken relative to them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

import numpy as np

from collectives.bench.document import PEERS, Document, Group, Row, read

MARGIN = math.log(1.05)  # below which a change is of no interest
DOUBT = 0.02  # the chance that noise is called a change
MACHINE_DOUBT = 0.1  # and a change of the machine: in doubt it was the machine
BLOCKS = 8  # of a row's samples
CLIP = 2.0  # standard deviations
PRIOR, PRIOR_ROWS = 0.15, 4  # from run to run, as far as the documents have too few rows to tell
FAR, FAR_DEVIATIONS = math.log(3), 8  # for a single size, whose noise has long tails
ENOUGH = 8  # rows or groups to judge others by

COLUMNS = "{:<15} {:<20} {:<45} {:>5} {:>7} {:>7}  {}"


class Change(NamedTuple):
    """How some rows changed: logarithms of after / before."""

    words: tuple[str, str, str]  # collective, algorithm, and the rest
    num_rows: int
    log: float
    error: float  # standard
    verdict: str = ""

    def judged(self, doubt: float) -> "Change":
        """With a verdict, where the chance of a wrong one is `doubt`."""
        beyond = abs(self.log) - NormalDist().inv_cdf(1 - doubt / 2) * self.error - MARGIN
        return self._replace(verdict="" if beyond <= 0 else "slower" if self.log > 0 else "faster")

    def relative_to(self, other: "Change") -> "Change":
        return self._replace(log=self.log - other.log, error=math.hypot(self.error, other.error))


class Samples(NamedTuple):
    """Rows of both documents, by ascending size within a group."""

    groups: Sequence[Group]
    nbytes: np.ndarray
    logs: np.ndarray
    errors: np.ndarray  # standard, of each row's change


@dataclass(frozen=True)
class Comparison:
    machine: Change | None  # what the peers' rows did; None where there are too few
    whole: Change
    parts: Sequence[Change]  # collectives, algorithms
    singles: Sequence[Change]  # sizes far off
    peers: Sequence[Change]
    notes: Sequence[str]

    @property
    def slower(self) -> bool:
        return any(change.verdict == "slower" for change in (self.whole, *self.parts, *self.singles))


def compare(before: Document, after: Document) -> Comparison:
    """Compare two documents.

    Raises: ValueError where they have nothing in common, with the reason.
    """
    for name in ("ranks", "nodes"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            raise ValueError(f"{name} are {was} in {before.path}, {now} in {after.path}: measure both alike")
    samples = matched(before, after)
    ours = [place for place, group in enumerate(samples.groups) if group.name not in PEERS]
    others = [place for place, group in enumerate(samples.groups) if group.name in PEERS]
    if not ours:
        raise ValueError(
            f"{before.path} and {after.path} share rows of {', '.join(sorted(PEERS))} only: nothing of ours"
        )
    spread = spread_of(samples, ours)
    machine = (
        mean(samples, others, ("machine", "", ""), spread).judged(MACHINE_DOUBT) if len(others) >= ENOUGH else None
    )
    moved = machine if machine and machine.verdict else Change(("", "", ""), 0, 0.0, 0.0)
    whole = mean(samples, ours, ("all", "", ""), spread).relative_to(moved).judged(DOUBT)
    parts = [mean(samples, places, words, spread).relative_to(moved) for words, places in split(samples, ours)]
    peers = [mean(samples, places, words, spread) for words, places in split(samples, others) if words[1]]
    return Comparison(
        machine,
        whole,
        [part.judged(DOUBT / len(parts)) for part in parts],
        far_off(samples, ours, moved),
        peers,
        list(notes(before, after)),
    )


def matched(before: Document, after: Document) -> Samples:
    """The rows that both have.

    Raises: ValueError for none.
    """
    was = {row.key: row for row in before.rows}
    pairs = [(was[row.key], row) for row in after.rows if row.key in was]
    if not pairs:
        differ = [f"{name} {' and '.join(values)}" for name, values in differences(before, after)]
        raise ValueError(f"{before.path} and {after.path} have no row in common: {'; '.join(differ) or 'other sizes'}")
    pairs.sort(key=lambda pair: (repr(pair[0].group), pair[0].nbytes))
    groups, nbytes = [row.group for row, _ in pairs], np.array([row.nbytes for row, _ in pairs])
    logs = np.array([log_median(new) - log_median(old) for old, new in pairs])
    variances = np.array([variance(old) + variance(new) for old, new in pairs])
    neighbours = np.array([a == b for a, b in pairwise(groups)], bool)
    run_to_run = jitter(np.diff(logs)[neighbours], (variances[1:] + variances[:-1])[neighbours])
    return Samples(groups, nbytes, logs, np.sqrt(variances + run_to_run**2))


def differences(before: Document, after: Document) -> Iterator[tuple[str, list[str]]]:
    """Fields of the groups of which the documents have no value in common."""
    for field in Group._fields:
        values = [{str(getattr(row.group, field)) for row in document.rows} for document in (before, after)]
        if not values[0] & values[1]:
            yield field, [", ".join(sorted(each)) or "nothing" for each in values]


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


def mean(samples: Samples, places: Sequence[int], words: tuple[str, str, str], spread: float = 1.0) -> Change:
    """The mean change of rows, by the inverse of their variances and with outliers clipped."""
    logs, errors = samples.logs[places], samples.errors[places]
    center = np.median(logs)
    clipped = center + np.clip(logs - center, -CLIP * errors, CLIP * errors)
    weights = errors**-2
    log, error = float(np.average(clipped, weights=weights)), float(spread / math.sqrt(weights.sum()))
    return Change(words, len(places), log, error)


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
    """The scale of the parts' mean changes in their standard errors, at least 1; few parts tell little."""
    means = [mean(samples, rows, ("", "", "")) for rows in parts]
    center = np.median([part.log for part in means])
    off = np.median([abs(part.log - center) / part.error for part in means]) / NormalDist().inv_cdf(0.75)
    weight = ENOUGH / (ENOUGH + len(means))
    return math.sqrt(max(1.0, weight + (1 - weight) * off**2))


def split(samples: Samples, places: Iterable[int]) -> list[tuple[tuple[str, str, str], list[int]]]:
    """Rows by collective, and by group."""
    parts = defaultdict(list)
    for place in places:
        group = samples.groups[place]
        for words in ((group.collective, "", ""), words_of(group)):
            parts[words].append(place)
    return sorted(parts.items())


def words_of(group: Group) -> tuple[str, str, str]:
    root = f"root {group.root}" if group.root else ""
    rest = (group.memory, group.device, group.dtype, group.op or "", root, "in place" if group.in_place else "")
    return group.collective, group.name, " ".join(filter(None, rest))


def far_off(samples: Samples, places: Sequence[int], moved: Change) -> list[Change]:
    """Single sizes so far off that no noise seen explains it: twice as far as any is on the other side."""
    found = []
    logs = samples.logs - moved.log
    deviations = logs / samples.errors
    for place in places:
        others = np.max(-np.sign(logs[place]) * deviations[places], initial=0.0)
        if abs(logs[place]) > FAR and abs(deviations[place]) > max(FAR_DEVIATIONS, 2 * others):
            collective, name, rest = words_of(samples.groups[place])
            words = collective, name, f"{rest} {samples.nbytes[place]} B"
            verdict = "slower" if logs[place] > 0 else "faster"
            found.append(Change(words, 1, float(logs[place]), float(samples.errors[place]), verdict))
    return found


def notes(before: Document, after: Document) -> Iterator[str]:
    """What is not compared, and what else differs."""
    keys = {document.path: {row.key for row in document.rows} for document in (before, after)}
    for mine, theirs in ((before, after), (after, before)):
        alone = keys[mine.path] - keys[theirs.path]
        if alone:
            what = sorted({f"{group.collective} {group.name}" for group, _ in alone})
            shown = ", ".join(what[:4]) + (", ..." if len(what) > 4 else "")
            yield f"only in {mine.path}: {len(alone)} rows ({shown})"
    both = sorted(set(before.environment) | set(after.environment))
    changed = [name for name in both if before.environment.get(name) != after.environment.get(name)]
    if changed:
        yield f"the environments differ in {', '.join(changed)}"


def lines(result: Comparison) -> Iterator[str]:
    """The comparison as a table."""
    yield from result.notes
    yield COLUMNS.format("collective", "algorithm", "", "rows", "ratio", "+-", "").rstrip()
    for change in (*result.peers, *result.parts, *result.singles, result.whole):
        yield line(change)
    if result.machine and result.machine.verdict:
        percent = math.expm1(result.machine.log) * 100
        yield f"the machine changed: the peers' own times moved by {percent:+.0f}%; ours are relative to theirs"
    elif result.slower and not result.machine:
        yield "without peers in both documents this may be the machine: measure with --peers mpi to know"
    yield verdict(result)


def line(change: Change) -> str:
    ratio, noise = f"{math.exp(change.log):.2f}", f"{math.expm1(2 * change.error):.0%}"
    return COLUMNS.format(*change.words, change.num_rows, ratio, noise, change.verdict).rstrip()


def verdict(result: Comparison) -> str:
    changes = (result.whole, *result.parts, *result.singles)
    slower, faster = (sum(change.verdict == word for change in changes) for word in ("slower", "faster"))
    if not slower and not faster:
        return "equal, as far as the noise lets see"
    return f"{slower} slower, {faster} faster, of {len(changes)} lines"


def report(before: str, after: str) -> int:
    """Print how two documents compare; return 1 if something got slower, else 0.

    Raises: ValueError for documents that can't be compared.
    """
    result = compare(read(before), read(after))
    print("\n".join(lines(result)))
    return int(result.slower)
