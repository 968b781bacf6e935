"""A rank's schedule in little space and time: its work in each round, equal rounds in a row counted as one stretch.

Peers are counted from the rank itself, so that a ring, of however many ranks, is a single stretch.
"""

from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from typing import NamedTuple

from collectives.schedule.moves import Barrier, Copy, Get, GetReduce, Put, Recv, RecvReduce, Round, Send

Nodes = tuple[tuple[int, ...], ...]  # the ranks of each


class PeerTraffic(NamedTuple):
    """All that a rank sends another in a round, or receives from it."""

    is_send: bool
    offset: int  # of the peer, from the rank itself round the ring
    chunks: int
    folded: int  # of the chunks


class RoundSummary(NamedTuple):
    """A rank's work in a round; `copied` and `folded` are chunks in its node's memory, `pulled` those of others."""

    messages: tuple[PeerTraffic, ...] = ()
    copied: int = 0
    folded: int = 0
    pulled: int = 0
    barrier: tuple[int, ...] = ()  # offsets of its ranks, as they are


IDLE = RoundSummary()


class RankProgram(NamedTuple):
    """A rank's stretches: what it does in each, and the round in which it is over."""

    summaries: tuple[RoundSummary, ...]
    ends: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """The number of rounds of each stretch."""
        return [b - a for a, b in pairwise((0, *self.ends))]

    def rounds(self) -> list[RoundSummary]:
        """Return the work of every round."""
        return list(chain.from_iterable(map(repeat, self.summaries, self.lengths)))


def program(rounds: Sequence[Round], rank: int, size: int) -> RankProgram:
    """Return a rank's rounds as stretches."""
    summaries: list[RoundSummary] = []
    ends: list[int] = []
    for number, moves in enumerate(rounds, 1):
        own = summary(moves, rank, size) if moves else IDLE
        if summaries and summaries[-1] == own:
            ends[-1] = number
        else:
            summaries.append(own)
            ends.append(number)
    return RankProgram(tuple(summaries), tuple(ends))


def summary(moves: Round, rank: int, size: int) -> RoundSummary:
    chunks: dict[tuple[bool, int], list[int]] = {}
    copied = folded = pulled = 0
    barrier: tuple[int, ...] = ()
    for move in moves:
        match move:
            case Send(peer, run) | Recv(peer, run) | RecvReduce(peer, run):
                sums = chunks.setdefault((isinstance(move, Send), (peer - rank) % size), [0, 0])
                sums[0] += len(run)
                sums[1] += len(run) * isinstance(move, RecvReduce)
            case Copy(_, run) | Get(_, _, run) | Put(_, run, _):
                copied += len(run)
                pulled += len(run) * (not isinstance(move, Copy))
            case GetReduce(sources, _, run):
                folded += len(sources) * len(run)
                pulled += (len(sources) - (rank in sources)) * len(run)
            case Barrier(ranks):
                barrier = tuple(other - rank for other in ranks)
    return RoundSummary(
        tuple(PeerTraffic(*way, *sums) for way, sums in chunks.items()), copied, folded, pulled, barrier
    )
