"""Why a chunk does not hold what it should at the end: whose contribution is missing or too many, and since when."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from collectives.exercise.exercise import MistakeError
from collectives.exercise.history import Change
from collectives.schedule.moves import Copy, Recv
from collectives.schedule.proof import Value, World
from collectives.schedule.spec import Collective

Place = tuple[int, int]  # a rank, and a chunk of its vector


class Cause(NamedTuple):
    """What makes a chunk wrong: the rank and the round to look at, and the reason in words."""

    round: int
    rank: int
    reason: str


def check_results(spec: Collective, world: World, changes: Sequence[Change]) -> None:
    """Hold what every rank ends with against what it should hold.

    Of several wrong chunks, name the first to go wrong among those that are not merely received from another one.

    Raises: MistakeError.
    """
    goals = {(rank, chunk): goal for rank, after in enumerate(world.after) for chunk, goal in after.items()}
    wrong = [(rank, chunk) for (rank, chunk), goal in goals.items() if world.vectors[rank].get(chunk) != goal]
    last = {(change.rank, change.chunk): change for change in changes}

    def is_received(place: Place) -> bool:
        move = last[place].move if place in last else None
        return isinstance(move, Recv) and (move.source, place[1]) in wrong

    if not wrong:
        return
    causes = {place: cause(spec, world, place, goals[place], changes) for place in wrong}
    rank, chunk = min(wrong, key=lambda place: (is_received(place), causes[place][:2], place))
    at, value, goal = causes[rank, chunk], world.vectors[rank].get(chunk), goals[rank, chunk]
    end = f"after round {len(world.programs[0]) - 1}" if world.programs[0] else "without any round"
    holds = f"{end}, rank {rank}'s chunk {chunk} holds {contents(spec, value, goal)}"
    raise MistakeError(at.rank, at.round, f"{holds}; it should hold {contents(spec, goal, goal)}: {at.reason}")


def contents(spec: Collective, value: Value | None, goal: Value) -> str:
    """Say what a chunk holds, where it should hold `goal`."""
    if value is None:
        return "nothing"
    counts = value.counts
    ranks = listed(f"{rank} ({n} times)" if n > 1 else str(rank) for rank, n in counts.items())
    plural = "s" * (len(counts) > 1)
    if not spec.reduces:
        return f"chunk {value.chunk} of rank{plural} {ranks}"
    other_chunk = f" to chunk {value.chunk}" if value.chunk != goal.chunk else ""
    return f"the contribution{plural} of rank{plural} {ranks}{other_chunk}"


def listed(words: Iterable[str]) -> str:
    """Join words as a sentence does.

    >>> listed("012"), listed("0")
    ('0, 1 and 2', '0')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def cause(spec: Collective, world: World, place: Place, goal: Value, changes: Sequence[Change]) -> Cause:
    """Return what makes a chunk wrong: another chunk came, a contribution came twice, was lost, or never came."""
    value = world.vectors[place[0]].get(place[1])
    own = [change for change in changes if (change.rank, change.chunk) == place]
    if value and (not spec.reduces or value.chunk != goal.chunk):
        return Cause(own[-1].round, place[0], f"that {origin(own[-1])} in round {own[-1].round}")
    counts = value.counts if value else {}
    for other, count in counts.items():
        if count > goal.counts.get(other, 0):
            return too_many(other, goal, changes)
    missing = [other for other in goal.counts if other not in counts]
    for change in own:
        for other in missing:
            if change.before and other in change.before.counts and other not in change.after.counts:
                reason = f"rank {other}'s was there until round {change.round}, when what {origin(change)} replaced it"
                return Cause(change.round, place[0], reason)
    return Cause(len(world.programs[0]) - 1, place[0], never(missing, place[0], goal, changes))


def origin(change: Change) -> str:
    move = change.move
    return f"was copied from {move.source}" if isinstance(move, Copy) else f"came from rank {move.source}"


def too_many(other: int, goal: Value, changes: Sequence[Change]) -> Cause:
    """Return where a rank's contribution is first added more often than it should be, on whatever rank."""
    most = goal.counts.get(other, 0)
    first = next(c for c in changes if c.after.chunk == goal.chunk and c.after.counts.get(other, 0) > most)
    again = "a second time" if most else "though it does not belong there"
    reason = f"in round {first.round}, rank {first.rank} adds rank {other}'s {again}, with what {origin(first)}"
    return Cause(first.round, first.rank, reason)


def never(missing: Sequence[int], rank: int, goal: Value, changes: Sequence[Change]) -> str:
    """Say that contributions never arrive, and how far one gets."""
    if len(missing) > 1:
        return f"those of ranks {listed(map(str, missing))} never arrive"
    other = missing[0]
    if other == rank:
        return "its own is never copied there"
    got = [c for c in changes if c.after.chunk == goal.chunk and other in c.after.counts and c.rank != other]
    if not got:
        return f"rank {other}'s never arrives, nor leaves rank {other}"
    return f"rank {other}'s never arrives; it gets as far as rank {got[-1].rank}, in round {got[-1].round}"
