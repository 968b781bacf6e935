"""The cause of a chunk's wrong value at the end: the contribution that is missing or extra, and since when."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from collectives.schedule.moves import Copy, Recv, Send
from collectives.schedule.proof import Value, World
from collectives.schedule.spec import Collective
from teaching.exercise.exercise import MistakeError
from teaching.exercise.history import Change

Location = tuple[int, int]  # a rank, and a chunk of its vector


class Cause(NamedTuple):
    """The cause of a wrong chunk: the rank and the round to look at, and the reason in words."""

    round: int
    rank: int
    reason: str


def check_results(spec: Collective, world: World, changes: Sequence[Change]) -> None:
    """Compare every rank's final vector with the expected one.

    Of several wrong chunks, name the first to go wrong among those that are not merely received from another one.

    Raises: MistakeError.
    """
    goals = {(rank, chunk): goal for rank, after in enumerate(world.after) for chunk, goal in after.items()}
    wrong = [(rank, chunk) for (rank, chunk), goal in goals.items() if world.vectors[rank].get(chunk) != goal]
    last = {(change.rank, change.chunk): change for change in changes}

    def is_received(location: Location) -> bool:
        change = last.get(location)
        if change is None or not isinstance(change.move, Recv):
            return False
        source = (change.move.source, location[1])
        return source in wrong and (source not in last or last[source].round < change.round)

    if not wrong:
        return
    causes = {location: cause(spec, world, location, goals[location], changes) for location in wrong}
    rank, chunk = min(wrong, key=lambda location: (is_received(location), causes[location][:2], location))
    at, value, goal = causes[rank, chunk], world.vectors[rank].get(chunk), goals[rank, chunk]
    end = f"after round {len(world.programs[0]) - 1}" if world.programs[0] else "without any round"
    should = contents(spec, goal, goal)
    if value and spec.reduces:
        should = should.replace("the contributions", "those", 1)
    why = (
        f"{end}, rank {rank}'s chunk {chunk} holds {contents(spec, value, goal)}; it should hold {should}: {at.reason}"
    )
    raise MistakeError(at.rank, at.round, why)


def contents(spec: Collective, value: Value | None, goal: Value) -> str:
    """Describe the value of a chunk that should hold `goal`."""
    if value is None:
        return "nothing"
    plural = "s" * (len(value.counts) > 1)
    ranks = f"rank{plural} {listed(times(rank, count) for rank, count in value.counts.items())}"
    if not spec.reduces:
        return f"chunk {value.chunk} of {ranks}"
    other_chunk = f" to chunk {value.chunk}" if value.chunk != goal.chunk else ""
    return f"the contribution{plural} of {ranks}{other_chunk}"


def times(rank: int, count: int) -> str:
    return f"{rank}" if count == 1 else f"{rank} (twice)" if count == 2 else f"{rank} ({count} times)"


def listed(words: Iterable[str]) -> str:
    """Join words as a sentence does.

    >>> listed("012"), listed("0")
    ('0, 1 and 2', '0')
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def cause(spec: Collective, world: World, location: Location, goal: Value, changes: Sequence[Change]) -> Cause:
    """Return the cause of a wrong chunk: another chunk came, or a contribution came twice, was lost, or never came."""
    value = world.vectors[location[0]].get(location[1])
    own = [change for change in changes if (change.rank, change.chunk) == location]
    if value and (not spec.reduces or value.chunk != goal.chunk):
        return Cause(own[-1].round, location[0], f"that {origin(own[-1])} in round {own[-1].round}")
    counts = value.counts if value else {}
    for other, count in counts.items():
        if count > goal.counts[other]:
            return too_many(other, goal, changes)
    return too_few([other for other in goal.counts if other not in counts], world, location, goal, changes)


def too_many(other: int, goal: Value, changes: Sequence[Change]) -> Cause:
    """Find where a rank's contribution is first added again, on any rank."""
    most = goal.counts[other]
    first = next(c for c in changes if c.after.chunk == goal.chunk and c.after.counts.get(other, 0) > most)
    reason = f"in round {first.round}, rank {first.rank} adds rank {other}'s a second time, with what {origin(first)}"
    return Cause(first.round, first.rank, reason)


def too_few(missing: Sequence[int], world: World, location: Location, goal: Value, changes: Sequence[Change]) -> Cause:
    """Find where a contribution was lost, was dropped by the rank that sent the rest, or stopped."""
    own = [change for change in changes if (change.rank, change.chunk) == location]
    for other in missing:
        overwrite = loss(other, own) or sent_without(other, world, goal, changes)
        if overwrite:
            until = f"rank {other}'s was on rank {overwrite.rank} until round {overwrite.round}"
            return Cause(overwrite.round, overwrite.rank, f"{until}, when what {origin(overwrite)} replaced it")
    is_one = len(missing) == 1
    whose = f"rank {missing[0]}'s" if is_one else f"those of ranks {listed(map(str, missing))}"
    if own and isinstance(own[-1].move, Recv):
        lacks = f"{whose} {'is' if is_one else 'are'} not in what {origin(own[-1])} in round {own[-1].round}"
        return Cause(own[-1].round, location[0], lacks)
    never = f"{whose} never arrive{'s' * is_one}{reach(missing[0], goal, changes)}"
    return Cause(max(0, len(world.programs[0]) - 1), location[0], never)


def loss(other: int, changes: Sequence[Change]) -> Change | None:
    """Return the first change of a chunk that replaces a value with a rank's contribution by one without it."""
    losses = (c for c in changes if c.before and other in c.before.counts and other not in c.after.counts)
    return next(losses, None)


def sent_without(other: int, world: World, goal: Value, changes: Sequence[Change]) -> Change | None:
    """Return the loss of a rank's contribution on that rank itself, if it sends the chunk on without."""
    overwrite = loss(other, [c for c in changes if (c.rank, c.chunk) == (other, goal.chunk)])
    following = world.programs[other][overwrite.round + 1 :] if overwrite else []
    return overwrite if any(isinstance(m, Send) and goal.chunk in m.run for moves in following for m in moves) else None


def origin(change: Change) -> str:
    move = change.move
    return f"was copied from {move.source}" if isinstance(move, Copy) else f"came from rank {move.source}"


def reach(other: int, goal: Value, changes: Sequence[Change]) -> str:
    """Describe how far a rank's contribution to a chunk gets."""
    first: dict[int, int] = {}  # the round in which each rank has it
    for change in changes:
        if change.after.chunk == goal.chunk and other in change.after.counts and change.rank != other:
            first.setdefault(change.rank, change.round)
    if not first:
        return f", nor leaves rank {other}"
    rank = list(first)[-1]
    return f"; it gets as far as rank {rank}, in round {first[rank]}"
