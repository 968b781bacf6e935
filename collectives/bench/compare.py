"""Say what got slower, or faster, from one benchmark to the next, beyond the noise of both.

python -m collectives.bench --compare before.json after.json

Ends with 1 if something got slower, with 0 if nothing did, with 2 if the two cannot be compared.

Changes (`changes.py`) are called slower or faster when they are more than `MARGIN` with a chance of error of `DOUBT`
over all that is asked (Bonferroni).  The other libraries' own collectives (mpi, gloo, nccl) are no part of the build:
if they moved, so did the machine, and all else is taken relative to them: as a whole, then at each collective, then at
its small, middle and large sizes, wherever there are enough of their rows.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.bench.changes import ENOUGH, Change, Samples, Words, changes, grouped, mean, split, spread_of, words_of
from collectives.bench.document import PEERS, Document, Group, read

DOUBT = 0.02  # the chance that noise is called a change
MACHINE_DOUBT = 0.1  # and a change of the machine: in doubt it was the machine
FAR, FAR_DEVIATIONS = math.log(3), 8  # for a single size, whose noise has long tails

COLUMNS = "{:<15} {:<20} {:<45} {:>5} {:>7} {:>7}  {}"


@dataclass(frozen=True)
class Comparison:
    has_peers: bool  # enough of them to know the machine
    machine: Mapping[str, float]  # by how much it changed, as a logarithm, at each collective; none where it did not
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
    peers = [mean(samples, places, words, spread) for words, places in split(samples, others) if words[1]]
    given, samples = samples, relative_to_peers(samples, ours, others)
    spread = spread_of(samples, ours)
    parts = [mean(samples, places, words, spread) for words, places in split(samples, ours)]
    return Comparison(
        len(others) >= ENOUGH,
        moves(given.logs - samples.logs, grouped(ours, samples.collective_at)),
        mean(samples, ours, ("all", "", ""), spread).judged(DOUBT),
        [part.judged(DOUBT / len(parts)) for part in parts],
        far_off(samples, ours),
        peers,
        list(notes(before, after)),
    )


def relative_to_peers(samples: Samples, ours: Sequence[int], others: Sequence[int]) -> Samples:
    """Changes less what the machine did: all of it, at a collective, at a collective's sizes of a band.

    Where it changed, a part with enough of the peers' rows is judged by them alone, whether or not they stand out: the
    mean over all parts may be what one of them did.
    """
    for words_at in (lambda place: ("", "", ""), samples.collective_at, samples.band_at):
        spread = spread_of(samples, ours)
        judges = grouped(others, words_at)
        for words, places in judges:
            change = mean(samples, places, words, spread).judged(MACHINE_DOUBT / len(judges))
            if len(places) >= ENOUGH and (change.verdict or samples.shared_errors[places].any()):
                samples = samples.less(change, [words_at(place) == words for place in range(len(samples.groups))])
    return samples


def moves(logs: np.ndarray, collectives: Iterable[tuple[Words, list[int]]]) -> dict[str, float]:
    """The mean at each collective that has any."""
    return {words[0]: float(logs[places].mean()) for words, places in collectives if logs[places].any()}


def matched(before: Document, after: Document) -> Samples:
    """The rows that both have.

    Raises: ValueError for none.
    """
    was = {row.key: row for row in before.rows}
    pairs = [(was[row.key], row) for row in after.rows if row.key in was]
    if not pairs:
        differ = [f"{name} {' and '.join(values)}" for name, values in differences(before, after)]
        raise ValueError(f"{before.path} and {after.path} have no row in common: {'; '.join(differ) or 'other sizes'}")
    return changes(pairs)


def differences(before: Document, after: Document) -> Iterator[tuple[str, list[str]]]:
    """Fields of the groups of which the documents have no value in common."""
    for field in Group._fields:
        values = [{str(getattr(row.group, field)) for row in document.rows} for document in (before, after)]
        if not values[0] & values[1]:
            yield field, [", ".join(sorted(each)) or "nothing" for each in values]


def far_off(samples: Samples, places: Sequence[int]) -> list[Change]:
    """Single sizes so far off that no noise seen explains it: twice as far as any is on the other side."""
    found, logs = [], samples.logs
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
    if result.machine:
        changes = ", ".join(f"{math.expm1(log):+.0%} at {collective}" for collective, log in result.machine.items())
        yield f"the machine changed: the peers' own times moved by {changes}; ours are relative to theirs"
    elif result.slower and not result.has_peers:
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
