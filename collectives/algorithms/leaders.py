"""One rank of each node, its leader, exchanges messages with other nodes, and accesses the memory of its own.

Fewer ranks send fewer messages, which dominate the time for short vectors; but a leader moves the data of its whole
node, so that long ones take longer than with `hierarchical_direct`.  In the cost lines, for k nodes of l ranks, mu is
the cost of a barrier in a node.

Source: MPICH, src/mpi/coll/allreduce/allreduce_intra_smp.c; Träff and Rougier, "MPI Collectives and Datatypes for
Hierarchical All-to-all Communication", EuroMPI 2014.
"""

from collections.abc import Iterator
from itertools import product

from collectives.algorithms import recursive, ring
from collectives.algorithms.algorithm import EQUAL_CHUNKS, Access, Algorithm, Groups, Scheduler
from collectives.algorithms.groups import Grid, consecutive, group_of, singles, whole
from collectives.schedule.moves import (
    Barrier,
    Copy,
    Get,
    GetReduce,
    Put,
    Recv,
    Round,
    Send,
    among,
    even_runs,
    laid,
    span,
)


def all_reduce(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Reduce each group's vectors on its leader, all-reduce among leaders, and write the result to the groups.

    Cost: 2 mu + log2 k (alpha + n beta + n gamma) + (l-1)n beta + ln gamma, for a power of two of groups.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_reduce, groups=((0, 1), (2, 3))), 4))
    round 0:  (0-1)   (2-3)
    round 1:  0-1=>0 [0-3]+   2-3=>2 [0-3]+
    round 2:  0->2 [0-3]+   2->0 [0-3]+
    round 3:  0~>1 [0-3]   2~>3 [0-3]
    round 4:  (0-1)   (2-3)
    """
    teams = teams_of(groups, size)
    team, leaders, everything = group_of(rank, teams), [members[0] for members in teams], range(size)
    leads = rank == team[0]
    yield arrival(team)
    yield (GetReduce(team, everything, everything),) if leads and len(team) > 1 else ()
    yield from among(rank, leaders, even_runs(size, len(leaders)), recursive.all_reduce)
    yield tuple(Put(member, everything, everything) for member in team[1:] if leads)
    yield arrival(team)


def reduce_scatter(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Reduce each group's vectors on its leader, reduce-scatter among leaders, and write chunk r to each rank r.

    Cost: 2 mu + log2 k alpha + n(k-1)/k (beta + gamma) + n(l-1)/p beta + ln gamma, for a power of two of groups.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(reduce_scatter, groups=((0, 1), (2, 3))), 4))
    round 0:  (0-1)   (2-3)
    round 1:  0-1=>0 [0-3]+   2-3=>2 [0-3]+
    round 2:  0->2 [2-3]+   2->0 [0-1]+
    round 3:  0~>1 [1]   2~>3 [3]
    round 4:  (0-1)   (2-3)
    """
    teams = teams_of(groups, size)
    team, everything = group_of(rank, teams), range(size)
    leads = rank == team[0]
    yield arrival(team)
    yield (GetReduce(team, everything, everything),) if leads and len(team) > 1 else ()
    yield from among_leaders(rank, teams, size, recursive.reduce_scatter, ring.reduce_scatter)
    yield tuple(Put(member, range(member, member + 1), range(member, member + 1)) for member in team[1:] if leads)
    yield arrival(team)


def all_gather(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Rank r starts owning chunk r: leaders read their groups' chunks, all-gather them, and write them to their groups.

    Cost: 2 mu + log2 k alpha + (n(k-1)/k + n(l-1) + n(l-1)/p) beta, for a power of two of groups.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_gather, groups=((0, 1), (2, 3))), 4))
    round 0:  (0-1)   (2-3)
    round 1:  1=>0 [1]   3=>2 [3]
    round 2:  0->2 [0-1]   2->0 [2-3]
    round 3:  0~>1 [0-3]   2~>3 [0-3]
    round 4:  (0-1)   (2-3)
    """
    teams = teams_of(groups, size)
    team = group_of(rank, teams)
    leads = rank == team[0]
    yield arrival(team)
    yield tuple(Get(member, range(member, member + 1), range(member, member + 1)) for member in team[1:] if leads)
    yield from among_leaders(rank, teams, size, recursive.all_gather, ring.all_gather)
    yield tuple(Put(member, range(size), range(size)) for member in team[1:] if leads)
    yield arrival(team)


def among_leaders(
    rank: int, teams: list[tuple[int, ...]], size: int, algorithm: Scheduler, fallback: Scheduler
) -> Iterator[Round]:
    """Run an algorithm among the leaders, each with its team's chunks; the fallback where these are not adjacent."""
    leaders = [members[0] for members in teams]
    leader_of = {member: members[0] for members in teams for member in members}
    adjacent = [member for members in teams for member in members] == list(range(size))
    grid = Grid(singles(leaders))
    rounds = grid.across_groups(rank, [leader_of[r] for r in range(size)], algorithm if adjacent else fallback)
    yield from rounds


def all_to_all(rank: int, size: int, groups: Groups | None = None) -> Iterator[Round]:
    """Chunk d of rank s becomes chunk p+s of rank d: leaders read their groups' data, and write incoming data.

    Chunks in transit are packed in working space after the 2p chunks of the collective: all chunks must have one
    length.  A leader packs its group's chunks in the receivers' order: by their dests' groups, dests and sources.

    Cost: 2 mu + alpha + (3-1/k)ln beta, of which 2ln is for reading and writing the group's memory; where k is a power
    of two, and all groups have one length, 2 mu + log2 k alpha + (2 + log2 k / 2)ln beta.

    >>> from functools import partial
    >>> from collectives.schedule.moves import render
    >>> print(render(partial(all_to_all, groups=((0,), (1, 2))), 3))
    round 0:  (1-2)
    round 1:  0: [0-2]>[6-8]   1: [0]>[6]   2=>1 [0]>[7]   1: [1]>[8]   2=>1 [1]>[9]   1: [2]>[10]   2=>1 [2]>[11]
    round 2:  0->1 [7-8]   1->0 [6-7]
    round 3:  0: [6]>[3]   0: [9-10]>[4-5]   1: [12]>[3]   1~>2 [13]>[3]   1: [8-9]>[4-5]   1~>2 [10-11]>[4-5]
    round 4:  (1-2)
    """
    teams = teams_of(groups, size)
    team = group_of(rank, teams)
    yield arrival(team)
    is_cube = len(teams) in (2, 4, 8, 16) and len(set(map(len, teams))) == 1  # along whose edges leaders can exchange
    exchange = exchange_in_cube if is_cube else exchange_with_each
    rounds = list(exchange(team, teams, size))
    yield from rounds if rank == team[0] else [()] * len(rounds)
    yield arrival(team)


def exchange_in_cube(team: tuple[int, ...], teams: list[tuple[int, ...]], size: int) -> Iterator[Round]:
    """Exchange with the leader across each dimension of the cube: log2 k messages for each leader.

    Slot s first holds the data for the team `s` away, and last those from it: a bit's round exchanges the slots that
    have it set.  Slots are sent from one of two areas, and received into the other.
    """
    own, num_teams, block = teams.index(team), len(teams), len(team) ** 2
    slots = laid(2 * size, [block] * 2 * num_teams)
    toward = [teams[own ^ slot] for slot in range(num_teams)]
    yield pack(team, toward, size)
    run_of = list(range(num_teams))  # the run of each slot
    for bit in range(num_teams.bit_length() - 1):
        crossing = [slot for slot in range(num_teams) if slot >> bit & 1]
        leader = toward[1 << bit][0]
        sends = [Send(leader, span(slots, run)) for run in consecutive([run_of[slot] for slot in crossing])]
        for slot in crossing:
            run_of[slot] = (run_of[slot] + num_teams) % (2 * num_teams)
        yield (*sends, *(Recv(leader, span(slots, run)) for run in consecutive([run_of[slot] for slot in crossing])))
    yield unpack(team, toward, [slots[run] for run in run_of], size)


def exchange_with_each(team: tuple[int, ...], teams: list[tuple[int, ...]], size: int) -> Iterator[Round]:
    """Send each of the other leaders the data for its team: k-1 messages for each leader, all at once."""
    own = teams.index(team)
    leaving = laid(2 * size, [len(team) * len(other) for other in teams])
    arriving = laid(leaving[-1].stop, [len(team) * len(other) * (other != team) for other in teams])
    arriving[own] = leaving[own]
    yield pack(team, teams, size)
    others = [(own + step) % len(teams) for step in range(1, len(teams))]  # so that not all send to one at once
    sends = [Send(teams[other][0], leaving[other]) for other in others]
    yield (*sends, *(Recv(teams[other][0], arriving[other]) for other in reversed(others)))
    yield unpack(team, teams, arriving, size)


def pack(team: tuple[int, ...], teams: list[tuple[int, ...]], size: int) -> Round:
    """Return the round in which a leader reads its team's data for these teams, by dests and sources."""
    dests = [dest for other in teams for dest in other]
    runs = consecutive(dests) if len(team) == 1 else [range(dest, dest + 1) for dest in dests]
    parts = list(product(runs, team))
    targets = laid(2 * size, (len(run) for run, _ in parts))
    return tuple(
        Copy(run, target) if source == team[0] else Get(source, run, target)
        for (run, source), target in zip(parts, targets, strict=True)
    )


def unpack(team: tuple[int, ...], teams: list[tuple[int, ...]], runs: list[range], size: int) -> Round:
    """Return the round in which a leader writes the data from these teams to their targets in its own team."""
    return tuple(
        Copy(part, target) if dest == team[0] else Put(dest, part, target)
        for other, run in zip(teams, runs, strict=True)
        for nth, dest in enumerate(team)
        for part, target in with_targets(run[nth * len(other) : (nth + 1) * len(other)], [size + s for s in other])
    )


def with_targets(run: range, chunks: list[int]) -> Iterator[tuple[range, range]]:
    """Yield the parts of a run that go to consecutive chunks, and those chunks."""
    targets = consecutive(chunks)
    return zip(laid(run.start, map(len, targets)), targets, strict=True)


def teams_of(groups: Groups | None, size: int) -> list[tuple[int, ...]]:
    return [tuple(sorted(group)) for group in whole(groups, size)]


def arrival(team: tuple[int, ...]) -> Round:
    return (Barrier(team),) if len(team) > 1 else ()


ALGORITHMS = (
    Algorithm("all_reduce", "leaders", all_reduce, over_nodes=True, access=Access.INTRA_NODE),
    Algorithm("reduce_scatter", "leaders", reduce_scatter, over_nodes=True, access=Access.INTRA_NODE),
    Algorithm("all_gather", "leaders", all_gather, over_nodes=True, access=Access.INTRA_NODE),
    Algorithm("all_to_all", "leaders", all_to_all, EQUAL_CHUNKS, over_nodes=True, access=Access.INTRA_NODE),
)
